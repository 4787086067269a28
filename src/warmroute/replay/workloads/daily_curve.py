"""A daily load curve: few requests at night and most in the afternoon.

rate(t) = mean · (1 − DEPTH · cos(2π · t / day))             t = 0 is the quietest hour
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import pi, sin

from warmroute.replay.workloads.workload_prompt import WorkloadPrompt

DEPTH = 0.6
"""The peak rate is (1 + DEPTH) × mean, the lowest rate (1 − DEPTH) × mean: a ratio of four."""


def follow_daily_curve(prompts: Iterable[WorkloadPrompt], day_s: float) -> Iterator[WorkloadPrompt]:
    """Shift evenly spread arrivals within days of `day_s` seconds. Their number and order stay the same."""
    day_ms = day_s * 1000.0
    for prompt in prompts:
        days, even = divmod(prompt.at_ms / day_ms, 1.0)
        prompt.at_ms = (days + _time_of(even)) * day_ms
        yield prompt


def _time_of(fraction: float) -> float:
    """Return when in a day this fraction of its requests has arrived; both are from 0 to 1."""
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        if middle - DEPTH * sin(2 * pi * middle) / (2 * pi) < fraction:
            low = middle
        else:
            high = middle
    return (low + high) / 2
