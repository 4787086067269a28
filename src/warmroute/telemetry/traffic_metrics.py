"""Adds the traffic to the metrics page: tokens by route, tenant and node, times and saved prefill time by route."""

from __future__ import annotations

from typing import Final

from warmroute.config.priority import PRIORITY_NAMES
from warmroute.telemetry import metric_definitions as metrics
from warmroute.telemetry.counters import Counters
from warmroute.telemetry.exposition import MergedBuckets, MetricLines, Page, format_labels, label_value
from warmroute.telemetry.metric_definitions import Metric
from warmroute.telemetry.traffic import MAX_TENANTS, OTHER, TIME_BOUNDS_MS, RouteTraffic, Traffic

WAIT_BUCKETS: Final = MergedBuckets(
    TIME_BOUNDS_MS, (1, 10, 25, 50, 100, 250, 500, 1000, 2500, 5000, 10_000, 25_000, 50_000, 100_000)
)
_TOKEN_TIMES: Final = MergedBuckets(TIME_BOUNDS_MS, (2.5, 5, 10, 16, 25, 40, 63, 100, 160, 250, 500, 1000, 2500))
_DURATIONS: Final = MergedBuckets(
    TIME_BOUNDS_MS, (50, 100, 250, 500, 1000, 2500, 5000, 10_000, 25_000, 50_000, 100_000, 250_000, 500_000, 1_000_000)
)
_HISTOGRAMS: Final = (
    (metrics.TTFT, "ttft", WAIT_BUCKETS),
    (metrics.INTER_TOKEN, "inter_token", _TOKEN_TIMES),
    (metrics.QUEUE_WAIT, "queue_wait", WAIT_BUCKETS),
    (metrics.DURATION, "duration", _DURATIONS),
)
_TOKENS: Final = ("prompt_tokens", "cached_tokens", "predicted_tokens", "reported_tokens", "output_tokens")
_BY_ROUTE: Final[tuple[Metric, ...]] = (
    metrics.PROMPT_TOKENS, metrics.CACHED_TOKENS, metrics.PREDICTED_TOKENS, metrics.REPORTED_TOKENS,
    metrics.OUTPUT_TOKENS,
)  # fmt: skip
_BY_TENANT: Final[tuple[Metric, ...]] = (
    metrics.TENANT_PROMPT_TOKENS, metrics.TENANT_CACHED_TOKENS, metrics.TENANT_PREDICTED_TOKENS,
    metrics.TENANT_REPORTED_TOKENS, metrics.TENANT_OUTPUT_TOKENS,
)  # fmt: skip
_BY_NODE: Final[tuple[Metric, ...]] = (
    metrics.NODE_PROMPT_TOKENS, metrics.NODE_CACHED_TOKENS, metrics.NODE_PREDICTED_TOKENS,
    metrics.NODE_REPORTED_TOKENS, metrics.NODE_OUTPUT_TOKENS,
)  # fmt: skip


class TrafficMetrics:
    """Every method may run in a thread while requests are counted. So it reads copies of dicts: `copy()` is one step
    for other threads. `list(d.items())` is not: it creates tuples, and the garbage collector may run in between."""

    def __init__(self, traffic: Traffic, counters: Counters) -> None:
        self._traffic = traffic
        self._counters = counters

    def __call__(self, page: Page) -> None:
        traffic = self._traffic
        route_lines = _lines(page, _BY_ROUTE)
        for (model, route), of_route in traffic.by_route.copy().items():
            labels = f'model="{label_value(model)}",route="{label_value(route)}"'
            for name, lines in route_lines:
                lines.add(getattr(of_route, name), labels)
            self._add_route(page, of_route, labels)
        tenant_lines = [("requests", page[metrics.TENANT_REQUESTS]), *_lines(page, _BY_TENANT)]
        for (model, tenant), of_tenant in traffic.by_tenant.copy().items():
            labels = f'model="{label_value(model)}",tenant="{label_value(tenant)}"'
            for name, lines in tenant_lines:
                lines.add(getattr(of_tenant, name), labels)
        node_lines = _lines(page, _BY_NODE)
        for (model, node), of_node in traffic.by_node.copy().items():
            labels = f'model="{label_value(model)}",node="{label_value(node)}"'
            for name, lines in node_lines:
                lines.add(getattr(of_node, name), labels)
        self._add_rejected(page[metrics.TENANT_REJECTED])

    @staticmethod
    def _add_route(page: Page, of_route: RouteTraffic, labels: str) -> None:
        page[metrics.ROUND_ROBIN_TOKENS].add(of_route.round_robin_tokens, labels)
        page[metrics.SHORT_REPORTS].add(of_route.short_reports, labels)
        page[metrics.SAVED_PREFILL].add(of_route.saved_ms / 1000.0, labels)
        page[metrics.SAVED_GPU].add(of_route.saved_gpu_ms / 1000.0, labels)
        page[metrics.ROUND_ROBIN_SAVED_PREFILL].add(of_route.round_robin_saved_ms / 1000.0, labels)
        page[metrics.ROUND_ROBIN_SAVED_GPU].add(of_route.round_robin_saved_gpu_ms / 1000.0, labels)
        for metric, name, buckets in _HISTOGRAMS:
            histogram = getattr(of_route, name)
            page[metric].add_histogram(
                buckets.labels, buckets.merge(histogram.counts), histogram.sum_ms / 1000.0, labels
            )

    def _add_rejected(self, lines: MetricLines) -> None:
        other: dict[tuple[int, str], int] = {}
        rejected = sorted(self._counters.rejected_by_tenant.copy().items())
        for number, ((tenant, priority, reason), count) in enumerate(rejected):
            if number < MAX_TENANTS:
                lines.add(count, format_labels(tenant=tenant, priority=PRIORITY_NAMES[priority], reason=reason))
            else:
                other[priority, reason] = other.get((priority, reason), 0) + count
        for (priority, reason), count in other.items():
            lines.add(count, format_labels(tenant=OTHER[0], priority=PRIORITY_NAMES[priority], reason=reason))


def _lines(page: Page, of_metrics: tuple[Metric, ...]) -> list[tuple[str, MetricLines]]:
    return [(name, page[metric]) for name, metric in zip(_TOKENS, of_metrics, strict=True)]
