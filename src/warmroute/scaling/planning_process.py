"""Searches by replay in a process of their own, so that they take nothing from the router's event loop.

Each search is one process (replay/planning/process.py). It has the lowest priority, sleeps so that it takes at most
`scaling.replay.cpu_share` of a core, and ends with its search, with its time limit, or with the router. Whatever
happens to it, the router goes on, and scales by thresholds meanwhile.

    stdin     a file in memory: the length of the task (8 bytes), the task, then one recorded request a line
    stdout    the plan
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from tempfile import TemporaryFile
from typing import IO, Final

import msgspec

from warmroute.blocking import run_in_thread
from warmroute.scaling.fleet_plan import FleetPlan, PlanRequest
from warmroute.scaling.recent_traffic import BLOCK_TOKENS, RecentTraffic, framed

MODULE: Final = "warmroute.replay.planning.process"
START_S: Final = 60.0
"""Time for the process to start and to read the traffic, on a busy machine."""
LATE: Final = 3.0
"""A process that takes this many times its time is killed."""
LINES_AT_ONCE: Final = 64
PAUSE_S: Final = 0.0005
"""Between them. A shorter one would give the event loop no chance to take over."""
ENVIRONMENT: Final = ("PATH", "HOME", "LANG", "PYTHONPATH", "LD_LIBRARY_PATH", "TMPDIR")
"""Variables that the process inherits: it needs no credentials."""


class PlanningTask(msgspec.Struct, kw_only=True):
    request: PlanRequest
    cpu_share: float
    parent: int
    """Process that the plan is for: without it the search ends."""
    block_tokens: int
    recorded_ms: float
    """The time now, as the times of the requests count."""


class SearchFailed(Exception):
    """Why there is no plan."""


class PlanningProcess:
    """Runs one search at a time."""

    def __init__(self, traffic: RecentTraffic, cpu_share: float, command: tuple[str, ...] = ()) -> None:
        """`command`: another program, for tests."""
        self._traffic = traffic
        self.cpu_share = cpu_share
        self._command = command or (sys.executable, "-m", MODULE)
        self._process: subprocess.Popen[bytes] | None = None
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def recorded(self) -> int:
        return len(self._traffic)

    @property
    def pid(self) -> int | None:
        """The running search; None if there is none."""
        return self._process.pid if self._process is not None else None

    def start(self, request: PlanRequest, done: Callable[[FleetPlan | None, str], object]) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run(request, done))

    async def _run(self, request: PlanRequest, done: Callable[[FleetPlan | None, str], object]) -> None:
        try:
            plan = await run_in_thread(partial(self._search, request), "planning")
        except Exception as error:  # whatever it is, thresholds remain, and the next search is tried
            if not self._closed:
                known = isinstance(error, OSError | SearchFailed | msgspec.MsgspecError)
                done(None, str(error) if known else f"{type(error).__name__}: {error}")
        else:
            done(plan, "")

    def _search(self, request: PlanRequest) -> FleetPlan:
        """In a thread. Raises OSError, MsgspecError or SearchFailed."""
        lines, share, recorded_ms = self._traffic.snapshot()
        request.share *= share
        task = PlanningTask(
            request=request,
            cpu_share=self.cpu_share,
            parent=os.getpid(),
            block_tokens=BLOCK_TOKENS,
            recorded_ms=recorded_ms,
        )
        since_ms = recorded_ms - 1000.0 * self._traffic.window_s
        timeout_s = START_S + LATE * request.max_cpu_s / self.cpu_share
        with _new_file() as file:
            encoded = msgspec.msgpack.encode(task)
            file.write(len(encoded).to_bytes(8, "big") + encoded)
            for at in range(0, len(lines), LINES_AT_ONCE):
                if self._closed:
                    raise SearchFailed("the router stops")
                file.writelines(framed(lines[at : at + LINES_AT_ONCE], share, since_ms))
                time.sleep(PAUSE_S)  # lets the event loop run
            file.seek(0)
            process = subprocess.Popen(
                self._command, stdin=file, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
                env={name: os.environ[name] for name in ENVIRONMENT if name in os.environ},
            )  # fmt: skip
        self._process = process
        if self._closed:  # `close` has not seen the process
            process.kill()
        try:
            output, errors = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            raise SearchFailed(f"the process did not end within {timeout_s:.0f} s") from None
        finally:
            self._process = None
        if process.returncode:
            raise SearchFailed(_reason(process.returncode, errors))
        return msgspec.msgpack.decode(output, type=FleetPlan)

    async def close(self) -> None:
        self._closed = True
        process = self._process
        if process is not None:
            process.kill()
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)


def _new_file() -> IO[bytes]:
    """Return a file in memory, where Python can create one."""
    if hasattr(os, "memfd_create"):
        return open(os.memfd_create("recent traffic"), "w+b")
    return TemporaryFile()


def _reason(code: int, errors: bytes) -> str:
    if code < 0:
        return f"the process was ended by signal {-code}"
    last = errors.decode("utf-8", "replace").strip().splitlines()[-1:]
    return f"the process ended with status {code}" + (f": {last[0][:200]}" if last else "")
