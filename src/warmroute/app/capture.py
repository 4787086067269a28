"""What is captured now: to the files of `[capture]`, and to clients of the admin API. Each has a key of its own.

While nothing is captured, a request pays one comparison. Otherwise it pays for one object, and if its policy needs no
tokens, for reading its prompt. A thread computes the hashes and writes the lines a moment after the request has ended.
If that is too slow, or the disk is full or missing, requests are dropped from the capture and counted; none waits.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol

from warmroute.blocking import run_in_thread
from warmroute.capture.capture_files import CaptureDirectory, CaptureFull
from warmroute.capture.capture_run import CaptureRun, EndedRequest
from warmroute.capture.trace_row import CaptureOutcome
from warmroute.config import Capture as CaptureConfig
from warmroute.event_log import EventLog, where_it_failed
from warmroute.fleet.node import Outcome
from warmroute.prompt.prompt import Prompt
from warmroute.routing.attempts import Attempts
from warmroute.routing.dispatch import Dispatch
from warmroute.telemetry.counters import Counters

log = EventLog("warmroute.capture")

WRITE_INTERVAL_S: Final = 0.25
MAX_PENDING: Final = 8192
"""Requests that may wait for the thread."""
MAX_PENDING_BYTES: Final = 128 << 20
"""Tokens of their prompts, four bytes each."""
WRITE_REQUESTS: Final = 128
"""Requests that are written at once."""
CLOSE_TIMEOUT_S: Final = 2.0

_OUTCOMES: Final[dict[Outcome, CaptureOutcome]] = {
    Outcome.OK: "ok", Outcome.CANCELLED: "cancelled", Outcome.BROKEN: "broken", Outcome.FAILED: "failed",
    Outcome.BUSY: "failed",
}  # fmt: skip
"""A request that a node rejected (4xx) is not in a capture: the node did not prefill it."""


class CapturedPrompt:
    """What a running request keeps for the capture."""

    __slots__ = ("body_bytes", "prompt")

    def __init__(self, body_bytes: int) -> None:
        self.body_bytes = body_bytes
        self.prompt: Prompt | None = None


class Sink(Protocol):
    """Takes the lines of one capture, in a thread."""

    @property
    def path(self) -> Path: ...

    def write(self, lines: bytes) -> None:
        """Raises OSError."""


class _Target:
    """One capture and where it goes."""

    def __init__(self, run: CaptureRun, sink: Sink, internal: bool = False) -> None:
        self.run = run
        self.sink = sink
        self.internal = internal
        """Whether the router itself uses it: then no operator started it, and it is not counted."""
        self.failing = False
        self.written = self.written_bytes = self.dropped = 0


class Capture:
    def __init__(self, config: CaptureConfig, counters: Counters, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._counters = counters
        self._pending: list[EndedRequest] = []
        self._pending_bytes = 0
        self._targets: tuple[_Target, ...] = ()
        self._file: _Target | None = None
        self._overloaded = False
        self._write_lock = threading.Lock()
        self.on = False
        """Whether anything is captured."""
        self.config = CaptureConfig()
        self.reconfigure(config)

    def reconfigure(self, config: CaptureConfig) -> None:
        """A changed configuration ends the capture to files and begins another one, with a new key."""
        before, self.config = self.config, config
        if config == before:
            return
        if self._file is not None:
            self.stop(self._file)
            self._file = None
        if config.directory:
            run = CaptureRun(config.block_size, self._now())
            files = CaptureDirectory(
                Path(config.directory), config.file_max_bytes, config.max_files, run.started_unix_s
            )
            self._file = self.start(files, run)
            log.info("capture_started", directory=config.directory)

    def start(self, sink: Sink, run: CaptureRun | None = None, internal: bool = False) -> _Target:
        """Begin a capture. Requests that arrive from now on are in it. `internal`: the router itself uses it."""
        target = _Target(run or CaptureRun(self.config.block_size, self._now()), sink, internal)
        self._targets = (*self._targets, target)
        self.on = True
        return target

    def stop(self, target: _Target) -> None:
        self._targets = tuple(one for one in self._targets if one is not target)
        self.on = bool(self._targets)

    # From the event loop.

    def request_ended(
        self, attempts: Attempts, captured: CapturedPrompt, outcome: Outcome | None, now_s: float
    ) -> None:
        """A request that was captured from its arrival on has ended. `outcome`: None if no node got it."""
        request = attempts.request
        name = _OUTCOMES.get(outcome) if outcome is not None else "not_admitted"
        if name is None:
            return
        reported = attempts.reported or (None, None, None)
        output = reported[2]
        ended = EndedRequest(
            request, captured.prompt, captured.body_bytes, name, now_s,
            attempts.expected_output if output is None else output, output is None, reported,
        )  # fmt: skip
        if attempts.tried:
            ticket = attempts.ticket
            if isinstance(ticket, Dispatch):
                ended.predicted = ticket.cached
            ended.node, ended.attempts, ended.first_token_s = ticket.node.name, attempts.tried, ticket.first_token_s
        self.add(ended)

    def add(self, ended: EndedRequest) -> None:
        """Add a request to all captures, or count it as dropped if too many wait for the thread."""
        pending = self._pending
        if len(pending) >= MAX_PENDING or self._pending_bytes > MAX_PENDING_BYTES:
            self._counters.capture_dropped += 1
            if not self._overloaded:
                self._overloaded = True
                log.warning("capture_overloaded", "The capture lacks requests that ended meanwhile.")
            return
        if ended.prompt is not None:
            self._pending_bytes += len(ended.prompt.tokens)
        pending.append(ended)

    # Writing.

    async def run(self) -> None:
        """Write ended requests until the task is cancelled."""
        while True:
            await asyncio.sleep(WRITE_INTERVAL_S)
            await self.flush()

    async def flush(self) -> None:
        ended, self._pending, self._pending_bytes = self._pending, [], 0
        if ended and self._targets:
            try:
                await run_in_thread(partial(self._write, ended, self._targets), "capture")
            except RuntimeError:  # the system cannot start another thread
                self._counters.capture_dropped += len(ended)
            else:
                self._overloaded = False

    async def close(self) -> None:
        """Write the remaining requests, or drop them after CLOSE_TIMEOUT_S."""
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self.flush()
        except TimeoutError:
            log.error("capture_close_timed_out", "The disk is too slow; the last requests are not written.")

    def _write(self, ended: list[EndedRequest], targets: tuple[_Target, ...]) -> None:
        with self._write_lock:
            for at in range(0, len(ended), WRITE_REQUESTS):
                for target in targets:
                    self._write_to(target, ended[at : at + WRITE_REQUESTS])

    def _write_to(self, target: _Target, ended: list[EndedRequest]) -> None:
        counters, run = self._counters, target.run
        before = run.requests
        try:
            lines = run.lines(ended)
            if not lines:
                return
            target.sink.write(lines)
        except Exception as error:
            target.dropped += len(ended)
            counters.capture_dropped += len(ended)
            if not target.failing:
                target.failing = True
                _log_failure(target.sink.path, error)
            return
        target.written += run.requests - before
        target.written_bytes += len(lines)
        if not target.internal:
            counters.capture_written += run.requests - before
        if target.failing:
            target.failing = False
            log.info("capture_write_recovered", file=target.sink.path, dropped=target.dropped)

    # For the admin API.

    def describe(self) -> dict[str, Any]:
        return {
            "captures": [
                {
                    "to": str(target.sink.path),
                    "seconds": round(self._now() - target.run.started_s, 1),
                    "requests": target.written,
                    "bytes": target.written_bytes,
                    "dropped": target.dropped,
                    "failing": target.failing,
                }
                for target in self._targets
                if not target.internal
            ]
        }


def _log_failure(path: Path, error: Exception) -> None:
    if isinstance(error, CaptureFull):
        log.warning("capture_full", "Requests are served, but no longer captured.", file=path, reason=error.strerror)
        return
    log.error(
        "capture_write_failed",
        "Requests are served, but not captured, until the file can be written again.",
        file=path,
        reason=error.strerror if isinstance(error, OSError) else where_it_failed(error),
    )
