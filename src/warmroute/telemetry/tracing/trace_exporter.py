"""Sends finished traces to the collector, in batches, in a thread of its own.

A request only appends its trace to a queue of bounded length. If the collector is slow, down or rejects the spans, the
exporter drops traces, counts them, and logs the first failure of a row. Requests never wait for it.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from warmroute.event_log import EventLog, where_it_failed
from warmroute.telemetry.counters import Counters
from warmroute.telemetry.tracing.request_trace import EndedTrace

log = EventLog("warmroute.tracing")

EXPORT_INTERVAL_S: Final = 5.0
"""Longest time until a trace is sent. A full batch is sent within CHECK_S."""
CHECK_S: Final = 1.0
MAX_QUEUED: Final = 4096
"""Traces that may wait for the collector, about 3 KB each."""
BATCH_TRACES: Final = 64
"""Traces that are sent at once. More would keep the interpreter lock for too long."""
CLOSE_TIMEOUT_S: Final = 2.0


class SpanSender(Protocol):
    """Sends the spans of traces. Called in a thread."""

    def send(self, traces: Sequence[EndedTrace]) -> str:
        """Return why the collector did not take them; empty if it did."""

    def stop(self) -> None:
        """End a `send` that waits to try again. Called from another thread."""


class TraceExporter:
    def __init__(self, create_sender: Callable[[], SpanSender], counters: Counters) -> None:
        self._sender = create_sender()
        self._counters = counters
        self._queue: deque[EndedTrace] = deque()
        self._stopping = threading.Event()
        self._failing = False
        self._thread = threading.Thread(target=self._run, name="warmroute-traces", daemon=True)

    def add(self, trace: EndedTrace) -> None:
        if len(self._queue) < MAX_QUEUED:
            self._queue.append(trace)
        else:
            self._counters.traces_dropped["queue_full"] += 1

    def start(self) -> None:
        self._thread.start()

    async def close(self) -> None:
        """Send the remaining traces, or drop them after CLOSE_TIMEOUT_S."""
        self._stopping.set()
        until_s = time.monotonic() + CLOSE_TIMEOUT_S
        while self._thread.is_alive():
            if time.monotonic() >= until_s:
                self._sender.stop()
                dropped = len(self._queue)
                self._counters.traces_dropped["shutdown"] += dropped
                log.error(
                    "trace_export_timed_out", "The collector is too slow; the remaining traces are lost.",
                    dropped=dropped,
                )  # fmt: skip
                return
            await asyncio.sleep(0.01)

    # In the thread.

    def _run(self) -> None:
        due_s = 0.0
        while not self._stopping.wait(min(CHECK_S, EXPORT_INTERVAL_S)):
            now_s = time.monotonic()
            if now_s >= due_s or len(self._queue) >= BATCH_TRACES:
                self._send_queued()
                due_s = now_s + EXPORT_INTERVAL_S
        self._send_queued()

    def _send_queued(self) -> None:
        while batch := [self._queue.popleft() for _ in range(min(BATCH_TRACES, len(self._queue)))]:
            try:
                reason = self._sender.send(batch)
            except Exception as error:  # a bug must not end the thread
                reason = where_it_failed(error)
            self._sent(len(batch), reason)

    def _sent(self, count: int, failure: str) -> None:
        counters = self._counters
        if not failure:
            counters.traces_exported += count
            if self._failing:
                self._failing = False
                log.info("trace_export_recovered", dropped=counters.traces_dropped.total())
            return
        counters.traces_dropped["export_failed"] += count
        if not self._failing:
            self._failing = True
            log.warning(
                "trace_export_failed", "The router drops traces until the collector takes them.", reason=failure
            )
