"""The last samples in two windows: a stable one for decisions and a short one that detects a panic. A longer window
measures the trend of the load, so that nodes that take minutes to start are requested early enough.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from warmroute.config import Scaling
from warmroute.config.scaling_settings import Pool
from warmroute.fleet.demand import COUNTERS
from warmroute.scaling.fleet_observer import Sample, WindowMetrics, summarize

MAX_SAMPLES: Final = 2048
MIN_TREND_SAMPLES: Final = 12
STANDARD_ERRORS: Final = 1.0
"""A trend counts minus this many standard errors, so that noise is no trend."""
_ARRIVED: Final = COUNTERS.index("arrived")


class MetricWindows:
    def __init__(self, config: Scaling) -> None:
        self.config = config
        self._samples: deque[Sample] = deque(maxlen=MAX_SAMPLES)

    def add(self, sample: Sample) -> None:
        samples, config = self._samples, self.config
        if sample.span_s > 0:
            samples.append(sample)
        longest_s = max(config.stable_window_s, config.trend_window_s)
        while len(samples) > 1 and samples[0].at_s <= sample.at_s - longest_s:
            samples.popleft()

    def _last(self, window_s: float, pool: Pool | None = None) -> WindowMetrics:
        if not self._samples:
            return WindowMetrics()
        since_s = self._samples[-1].at_s - window_s
        return summarize((sample for sample in self._samples if sample.at_s > since_s + 1e-6), pool)

    @property
    def stable(self) -> WindowMetrics:
        return self._last(self.config.stable_window_s)

    @property
    def panic(self) -> WindowMetrics:
        return self._last(self.config.panic_window_s)

    def of_pool(self, pool: Pool) -> tuple[WindowMetrics, WindowMetrics]:
        """Return the stable window and the panic window of one pool."""
        return self._last(self.config.stable_window_s, pool), self._last(self.config.panic_window_s, pool)

    @property
    def growth_per_s(self) -> float:
        """The relative growth of the load per second: the slope of a line through the arrivals of `trend_window_s`. 0
        if chance alone could explain it."""
        config, samples = self.config, self._samples
        if not config.trend_window_s or not samples:
            return 0.0
        since_s = samples[-1].at_s - config.trend_window_s
        points = [(s.at_s, s.counts[_ARRIVED] / s.span_s) for s in samples if s.at_s > since_s]
        count = len(points)
        if count < MIN_TREND_SAMPLES or points[-1][0] - points[0][0] < 0.5 * config.trend_window_s:
            return 0.0
        mean_t = sum(t for t, _ in points) / count
        mean_y = sum(y for _, y in points) / count
        spread = sum((t - mean_t) ** 2 for t, _ in points)
        slope = sum((t - mean_t) * (y - mean_y) for t, y in points) / spread
        residual = sum((y - mean_y - slope * (t - mean_t)) ** 2 for t, y in points)
        margin = STANDARD_ERRORS * (residual / (count - 2) / spread) ** 0.5
        certain = max(0.0, slope - margin) if slope > 0 else min(0.0, slope + margin)
        level = mean_y + slope * (points[-1][0] - mean_t)
        return certain / level if level > 0 else 0.0
