"""A router that scales simulated engines on this machine. Nothing of it is left when its context is left."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections import Counter
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from warmroute.config import ConfigError, ProvisionerConfig
from warmroute.demo.child_processes import Children, free_port
from warmroute.demo.router_process import RouterProcess, start_router
from warmroute.fake_engine.server.engine_server import LAST_WORDS
from warmroute.scaling.provisioner import ProvisionerError, MachineState
from warmroute.scaling.provisioners.process import ProcessProvisioner

COMING = ("requested", "booting", "loading", "warming")
LEAVING = ("draining", "terminating")
START_LIMIT_S = 60.0
END_LIMIT_S = 20.0
LOOK_S = 0.25


class FleetOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How large it may be, and what its engines are."""

    least: int = 2
    most: int = 5
    profile: str = "l4-8b"
    speed: float = 4.0
    """How many times faster than life engines run, so that a day's swing takes a minute."""


class FleetStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The fleet at one moment, by the router's own account."""

    serving: int
    coming: int
    leaving: int
    waiting: int
    desired: int
    reasons: tuple[str, ...]

    @property
    def settled(self) -> bool:
        return not self.coming and not self.leaving


class ScalingChange(msgspec.Struct, frozen=True):
    """A decision that the router has logged."""

    nodes: int
    desired: int
    why: str


class AutoscaledFleet:
    def __init__(self, children: Children, folder: Path, port: int, shape: FleetOptions) -> None:
        """`folder`: for what is written down of the engines; empty, and its own."""
        self._children = children
        self._folder = folder
        self._port = port
        self.shape = shape
        engine = ["engine", "--port", "{port}", "--profile", shape.profile, "--speed", f"{shape.speed:g}"]
        tied = [
            sys.executable,
            "-m",
            "warmroute.demo.die_with_parent",
            str(os.getpid()),
            str(folder / "engine-{token}.log"),
        ]
        self._provisioner = ProvisionerConfig(
            kind="process",
            deployment=f"demo-{os.getpid()}",
            gpu="L4",
            usd_per_hour=0.7,
            port=free_port(20_000 + os.getpid() % 10_000),
            command=(*tied, *engine, "--events-port", "0", "--replay-port", "0"),
            state_dir=str(folder / "processes"),
            stop_grace_s=5.0,
        )
        self.router: RouterProcess

    async def __aenter__(self) -> AutoscaledFleet:
        """Returns when the least number of engines serves. Raises ConfigError."""
        try:
            self.router = await start_router(self._children, self._folder, self._port, self._tables())
            await self._until_least()
        except BaseException:
            await self._end()
            raise
        return self

    async def __aexit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        await self._end()

    def _tables(self) -> dict[str, Any]:
        own = self._provisioner
        chosen = ("kind", "deployment", "gpu", "usd_per_hour", "port", "command", "state_dir")
        return {
            "scaling": {
                "enabled": True,
                "min_nodes": self.shape.least,
                "max_nodes": self.shape.most,
                "interval_s": 1.0,
                "stable_window_s": 10.0,
                "panic_window_s": 4.0,
                "trend_window_s": 0.0,
                "cooldown_up_s": 3.0,
                "cooldown_down_s": 8.0,
            },
            "prompts": {"remote_tokenize": True},
            "provisioners": [{name: getattr(own, name) for name in chosen}],
        }

    async def _until_least(self) -> None:
        try:
            async with asyncio.timeout(START_LIMIT_S):
                while (await self.look()).serving < self.shape.least:  # noqa: ASYNC110 (it is asked)
                    await asyncio.sleep(LOOK_S)
        except TimeoutError:
            raise ConfigError(f"{self.shape.least} engines did not serve within {START_LIMIT_S:g} s") from None

    async def look(self) -> FleetStatus:
        """Raises ConfigError where the router does not answer."""
        told = await self.router.tell("/admin/scaling")
        states = Counter(node["state"] for node in told["nodes"])
        return FleetStatus(
            serving=states["serving"],
            coming=sum(states[state] for state in COMING),
            leaving=sum(states[state] for state in LEAVING),
            waiting=told["waiting"],
            desired=told["desired_nodes"],
            reasons=tuple(told["last"]["reasons"]) if told["last"] else (),
        )

    def changes(self) -> list[ScalingChange]:
        """What the router has decided so far, and why, by its log."""
        lines = re.findall(r"INFO +(\d+) nodes, (\d+) desired: (.+)", self.router.child.said())
        return [ScalingChange(int(nodes), int(desired), why) for nodes, desired, why in lines]

    def endings(self) -> dict[str, int]:
        """Requests that were under way on each engine when it was told to end, by the engines' own account."""
        pattern = re.compile(re.escape(LAST_WORDS).replace("%d", r"(\d+)"))
        said = {file.stem: pattern.search(file.read_text()) for file in self._folder.glob("engine-*.log")}
        return {name.removeprefix("engine-"): int(found[1]) for name, found in said.items() if found}

    async def _end(self) -> None:
        """The router, which would start new ones; then its engines, which outlive it, also where it has crashed."""
        if hasattr(self, "router") and not self.router.child.has_ended():
            await asyncio.to_thread(self._children.end, self.router.child)
        cloud = ProcessProvisioner(self._provisioner)
        try:
            async with asyncio.timeout(END_LIMIT_S):
                machines = [machine for machine in await cloud.status() if machine.state is not MachineState.TERMINATED]
                await asyncio.gather(*(cloud.terminate(machine) for machine in machines))
        except (ProvisionerError, TimeoutError) as error:  # they end with this process all the same
            raise ConfigError(f"engines of the demo could not be ended: {error or 'they took too long'}") from None
        finally:
            await cloud.close()
