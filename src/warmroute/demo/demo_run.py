"""The demo from start to end: its acts one after the other, and a router that stays up for whoever wants to try."""

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
from warmroute.demo import show_comparison, show_scaling
from warmroute.demo.child_processes import Children, free_port
from warmroute.demo.routing_comparison import MODEL, Comparison
from warmroute.demo.variable_load import VariableLoad
from warmroute.demo.router_process import RouterProcess
from warmroute.demo.scaling_demo import LoadPlan, ScalingDemo
from warmroute.demo.autoscaled_fleet import AutoscaledFleet, FleetOptions

DemoPart = Literal["compare", "scale"]
FIRST_PORT = 8080


class DemoOptions(msgspec.Struct, frozen=True):
    port: int | None = None
    """None for 8080, or the next one that is free."""
    speed: float = 1.0
    """Of the comparison's engines."""
    leave: bool = False
    """End after the last act instead of leaving the router up."""
    only: DemoPart | None = None


def run(options: DemoOptions, console: Console) -> int:
    """The demo from start to end; all processes are gone when it returns or raises. Raises ConfigError."""
    # The children end before the loop closes: it waits for threads that wait for them.
    with (
        tempfile.TemporaryDirectory(prefix="warmroute-demo-") as folder,
        asyncio.Runner() as runner,
        Children() as children,
    ):
        return runner.run(_until_told(_Demo(options, console, children, Path(folder)).run()))


async def _until_told(demo: Coroutine[Any, Any, int]) -> int:
    """Runs it; SIGINT, SIGTERM and SIGHUP end it in order."""
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
        self._port = free_port(FIRST_PORT) if options.port is None else _only(options.port)

    async def run(self) -> int:
        kept = True
        if self._options.only != "scale":
            kept = await self._compare(last=self._options.only == "compare")
        if self._options.only != "compare":
            kept = await self._scale() and kept
        return 0 if kept else 1

    async def _compare(self, last: bool) -> bool:
        """Whether nothing failed."""
        comparison = Comparison(self._children, self._folder, self._options.speed)
        show_comparison.introduce(self._console)
        await comparison.start_engines()
        with show_comparison.progress(self._console) as bars:
            passes = await comparison.run(self._port, bars.advance)
        why = await comparison.why()
        show_comparison.conclude(self._console, passes, why)
        if last and not self._options.leave:
            await self._stay(comparison.router)
        await asyncio.to_thread(comparison.end)
        return not any(one.failed for one in passes)

    async def _scale(self) -> bool:
        """Whether it kept what it promises: no request lost, no engine ended with work on it, up and down again."""
        shape, plot = FleetOptions(), LoadPlan()
        show_scaling.introduce(self._console, shape)
        async with AutoscaledFleet(self._children, self._folder, self._port, shape) as fleet:
            load = VariableLoad(fleet.router.url, MODEL)
            with show_scaling.Screen(self._console, shape, plot) as screen:
                story = await ScalingDemo(fleet, load, plot, screen.show).run()
            kept = show_scaling.conclude(self._console, shape, load, story)
            if not self._options.leave:
                await self._stay(fleet.router, grows=True)
        return kept

    async def _stay(self, router: RouterProcess, grows: bool = False) -> None:
        """Until Ctrl-C, which is how it ends."""
        body = f'{{"model": "{MODEL}", "stream": true, "messages": [{{"role": "user", "content": "Hello!"}}]}}'
        lines = [
            f"curl -N {router.url}/v1/chat/completions -H 'Content-Type: application/json' \\\n    -d '{body}'",
            f"curl '{router.admin_url}/admin/decisions?limit=1'",
        ]
        if grows:
            lines += [
                f"{_command()} load rag --url {router.url} --rate 12",
                f"curl {router.admin_url}/admin/scaling",
            ]
        self._console.print("\nThe router is still there. Try it:\n")
        for line in lines:
            self._console.print(f"  {line}", style="cyan", soft_wrap=True, markup=False, highlight=False)
        self._console.print("\nCtrl-C ends it.", style="dim")
        try:
            await asyncio.to_thread(router.child.process.wait)
        except asyncio.CancelledError:
            return
        raise ConfigError(f"the router has ended (exit {router.child.process.returncode})")


def _command() -> str:
    """How this program was called, so that lines can be copied where it is not on the path."""
    return sys.argv[0] if Path(sys.argv[0]).name == "warmroute" else "warmroute"


def _only(port: int) -> int:
    try:
        return free_port(port, tries=1)
    except ConfigError:
        raise ConfigError(f"port {port} is taken; leave --port out for the next free one from {FIRST_PORT}") from None
