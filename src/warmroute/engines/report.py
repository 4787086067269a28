"""What an engine's metrics page says of its load, in one shape for every engine."""

from __future__ import annotations

import re

import msgspec


class LoadReport(msgspec.Struct, frozen=True):
    running: int
    waiting: int
    kv_usage: float
    """Share of KV blocks in use by running requests, 0 to 1."""
    incarnation: float
    """Start time of the engine's process; 0 where it does not say."""


def samples(page: bytes, name: bytes) -> list[float]:
    """Every value of one metric, whatever its labels. Looks only at the lines that begin with its name."""
    found: list[float] = []
    at = 0 if page.startswith(name) else page.find(b"\n" + name) + 1
    while at > 0 or (at == 0 and page.startswith(name)):
        end = page.find(b"\n", at)
        line = page[at : end if end >= 0 else len(page)]
        if line[len(name) : len(name) + 1] in (b"{", b" "):
            value = _VALUE.search(line)
            if value is not None:
                found.append(float(value[1]))
        at = page.find(b"\n" + name, at) + 1
        if at == 0:
            break
    return found


_VALUE = re.compile(rb"[} ]([-+0-9.eE]+)(?: [0-9]+)?\s*$")


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
