"""What an engine's metrics page says of its load, in one shape for every engine."""

from __future__ import annotations

import math
import re
from typing import Final

import msgspec

_VALUE: Final = re.compile(rb"(?:\{.*\})?[ \t]+([-+]?[0-9.]+(?:[eE][-+]?[0-9]+)?)(?:[ \t]+[0-9]+)?\s*\Z")
"""What follows a metric's name: labels, a value, perhaps a time."""


class LoadReport(msgspec.Struct, frozen=True):
    running: int
    waiting: int
    kv_usage: float
    """Share of KV blocks in use by running requests, 0 to 1."""
    incarnation: float
    """Start time of the engine's process; 0 where it does not say."""


def samples(page: bytes, name: bytes) -> list[float]:
    """Every finite value of one metric, whatever its labels. Looks only at the lines that begin with its name."""
    found: list[float] = []
    mark = b"\n" + name
    at = 0 if page.startswith(name) else page.find(mark) + 1
    while at or page.startswith(name):
        end = page.find(b"\n", at)
        value = _VALUE.match(page, at + len(name), end if end >= 0 else len(page))
        if value is not None:
            number = float(value[1])
            if math.isfinite(number):
                found.append(number)
        at = page.find(mark, at) + 1
        if not at:
            break
    return found


def total(page: bytes, *names: bytes) -> int:
    """Sum of the first of these metrics that is there (ranks are summed)."""
    for name in names:
        values = samples(page, name)
        if values:
            return max(0, int(sum(values)))
    return 0


def mean(page: bytes, *names: bytes) -> float:
    for name in names:
        values = samples(page, name)
        if values:
            return sum(values) / len(values)
    return 0.0
