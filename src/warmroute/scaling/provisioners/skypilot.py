"""skypilot: clusters of one node, through the `sky` command and the API server that the operator runs. SkyPilot is
never imported: it takes seconds and 290 MB.

A cluster's name is the deployment's and the token, so asking twice starts one. `sky launch` takes minutes: what fails
at once is told at once, and the rest runs on by itself; whoever asks for the status learns how it ended.
"""

from __future__ import annotations

import asyncio
import re
import shlex
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from warmroute.config import ProvisionerConfig
from warmroute.scaling.offer import Offer
from warmroute.scaling.provisioner import CloudError, Machine, MachineState, NoCapacity
from warmroute.scaling.provisioners import child
from warmroute.scaling.provisioners.answers import beginning
from warmroute.scaling.provisioners.configured import sanity_of
from warmroute.scaling.provisioners.sky_catalogue import Row, Wanted, folder_of, rows_of

STATES = {
    "INIT": MachineState.PENDING,
    "PENDING": MachineState.PENDING,
    "UP": MachineState.RUNNING,
    "AUTOSTOPPING": MachineState.ENDING,
    "STOPPED": MachineState.ENDED,
}
NO_CAPACITY = re.compile(
    r"ResourcesUnavailableError|Failed to provision all|[Qq]uota|[Ii]nsufficient.{0,20}[Cc]apacity"
)
COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
LAUNCH_LIMIT_S = 3600.0
FORGET_S = 600.0
"""How long a launch that failed is still told of."""


class _Failed(msgspec.Struct, frozen=True):
    offer: str
    reason: str
    when_s: float


class SkyPilotProvisioner:
    def __init__(self, config: ProvisionerConfig) -> None:
        self.name = config.label
        self._config = config
        self._sanity = sanity_of(config)
        self._thread = ThreadPoolExecutor(1, f"warmroute-{config.label}")
        self._rows: dict[str, tuple[float, list[Row], list[str]]] = {}
        self._launching: dict[str, tuple[Offer, asyncio.Task[child.Said]]] = {}
        self._failed: dict[str, _Failed] = {}
        self._urls: dict[tuple[str, int], str] = {}

    async def offers(self) -> list[Offer]:
        rows, said = await asyncio.get_running_loop().run_in_executor(self._thread, self._read_catalogue)
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
        if token in self._launching:
            return
        cluster = self._cluster(token)
        if any(one.get("name") == cluster for one in await self._clusters()):
            return
        cloud, region, kind, *market = offer.name.split("/")
        command = [self._config.sky, "launch", "-y", "-d", "--cluster", cluster, "--infra", f"{cloud}/{region}"]
        command += ["--instance-type", kind, "--use-spot" if market == ["spot"] else "--no-use-spot"]
        command += ["--env", f"WARMROUTE_TOKEN={token}", self._config.task]
        launch = asyncio.create_task(child.run(command, self.name, timeout_s=LAUNCH_LIMIT_S))
        self._launching[token] = offer, launch
        self._failed.pop(token, None)
        launch.add_done_callback(lambda _: self._settle(token))
        await asyncio.wait([launch], timeout=self._config.timeout_s)
        if launch.done():
            said = launch.result()
            if said.code:
                self._failed.pop(token, None)  # told here
                raise _why(self.name, said)

    async def status(self) -> list[Machine]:
        clusters = await self._clusters()
        machines = await asyncio.gather(*(self._machine(one) for one in clusters))
        seen = {machine.token for machine in machines}
        now_s = time.monotonic()
        self._failed = {token: one for token, one in self._failed.items() if now_s - one.when_s < FORGET_S}
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
        launching = self._launching.pop(machine.token, None)
        if launching is not None:
            launching[1].cancel()
        self._failed.pop(machine.token, None)
        said = await self._sky("down", "-y", machine.id)
        if said.code and "not found" not in COLOUR.sub("", (said.out + said.err).decode(errors="replace")):
            raise CloudError(f"{self.name}: sky down failed (exit {said.code}): {said.last_line}")

    async def close(self) -> None:
        """Launches that run on are the API server's by now; only the commands that watch them end."""
        for _offer, launch in self._launching.values():
            launch.cancel()
        await asyncio.gather(*(launch for _offer, launch in self._launching.values()), return_exceptions=True)
        self._thread.shutdown(wait=False, cancel_futures=True)

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

    async def _clusters(self) -> list[dict[str, Any]]:
        """Ours, by name. Before the JSON there may be lines of progress."""
        said = await self._sky("status", "--refresh", "-o", "json")
        if said.code:
            raise CloudError(f"{self.name}: sky status failed (exit {said.code}): {said.last_line}")
        found = re.search(rb"^\s*\[", said.out, re.MULTILINE)
        try:
            read = msgspec.json.decode(said.out[found.start() :] if found else said.out, type=list[dict[str, Any]])
        except (msgspec.DecodeError, msgspec.ValidationError):
            raise CloudError(f"{self.name}: sky status answered no JSON; it begins {beginning(said.out)}") from None
        return [one for one in read if str(one.get("name", "")).startswith(f"{self._config.deployment}-")]

    async def _machine(self, cluster: dict[str, Any]) -> Machine:
        name, launched = str(cluster["name"]), int(cluster.get("launched_at") or 0)
        state = STATES.get(str(cluster.get("status")), MachineState.PENDING)
        reason = str(cluster.get("init_status_reason") or cluster.get("last_event") or "")
        if cluster.get("status") == "INIT" and cluster.get("init_kind") == "unhealthy":
            state = MachineState.ENDED  # what SkyPilot says of a cluster whose node was taken away
        url = ""
        if state is MachineState.RUNNING:
            url = await self._url(name, launched)
            if not url:
                state, reason = MachineState.PENDING, f"port {self._config.port} is not open yet (resources.ports)"
        return Machine(
            id=name,
            token=name.removeprefix(f"{self._config.deployment}-"),
            offer=_offer_of(str(cluster.get("last_creation_command") or "")),
            state=state,
            url=url,
            started_s=float(launched),
            reason=reason,
            island=self._config.island or _island_of(cluster),
        )

    async def _url(self, name: str, launched: int) -> str:
        """Asked until it is known; it stays as it is until the cluster is launched anew."""
        known = self._urls.get((name, launched))
        if known:
            return known
        said = await self._sky("status", name, "--endpoint", str(self._config.port))
        lines = COLOUR.sub("", said.out.decode(errors="replace")).split()
        address = (lines[-1] if lines else "").removeprefix("http://").rstrip("/")
        if said.code or not re.fullmatch(r"[^\s/@]+:[0-9]+", address):
            return ""
        self._urls[name, launched] = f"http://{address}"
        return f"http://{address}"

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


def _why(who: str, said: child.Said) -> CloudError:
    text = COLOUR.sub("", (said.out + said.err).decode(errors="replace"))
    kind = NoCapacity if NO_CAPACITY.search(text) else CloudError
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
