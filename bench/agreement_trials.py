"""The same workload twice: over real sockets (engines, router and load generator), and in virtual time.

Both have the same nodes by name, the same seeds and the same routing keys, so a request goes to the same node in both
as far as its policy is not led by moments. What remains different is said in docs/simulation.md.
"""

from __future__ import annotations

import asyncio
import json
import re
import socket
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from warmroute.config import Admission, Config, ConfigError, Metrics, Pricing, from_table
from warmroute.demo.chat_client import Unanswered, send_request
from warmroute.demo.child_processes import Child, Children
from warmroute.demo.load_generator.drive import Drive, Load
from warmroute.fake_engine.profiles import profile
from warmroute.replay.summary import Run, summary
from warmroute.replay.workloads import Prompt, choose
from warmroute.replay.workloads.text import Form
from warmroute.replay.world import Conditions, Island, NodeSpec, World

HOST = "127.0.0.1"
READY_WITHIN_S = 30.0


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """What is run twice."""

    workload: tuple[str, ...]
    policy: str
    nodes: int = 3
    profile: str = "l4-8b"
    blocks: int | None = None
    form: Form = "chat"
    rate: float | None = None
    concurrency: int | None = None
    limit: int = 100
    seed: int = 1
    speed: float = 3.0
    """Of the real engines. The machine's own time, some milliseconds a request, counts this many times."""
    events: bool = False
    """Whether the real engines tell of their caches and count the router's tokens, as the simulated ones always do."""

    def prompts(self) -> Iterator[Prompt]:
        return choose(self.workload).arrive(self.seed, self.rate, limit=self.limit)

    def names(self) -> list[str]:
        """Rendezvous hashing goes by them."""
        return [f"node-{at}" for at in range(self.nodes)]


class Both(msgspec.Struct, frozen=True):
    live: Run
    virtual: Run

    @property
    def hit_rate_points(self) -> float:
        """How much more was hit live, in points of a hundred."""
        return 100.0 * float(self.live["hit_rate"] - self.virtual["hit_rate"])

    def ttft_off(self, percent: str) -> float:
        """How much longer it took live, as a share."""
        return float(self.live["ttft_ms"][percent] / self.virtual["ttft_ms"][percent]) - 1.0


def virtual(trial: Trial) -> Run:
    conditions = Conditions(
        seed=trial.seed,
        form=trial.form,
        islands={"local": Island(0.0)},
        poll_interval_s=Metrics().interval_s * trial.speed,
        stale_s=Metrics().stale_s * trial.speed,
    )
    hardware = profile(trial.profile)
    specs = [NodeSpec(name, hardware, blocks=trial.blocks) for name in trial.names()]
    world = World(specs, conditions, _config(trial))
    world.run(trial.prompts(), concurrency=trial.concurrency, limit=trial.limit)
    return summary(world)


def _config(trial: Trial) -> Config:
    return from_table({"routing": {"policy": trial.policy, "seed": trial.seed}})


async def live(trial: Trial) -> Run:
    """Raises ConfigError where something does not start."""
    async with _fleet(trial) as url:
        load = Load(url=url, form=trial.form, concurrency=trial.concurrency, limit=trial.limit, speed=trial.speed)
        return await Drive(load, trial.prompts()).run()


@asynccontextmanager
async def _fleet(trial: Trial) -> AsyncIterator[str]:
    """Engines with the router before them; yields the router's address when every node is up."""
    with Children() as children, tempfile.TemporaryDirectory() as folder:
        urls = _engines(trial, children)
        port, admin_port = _any_port(), _any_port()
        table = [f'[routing]\npolicy = "{trial.policy}"\nseed = {trial.seed}\n', _as_fast_as(trial.speed)]
        if trial.events:
            table.append("[prompts]\nremote = true\n")
        table += [
            f'[[nodes]]\nname = "{name}"\nurl = "{url}"\nmodels = ["sim"]\n'
            for name, url in zip(trial.names(), urls, strict=True)
        ]
        file = Path(folder) / "agreement.toml"
        file.write_text("\n".join(table), encoding="utf-8")
        router = children.start(
            "serve", "--config", str(file), "--host", HOST, "--port", str(port), "--admin-port", str(admin_port)
        )
        await _all_up(router, admin_port)
        if trial.events and _config(trial).routing.uses_events:
            await _all_followed(admin_port)
        yield f"http://{HOST}:{port}"


def _as_fast_as(speed: float) -> str:
    """The router's settings that are times of an engine, for engines that run so many times faster than life."""
    admission, price = Admission(), Pricing()
    return (
        f"[admission]\nahead_ms = {admission.ahead_ms / speed}\n\n"
        f"[price]\nsecond_home_ms = {price.second_home_ms / speed}\nmax_saving_ms = {price.max_saving_ms / speed}\n"
    )


def _any_port() -> int:
    """One that is free now. Not the first of a range: trials may run beside each other."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def _engines(trial: Trial, children: Children) -> list[str]:
    blocks = () if trial.blocks is None else ("--blocks", str(trial.blocks))
    flags = ("--port", "0", "--profile", trial.profile, "--speed", str(trial.speed), *blocks)
    if trial.events:
        flags += ("--events-port", "0", "--replay-port", "0")
    engines = [children.start("engine", *flags) for _ in range(trial.nodes)]
    return [json.loads(engine.first_line())["url"] for engine in engines]


async def _all_up(router: Child, admin_port: int) -> None:
    async with asyncio.timeout(READY_WITHIN_S):
        while True:
            await asyncio.sleep(0.05)
            if router.has_ended():
                raise ConfigError(router.why_it_ended())
            try:
                status, body = await send_request(HOST, admin_port, "GET", "/admin/nodes")
            except (OSError, Unanswered):
                continue
            if status == 200 and all(node["state"] == "up" for node in json.loads(body)["nodes"]):
                return


async def _all_followed(admin_port: int) -> None:
    """Until the router hears what every node tells of its cache."""
    async with asyncio.timeout(READY_WITHIN_S):
        while True:
            _, page = await send_request(HOST, admin_port, "GET", "/metrics")
            told = re.findall(rb"^warmroute_node_cache_told\{.*\} (\S+)$", page, re.MULTILINE)
            if told and all(float(value) for value in told):
                return
            await asyncio.sleep(0.05)


async def both(trial: Trial) -> Both:
    return Both(await live(trial), virtual(trial))
