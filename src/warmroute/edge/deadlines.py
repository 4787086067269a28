"""Timeouts for many connections at little cost: a wheel of buckets, one entry a connection.

A connection moves its deadline by setting `deadline_s`, which costs an attribute; the wheel looks at it only when the
bucket it stands in comes up, and moves it on if its deadline has moved. Only an earlier deadline needs `arm`.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from typing import Final, Protocol

log = logging.getLogger("warmroute.edge")

NEVER: Final = math.inf
TICK_S: Final = 0.05


class Timed(Protocol):
    deadline_s: float
    """When `timed_out` is due, on the wheel's clock."""
    bucket: int
    """The wheel's own: where it stands, -1 where it does not."""

    def timed_out(self) -> None: ...


class Deadlines:
    def __init__(self, now: Callable[[], float]) -> None:
        self.now = now
        self._buckets: dict[int, set[Timed]] = {}
        self._next = int(now() / TICK_S)

    def arm(self, timed: Timed, deadline_s: float) -> None:
        """Sets a deadline, whether earlier or later than the one before."""
        timed.deadline_s = deadline_s
        if 0.0 <= timed.bucket * TICK_S <= deadline_s or deadline_s == NEVER:
            return  # the bucket that it stands in comes up before
        bucket = max(int(deadline_s / TICK_S) + 1, self._next)
        if 0 <= timed.bucket <= bucket:
            return
        self._leave(timed)
        timed.bucket = bucket
        self._buckets.setdefault(bucket, set()).add(timed)

    def disarm(self, timed: Timed) -> None:
        timed.deadline_s = NEVER
        self._leave(timed)

    def _leave(self, timed: Timed) -> None:
        if timed.bucket >= 0:
            bucket = self._buckets.get(timed.bucket)
            if bucket is not None:
                bucket.discard(timed)
            timed.bucket = -1

    def sweep(self) -> None:
        """Calls `timed_out` on all whose deadline has passed."""
        now = self.now()
        due = int(now / TICK_S)
        while self._next <= due:
            bucket = self._buckets.pop(self._next, None)
            self._next += 1
            for timed in bucket or ():
                timed.bucket = -1
                if timed.deadline_s <= now:
                    try:
                        timed.timed_out()
                    except Exception:  # one connection's fault must not be the end of all timeouts
                        log.exception("a timeout failed")
                else:
                    self.arm(timed, timed.deadline_s)

    async def run(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self.sweep()
