"""Runs the demo: its parts one after the other, then a router that keeps serving until Ctrl-C."""

from __future__ import annotations

import asyncio
import signal
import sys
import tempfile
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, Literal

import msgspec
from rich.console import Console

from warmroute.config import ConfigError
from warmroute.lab.demo import part_routing, part_scaling
from warmroute.lab.demo.part_routing import MODEL, RoutingComparison
from warmroute.lab.demo.part_scaling import AutoscaledFleet, FleetOptions, LoadPlan, ScalingDemo, VariableLoad
from warmroute.lab.demo.processes import Children, RouterProcess, free_port

FIRST_PORT = 8080


class DemoOptions(msgspec.Struct, frozen=True):
    port: int | None = None
    """The router's port. None: 8080, or the next free one."""
    speed: float = 1.0
    """The speed of the engines in the comparison."""
    exit: bool = False
    """Whether the demo exits after the last part instead of leaving the router running."""
    only: Literal["compare", "scale"] | None = None


def run_demo(options: DemoOptions, console: Console) -> int:
    """Run the demo and return its exit status. All its processes have ended then. Raises ConfigError."""
    # The children end before the event loop closes, because the loop waits for threads that wait for them.
    with (
        tempfile.TemporaryDirectory(prefix="warmroute-demo-") as folder,
        asyncio.Runner() as runner,
        Children() as children,
    ):
        return runner.run(_until_signal(_Demo(options, console, children, Path(folder)).run()))


async def _until_signal(demo: Coroutine[Any, Any, int]) -> int:
    """Run the demo. SIGINT, SIGTERM and SIGHUP cancel it."""
    loop = asyncio.get_running_loop()
    task: asyncio.Task[int] = loop.create_task(demo)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, task.cancel)
    try:
        return await task
    except asyncio.CancelledError:
        return 130


class _Demo:
    def __init__(self, options: DemoOptions, console: Console, children: Children, folder: Path) -> None:
        self._options = options
        self._console = console
        self._children = children
        self._folder = folder
        self._port = free_port(FIRST_PORT) if options.port is None else _check_port(options.port)

    async def run(self) -> int:
        succeeded = True
        if self._options.only != "scale":
            succeeded = await self._compare(is_last=self._options.only == "compare")
        if self._options.only != "compare":
            succeeded = await self._scale() and succeeded
        return 0 if succeeded else 1

    async def _compare(self, is_last: bool) -> bool:
        """Return whether no request failed."""
        comparison = RoutingComparison(self._children, self._folder, self._options.speed)
        part_routing.introduce(self._console)
        await comparison.start_engines()
        with part_routing.progress(self._console) as bars:
            runs = await comparison.run(self._port, bars.advance)
        part_routing.conclude(self._console, runs, await comparison.example_decision())
        if is_last and not self._options.exit:
            await self._keep_serving(comparison.router)
        await asyncio.to_thread(comparison.stop)
        return not any(run.failed for run in runs)

    async def _scale(self) -> bool:
        """Return whether the fleet grew and shrank, lost no request and stopped no engine that had one."""
        options, plan = FleetOptions(), LoadPlan()
        part_scaling.introduce(self._console, options)
        async with AutoscaledFleet(self._children, self._folder, self._port, options) as fleet:
            load = VariableLoad(fleet.router.url, MODEL)
            _show_link(self._console, fleet.router)
            with part_scaling.LiveView(self._console, options, plan) as view:
                result = await ScalingDemo(fleet, load, plan, view.show).run()
            succeeded = part_scaling.conclude(self._console, options, plan, load, result)
            if not self._options.exit:
                await self._keep_serving(fleet.router, autoscaled=True)
        return succeeded

    async def _keep_serving(self, router: RouterProcess, autoscaled: bool = False) -> None:
        """Print commands to try, and wait for Ctrl-C."""
        body = f'{{"model": "{MODEL}", "stream": true, "messages": [{{"role": "user", "content": "Hello!"}}]}}'
        commands = [
            f"curl -N {router.url}/v1/chat/completions -H 'Content-Type: application/json' \\\n    -d '{body}'",
            f"curl '{router.admin_url}/admin/decisions?limit=1'",
            f"{_command()} load rag --url {router.url} --rate {12 if autoscaled else 2}",
        ]
        if autoscaled:
            commands.append(f"curl {router.admin_url}/admin/scaling")
        _show_link(self._console, router)
        self._console.print("The router keeps running. Try:\n")
        for command in commands:
            self._console.print(f"  {command}", style="cyan", soft_wrap=True, markup=False, highlight=False)
        self._console.print("\nPress Ctrl-C to stop it.", style="dim")
        try:
            await asyncio.to_thread(router.child.process.wait)
        except asyncio.CancelledError:
            return
        raise ConfigError(f"the router exited with status {router.child.process.returncode}")


def _show_link(console: Console, router: RouterProcess) -> None:
    console.print(f"\nLive page: [link={router.admin_url}/]{router.admin_url}/[/link]", highlight=False)
    console.print(
        f"The same in a terminal: {_command()} top --admin {router.admin_url}\n", highlight=False, soft_wrap=True
    )


def _command() -> str:
    """Return how this program was called, so that printed commands also work if it is not on the PATH."""
    return sys.argv[0] if Path(sys.argv[0]).name == "warmroute" else "warmroute"


def _check_port(port: int) -> int:
    try:
        return free_port(port, tries=1)
    except ConfigError:
        raise ConfigError(
            f"port {port} is in use; without --port the demo takes the next free one from {FIRST_PORT}"
        ) from None
