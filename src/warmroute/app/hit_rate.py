"""The usual hit rate of one route, and when it has dropped.

Two rates: by tokens (cached ÷ prompt tokens), which is what counts, and by prompts (the mean of each prompt's cached
share), which one huge prompt cannot change. A drop is an alert if all of this holds, at two checks in a row:

1. The baseline is mature: MIN_AGE_S of traffic and MIN_BASE_PROMPTS prompts.
2. The rate by tokens is MIN_DROP, and a fifth of the baseline, below it.
3. The rate by prompts is SIGMAS standard deviations below its baseline. The deviation has three parts: that of single
   prompts, that of the baseline's own mean, and that between windows of the same length in the past (traffic comes in
   bursts and has seasons).

The check looks at the last 30, 60, 150 and 300 seconds, as far as they have MIN_PROMPTS prompts: a large drop shows in
the first, a small one, or one of a route with few requests, needs more of them.

The baseline decays with DECAY_S and lags a minute behind, or up to five with few requests, so that a drop does not
enter it before it is noticed. It
stands still while there is a drop. After ADAPT_S with prompts the current rate becomes the baseline. A drop that ended
by itself counts as a deviation between windows, so that drops that recur do not alert again and again.

Only prompts end a drop: the check looks at windows since the drop began, and only when prompts have come since the last
check. Otherwise a route without traffic would recover as soon as the low prompts have left the short windows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import pairwise
from math import exp, inf, sqrt
from operator import sub
from typing import Final, Literal, NamedTuple

from warmroute.telemetry.traffic import RouteTraffic

CHECK_S: Final = 5.0
WINDOWS_S: Final = (30.0, 60.0, 150.0, 300.0)
WINDOW_S: Final = WINDOWS_S[0]
MAX_WINDOW_S: Final = WINDOWS_S[-1]
MIN_PROMPTS: Final = 30
DELAY_S: Final = 60.0
"""The baseline lags at least this far behind, and until 2 · MIN_PROMPTS prompts have come since, but never more than
MAX_WINDOW_S."""
DECAY_S: Final = 1800.0
"""A prompt this long ago counts 1/e: seven eighths of the baseline are from the last hour."""
MIN_AGE_S: Final = 120.0
MIN_BASE_PROMPTS: Final = 150.0
MIN_DROP: Final = 0.12
MIN_RELATIVE_DROP: Final = 0.2
SIGMAS: Final = 5.0
DEVIATION_DECAY_S: Final = 14_400.0
"""How long the router remembers how much windows differ."""
RECOVERED_WEIGHT: Final = 5.0
"""A window of a drop that ended by itself counts as this many in the deviation between windows."""
PRIOR_WINDOWS: Final = 4.0
PRIOR_DEVIATION: Final = 0.04
"""Deviation between windows that is assumed at first. It weighs as much as PRIOR_WINDOWS."""
RECOVERED: Final = 0.5
"""A drop has ended when less than this fraction of the least drop is left."""
ADAPT_S: Final = 3600.0

End = Literal["recovered", "adapted"]


class Totals(NamedTuple):
    """A route's totals at one time; also their difference between two times."""

    at_s: float
    prompts: int
    prompt_tokens: int
    cached_tokens: int
    shares: float
    squares: float
    saved_ms: float
    prompt_ms: float
    sampled_blocks: int
    known_blocks: int

    def since(self, before: Totals) -> Totals:
        return Totals(*map(sub, self, before))

    @property
    def hit_ratio(self) -> float:
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def known_ratio(self) -> float | None:
        """The hit rate of a cache that never evicts, from a sample of blocks; None without any."""
        return self.known_blocks / self.sampled_blocks if self.sampled_blocks else None


def totals_of(traffic: RouteTraffic, now_s: float) -> Totals:
    return Totals(
        now_s, traffic.counted_prompts, traffic.prompt_tokens, traffic.cached_tokens, traffic.hit_shares,
        traffic.hit_share_squares, traffic.saved_gpu_ms, traffic.prompt_gpu_ms, traffic.sampled_blocks,
        traffic.known_blocks,
    )  # fmt: skip


class Baseline:
    """Decayed sums of what was usual."""

    __slots__ = (
        "_deviation", "_windows", "age_s", "cached", "known", "prompt_ms", "prompts", "sampled", "saved_ms", "shares",
        "squares", "tokens",
    )  # fmt: skip

    def __init__(self) -> None:
        self.age_s = self.prompts = self.tokens = self.cached = self.prompt_ms = 0.0
        self.shares = self.squares = self.saved_ms = self.sampled = self.known = 0.0
        self._windows = PRIOR_WINDOWS
        self._deviation = PRIOR_WINDOWS * PRIOR_DEVIATION**2

    def add(self, part: Totals) -> None:
        """Add the traffic of `part.at_s` seconds."""
        kept = exp(-part.at_s / DECAY_S)
        self.age_s += part.at_s if part.prompts else 0.0
        self.prompts = self.prompts * kept + part.prompts
        self.tokens = self.tokens * kept + part.prompt_tokens
        self.cached = self.cached * kept + part.cached_tokens
        self.prompt_ms = self.prompt_ms * kept + part.prompt_ms
        self.shares = self.shares * kept + part.shares
        self.squares = self.squares * kept + part.squares
        self.saved_ms = self.saved_ms * kept + part.saved_ms
        self.sampled = self.sampled * kept + part.sampled_blocks
        self.known = self.known * kept + part.known_blocks

    def add_window(self, window: Totals, weight: float = 1.0) -> None:
        """Learn how much windows differ from the baseline, beyond the variance of their prompts."""
        if not self.is_mature:
            return
        kept = exp(-window.at_s / DEVIATION_DECAY_S)
        beyond = (window.shares / window.prompts - self.mean) ** 2 - self.variance / window.prompts
        self._windows = self._windows * kept + weight
        self._deviation = self._deviation * kept + weight * max(0.0, beyond)

    @property
    def is_mature(self) -> bool:
        return self.age_s >= MIN_AGE_S and self.prompts >= MIN_BASE_PROMPTS

    @property
    def hit_ratio(self) -> float:
        return self.cached / self.tokens if self.tokens else 0.0

    @property
    def known_ratio(self) -> float | None:
        return self.known / self.sampled if self.sampled >= 1.0 else None

    @property
    def mean(self) -> float:
        return self.shares / self.prompts if self.prompts else 0.0

    @property
    def variance(self) -> float:
        """Of single prompts. A little is assumed in any case: all prompts may have been alike by chance."""
        return max(0.01, self.squares / self.prompts - self.mean**2) if self.prompts else 0.25

    def deviation(self, prompts: int) -> float:
        """Return the standard deviation of the mean of a window with this many prompts."""
        return sqrt(self.variance / prompts + self.variance / max(1.0, self.prompts) + self._deviation / self._windows)


class Drop:
    """A drop that lasts."""

    def __init__(self, since_s: float, baseline: Baseline) -> None:
        self.since_s = since_s
        """When the window began in which it was noticed."""
        self.hit_ratio = 0.0
        """The current one."""
        self.baseline_ratio = baseline.hit_ratio
        self.prompts = 0
        self.traffic_s = 0.0
        """Time between checks between which prompts came."""
        self.last_prompt_s = since_s
        """When the last check was that found new prompts."""
        self.lost_ms = 0.0
        """Prefill time beyond what the same prompts would have taken at the baseline's hit rate, at current speeds:
        while nearly all tokens are cached, the learned speed is that of short prefills, and too slow for long ones."""

    def add(self, part: Totals, baseline: Baseline, now_s: float) -> None:
        self.prompts += part.prompts
        if part.prompts:
            self.traffic_s += part.at_s
            self.last_prompt_s = now_s
        self.lost_ms += part.prompt_ms * baseline.saved_ms / max(1.0, baseline.prompt_ms) - part.saved_ms


class HitRate:
    """Takes the totals of one route every CHECK_S."""

    def __init__(self) -> None:
        self.baseline = Baseline()
        self.window: Totals | None = None
        """The current window; None with too little traffic."""
        self.hit_ratio: float | None = None
        """Of the last window with enough prompts; None before the first."""
        self.drop: Drop | None = None
        self.ended: End | None = None
        """Why the last drop ended, at the check at which it did."""
        self._readings: deque[Totals] = deque()
        self._absorbed = 0
        """Readings that the baseline has taken."""
        self._window_start: Totals | None = None
        self._low_checks = 0
        self._high_checks = 0

    @property
    def prompts(self) -> int:
        """The prompts of the last reading; below 0 before the first."""
        return self._readings[-1].prompts if self._readings else -1

    def update(self, now: Totals) -> None:
        self.ended = None
        readings = self._readings
        last = readings[-1] if readings else None
        readings.append(now)
        self._absorb()
        while len(readings) > 2 and readings[1].at_s <= now.at_s - MAX_WINDOW_S - DELAY_S:
            readings.popleft()
            self._absorbed = max(0, self._absorbed - 1)
        windows = list(self._windows(now, self.drop.since_s if self.drop is not None else -inf))
        self.window = windows[0] if windows else None
        if self.window is not None:
            self.hit_ratio = self.window.hit_ratio
        if self.drop is not None:
            self._follow(self.drop, now, last)
            return
        low = next((window for window in windows if self._is_low(window)), None)
        self._low_checks = self._low_checks + 1 if low is not None else 0
        if low is not None and self._low_checks >= 2:
            self._begin(low, now)

    def _absorb(self) -> None:
        """Let the baseline take the readings that are old enough. While the rate is low, it takes none."""
        readings = self._readings
        if self.drop is not None or self._low_checks:
            return
        while self._absorbed + 1 < len(readings):
            before, then = readings[self._absorbed], readings[self._absorbed + 1]
            seconds, prompts = readings[-1].at_s - then.at_s, readings[-1].prompts - then.prompts
            if seconds < DELAY_S or (prompts < 2 * MIN_PROMPTS and seconds < MAX_WINDOW_S):
                break
            self.baseline.add(then.since(before))
            self._absorbed += 1
            self._learn_deviation(before, then)

    def _learn_deviation(self, before: Totals, then: Totals, weight: float = 1.0) -> None:
        start = self._window_start = self._window_start or before
        whole = then.since(start)
        if whole.at_s >= WINDOW_S and whole.prompts >= MIN_PROMPTS:
            self.baseline.add_window(whole, weight)
            self._window_start = then
        elif whole.at_s > MAX_WINDOW_S:
            self._window_start = then

    def _windows(self, now: Totals, since_s: float) -> Iterator[Totals]:
        """Yield the windows that begin at `since_s` at the earliest, end now and have enough prompts, the shortest
        first."""
        lengths = list(WINDOWS_S)
        for start in reversed(self._readings):
            if start.at_s < since_s:
                return
            while lengths and now.at_s - start.at_s >= lengths[0] - 0.5:
                length = lengths.pop(0)
                if now.prompts - start.prompts >= MIN_PROMPTS and now.at_s - start.at_s < length + WINDOW_S:
                    yield now.since(start)
            if not lengths:
                return

    @property
    def least_drop(self) -> float:
        return max(MIN_DROP, MIN_RELATIVE_DROP * self.baseline.hit_ratio)

    def _is_low(self, window: Totals) -> bool:
        baseline = self.baseline
        if not baseline.is_mature or baseline.hit_ratio - window.hit_ratio < self.least_drop:
            return False
        below = baseline.mean - window.shares / window.prompts
        return below >= SIGMAS * baseline.deviation(window.prompts)

    def _begin(self, window: Totals, now: Totals) -> None:
        self.drop = drop = Drop(now.at_s - window.at_s, self.baseline)
        drop.hit_ratio = window.hit_ratio
        drop.add(window, self.baseline, now.at_s)
        self._high_checks = 0

    def _follow(self, drop: Drop, now: Totals, last: Totals | None) -> None:
        if last is not None:
            drop.add(now.since(last), self.baseline, now.at_s)
        window = self.window
        if window is not None:
            drop.hit_ratio = window.hit_ratio
        if window is not None and drop.last_prompt_s == now.at_s:
            is_high = self.baseline.hit_ratio - window.hit_ratio < RECOVERED * self.least_drop
            self._high_checks = self._high_checks + 1 if is_high else 0
        if self._high_checks >= 2:
            self._end("recovered")
        elif drop.traffic_s >= ADAPT_S:
            self._end("adapted")
            self.baseline = Baseline()

    def _end(self, why: End) -> None:
        """The baseline learns from the drop how much windows may differ, and nothing else."""
        self.drop, self.ended = None, why
        self._low_checks = 0
        if why == "recovered":
            for before, then in pairwise(list(self._readings)[self._absorbed :]):
                self._learn_deviation(before, then, RECOVERED_WEIGHT)
        self._absorbed = len(self._readings) - 1
        self._window_start = None
