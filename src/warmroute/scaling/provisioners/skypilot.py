"""The provisioner `skypilot`: machines of many clouds."""

from __future__ import annotations

import asyncio
import csv
import json
import math
import re
import shlex
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from warmroute.blocking import run_in_thread
from warmroute.config import ConfigError, ProvisionerConfig
from warmroute.scaling.offers import Offer, OfferValidator, configured_offer
from warmroute.scaling.provisioner import TOKEN, Machine, MachineState, NoCapacity, ProvisionerError, ProvisionerTimeout
from warmroute.scaling.provisioners.command import CommandResult, excerpt, run_command

# SkyPilot's catalogue: a CSV file for each cloud with the price of each instance type by region. A price of 0 stands
# for an unknown one, and some spot prices are bid floors. Of several prices the lowest plausible one counts.

COLUMNS = ("InstanceType", "AcceleratorName", "AcceleratorCount", "Region", "Price", "SpotPrice")


class CatalogRow(NamedTuple):
    cloud: str
    region: str
    instance_type: str
    gpu: str
    gpus: int
    spot: bool
    usd_per_hour: float

    @property
    def name(self) -> str:
        return f"{self.cloud}/{self.region}/{self.instance_type}" + ("/spot" if self.spot else "")


def catalog_folder(catalog_dir: str) -> Path:
    """Return the folder with one folder for each cloud: that of the newest version, if there are versions."""
    folder = Path(catalog_dir).expanduser()
    versions = [one for one in folder.glob("v*") if re.fullmatch(r"v[0-9]+", one.name)]
    return max(versions, key=lambda one: int(one.name[1:])) if versions else folder


def read_catalog(path: Path, cloud: str, wanted: ProvisionerConfig) -> tuple[list[CatalogRow], list[str]]:
    """Return the rows of a cloud's file that the configuration wants, one for each offer, and the file's problems.
    Raises ProvisionerError."""
    best: dict[str, CatalogRow] = {}
    without_type = invalid = 0
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            missing = set(COLUMNS) - set(reader.fieldnames or ())
            if missing:
                raise ProvisionerError(f"{path} lists no instances: no column {', '.join(sorted(missing))}")
            for line in reader:
                gpu, instance_type = line["AcceleratorName"] or "", line["InstanceType"] or ""
                region = line["Region"] or ""
                if not gpu or (wanted.gpu and gpu.lower() != wanted.gpu.lower()):
                    continue
                if wanted.regions and region not in wanted.regions:
                    continue
                if not instance_type:
                    without_type += 1
                    continue
                if wanted.instance_types and instance_type not in wanted.instance_types:
                    continue
                try:
                    gpus = int(float(line["AcceleratorCount"] or 1))
                    rows = [
                        CatalogRow(cloud, region, instance_type, gpu, gpus, market == "spot", float(price))
                        for market in wanted.markets
                        if (price := line["SpotPrice" if market == "spot" else "Price"])
                    ]
                except (ValueError, TypeError):
                    invalid += 1
                    continue
                for row in rows:
                    best[row.name] = _better((best.get(row.name, row), row), wanted.min_usd_per_gpu_hour)
    except FileNotFoundError:
        raise ProvisionerError(f"{path} does not exist: download it with `sky show-gpus --cloud {cloud}`") from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ProvisionerError(f"cannot read {path}: {error}") from None
    problems = []
    if without_type:
        problems.append(
            f"{path}: ignoring {without_type} rows without an instance type (the cloud sells GPUs separately); "
            "name the instance type in provisioners.prices"
        )
    if invalid:
        problems.append(f"{path}: ignoring {invalid} rows whose prices or counts are not numbers")
    return list(best.values()), problems


def _better(rows: Iterable[CatalogRow], min_usd_per_gpu_hour: float) -> CatalogRow:
    """Return the cheapest row with a plausible price, else any, whose price the validation then reports."""

    def rank(row: CatalogRow) -> tuple[bool, float]:
        usd = row.usd_per_hour
        return not (math.isfinite(usd) and usd > 0 and usd >= min_usd_per_gpu_hour * row.gpus), usd

    return min(rows, key=rank)


# skypilot: clusters of one node, through the `sky` command and the operator's API server. The router never imports
# SkyPilot, which takes seconds and 290 MB.
#
# A cluster's name is the deployment's name and the token, so that a repeated request creates one cluster; the router
# leaves other clusters alone. `sky launch` and `sky down` take minutes. The router waits a while for a refusal; then
# the command runs on, and the status reports its outcome. A cluster that has stopped, or that stays unhealthy, is still
# paid for: the status reports it as reclaimed, and the router terminates it.

STATES = {"INIT": MachineState.PENDING, "PENDING": MachineState.PENDING, "UP": MachineState.RUNNING}
STOPPED = ("AUTOSTOPPING", "STOPPING", "STOPPED")
UNHEALTHY_S = 60.0
"""SkyPilot also reports a cluster as unhealthy that it cannot reach for a moment. It may recover for this time."""
NO_CAPACITY = re.compile(
    r"ResourcesUnavailableError|Failed to provision all|[Qq]uota|[Ii]nsufficient.{0,20}[Cc]apacity"
)
NOT_FOUND = re.compile(r"Cluster\(s\) not found|Cluster \S+ (was )?(not found|does not exist)|ClusterDoesNotExist")
ANSI_COLOR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
LAUNCH_LIMIT_S = DOWN_LIMIT_S = 3600.0
"""A command that watches a launch or a termination for longer than an hour hangs."""
REFUSAL_SHARE = 0.5
"""Fraction of a call's time limit to wait for a launch to fail."""
MAX_ENDPOINT_LOOKUPS = 4
"""Concurrent lookups of an address. Each is a process of hundreds of megabytes."""
FORGET_S = 600.0
"""How long the status reports a launch that failed."""


_LaunchKey = tuple[str, float]
"""A cluster's name and launch time. A new launch may have another address."""


class _FailedLaunch(msgspec.Struct, frozen=True):
    offer: str
    reason: str
    when_s: float


class SkyPilotProvisioner:
    def __init__(self, config: ProvisionerConfig) -> None:
        self.name = config.label
        self._config = config
        if not config.deployment[0].isalpha():
            raise ConfigError(
                f"provisioners.deployment: {config.deployment!r}: names of SkyPilot clusters start with a letter"
            )
        self._validator = OfferValidator(config)
        self._catalog_slot = asyncio.Semaphore(1)
        self._catalog: dict[str, tuple[float, list[CatalogRow], list[str]]] = {}
        """The catalogue by cloud: the file's time of change, its rows and its problems."""
        self._launching: dict[str, tuple[Offer, asyncio.Task[CommandResult]]] = {}
        self._failed: dict[str, _FailedLaunch] = {}
        self._ending: dict[str, asyncio.Task[CommandResult]] = {}
        """The running `sky down` of each cluster."""
        self._urls: dict[_LaunchKey, str] = {}
        self._lookups: dict[_LaunchKey, asyncio.Task[None]] = {}
        self._lookup_slots = asyncio.Semaphore(MAX_ENDPOINT_LOOKUPS)
        self._unhealthy_since_s: dict[_LaunchKey, float] = {}

    async def offers(self) -> list[Offer]:
        rows, problems = await run_in_thread(self._read_catalog, self.name, self._catalog_slot)
        by_name = {row.name: row for row in rows}
        for name, usd in self._config.prices.items():
            cloud, region, instance_type, *market = name.split("/") if name.count("/") in (2, 3) else ("", "", "")
            if not instance_type or market not in ([], ["spot"]):
                problems.append(f"provisioners.prices: ignoring {name!r}: it is not like CLOUD/REGION/TYPE or …/spot")
                continue
            known = by_name.get(name)
            gpu, gpus = (known.gpu, known.gpus) if known else (self._config.gpu, self._config.gpus)
            by_name[name] = CatalogRow(cloud, region, instance_type, gpu, gpus, bool(market), usd)
        offers = []
        for row in by_name.values():
            hardware = {"gpu": row.gpu, "gpus": row.gpus, "spot": row.spot, "usd_per_hour": row.usd_per_hour}
            offers.append(configured_offer(self._config, row.name, f"{row.cloud}/{row.region}", **hardware))
        return self._validator.validate(offers, problems)

    async def provision(self, offer: Offer, token: str) -> None:
        if not TOKEN.fullmatch(token):
            raise ProvisionerError(f"{self.name}: token {token!r} is invalid: the status would not find its cluster")
        deadline_s = time.monotonic() + self._config.timeout_s
        cluster = self._cluster(token)
        try:
            clusters = await self._clusters()
        except ProvisionerTimeout as error:
            # A timeout here is not a ProvisionerTimeout: that would mean that the machine may exist.
            raise ProvisionerError(str(error)) from None  # nothing was started
        if token in self._launching or any(one["name"] == cluster for one in clusters):
            return
        cloud, region, instance_type, *market = offer.name.split("/")
        command = [self._config.sky_command, "launch", "-y", "-d", "--cluster", cluster, "--infra", f"{cloud}/{region}"]
        command += ["--instance-type", instance_type, "--use-spot" if market == ["spot"] else "--no-use-spot"]
        command += ["--env", f"WARMROUTE_TOKEN={token}", self._config.task_file]
        launch = asyncio.create_task(run_command(command, self._config, timeout_s=LAUNCH_LIMIT_S))
        self._launching[token] = offer, launch
        self._failed.pop(token, None)
        launch.add_done_callback(lambda _: self._launch_ended(token))
        await asyncio.wait([launch], timeout=max(0.0, REFUSAL_SHARE * (deadline_s - time.monotonic())))
        if launch.done():
            result = launch.result()
            if result.code:
                raise _launch_error(self.name, result)

    async def status(self) -> list[Machine]:
        deadline_s = time.monotonic() + self._config.timeout_s
        clusters = await self._clusters("--refresh")
        self._forget_gone(clusters)
        await self._find_urls(clusters, deadline_s)
        machines = [self._machine(one) for one in clusters]
        seen = {machine.token for machine in machines}
        now_s = time.monotonic()
        self._failed = {
            token: one for token, one in self._failed.items() if token in seen or now_s - one.when_s < FORGET_S
        }
        pending = [(token, MachineState.PENDING, one[0].name, "") for token, one in self._launching.items()]
        failed = [(token, MachineState.TERMINATED, one.offer, one.reason) for token, one in self._failed.items()]
        return machines + [
            Machine(id=self._cluster(token), token=token, offer=offer, state=state, reason=reason)
            for token, state, offer, reason in (*pending, *failed)
            if token not in seen
        ]

    async def terminate(self, machine: Machine) -> None:
        """After a cancelled call, the next one waits for the same `sky down`."""
        cluster = self._cluster(machine.token)
        if machine.id != cluster or not TOKEN.fullmatch(machine.token):
            deployment = self._config.deployment
            raise ProvisionerError(f"{self.name}: {machine.id!r} is not a cluster of deployment {deployment!r}")
        down = self._ending.get(cluster)
        if down is None:
            command = [self._config.sky_command, "down", "-y", cluster]
            down = asyncio.create_task(run_command(command, self._config, timeout_s=DOWN_LIMIT_S))
            self._ending[cluster] = down
        timeout_s = self._config.timeout_s
        await asyncio.wait([down], timeout=timeout_s)
        if not down.done():
            raise ProvisionerTimeout(f"{self.name}: sky down of {cluster} took longer than {timeout_s:g} s")
        self._ending.pop(cluster, None)
        result = down.result()
        not_found = NOT_FOUND.search(_output(result))
        if result.code and not not_found:
            raise ProvisionerError(f"{self.name}: sky down failed {_exit_reason(result)}")
        if not_found and machine.token in self._launching:
            raise ProvisionerError(f"{self.name}: {cluster} cannot be terminated yet: its launch has just started")
        launching = self._launching.pop(machine.token, None)
        if launching is not None:
            launching[1].cancel()
        self._failed.pop(machine.token, None)

    async def close(self) -> None:
        """Launches and terminations continue on the API server; only the commands that watch them end."""
        watching: list[asyncio.Task[Any]] = [launch for _offer, launch in self._launching.values()]
        watching += [*self._ending.values(), *self._lookups.values()]
        for task in watching:
            task.cancel()
        await asyncio.gather(*watching, return_exceptions=True)

    def _launch_ended(self, token: str) -> None:
        """Remember a launch that failed."""
        entry = self._launching.pop(token, None)
        if entry is None or entry[1].cancelled():
            return
        offer, launch = entry
        error = launch.exception()
        if error is None and launch.result().code:
            error = _launch_error(self.name, launch.result())
        if error is not None:
            self._failed[token] = _FailedLaunch(offer.name, str(error), time.monotonic())

    def _cluster(self, token: str) -> str:
        return f"{self._config.deployment}-{token}"

    async def _sky(self, *words: str) -> CommandResult:
        return await run_command([self._config.sky_command, *words], self._config, timeout_s=self._config.timeout_s)

    async def _clusters(self, *words: str) -> list[dict[str, Any]]:
        """Return our clusters: those named with the deployment and a token. `prod` does not match `prod-eu-…`."""
        result = await self._sky("status", *words, "-o", "json")
        if result.code:
            raise ProvisionerError(f"{self.name}: sky status failed {_exit_reason(result)}")
        found = _parse_clusters(result.out.decode(errors="replace"))
        if found is None:
            raise ProvisionerError(f"{self.name}: the output of sky status is not JSON: {excerpt(result.out)}")
        ours = re.compile(re.escape(self._cluster("")) + TOKEN.pattern)
        return [one for one in found if ours.fullmatch(str(one.get("name", "")))]

    def _machine(self, cluster: dict[str, Any]) -> Machine:
        key = name, _launched_s = _launch_key(cluster)
        token = name.removeprefix(self._cluster(""))
        status, down = str(cluster.get("status")), self._ending.get(name)
        state, url = STATES.get(status, MachineState.PENDING), ""
        reason = str(cluster.get("init_status_reason") or cluster.get("last_event") or "")
        if down is not None and not down.done():
            state = MachineState.TERMINATING
        elif state is MachineState.RUNNING:
            url = self._urls.get(key, "")
            if not url:
                state, reason = MachineState.PENDING, f"port {self._config.port} is not open yet (resources.ports)"
        reclaim_reason = self._reclaim_reason(cluster, token)
        return Machine(
            id=name,
            token=token,
            offer=_offer_of(str(cluster.get("last_creation_command") or "")),
            state=state,
            url=url,
            reclaimed=bool(reclaim_reason),
            reason=reason or reclaim_reason,
            island=self._config.island or _island_of(cluster),
        )

    def _reclaim_reason(self, cluster: dict[str, Any], token: str) -> str:
        """Return why the router should terminate the cluster (it will not serve, and it is paid for), or an empty
        string."""
        status = str(cluster.get("status"))
        if status in STOPPED:
            return f"it is {status.lower()}"
        if self._stays_unhealthy(cluster):
            return "it is unhealthy"
        if status != "UP" and token in self._failed:
            return self._failed[token].reason
        return ""

    def _stays_unhealthy(self, cluster: dict[str, Any]) -> bool:
        """Return whether the cluster's machine was taken away, or has not answered SkyPilot for a while."""
        key = _launch_key(cluster)
        if cluster.get("status") != "INIT" or cluster.get("init_kind") != "unhealthy":
            self._unhealthy_since_s.pop(key, None)
            return False
        now_s = time.monotonic()
        return now_s - self._unhealthy_since_s.setdefault(key, now_s) >= UNHEALTHY_S

    def _forget_gone(self, clusters: Iterable[dict[str, Any]]) -> None:
        existing = {_launch_key(one) for one in clusters}
        names = {name for name, _launched_s in existing}
        self._urls = {key: url for key, url in self._urls.items() if key in existing}
        self._unhealthy_since_s = {key: at_s for key, at_s in self._unhealthy_since_s.items() if key in existing}
        for name in [name for name, down in self._ending.items() if down.done() and name not in names]:
            self._ending.pop(name).exception()  # the cluster is gone, whatever the command reported

    async def _find_urls(self, clusters: Iterable[dict[str, Any]], deadline_s: float) -> None:
        """Look up the unknown addresses until the deadline; unfinished lookups continue until the next call. An address
        stays valid until the cluster is launched again."""
        lookups = []
        for key in {_launch_key(one) for one in clusters if one.get("status") == "UP"} - self._urls.keys():
            lookup = self._lookups.get(key)
            if lookup is None or lookup.done():
                lookup = self._lookups[key] = asyncio.create_task(self._find_url(key))
            lookups.append(lookup)
        if lookups:
            await asyncio.wait(lookups, timeout=max(0.0, deadline_s - time.monotonic()))
        self._lookups = {key: lookup for key, lookup in self._lookups.items() if not lookup.done()}

    async def _find_url(self, key: _LaunchKey) -> None:
        async with self._lookup_slots:
            try:
                result = await self._sky("status", key[0], "--endpoint", str(self._config.port))
            except ProvisionerError:
                return  # the next call tries again
        lines = ANSI_COLOR.sub("", result.out.decode(errors="replace")).split()
        address = (lines[-1] if lines else "").removeprefix("http://").rstrip("/")
        if not result.code and re.fullmatch(r"[^\s/@]+:[0-9]+", address):
            self._urls[key] = f"http://{address}"

    def _read_catalog(self) -> tuple[list[CatalogRow], list[str]]:
        """Runs in a thread. Read each file again when it has changed. A cloud whose file is invalid has no offers."""
        config = self._config
        rows: list[CatalogRow] = []
        problems: list[str] = []
        invalid = 0
        for cloud in config.clouds:
            path = catalog_folder(config.catalog_dir) / cloud / "vms.csv"
            try:
                changed = path.stat().st_mtime if path.exists() else 0.0
                if cloud not in self._catalog or self._catalog[cloud][0] != changed:
                    self._catalog[cloud] = (changed, *read_catalog(path, cloud, config))
            except ProvisionerError as error:
                invalid += 1
                problems.append(str(error))
                continue
            rows += self._catalog[cloud][1]
            problems += self._catalog[cloud][2]
        if invalid == len(config.clouds) and not config.prices:
            raise ProvisionerError(f"{self.name}: {problems[0]}")
        return rows, problems


def _launch_key(cluster: dict[str, Any]) -> _LaunchKey:
    launched_s = cluster.get("launched_at")
    return str(cluster["name"]), float(launched_s) if isinstance(launched_s, (int, float)) else 0.0


def _parse_clusters(text: str) -> list[dict[str, Any]] | None:
    """Return the JSON list of clusters. Lines of progress around it may start with a bracket, too."""
    for found in re.finditer(r"^\s*(?=\[)", text, re.MULTILINE):
        try:
            decoded, _end = json.JSONDecoder().raw_decode(text, found.end())
        except ValueError:
            continue
        if all(isinstance(one, dict) for one in decoded):
            return list(decoded)
    return None


def _output(result: CommandResult) -> str:
    return ANSI_COLOR.sub("", (result.out + result.err).decode(errors="replace"))


def _exit_reason(result: CommandResult) -> str:
    return f"(exit code {result.code}): {ANSI_COLOR.sub('', result.last_line)}"


def _launch_error(provisioner: str, result: CommandResult) -> ProvisionerError:
    kind = NoCapacity if NO_CAPACITY.search(_output(result)) else ProvisionerError
    return kind(f"{provisioner}: sky launch failed {_exit_reason(result)}")


def _offer_of(command: str) -> str:
    """Return the offer of a cluster, from the launch command that SkyPilot remembers."""
    try:
        words = shlex.split(command)
        infra = words[words.index("--infra") + 1]
        instance_type = words[words.index("--instance-type") + 1]
    except (ValueError, IndexError):
        return ""
    return f"{infra}/{instance_type}" + ("/spot" if "--use-spot" in words else "")


def _island_of(cluster: dict[str, Any]) -> str:
    cloud, region = cluster.get("cloud"), cluster.get("region")
    return f"{str(cloud).lower()}/{region}" if cloud and region else ""
