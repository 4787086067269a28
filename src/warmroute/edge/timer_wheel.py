"""Timeouts for many connections at little cost: a timer wheel with one entry for each connection.

A connection postpones its deadline by setting `deadline_s`, which costs one attribute. The wheel looks at the deadline
only when the entry's bucket comes up, and then moves the entry to a later bucket. Only an earlier deadline needs `arm`.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Final, Protocol

from warmroute.event_log import EventLog

log = EventLog("warmroute.edge")

NEVER: Final = math.inf
TICK_S: Final = 0.05


class Timed(Protocol):
    deadline_s: float
    """When the wheel calls `timed_out`, on its clock."""
    bucket: int
    """The wheel's bucket that holds the entry; -1 if none does. Only the wheel sets it."""

    def timed_out(self) -> None: ...


class TimerWheel:
    def __init__(self, now: Callable[[], float]) -> None:
        self.now = now
        self._buckets: dict[int, set[Timed]] = {}
        self._next = int(now() / TICK_S)

    def arm(self, timed: Timed, deadline_s: float) -> None:
        """Set a deadline, earlier or later than the previous one."""
        timed.deadline_s = deadline_s
        if 0.0 <= timed.bucket * TICK_S <= deadline_s or deadline_s == NEVER:
            return  # its present bucket comes up before the deadline
        bucket = max(int(deadline_s / TICK_S) + 1, self._next)
        if 0 <= timed.bucket <= bucket:
            return
        self._remove(timed)
        timed.bucket = bucket
        self._buckets.setdefault(bucket, set()).add(timed)

    def disarm(self, timed: Timed) -> None:
        timed.deadline_s = NEVER
        self._remove(timed)

    def _remove(self, timed: Timed) -> None:
        if timed.bucket >= 0:
            bucket = self._buckets.get(timed.bucket)
            if bucket is not None:
                bucket.discard(timed)
            timed.bucket = -1

    def sweep(self) -> None:
        """Call `timed_out` on every entry whose deadline has passed."""
        now_s = self.now()
        due = int(now_s / TICK_S)
        while self._next <= due:
            bucket = self._buckets.pop(self._next, None)
            self._next += 1
            for timed in bucket or ():
                timed.bucket = -1
                if timed.deadline_s <= now_s:
                    try:
                        timed.timed_out()
                    except Exception:  # one connection must not stop the timeouts of all others
                        log.exception("timeout_handling_failed", "Other connections keep their timeouts.")
                else:
                    self.arm(timed, timed.deadline_s)

    async def run(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self.sweep()
