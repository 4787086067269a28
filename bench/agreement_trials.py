"""Run one workload twice: over real sockets (engines, router and load generator as processes), and in virtual time.

Both have the same node names, seeds and routing keys, so that a request goes to the same node in both, unless its
policy depends on timing.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from warmroute.config import Admission, Config, ConfigError, Polling, Pricing, from_table
from warmroute.lab.demo.processes import Child, Children, send_request
from warmroute.lab.engine.timing import profile
from warmroute.lab.load import LoadOptions, LoadRun
from warmroute.lab.simulated_node import Conditions, Island, NodeSpec
from warmroute.lab.summary import Run, summary
from warmroute.lab.workloads import parse_workload
from warmroute.lab.workloads.workload_prompt import Form, WorkloadPrompt
from warmroute.lab.world import World

os.environ["WARMROUTE_EXPERIMENT"] = "1"  # the routers' files set what is no key

HOST = "127.0.0.1"
READY_WITHIN_S = 30.0


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """One workload and fleet, to run both ways."""

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
    """Speed of the engine processes. The machine's own milliseconds are multiplied by it."""
    events: bool = False
    """Whether the engine processes send KV events and tokenize for the router. Simulated ones always do."""

    def prompts(self) -> Iterator[WorkloadPrompt]:
        return parse_workload(self.workload).arrivals(self.seed, self.rate, limit=self.limit)

    def names(self) -> list[str]:
        """Return the node names, which decide rendezvous hashing."""
        return [f"node-{at}" for at in range(self.nodes)]


class Comparison(msgspec.Struct, frozen=True):
    live: Run
    replay: Run

    @property
    def hit_rate_points(self) -> float:
        """Return how much higher the live hit rate is, in percentage points."""
        return 100.0 * float(self.live["hit_rate"] - self.replay["hit_rate"])

    def ttft_difference(self, percent: str) -> float:
        """Return how much longer the live TTFT is, as a fraction."""
        return float(self.live["ttft_ms"][percent] / self.replay["ttft_ms"][percent]) - 1.0


def run_in_replay(trial: Trial) -> Run:
    conditions = Conditions(
        seed=trial.seed,
        form=trial.form,
        islands={"local": Island(0.0)},
        poll_interval_s=Polling().interval_s * trial.speed,
        stale_s=Polling().stale_s * trial.speed,
    )
    hardware = profile(trial.profile)
    specs = [NodeSpec(name, hardware, blocks=trial.blocks) for name in trial.names()]
    world = World(specs, conditions, _config(trial))
    world.run(trial.prompts(), concurrency=trial.concurrency, limit=trial.limit)
    return summary(world)


def _config(trial: Trial) -> Config:
    return from_table({"routing": {"policy": trial.policy, "seed": trial.seed}}, experiment=True)


async def run_live(trial: Trial) -> Run:
    """Run the trial with real processes. Raises ConfigError if one does not start."""
    async with _fleet(trial) as url:
        load = LoadOptions(
            url=url, form=trial.form, concurrency=trial.concurrency, limit=trial.limit, speed=trial.speed
        )
        return await LoadRun(load, trial.prompts()).run()


@asynccontextmanager
async def _fleet(trial: Trial) -> AsyncIterator[str]:
    """Start the engines and the router, and yield the router's address when every node is up."""
    with Children() as children, tempfile.TemporaryDirectory() as folder:
        urls = _engines(trial, children)
        port, admin_port = _free_port(), _free_port()
        table = [f'[routing]\npolicy = "{trial.policy}"\nseed = {trial.seed}\n', _scaled_times(trial.speed)]
        if trial.events:
            table.append("[prompts]\nremote_tokenize = true\n")
        table += [
            f'[[nodes]]\nname = "{name}"\nurl = "{url}"\nmodels = ["sim"]\n'
            for name, url in zip(trial.names(), urls, strict=True)
        ]
        file = Path(folder) / "agreement.toml"
        file.write_text("\n".join(table), encoding="utf-8")
        router = children.start(
            "serve", "--config", str(file), "--host", HOST, "--port", str(port), "--admin-port", str(admin_port)
        )
        await _wait_until_up(router, admin_port)
        if trial.events and _config(trial).routing.uses_kv_events:
            await _wait_for_kv_events(admin_port)
        yield f"http://{HOST}:{port}"


def _scaled_times(speed: float) -> str:
    """Return the router's settings that are engine times, for engines that run `speed` times as fast."""
    admission, price = Admission(), Pricing()
    return (
        f"[admission]\nmax_node_backlog_ms = {admission.max_node_backlog_ms / speed}\n\n"
        f"[price]\nsecond_home_ms = {price.second_home_ms / speed}\n"
    )


def _free_port() -> int:
    """Return a port that is free now. It is random, because trials may run at the same time."""
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


async def _wait_until_up(router: Child, admin_port: int) -> None:
    async with asyncio.timeout(READY_WITHIN_S):
        while True:
            await asyncio.sleep(0.05)
            if router.has_ended():
                raise ConfigError(router.start_error())
            try:
                status, body = await send_request("GET", f"http://{HOST}:{admin_port}/admin/nodes")
            except OSError:
                continue
            if status == 200 and all(node["state"] == "up" for node in json.loads(body)["nodes"]):
                return


async def _wait_for_kv_events(admin_port: int) -> None:
    """Wait until the router receives the KV events of every node."""
    async with asyncio.timeout(READY_WITHIN_S):
        while True:
            _, page = await send_request("GET", f"http://{HOST}:{admin_port}/metrics")
            complete = re.findall(rb"^warmroute_node_cache_events_complete\{.*\} (\S+)$", page, re.MULTILINE)
            if complete and all(float(value) for value in complete):
                return
            await asyncio.sleep(0.05)


async def run_both(trial: Trial) -> Comparison:
    return Comparison(await run_live(trial), run_in_replay(trial))
