"""The shape of a day: what arrives evenly arrives as people do, few at night and most in the afternoon.

rate(t) = mean · (1 − DEPTH · cos(2π · t / day))             t = 0 is the quietest hour
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import pi, sin

from warmroute.replay.workloads.prompt import Prompt

DEPTH = 0.6
"""At its height a day has (1 + DEPTH) times its mean, at its lowest (1 − DEPTH): a ratio of four."""


def day_shaped(prompts: Iterable[Prompt], day_s: float) -> Iterator[Prompt]:
    """Moves arrivals within days of `day_s` seconds; their number and order stay."""
    day_ms = day_s * 1000.0
    for prompt in prompts:
        days, even = divmod(prompt.at_ms / day_ms, 1.0)
        prompt.at_ms = (days + _moment(even)) * day_ms
        yield prompt


def _moment(share: float) -> float:
    """When in a day this share of its requests has arrived; both from 0 to 1."""
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        if middle - DEPTH * sin(2 * pi * middle) / (2 * pi) < share:
            low = middle
        else:
            high = middle
    return (low + high) / 2
