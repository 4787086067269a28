"""The last samples, in two windows: a stable one that decides, and a short one that sees a panic coming. And the trend
of the load, over a longer time, so that nodes that take minutes to start are asked for in time.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from warmroute.config import Scaling
from warmroute.scaling.observe import SUMS, Sample, Seen, seen

MOST_SAMPLES: Final = 2048
LEAST_SAMPLES: Final = 12
"""Fewer make no trend."""
SURE: Final = 1.0
"""A trend counts less its standard error × this: noise is none."""
_ARRIVED: Final = SUMS.index("arrived")


class Windows:
    def __init__(self, config: Scaling) -> None:
        self._config = config
        self._samples: deque[Sample] = deque(maxlen=MOST_SAMPLES)

    def reconfigure(self, config: Scaling) -> None:
        self._config = config

    def add(self, sample: Sample) -> None:
        samples, config = self._samples, self._config
        if sample.span_s > 0:
            samples.append(sample)
        kept_s = max(config.stable_window_s, config.forecast_s)
        while len(samples) > 1 and samples[0].at_s <= sample.at_s - kept_s:
            samples.popleft()

    def _last(self, window_s: float) -> Seen:
        if not self._samples:
            return Seen()
        since_s = self._samples[-1].at_s - window_s
        return seen(sample for sample in self._samples if sample.at_s > since_s + 1e-6)

    @property
    def stable(self) -> Seen:
        return self._last(self._config.stable_window_s)

    @property
    def panic(self) -> Seen:
        return self._last(self._config.panic_window_s)

    @property
    def growth_per_s(self) -> float:
        """By how much of itself the load grows each second: a line through the arrivals of `forecast_s`. 0 where that
        could be chance."""
        config, samples = self._config, self._samples
        if not config.forecast_s or not samples:
            return 0.0
        since_s = samples[-1].at_s - config.forecast_s
        points = [(s.at_s, s.sums[_ARRIVED] / s.span_s) for s in samples if s.at_s > since_s]
        count = len(points)
        if count < LEAST_SAMPLES or points[-1][0] - points[0][0] < 0.5 * config.forecast_s:
            return 0.0
        mean_t = sum(t for t, _ in points) / count
        mean_y = sum(y for _, y in points) / count
        spread = sum((t - mean_t) ** 2 for t, _ in points)
        slope = sum((t - mean_t) * (y - mean_y) for t, y in points) / spread
        left = sum((y - mean_y - slope * (t - mean_t)) ** 2 for t, y in points)
        error = (left / (count - 2) / spread) ** 0.5
        sure = max(0.0, slope - SURE * error) if slope > 0 else min(0.0, slope + SURE * error)
        level = mean_y + slope * (points[-1][0] - mean_t)
        return sure / level if level > 0 else 0.0
