"""One metrics page for several processes. Counters and histograms are summed, and so are gauges that count something
of one process; of other gauges, which every process measures alike, the highest value counts.

A counter never falls: what a process counted until it ended stays in the sum, as of its last page. An engine's
own counters, which every process reads alike, count once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from warmroute.app.metrics import fleet_metrics
from warmroute.app.metrics import page as metrics
from warmroute.app.metrics.exposition import format_number
from warmroute.app.metrics.page import METRICS

SUMMED_GAUGES: Final = frozenset(
    {
        *(metrics.REQUESTS_WAITING.name, metrics.CLIENT_CONNECTIONS.name, fleet_metrics.NODE_IN_FLIGHT.name),
        *(metrics.CLIENT_UNREAD.name, metrics.REQUEST_BODIES.name),
        *(
            fleet_metrics.INDEX_BYTES.name,
            "process_resident_memory_bytes",
            "process_virtual_memory_bytes",
            "process_open_fds",
        ),
    }
)
ENGINE_COUNTERS: Final = "warmroute_node_engine_"
"""Begin the names of the counters that engines report."""
_KINDS: Final = {metric.name: metric.kind for metric in METRICS}
_SUFFIXES: Final = ("_bucket", "_count", "_sum")

Samples = dict[str, float]
"""Name and labels, as on the page → value."""


def parse_page(page: bytes) -> Samples:
    """Return the samples of a page. Lines that are no samples do not count."""
    samples: Samples = {}
    for line in page.decode("utf-8", "replace").splitlines():
        if not line or line.startswith("#"):
            continue
        name, _, value = line.rpartition(" ")
        try:
            samples[name] = float(value)
        except ValueError:
            continue
    return samples


def metric_name(sample: str) -> str:
    name = sample.partition("{")[0]
    if name in _KINDS:
        return name
    for suffix in _SUFFIXES:
        if name.endswith(suffix) and name.removesuffix(suffix) in _KINDS:
            return name.removesuffix(suffix)
    return name


def _is_summed(name: str) -> bool:
    if name.startswith(ENGINE_COUNTERS):
        return False
    return name in SUMMED_GAUGES or _KINDS.get(name) in ("counter", "histogram")


class CombinedMetrics:
    def __init__(self) -> None:
        self._latest: dict[str, Samples] = {}
        """The last page of each process, by its id."""
        self._ended: Samples = {}
        """Sums of the counters of processes that have ended."""
        self._engine_counters: dict[str, tuple[float, float]] = {}
        """By sample: its last value, and by how much the combined one is ahead of it."""

    def update(self, pages: Mapping[str, bytes], running: set[str]) -> None:
        """Take over the pages of processes. Those that are not in `running` have ended."""
        for process, page in pages.items():
            self._latest[process] = parse_page(page)
        for process in self._latest.keys() - running:
            for sample, value in self._latest.pop(process).items():
                name = metric_name(sample)
                if _is_summed(name) and name not in SUMMED_GAUGES:
                    self._ended[sample] = self._ended.get(sample, 0.0) + value

    def _never_falling(self, sample: str, value: float) -> float:
        """Return a counter that goes on where it was if the process with the highest value has ended."""
        last, ahead = self._engine_counters.get(sample, (value, 0.0))
        ahead += max(0.0, last - value)
        self._engine_counters[sample] = (value, ahead)
        return value + ahead

    def render(self, more: Mapping[str, float]) -> bytes:
        """`more`: samples of the parent process."""
        combined: Samples = dict(self._ended)
        for samples in self._latest.values():
            for sample, value in samples.items():
                name = metric_name(sample)
                if sample not in combined:
                    combined[sample] = value
                elif _is_summed(name):
                    combined[sample] += value
                else:
                    combined[sample] = max(combined[sample], value)
        for sample, value in combined.items():
            if sample.startswith(ENGINE_COUNTERS) and "_total" in sample:
                combined[sample] = self._never_falling(sample, value)
        combined.update(more)
        by_metric: dict[str, list[str]] = {}
        for sample, value in combined.items():
            number = format_number(int(value) if value.is_integer() else value)
            by_metric.setdefault(metric_name(sample), []).append(f"{sample} {number}")
        lines: list[str] = []
        for metric in METRICS:
            if metric.name in by_metric:
                text = metric.help.replace("\\", "\\\\").replace("\n", "\\n")
                lines += [
                    f"# HELP {metric.name} {text}",
                    f"# TYPE {metric.name} {metric.kind}",
                    *by_metric[metric.name],
                ]
        return ("\n".join(lines) + "\n").encode()
