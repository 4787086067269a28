"""The text format of Prometheus, written directly: the page of a thousand nodes has 50,000 lines."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf, isfinite, isnan
from typing import Final

from warmroute.telemetry.metric_definitions import Metric

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


def label_value(text: str) -> str:
    """Escape a label value."""
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def format_labels(**values: str) -> str:
    return ",".join([f'{name}="{label_value(value)}"' for name, value in values.items()])


def format_number(value: float) -> str:
    if isfinite(value):
        return repr(value) if isinstance(value, float) else str(int(value))
    return "NaN" if isnan(value) else "+Inf" if value > 0 else "-Inf"


class MetricLines:
    """The samples of one metric. Labels are passed as text, so that many metrics can share it."""

    __slots__ = ("_metric", "lines")

    def __init__(self, metric: Metric) -> None:
        self._metric = metric
        self.lines: list[str] = []

    def add(self, value: float, labels: str = "") -> None:
        name = self._metric.name
        self.lines.append(f"{name}{{{labels}}} {format_number(value)}" if labels else f"{name} {format_number(value)}")

    def add_histogram(self, bounds: list[str], counts: Iterable[int], sum_: float, labels: str) -> None:
        """`bounds`: as `bucket_bounds` returns them. `counts`: of each bucket alone, not cumulative."""
        name, total = self._metric.name, 0
        for bound, count in zip(bounds, counts, strict=True):
            total += count
            self.lines.append(f"{name}_bucket{{{labels},{bound}}} {total}")
        self.lines.append(f"{name}_count{{{labels}}} {total}")
        self.lines.append(f"{name}_sum{{{labels}}} {format_number(sum_)}")

    def render(self) -> str:
        metric = self._metric
        text = metric.help.replace("\\", "\\\\").replace("\n", "\\n")
        return "\n".join([f"# HELP {metric.name} {text}", f"# TYPE {metric.name} {metric.kind}", *self.lines, ""])


def bucket_bounds(bounds: Iterable[float]) -> list[str]:
    """Return the labels of a histogram's buckets, the unbounded one included."""
    return [f'le="{format_number(bound)}"' for bound in (*bounds, inf)]
