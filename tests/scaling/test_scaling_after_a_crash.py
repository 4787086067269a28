"""A router process that scales simulated engines and is killed while they boot: none is lost or started twice."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from support.free_port import free_port
from support.polling import until
from support.raw_client import chat, post
from support.serve_process import ServeProcess, serve

from warmroute.config import ProvisionerConfig
from warmroute.scaling.provisioners.process import TOKEN_VARIABLE, ProcessProvisioner

pytestmark = pytest.mark.usefixtures("experiment")

PATIENCE_S = 40.0
CONFIG = """
[listen]
port = 0
[admin]
port = 0
[health]
interval_s = 0.1
slow_start_s = 0.0
[shutdown]
deadline_s = 2.0
[scaling]
enabled = true
interval_s = 0.3
min_nodes = {nodes}
max_nodes = {nodes}
cooldown_up_s = 0.5
cooldown_down_s = 1.0
lock_file = "{folder}/lock"
{more}
[[provisioners]]
kind = "process"
deployment = "{deployment}"
state_dir = "{folder}/state"
port = {port}
usd_per_hour = 1.5
gpu = "sim"
command = [{command}]
"""


class Place:
    """A folder with a configuration, and the engines of its deployment."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.deployment = f"live-{folder.name[-12:].lower().replace('_', '-').strip('-')}"
        self.port = free_port()
        self.command: tuple[str, ...] = (
            sys.executable,
            "-m",
            "warmroute",
            "engine",
            "--port",
            "{port}",
            "--speed",
            "20",
        )
        self.file = folder / "warmroute.toml"

    def write(self, nodes: int, more: str = "") -> None:
        words = ", ".join(json.dumps(word) for word in self.command)
        self.file.write_text(
            CONFIG.format(
                nodes=nodes, folder=self.folder, deployment=self.deployment, port=self.port, command=words, more=more
            )
        )

    def processes(self) -> list[int]:
        """Return the pids of its running engines."""
        mark = f"{TOKEN_VARIABLE}={self.deployment}/".encode()
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                alive = (folder / "stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
                if alive and any(line.startswith(mark) for line in (folder / "environ").read_bytes().split(b"\0")):
                    found.append(int(folder.name))
            except OSError:
                continue
        return found

    async def end_all(self) -> None:
        provisioner = ProcessProvisioner(
            ProvisionerConfig(
                kind="process", deployment=self.deployment, state_dir=str(self.folder / "state"), stop_grace_s=2.0
            )
        )
        for machine in await provisioner.status():
            await provisioner.terminate(machine)
        await provisioner.close()


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


@asynccontextmanager
async def nothing_left_of(place: Place) -> AsyncIterator[None]:
    try:
        yield
    finally:
        await place.end_all()
        assert not place.processes()


def admin(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode()


async def scaling(router: ServeProcess) -> dict[str, Any]:
    answer = await router.request(admin("/admin/scaling"), router.admin_port)
    assert answer.status == 200
    found: dict[str, Any] = answer.json
    return found


async def until_serving(router: ServeProcess, count: int) -> dict[str, Any]:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            found = await scaling(router)
            if [node["state"] for node in found["nodes"]] == ["serving"] * count:
                return found
            await asyncio.sleep(0.05)


async def test_a_killed_router_is_followed_by_one_that_adopts_its_engines(place: Place) -> None:
    place.write(nodes=2)
    async with nothing_left_of(place):
        async with serve("--config", place.file) as first:
            await until(lambda: len(place.processes()) == 2, patience_s=PATIENCE_S)
            first.signal(signal.SIGKILL)
            await first.process.wait()
        before = sorted(place.processes())
        assert len(before) == 2  # engines outlive their router
        async with serve("--config", place.file) as second:
            found = await until_serving(second, 2)
            assert sorted(place.processes()) == before
            assert found["leading"] and found["desired_nodes"] == 2 and found["last_decision"]["nodes"] == 2
            (offer,) = found["offers"]
            assert (offer["offer"], offer["usd_per_hour"], offer["gpu"]) == ("process/process", 1.5, "sim")
            names = {node["node"] for node in found["nodes"]}
            nodes = (await second.request(admin("/admin/nodes"), second.admin_port)).json
            assert {node["name"] for node in nodes["nodes"]} == names
            answer = await second.request(post(chat(model="sim", max_tokens=2)))
            assert answer.status == 200
            page = (await second.request(admin("/metrics"), second.admin_port)).body.decode()
            metrics = dict(line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#"))
            assert float(metrics["warmroute_scaling_desired_nodes"]) == 2
            assert float(metrics['warmroute_scaling_nodes{state="serving"}']) == 2
            assert float(metrics['warmroute_scaling_nodes{state="booting"}']) == 0
            assert float(metrics['warmroute_scaling_changes_total{change="added"}']) == 2
            assert float(metrics["warmroute_scaling_cost_usd_per_hour"]) == 3.0
            assert float(metrics["warmroute_scaling_leader"]) == 1
            # A reloaded configuration removes a node, once it has no requests.
            place.write(nodes=1)
            await until_serving(second, 1)
            await until(lambda: len(place.processes()) == 1, patience_s=PATIENCE_S)
            assert set(place.processes()) < set(before)
            second.signal(signal.SIGTERM)
            assert await second.process.wait() == 0
        assert len(place.processes()) == 1  # a router that stops leaves its nodes to the next one


async def test_of_two_routers_with_one_lock_only_one_scales(place: Place) -> None:
    place.write(nodes=1)
    async with nothing_left_of(place), serve("--config", place.file) as first:
        await until_serving(first, 1)
        async with serve("--config", place.file) as second:
            await asyncio.sleep(1.0)
            found = await scaling(second)
            assert not found["leading"] and found["nodes"] == [] and len(place.processes()) == 1
            first.signal(signal.SIGKILL)
            await until_serving(second, 1)
            assert (await scaling(second))["leading"] and len(place.processes()) == 1


async def test_an_offer_whose_engines_cannot_start_backs_off(place: Place) -> None:
    place.command = (sys.executable, "-c", "raise SystemExit('no GPU here')")
    place.write(nodes=1, more="offer_backoff_s = 600.0")
    async with nothing_left_of(place), serve("--config", place.file) as router:
        async with asyncio.timeout(PATIENCE_S):
            while not (found := await scaling(router))["offers"] or not found["offers"][0]["backoff_s"]:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        assert found["offers"][0]["reason"] == "its node did not start: no GPU here"
        await asyncio.sleep(1.0)
        again = await scaling(router)
        assert again["nodes"] == [] and "1 × backing off after a failure" in again["last_decision"]["reasons"][-1]


async def test_an_unusable_lock_file_is_a_configuration_error(place: Place) -> None:
    place.write(nodes=1)
    (place.folder / "lock").mkdir()
    async with serve("--config", place.file) as router:
        assert await router.process.wait() != 0
        assert router.logged("scaling.lock_file") and router.logged("Is a directory")
    assert not place.processes()
