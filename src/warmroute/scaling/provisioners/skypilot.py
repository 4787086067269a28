"""skypilot: clusters of one node, through the `sky` command and the API server that the operator runs. SkyPilot is
never imported: it takes seconds and 290 MB.

A cluster's name is the deployment's and the token, so asking twice starts one; clusters with other names are others'.
`sky launch` and `sky down` take minutes: what fails at once is told at once, and the rest runs on by itself; whoever
asks for the status learns how it ended. A cluster that has stopped, or that stays unhealthy, is still paid for: it is
to be ended.
"""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import time
from collections.abc import Iterable
from typing import Any

import msgspec

from warmroute.blocking import aside
from warmroute.config import ConfigError, ProvisionerConfig
from warmroute.scaling.offer import Offer
from warmroute.scaling.provisioner import TOKEN, CloudError, Machine, MachineState, NoAnswer, NoCapacity
from warmroute.scaling.provisioners import child
from warmroute.scaling.provisioners.answers import beginning
from warmroute.scaling.provisioners.configured import sanity_of
from warmroute.scaling.provisioners.sky_catalogue import Row, Wanted, folder_of, rows_of

STATES = {
    "INIT": MachineState.PENDING,
    "PENDING": MachineState.PENDING,
    "UP": MachineState.RUNNING,
}
STOPPED = ("AUTOSTOPPING", "STOPPING", "STOPPED")
UNHEALTHY_S = 60.0
"""SkyPilot also calls a cluster unhealthy that it could not reach just now: so long it may be well again."""
NO_CAPACITY = re.compile(
    r"ResourcesUnavailableError|Failed to provision all|[Qq]uota|[Ii]nsufficient.{0,20}[Cc]apacity"
)
NOT_FOUND = re.compile(r"Cluster\(s\) not found|Cluster \S+ (was )?(not found|does not exist)|ClusterDoesNotExist")
COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
LAUNCH_LIMIT_S = DOWN_LIMIT_S = 3600.0
REFUSAL_SHARE = 0.5
"""Of the time for a call: how long to wait for a launch to be refused."""
LOOKUPS = 4
"""Endpoints that are asked for at once: each is a process of hundreds of megabytes."""
FORGET_S = 600.0
"""How long a launch that failed is still told of."""


_Launched = tuple[str, float]
"""A cluster's name, and when it was launched: with a new launch it may have another address."""


class _Failed(msgspec.Struct, frozen=True):
    offer: str
    reason: str
    when_s: float


class SkyPilotProvisioner:
    def __init__(self, config: ProvisionerConfig) -> None:
        self.name = config.label
        self._config = config
        if not config.deployment[0].isalpha():
            raise ConfigError(
                f"provisioners.deployment: {config.deployment!r}: a name of SkyPilot's clusters begins with a letter"
            )
        self._sanity = sanity_of(config)
        self._reading = asyncio.Semaphore(1)
        self._rows: dict[str, tuple[float, list[Row], list[str]]] = {}
        self._launching: dict[str, tuple[Offer, asyncio.Task[child.Said]]] = {}
        self._failed: dict[str, _Failed] = {}
        self._ending: dict[str, asyncio.Task[child.Said]] = {}
        """By cluster: a `sky down` that runs."""
        self._urls: dict[_Launched, str] = {}
        self._lookups: dict[_Launched, asyncio.Task[None]] = {}
        self._lookup_places = asyncio.Semaphore(LOOKUPS)
        self._unhealthy_s: dict[_Launched, float] = {}
        """Since when."""

    async def offers(self) -> list[Offer]:
        rows, said = await aside(self._read_catalogue, self.name, self._reading)
        priced = {row.name: row for row in rows}
        for name, usd in self._config.prices.items():
            cloud, region, kind, *market = name.split("/") if name.count("/") in (2, 3) else ("", "", "")
            if not kind or market not in ([], ["spot"]):
                said.append(
                    f"{self.name}: provisioners.prices: {name!r} is not like CLOUD/REGION/TYPE or …/spot: dropped"
                )
                continue
            known = priced.get(name)
            gpu, gpus = (known.gpu, known.gpus) if known else (self._config.gpu, self._config.gpus)
            priced[name] = Row(cloud, region, kind, gpu, gpus, bool(market), usd)
        return self._sanity.check(
            (
                Offer(
                    provisioner=self.name,
                    name=row.name,
                    island=self._config.island or f"{row.cloud}/{row.region}",
                    gpu=row.gpu,
                    gpus=row.gpus,
                    spot=row.spot,
                    usd_per_hour=row.usd_per_hour,
                    start_s=self._config.start_s,
                    most=self._config.most or None,
                )
                for row in priced.values()
            ),
            said,
        )

    async def provision(self, offer: Offer, token: str) -> None:
        if not TOKEN.fullmatch(token):
            raise CloudError(f"{self.name}: a cluster with the token {token!r} would not be found again")
        give_up_s = time.monotonic() + self._config.timeout_s
        cluster = self._cluster(token)
        try:
            clusters = await self._clusters()
        except NoAnswer as error:
            raise CloudError(str(error)) from None  # nothing was begun
        if token in self._launching or any(one["name"] == cluster for one in clusters):
            return
        cloud, region, kind, *market = offer.name.split("/")
        command = [self._config.sky, "launch", "-y", "-d", "--cluster", cluster, "--infra", f"{cloud}/{region}"]
        command += ["--instance-type", kind, "--use-spot" if market == ["spot"] else "--no-use-spot"]
        command += ["--env", f"WARMROUTE_TOKEN={token}", self._config.task]
        launch = asyncio.create_task(child.run(command, self.name, timeout_s=LAUNCH_LIMIT_S))
        self._launching[token] = offer, launch
        self._failed.pop(token, None)
        launch.add_done_callback(lambda _: self._settle(token))
        await asyncio.wait([launch], timeout=max(0.0, REFUSAL_SHARE * (give_up_s - time.monotonic())))
        if launch.done():
            said = launch.result()
            if said.code:
                raise _why(self.name, said)

    async def status(self) -> list[Machine]:
        give_up_s = time.monotonic() + self._config.timeout_s
        clusters = await self._clusters("--refresh")
        self._forget_gone(clusters)
        await self._find_urls(clusters, give_up_s)
        machines = [self._machine(one) for one in clusters]
        seen = {machine.token for machine in machines}
        now_s = time.monotonic()
        self._failed = {
            token: one for token, one in self._failed.items() if token in seen or now_s - one.when_s < FORGET_S
        }
        for token, (offer, _launch) in self._launching.items():
            if token not in seen:
                machines.append(
                    Machine(id=self._cluster(token), token=token, offer=offer.name, state=MachineState.PENDING)
                )
        for token, failed in self._failed.items():
            if token not in seen:
                machines.append(
                    Machine(
                        id=self._cluster(token),
                        token=token,
                        offer=failed.offer,
                        state=MachineState.ENDED,
                        reason=failed.reason,
                    )
                )
        return machines

    async def terminate(self, machine: Machine) -> None:
        """Given up in between, the next call waits for the same `sky down`."""
        cluster = self._cluster(machine.token)
        if machine.id != cluster or not TOKEN.fullmatch(machine.token):
            raise CloudError(f"{self.name}: {machine.id!r} is no cluster of {self._config.deployment!r}: left alone")
        down = self._ending.get(cluster)
        if down is None:
            command = [self._config.sky, "down", "-y", cluster]
            down = self._ending[cluster] = asyncio.create_task(
                child.run(command, self.name, timeout_s=DOWN_LIMIT_S), name=f"sky down {cluster}"
            )
        await asyncio.wait([down], timeout=self._config.timeout_s)
        if not down.done():
            raise NoAnswer(f"{self.name}: sky down of {cluster} goes on after {self._config.timeout_s:g} s")
        self._ending.pop(cluster, None)
        said = down.result()
        not_there = NOT_FOUND.search(_text(said))
        if said.code and not not_there:
            raise CloudError(f"{self.name}: sky down failed (exit {said.code}): {COLOUR.sub('', said.last_line)}")
        if not_there and machine.token in self._launching:
            raise CloudError(f"{self.name}: the launch of {cluster} has not come so far that it could be ended")
        launching = self._launching.pop(machine.token, None)
        if launching is not None:
            launching[1].cancel()
        self._failed.pop(machine.token, None)

    async def close(self) -> None:
        """What runs on is the API server's by now; only the commands that watch it end."""
        watching: list[asyncio.Task[Any]] = [launch for _offer, launch in self._launching.values()]
        watching += [*self._ending.values(), *self._lookups.values()]
        for task in watching:
            task.cancel()
        await asyncio.gather(*watching, return_exceptions=True)

    def _settle(self, token: str) -> None:
        """A launch has ended, well or not."""
        entry = self._launching.pop(token, None)
        if entry is None or entry[1].cancelled():
            return
        offer, launch = entry
        error = launch.exception()
        if error is not None:
            self._failed[token] = _Failed(offer.name, str(error), time.monotonic())
        elif launch.result().code:
            self._failed[token] = _Failed(offer.name, str(_why(self.name, launch.result())), time.monotonic())

    def _cluster(self, token: str) -> str:
        return f"{self._config.deployment}-{token}"

    async def _sky(self, *words: str) -> child.Said:
        return await child.run([self._config.sky, *words], self.name, timeout_s=self._config.timeout_s)

    async def _clusters(self, *words: str) -> list[dict[str, Any]]:
        """Ours: those with a name that is made here. `prod` has nothing to do with `prod-eu-…` or `prod-notebook`."""
        said = await self._sky("status", *words, "-o", "json")
        if said.code:
            raise CloudError(f"{self.name}: sky status failed (exit {said.code}): {COLOUR.sub('', said.last_line)}")
        found = _table_in(said.out.decode(errors="replace"))
        if found is None:
            raise CloudError(f"{self.name}: sky status answered no JSON; it begins {beginning(said.out)}")
        prefix = f"{self._config.deployment}-"
        names = [str(one.get("name", "")) for one in found]
        return [
            one
            for name, one in zip(names, found, strict=True)
            if name.startswith(prefix) and TOKEN.fullmatch(name.removeprefix(prefix))
        ]

    def _machine(self, cluster: dict[str, Any]) -> Machine:
        name, launched_s = launched = _launched(cluster)
        token = name.removeprefix(f"{self._config.deployment}-")
        status, down = str(cluster.get("status")), self._ending.get(name)
        state, url = STATES.get(status, MachineState.PENDING), ""
        reason = str(cluster.get("init_status_reason") or cluster.get("last_event") or "")
        if down is not None and not down.done():
            state = MachineState.ENDING
        elif state is MachineState.RUNNING:
            url = self._urls.get(launched, "")
            if not url:
                state, reason = MachineState.PENDING, f"port {self._config.port} is not open yet (resources.ports)"
        left = self._left_over(cluster, token)
        return Machine(
            id=name,
            token=token,
            offer=_offer_of(str(cluster.get("last_creation_command") or "")),
            state=state,
            url=url,
            reclaimed=bool(left),
            started_s=launched_s,
            reason=reason or left,
            island=self._config.island or _island_of(cluster),
        )

    def _left_over(self, cluster: dict[str, Any], token: str) -> str:
        """Why it is to be ended, where it is: nothing comes of it any more, and it is paid for."""
        status = str(cluster.get("status"))
        if status in STOPPED:
            return f"it is {status.lower()}"
        if self._stays_unhealthy(cluster):
            return "it is unhealthy"
        if status != "UP" and token in self._failed:
            return self._failed[token].reason
        return ""

    def _stays_unhealthy(self, cluster: dict[str, Any]) -> bool:
        """What SkyPilot says of a cluster whose node was taken away, or does not answer it."""
        launched = _launched(cluster)
        if cluster.get("status") != "INIT" or cluster.get("init_kind") != "unhealthy":
            self._unhealthy_s.pop(launched, None)
            return False
        now_s = time.monotonic()
        return now_s - self._unhealthy_s.setdefault(launched, now_s) >= UNHEALTHY_S

    def _forget_gone(self, clusters: Iterable[dict[str, Any]]) -> None:
        there = {_launched(one) for one in clusters}
        names = {name for name, _when in there}
        self._urls = {one: url for one, url in self._urls.items() if one in there}
        self._unhealthy_s = {one: since_s for one, since_s in self._unhealthy_s.items() if one in there}
        for name in [name for name, down in self._ending.items() if down.done() and name not in names]:
            self._ending.pop(name).exception()  # it is gone, whatever was said

    async def _find_urls(self, clusters: Iterable[dict[str, Any]], give_up_s: float) -> None:
        """Asks for those that are not known, and waits as long as there is time; the rest goes on until the next
        time. An address stays as it is until the cluster is launched anew."""
        asked = []
        for launched in {_launched(one) for one in clusters if one.get("status") == "UP"} - self._urls.keys():
            lookup = self._lookups.get(launched)
            if lookup is None or lookup.done():
                lookup = self._lookups[launched] = asyncio.create_task(self._find_url(launched))
            asked.append(lookup)
        if asked:
            await asyncio.wait(asked, timeout=max(0.0, give_up_s - time.monotonic()))
        self._lookups = {launched: lookup for launched, lookup in self._lookups.items() if not lookup.done()}

    async def _find_url(self, launched: _Launched) -> None:
        async with self._lookup_places:
            try:
                said = await self._sky("status", launched[0], "--endpoint", str(self._config.port))
            except CloudError:
                return  # it is asked again
        lines = COLOUR.sub("", said.out.decode(errors="replace")).split()
        address = (lines[-1] if lines else "").removeprefix("http://").rstrip("/")
        if not said.code and re.fullmatch(r"[^\s/@]+:[0-9]+", address):
            self._urls[launched] = f"http://{address}"

    def _read_catalogue(self) -> tuple[list[Row], list[str]]:
        """In a thread. A file is read again when it has changed; a cloud whose file is bad is said and left out."""
        config = self._config
        wanted = Wanted(
            gpu=config.gpu,
            regions=frozenset(config.regions),
            instance_types=frozenset(config.instance_types),
            spot=tuple(market == "spot" for market in config.markets),
            floor_usd=config.min_usd_per_gpu_hour,
        )
        rows: list[Row] = []
        said: list[str] = []
        bad = 0
        for cloud in config.clouds:
            path = folder_of(config.catalog_dir) / cloud / "vms.csv"
            try:
                changed = path.stat().st_mtime if path.exists() else 0.0
                if cloud not in self._rows or self._rows[cloud][0] != changed:
                    self._rows[cloud] = (changed, *rows_of(path, cloud, wanted))
            except CloudError as error:
                bad += 1
                said.append(f"{self.name}: {error}")
                continue
            rows += self._rows[cloud][1]
            said += self._rows[cloud][2]
        if bad == len(config.clouds) and not config.prices:
            raise CloudError(said[0])
        return rows, said


def _launched(cluster: dict[str, Any]) -> _Launched:
    when = cluster.get("launched_at")
    return str(cluster["name"]), float(when) if isinstance(when, (int, float)) else 0.0


def _table_in(text: str) -> list[dict[str, Any]] | None:
    """The list of clusters. Before and after it there may be lines of progress, which may begin with a bracket, too."""
    for found in re.finditer(r"^\s*(?=\[)", text, re.MULTILINE):
        try:
            read, _end = json.JSONDecoder().raw_decode(text, found.end())
        except ValueError:
            continue
        if all(isinstance(one, dict) for one in read):
            return list(read)
    return None


def _text(said: child.Said) -> str:
    return COLOUR.sub("", (said.out + said.err).decode(errors="replace"))


def _why(who: str, said: child.Said) -> CloudError:
    kind = NoCapacity if NO_CAPACITY.search(_text(said)) else CloudError
    return kind(f"{who}: sky launch failed (exit {said.code}): {COLOUR.sub('', said.last_line)}")


def _offer_of(command: str) -> str:
    """The offer that a cluster was launched for, read off the command that SkyPilot remembers."""
    try:
        words = shlex.split(command)
        infra, kind = words[words.index("--infra") + 1], words[words.index("--instance-type") + 1]
    except (ValueError, IndexError):
        return ""
    return f"{infra}/{kind}" + ("/spot" if "--use-spot" in words else "")


def _island_of(cluster: dict[str, Any]) -> str:
    cloud, region = cluster.get("cloud"), cluster.get("region")
    return f"{str(cloud).lower()}/{region}" if cloud and region else ""
