"""Virtual time: a calendar of what happens when. Things due at the same moment happen in the order in which they were
entered, except that engines live last: a request that arrives at the very end of a step takes part in the next one.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

_FIRST, _LAST = 0, 1


class Calendar:
    __slots__ = ("_count", "_heap", "now_ms")

    def __init__(self) -> None:
        self.now_ms = 0.0
        self._count = 0
        self._heap: list[tuple[float, int, int, Callable[..., object], tuple[Any, ...]]] = []

    def __len__(self) -> int:
        return len(self._heap)

    @property
    def now_s(self) -> float:
        return self.now_ms / 1000.0

    def at(self, at_ms: float, do: Callable[..., object], *args: Any) -> None:
        """Enters `do(*args)`. The past is not open to entries."""
        self._enter(at_ms, _FIRST, do, args)

    def at_end_of(self, at_ms: float, do: Callable[..., object], *args: Any) -> None:
        """The same, after everything else of that moment."""
        self._enter(at_ms, _LAST, do, args)

    def after(self, delay_ms: float, do: Callable[..., object], *args: Any) -> None:
        self._enter(self.now_ms + delay_ms, _FIRST, do, args)

    def _enter(self, at_ms: float, order: int, do: Callable[..., object], args: tuple[Any, ...]) -> None:
        if at_ms < self.now_ms:
            raise ValueError(f"{at_ms} ms is over: it is {self.now_ms} ms")
        self._count += 1
        heapq.heappush(self._heap, (at_ms, order, self._count, do, args))

    def run_while(self, wanted: Callable[[], bool]) -> None:
        """Lives on while `wanted()`, or until nothing is entered any more."""
        heap, pop = self._heap, heapq.heappop
        while heap and wanted():
            at_ms, _, _, do, args = pop(heap)
            self.now_ms = at_ms
            do(*args)

    def run_until(self, at_ms: float) -> None:
        """Lives up to and including that moment."""
        heap = self._heap
        self.run_while(lambda: heap[0][0] <= at_ms)
        self.now_ms = max(self.now_ms, at_ms)
