"""A router that autoscales simulated engines on this machine. When its context ends, all its processes have ended."""

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
from warmroute.fake_engine.server.engine_server import STOP_EVENT
from warmroute.scaling.provisioner import MachineState, ProvisionerError
from warmroute.scaling.provisioners.process import ProcessProvisioner

STARTING_STATES = ("requested", "booting", "loading", "warming")
STOPPING_STATES = ("draining", "terminating")
START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 20.0
POLL_S = 0.25

_DECISION = re.compile(r'scaling_decision nodes=(\d+) desired_nodes=(\d+) reason=("(?:[^"\\]|\\.)*"|\S+)')
_STOP = re.compile(rf"{STOP_EVENT} requests_in_flight=(\d+)")


class FleetOptions(msgspec.Struct, frozen=True, kw_only=True):
    min_nodes: int = 2
    max_nodes: int = 5
    profile: str = "l4-8b"
    speed: float = 4.0
    """The engines' speed. It shortens the demo to about a minute."""


class FleetStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The state of the fleet, as the router's admin API reports it."""

    serving: int
    starting: int
    stopping: int
    waiting_requests: int
    reasons: tuple[str, ...]
    """The reasons of the last scaling decision."""

    @property
    def is_stable(self) -> bool:
        return not self.starting and not self.stopping


class ScalingChange(msgspec.Struct, frozen=True):
    """A scaling decision that the router logged."""

    nodes: int
    desired_nodes: int
    reason: str


class AutoscaledFleet:
    def __init__(self, children: Children, folder: Path, port: int, options: FleetOptions) -> None:
        """`folder`: an empty directory for configuration, logs and process states."""
        self._children = children
        self._folder = folder
        self._port = port
        self.options = options
        command = [sys.executable, "-m", "warmroute.demo.die_with_parent", str(os.getpid())]
        command += [str(folder / "engine-{token}.log"), "engine", "--port", "{port}", "--profile", options.profile]
        command += ["--speed", f"{options.speed:g}", "--events-port", "0", "--replay-port", "0"]
        self._provisioner = ProvisionerConfig(
            kind="process",
            deployment=f"demo-{os.getpid()}",
            gpu="L4",
            usd_per_hour=0.7,
            port=free_port(20_000 + os.getpid() % 10_000),
            command=tuple(command),
            state_dir=str(folder / "processes"),
            stop_grace_s=5.0,
        )
        self.router: RouterProcess

    async def __aenter__(self) -> AutoscaledFleet:
        """Start the router and wait until `min_nodes` engines serve. Raises ConfigError."""
        try:
            self.router = await start_router(self._children, self._folder, self._port, self._router_config())
            await self._wait_for_min_nodes()
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        await self._stop()

    def _router_config(self) -> dict[str, Any]:
        settings = ("kind", "deployment", "gpu", "usd_per_hour", "port", "command", "state_dir")
        return {
            "scaling": {
                "enabled": True,
                "min_nodes": self.options.min_nodes,
                "max_nodes": self.options.max_nodes,
                "interval_s": 1.0,
                "stable_window_s": 10.0,
                "panic_window_s": 4.0,
                "trend_window_s": 0.0,
                "cooldown_up_s": 3.0,
                "cooldown_down_s": 8.0,
            },
            "scaling.replay": {"enabled": False},  # a minute has too little traffic
            "prompts": {"remote_tokenize": True},
            "provisioners": [{name: getattr(self._provisioner, name) for name in settings}],
        }

    async def _wait_for_min_nodes(self) -> None:
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                while (await self.status()).serving < self.options.min_nodes:  # noqa: ASYNC110 (polls over HTTP)
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            raise ConfigError(
                f"{self.options.min_nodes} engines were not serving within {START_TIMEOUT_S:g} s"
            ) from None

    async def status(self) -> FleetStatus:
        """Raises ConfigError if the router does not answer."""
        scaling = await self.router.admin_get("/admin/scaling")
        states = Counter(node["state"] for node in scaling["nodes"])
        last = scaling["last_decision"]
        return FleetStatus(
            serving=states["serving"],
            starting=sum(states[state] for state in STARTING_STATES),
            stopping=sum(states[state] for state in STOPPING_STATES),
            waiting_requests=scaling["waiting_requests"],
            reasons=tuple(last["reasons"]) if last else (),
        )

    def changes(self) -> list[ScalingChange]:
        """Return the scaling decisions in the router's log."""
        found = _DECISION.findall(self.router.child.stderr_text())
        return [
            ScalingChange(int(nodes), int(desired), msgspec.json.decode(reason) if reason[0] == '"' else reason)
            for nodes, desired, reason in found
        ]

    def requests_at_stop(self) -> dict[str, int]:
        """Return how many requests each stopped engine still had, from the engines' logs."""
        found = {file.stem: _STOP.search(file.read_text()) for file in self._folder.glob("engine-*.log")}
        return {name.removeprefix("engine-"): int(match[1]) for name, match in found.items() if match}

    async def _stop(self) -> None:
        """Stop the router first, because it would start new engines, then its engines, which outlive it."""
        if hasattr(self, "router") and not self.router.child.has_ended():
            await asyncio.to_thread(self._children.end, self.router.child)
        provisioner = ProcessProvisioner(self._provisioner)
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                machines = await provisioner.status()
                running = [machine for machine in machines if machine.state is not MachineState.TERMINATED]
                await asyncio.gather(*(provisioner.terminate(machine) for machine in running))
        except (ProvisionerError, TimeoutError) as error:  # the engines end with this process in any case
            raise ConfigError(f"cannot stop the demo's engines: {error or 'timeout'}") from None
        finally:
            await provisioner.close()
