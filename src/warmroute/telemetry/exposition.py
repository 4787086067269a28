"""Prometheus' text format, written straight out: a page of a thousand nodes has 50,000 lines, and each counts."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf, isfinite, isnan
from typing import Final

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


def label_value(text: str) -> str:
    """As it stands between quotes."""
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def labels(**named: str) -> str:
    return ",".join([f'{name}="{label_value(value)}"' for name, value in named.items()])


def number(value: float) -> str:
    if isfinite(value):
        return repr(value) if isinstance(value, float) else str(int(value))
    return "NaN" if isnan(value) else "+Inf" if value > 0 else "-Inf"


class Family:
    """Samples of one name. What they are labelled with is text by then (`labels`), made once for many families."""

    __slots__ = ("_help", "_kind", "lines", "name")

    def __init__(self, name: str, kind: str, text: str) -> None:
        self.name = name
        self._kind = kind
        self._help = text
        self.lines: list[str] = []

    def add(self, value: float, labelled: str = "") -> None:
        self.lines.append(f"{self.name}{{{labelled}}} {number(value)}" if labelled else f"{self.name} {number(value)}")

    def written(self) -> str:
        help_text = self._help.replace("\\", "\\\\").replace("\n", "\\n")
        return "\n".join([f"# HELP {self.name} {help_text}", f"# TYPE {self.name} {self._kind}", *self.lines, ""])


def gauge(name: str, text: str) -> Family:
    return Family(name, "gauge", text)


def counter(name: str, text: str) -> Family:
    return Family(f"{name}_total", "counter", text)


class Histogram(Family):
    __slots__ = ("_bounds",)

    def __init__(self, name: str, text: str, bounds: Iterable[float]) -> None:
        super().__init__(name, "histogram", text)
        self._bounds = [f'le="{number(bound)}"' for bound in (*bounds, inf)]

    def add_counts(self, counts: Iterable[int], sum_: float, labelled: str) -> None:
        """`counts`: of each bucket by itself, the last for what lies beyond the bounds."""
        name, so_far = self.name, 0
        for bound, count in zip(self._bounds, counts, strict=True):
            so_far += count
            self.lines.append(f"{name}_bucket{{{labelled},{bound}}} {so_far}")
        self.lines.append(f"{name}_count{{{labelled}}} {so_far}")
        self.lines.append(f"{name}_sum{{{labelled}}} {number(sum_)}")


def page(families: Iterable[Family]) -> bytes:
    return "".join([family.written() for family in families]).encode()
