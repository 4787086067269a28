"""The engine's clock: real time, faster or slower, or stopped."""

from __future__ import annotations

import time
from collections.abc import Callable


class EngineClock:
    """Counts engine milliseconds, which pass `speed` times as fast as real ones. Speed 0 stops the clock."""

    def __init__(self, speed: float, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._speed = speed
        self._real_s = now()
        self._engine_ms = 0.0

    def now_ms(self) -> float:
        return self._at(self._now())

    def _at(self, real_s: float) -> float:
        return self._engine_ms + (real_s - self._real_s) * 1000 * self._speed

    def set_speed(self, speed: float) -> None:
        real_s = self._now()
        self._engine_ms, self._real_s, self._speed = self._at(real_s), real_s, speed

    def seconds_until(self, at_ms: float) -> float | None:
        """Return real seconds from now, or None while the clock is stopped."""
        return (at_ms - self.now_ms()) / (1000 * self._speed) if self._speed else None

    def real_seconds(self, span_ms: float) -> float:
        """Convert a duration to real seconds at the current speed."""
        return span_ms / (1000 * self._speed) if self._speed else 0.0
