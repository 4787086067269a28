"""The load report: load and cache of an engine, in one form for all engines, and functions that read them from a
Prometheus page without parsing all of it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from typing import Final

import msgspec

_VALUE: Final = re.compile(rb"(?:\{.*\})?[ \t]+([-+]?[0-9.]+(?:[eE][-+]?[0-9]+)?)(?:[ \t]+[0-9]+)?\s*\Z")
"""The part of a sample after the metric's name: labels, a value, perhaps a time."""

_LABEL: Final = re.compile(rb'(\w+)="([^"\\]*)"')

Labels = dict[bytes, bytes]


class LoadReport(msgspec.Struct, frozen=True):
    running: int
    waiting: int
    kv_usage: float
    """Share of KV blocks that running requests use, 0 to 1."""
    incarnation: float
    """Start time of the engine's process; 0 if the engine does not report it."""
    block_size: int = 0
    """Tokens in a block of its cache; 0 if the engine does not report it."""
    capacity_tokens: int = 0
    """Tokens that the caches of all ranks hold; 0 if the engine does not report it."""
    adapters: tuple[str, ...] = ()
    """LoRA adapters of running requests."""
    adapter_slots: int = 0
    """Adapters that it keeps loaded; 0 if the engine does not report it."""


def _labelled_samples(page: bytes, name: bytes) -> Iterator[tuple[bytes, Labels]]:
    """Return each sample of a metric that has labels: the text after its name, and its labels."""
    mark = b"\n" + name + b"{"
    at = page.find(mark)
    while at >= 0:
        end = page.find(b"\n", at + 1)
        sample = page[at + len(mark) - 1 : end if end >= 0 else len(page)]
        yield sample, dict(_LABEL.findall(sample))
        at = page.find(mark, at + 1)


def labels(page: bytes, name: bytes) -> list[Labels]:
    return [found for _, found in _labelled_samples(page, name)]


def latest_labels(page: bytes, name: bytes) -> Labels:
    """Return the labels of the sample with the greatest value, for a metric whose value is a time stamp."""
    latest: Labels = {}
    greatest = -math.inf
    for sample, found in _labelled_samples(page, name):
        value = _VALUE.match(sample)
        if value is not None and float(value[1]) > greatest:
            greatest, latest = float(value[1]), found
    return latest


def split_names(text: bytes | None) -> tuple[str, ...]:
    """Return the names in a label that lists them with commas."""
    return tuple(name for name in (text or b"").decode("utf-8", "replace").split(",") if name)


def whole_number(text: bytes | None) -> int:
    """Return a label's value as a number; 0 if it is none."""
    return int(text) if text is not None and text.isdigit() and len(text) < 16 else 0


def samples(page: bytes, name: bytes) -> list[float]:
    """Return every finite value of a metric, whatever its labels. Reads only the lines that start with its name."""
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
    """Return the sum of the first of these metrics that is present, over all ranks."""
    return max(0, int(sum(_first_present(page, names))))


def mean(page: bytes, *names: bytes) -> float:
    """Return the mean of the first of these metrics that is present."""
    values = _first_present(page, names)
    return sum(values) / len(values) if values else 0.0


def _first_present(page: bytes, names: Iterable[bytes]) -> list[float]:
    return next(filter(None, (samples(page, name) for name in names)), [])
