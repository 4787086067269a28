"""The load report: load and cache of an engine, in one form for all engines, and functions that read them from a
Prometheus page without parsing all of it.

The functions accept any page. A page with absurd values gives a report with absurd values, which
`ReportedValues.check` removes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from typing import Final

from warmroute.core.reported_values import MAX_NAME_LENGTH

_VALUE: Final = re.compile(
    rb"(?:\{.*\})?[ \t]+([-+]?(?:[0-9]{1,400}(?:\.[0-9]{0,400})?|\.[0-9]{1,400})(?:[eE][-+]?[0-9]{1,9})?)"
    rb"(?:[ \t]+[0-9]+)?\s*\Z"
)
"""The part of a sample after the metric's name: labels, a value, perhaps a time."""
MAX_LINE_BYTES: Final = 1 << 16
"""The functions ignore longer lines."""
MAX_SAMPLES: Final = 1024
"""Samples of one metric that are read: far more than a node has ranks. Further ones are ignored."""
MAX_TOTAL: Final = 1e18
"""A sum of absurd values stays a number that an integer and a float can both hold."""

_LABEL: Final = re.compile(rb'(?<!\w)(\w{1,64})="([^"\\]*)"')
"""A label. Without the look-behind, the search would try a long word again from each of its characters."""

Labels = dict[bytes, bytes]


def _labelled_samples(page: bytes, name: bytes) -> Iterator[tuple[bytes, Labels]]:
    """Return each sample of a metric that has labels: the text after its name, and its labels."""
    mark = b"\n" + name + b"{"
    at = page.find(mark)
    for _ in range(MAX_SAMPLES):
        if at < 0:
            return
        end = page.find(b"\n", at + 1)
        sample = page[at + len(mark) - 1 : end if end >= 0 else len(page)]
        if len(sample) <= MAX_LINE_BYTES:
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
    names = (text or b"").decode("utf-8", "replace").split(",")
    return tuple(name for name in names if 0 < len(name) <= MAX_NAME_LENGTH)


def whole_number(text: bytes | None) -> int:
    """Return a label's value as a number; 0 if it is none."""
    return int(text) if text is not None and text.isdigit() and len(text) < 16 else 0


def samples(page: bytes, name: bytes) -> list[float]:
    """Return every finite value of a metric, whatever its labels. Reads only the lines that start with its name."""
    found: list[float] = []
    mark = b"\n" + name
    at = 0 if page.startswith(name) else page.find(mark) + 1
    for _ in range(MAX_SAMPLES if at or page.startswith(name) else 0):
        end = page.find(b"\n", at)
        end = min(end if end >= 0 else len(page), at + MAX_LINE_BYTES)
        value = _VALUE.match(page, at + len(name), end)
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
    return int(min(max(0.0, sum(_first_present(page, names))), MAX_TOTAL))


def counter(page: bytes, *names: bytes) -> float:
    """Return the sum of the first of these metrics that is present, over all ranks; below 0 if none is."""
    values = _first_present(page, names)
    return min(max(0.0, sum(values)), MAX_TOTAL) if values else -1.0


def less(total: float, part: float) -> float:
    """Return a counter without a part of it; below 0 if one of them is not reported."""
    return max(0.0, total - part) if total >= 0.0 and part >= 0.0 else -1.0


def mean(page: bytes, *names: bytes) -> float:
    """Return the mean of the first of these metrics that is present."""
    values = _first_present(page, names)
    return min(max(-MAX_TOTAL, sum(values) / len(values)), MAX_TOTAL) if values else 0.0


def _first_present(page: bytes, names: Iterable[bytes]) -> list[float]:
    return next(filter(None, (samples(page, name) for name in names)), [])
