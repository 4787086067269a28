"""Prometheus' text format, rendered in a thread, once for all who ask."""

from __future__ import annotations

import asyncio
import re
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import inf, isfinite, isnan
from typing import Final

from warmroute.app.metrics import Metric

# The text formats of Prometheus and OpenMetrics, written directly: the page of a thousand nodes has 50,000 lines.

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS_CONTENT_TYPE: Final = "application/openmetrics-text; version=1.0.0; charset=utf-8"


PAUSE_LINES: Final = 64
"""Samples of a metric after which a pause may follow."""
PAUSE_AFTER_S: Final = 0.0001
"""Time of work between two pauses."""
PAUSE_S: Final = 0.00005


def label_value(text: str) -> str:
    """Escape a label value."""
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def format_labels(**values: str) -> str:
    return ",".join([f'{name}="{label_value(value)}"' for name, value in values.items()])


def format_number(value: float) -> str:
    if isfinite(value):
        return repr(value) if isinstance(value, float) else str(int(value))
    return "NaN" if isnan(value) else "+Inf" if value > 0 else "-Inf"


class Pauses:
    """Lets other threads run while a thread renders a page. Without pauses, the event loop would wait for the
    interpreter lock whenever it has something to do."""

    def __init__(self) -> None:
        self._due_s = time.perf_counter() + PAUSE_AFTER_S

    def __call__(self) -> None:
        if time.perf_counter() >= self._due_s:
            time.sleep(PAUSE_S)
            self._due_s = time.perf_counter() + PAUSE_AFTER_S


class MetricLines:
    """The samples of one metric. Labels are passed as text, so that many metrics can share it."""

    __slots__ = ("_metric", "_pause", "lines")

    def __init__(self, metric: Metric, pause: Callable[[], object] = lambda: None) -> None:
        """`pause` is called now and then."""
        self._metric = metric
        self._pause = pause
        self.lines: list[str] = []

    def add(self, value: float, labels: str = "") -> None:
        name, lines = self._metric.name, self.lines
        lines.append(f"{name}{{{labels}}} {format_number(value)}" if labels else f"{name} {format_number(value)}")
        if not len(lines) % PAUSE_LINES:
            self._pause()

    def add_histogram(self, bounds: Iterable[str], counts: Iterable[int], sum_: float, labels: str = "") -> None:
        """`bounds`: as `bucket_bounds` returns them. `counts`: of each bucket alone, not cumulative."""
        name, total = self._metric.name, 0
        braces, comma = (f"{{{labels}}}", ",") if labels else ("", "")
        for bound, count in zip(bounds, counts, strict=True):
            total += count
            self.lines.append(f"{name}_bucket{{{labels}{comma}{bound}}} {total}")
        self.lines.append(f"{name}_count{braces} {total}")
        self.lines.append(f"{name}_sum{braces} {format_number(sum_)}")
        self._pause()

    def render(self, openmetrics: bool = False) -> bytes:
        self._pause()
        metric = self._metric
        name, text = metric.name, metric.help.replace("\\", "\\\\").replace("\n", "\\n")
        if openmetrics:
            name, text = name.removesuffix("_total"), text.replace('"', '\\"')
        lines = "\n".join([f"# HELP {name} {text}", f"# TYPE {name} {metric.kind}", *self.lines, ""])
        return lines.encode("utf-8", "replace")  # a node may have sent a name with half a character


Page = Mapping[Metric, MetricLines]
"""The samples of all metrics."""


def bucket_bounds(bounds: Iterable[float]) -> list[str]:
    """Return the labels of a histogram's buckets, the unbounded one included."""
    return [f'le="{format_number(bound)}"' for bound in (*bounds, inf)]


class MergedBuckets:
    """Some of a histogram's bounds, for a page that does not need all of them."""

    def __init__(self, all_bounds_ms: Sequence[float], shown_ms: Sequence[float]) -> None:
        """`shown_ms`: some of the bounds, in milliseconds. The page has them in seconds."""
        self.bounds_s = tuple(bound / 1000.0 for bound in shown_ms)
        self.labels = bucket_bounds(self.bounds_s)
        ends = [all_bounds_ms.index(bound) + 1 for bound in shown_ms]
        self._slices = [slice(start, end) for start, end in zip((0, *ends), (*ends, None), strict=True)]

    def merge(self, counts: Sequence[int]) -> list[int]:
        return [sum(counts[part]) for part in self._slices]


# Serves the metrics page: renders it in a thread, once for all who ask at the same time, and compresses it.
#
# The event loop only starts the thread and sends the result. A page of 64 nodes, 16 models and 100 tenants has
# megabytes: Prometheus accepts it compressed, so that sending it takes a hundredth of the time.

_GZIP: Final = 16 + zlib.MAX_WBITS
_LEVEL: Final = 1
"""Higher levels take several times as long, for a page that is a third smaller."""

_REFUSED: Final = re.compile(rb"q\s*=\s*0(\.0*)?")

Headers = tuple[tuple[str, str], ...]


class Scrapes:
    def __init__(self, render: Callable[[bool], list[bytes]]) -> None:
        """`render`: returns the page in pieces; True: in the format of OpenMetrics."""
        self._render = render
        self._running: dict[tuple[bool, bool], asyncio.Future[list[bytes]]] = {}

    async def page(self, accept: bytes, accept_encoding: bytes) -> tuple[list[bytes], str, Headers]:
        """Return the page in pieces, its content type and further headers, for these headers of the request."""
        openmetrics = b"application/openmetrics-text" in accept.lower()
        compressed = accepts_gzip(accept_encoding)
        key = (openmetrics, compressed)
        running = self._running.get(key)
        if running is None:
            loop = asyncio.get_running_loop()
            running = self._running[key] = loop.run_in_executor(None, self._render_page, openmetrics, compressed)
            running.add_done_callback(lambda _: self._running.pop(key))
        page = await asyncio.shield(running)  # a client that disconnects must not cancel the page of the others
        headers: Headers = (("Vary", "Accept, Accept-Encoding"),)
        if compressed:
            headers = (("Content-Encoding", "gzip"), *headers)
        return page, OPENMETRICS_CONTENT_TYPE if openmetrics else CONTENT_TYPE, headers

    def _render_page(self, openmetrics: bool, compressed: bool) -> list[bytes]:
        page = self._render(openmetrics)
        if not compressed:
            return page
        gzip = zlib.compressobj(_LEVEL, zlib.DEFLATED, _GZIP)
        return [b"".join([*[gzip.compress(piece) for piece in page], gzip.flush()])]


def accepts_gzip(accept_encoding: bytes) -> bool:
    """Return whether this `Accept-Encoding` names gzip, and does not refuse it with a quality of 0."""
    for item in accept_encoding.lower().split(b","):
        name, *parameters = [part.strip() for part in item.split(b";")]
        if name == b"gzip":
            return not any(_REFUSED.fullmatch(one) for one in parameters)
    return False
