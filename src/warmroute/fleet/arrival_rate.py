"""How often something arrives, and how fast queued requests are served."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import exp
from typing import Final

from warmroute._kernel import ARRIVAL_DECAY_S

MIN_WINDOW_S: Final = 5.0
MIN_SERVED: Final = 8
"""ServiceRate measures over the last MIN_WINDOW_S, and over more if fewer than MIN_SERVED requests left the queue."""
BATCH_S: Final = 0.25
"""Requests that leave the queue within this time are counted together."""
UNMEASURED_S: Final = 5.0
"""Estimate of a wait while no rate is measured."""
FORGET_S: Final = 600.0
"""A rate from before so long a time without a queue is no longer used: the fleet may be another one."""


@dataclass(slots=True, eq=False)
class ArrivalRate:
    _rate: float = 0.0
    _updated_s: float = 0.0

    def record(self, now_s: float) -> None:
        self._rate = self.per_ms(now_s) + 0.001 / ARRIVAL_DECAY_S
        self._updated_s = now_s

    def per_ms(self, now_s: float) -> float:
        """Return arrivals per millisecond, averaged over about the last ten seconds."""
        return self._rate * exp((self._updated_s - now_s) / ARRIVAL_DECAY_S)


@dataclass(slots=True, eq=False)
class ServiceRate:
    """How many requests per second leave a queue because a node takes them, while others wait.

    Its clock stands still while nobody waits. It starts with the first request that leaves, which does not count: how
    long that one waited says nothing about the time between two of them.
    """

    _batches: deque[list[float]] = field(default_factory=deque)
    """Time of the last request on this clock, and number of requests."""
    _served: int = 0
    """Sum of these numbers."""
    _start_s: float = 0.0
    """When the first of these batches began, on this clock."""
    _clock_s: float = 0.0
    _runs: bool = False
    _last_s: float = 0.0
    """When a request last left the queue, or came into the empty one, on the router's clock."""

    def begin(self, now_s: float) -> None:
        """A request came into the empty queue."""
        if now_s - self._last_s > FORGET_S:
            self._batches.clear()
            self._served, self._start_s = 0, self._clock_s
        self._last_s = now_s

    def record(self, now_s: float) -> None:
        """A node took a queued request."""
        if not self._runs:
            self._runs, self._last_s = True, now_s
            return
        self._clock_s += now_s - self._last_s
        self._last_s = now_s
        batches, clock_s = self._batches, self._clock_s
        if batches and clock_s - batches[-1][0] < BATCH_S and clock_s - self._batch_start_s() < BATCH_S:
            batches[-1][0] = clock_s
            batches[-1][1] += 1
        else:
            batches.append([clock_s, 1])
        self._served += 1
        while self._served - batches[0][1] >= MIN_SERVED and clock_s - batches[0][0] >= MIN_WINDOW_S:
            self._start_s, count = batches.popleft()
            self._served -= int(count)

    def _batch_start_s(self) -> float:
        """Return the time of the last request before the newest batch."""
        return self._batches[-2][0] if len(self._batches) > 1 else self._start_s

    def end(self) -> None:
        """Nobody waits any more."""
        self._runs = False

    def per_s(self, now_s: float) -> float:
        """Return the rate; 0.0 before the first measurement."""
        since_s = max(0.0, now_s - self._last_s)
        measured_s = self._clock_s - self._start_s + (since_s if self._runs else 0.0)
        if not self._served or measured_s <= 0.0:
            return 0.0
        rate = self._served / measured_s
        return min(rate, MIN_SERVED / since_s) if since_s else rate

    def time_for(self, requests: int, now_s: float) -> float:
        """Return after how many seconds so many requests will have left the queue. Call this while somebody waits."""
        per_s = self.per_s(now_s)
        return requests / per_s if per_s else max(UNMEASURED_S, now_s - self._last_s)
