"""Measures the delay of the event loop: how late it runs a timer."""

from __future__ import annotations

import asyncio
import time
from typing import Final

from warmroute._kernel import Histogram

INTERVAL_S: Final = 0.1
WINDOW_S: Final = 60.0


class LoopDelay:
    def __init__(self) -> None:
        self.histogram = Histogram()
        self._max_s = 0.0
        self._max_before_s = 0.0
        """The longest delay of the last whole WINDOW_S."""
        self._window_ends_s = -1e9

    @property
    def max_s(self) -> float:
        """The longest delay of the last one to two WINDOW_S. Reading it does not reset it."""
        return max(self._max_s, self._max_before_s)

    def record(self, delay_s: float, now_s: float) -> None:
        self.histogram.observe(delay_s * 1000.0)
        if now_s >= self._window_ends_s:
            self._window_ends_s = now_s + WINDOW_S
            self._max_before_s, self._max_s = self._max_s, 0.0
        self._max_s = max(self._max_s, delay_s)

    async def run(self) -> None:
        while True:
            before_s = time.monotonic()
            await asyncio.sleep(INTERVAL_S)
            now_s = time.monotonic()
            self.record(now_s - before_s - INTERVAL_S, now_s)
