"""The virtual clock: a calendar of callbacks, each with the time at which it runs.

Callbacks due at the same time run in the order in which they were scheduled. Engine steps run last: a request that
arrives exactly when a step ends takes part in the next step.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from math import inf
from typing import Any

_FIRST, _LAST = 0, 1


class Calendar:
    def __init__(self) -> None:
        self.now_ms = 0.0
        self._count = 0
        self._heap: list[tuple[float, int, int, Callable[..., object], tuple[Any, ...]]] = []

    @property
    def now_s(self) -> float:
        return self.now_ms / 1000.0

    def at(self, at_ms: float, do: Callable[..., object], *args: Any) -> None:
        """Schedule `do(*args)`. Raises ValueError for a time in the past."""
        self._schedule(at_ms, _FIRST, do, args)

    def at_end_of(self, at_ms: float, do: Callable[..., object], *args: Any) -> None:
        """Schedule `do(*args)` after all other callbacks of the same time."""
        self._schedule(at_ms, _LAST, do, args)

    def after(self, delay_ms: float, do: Callable[..., object], *args: Any) -> None:
        self._schedule(self.now_ms + delay_ms, _FIRST, do, args)

    def _schedule(self, at_ms: float, order: int, do: Callable[..., object], args: tuple[Any, ...]) -> None:
        if at_ms < self.now_ms:
            raise ValueError(f"cannot schedule at {at_ms} ms: the clock is at {self.now_ms} ms")
        self._count += 1
        heapq.heappush(self._heap, (at_ms, order, self._count, do, args))

    def run(self, wanted: Callable[[], bool] = lambda: True, until_ms: float = inf) -> None:
        """Run the scheduled callbacks, up to and including `until_ms`, while `wanted()` is true."""
        heap, pop = self._heap, heapq.heappop
        while heap and heap[0][0] <= until_ms and wanted():
            at_ms, _, _, do, args = pop(heap)
            self.now_ms = at_ms
            do(*args)
        if until_ms < inf:
            self.now_ms = max(self.now_ms, until_ms)
