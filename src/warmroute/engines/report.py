"""What an engine's metrics page says of its load, in one shape for every engine."""

from __future__ import annotations

import math
import re
from typing import Final

import msgspec

_VALUE: Final = re.compile(rb"(?:\{.*\})?[ \t]+([-+]?[0-9.]+(?:[eE][-+]?[0-9]+)?)(?:[ \t]+[0-9]+)?\s*\Z")
"""What follows a metric's name: labels, a value, perhaps a time."""

_LABEL: Final = re.compile(rb'(\w+)="([^"\\]*)"')


class LoadReport(msgspec.Struct, frozen=True):
    running: int
    waiting: int
    kv_usage: float
    """Share of KV blocks in use by running requests, 0 to 1."""
    incarnation: float
    """Start time of the engine's process; 0 where it does not say."""
    block_size: int = 0
    """Tokens in a block of its cache; 0 where it does not say, as for the next."""
    capacity_tokens: int = 0
    """What its cache holds, all ranks together."""
    prefix_queries: int = 0
    """Prompt tokens looked for in its cache since it started."""
    prefix_hits: int = 0
    """Of these, those found."""
    preemptions: int = 0
    """Requests it has thrown out of its cache to make room since it started."""
    adapters: tuple[str, ...] = ()
    """LoRA adapters that run now."""
    adapter_slots: int = 0
    """How many it keeps loaded; 0 where it does not say."""


def info(page: bytes, name: bytes) -> list[dict[bytes, bytes]]:
    """The labels of every sample of one metric."""
    found: list[dict[bytes, bytes]] = []
    mark = b"\n" + name + b"{"
    at = page.find(mark)
    while at >= 0:
        end = page.find(b"\n", at + 1)
        found.append(dict(_LABEL.findall(page, at + len(mark), end if end >= 0 else len(page))))
        at = page.find(mark, at + 1)
    return found


def latest(page: bytes, name: bytes) -> dict[bytes, bytes]:
    """The labels of the sample with the greatest value: of a metric whose value is when its labels were true."""
    found: dict[bytes, bytes] = {}
    greatest = -math.inf
    mark = b"\n" + name + b"{"
    at = page.find(mark)
    while at >= 0:
        end = page.find(b"\n", at + 1)
        end = end if end >= 0 else len(page)
        value = _VALUE.match(page, at + len(mark) - 1, end)
        if value is not None and float(value[1]) > greatest:
            greatest = float(value[1])
            found = dict(_LABEL.findall(page, at + len(mark), end))
        at = page.find(mark, at + 1)
    return found


def names(text: bytes | None) -> tuple[str, ...]:
    """A label that is a list of names with commas between them."""
    return tuple(name for name in (text or b"").decode("utf-8", "replace").split(",") if name)


def whole(text: bytes | None) -> int:
    """A label that is a whole number; 0 where it is not."""
    return int(text) if text is not None and text.isdigit() and len(text) < 16 else 0


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
