"""The metrics page: each metric's value, read from the part of the router that knows it."""

from __future__ import annotations

import os
import resource
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, Protocol

from warmroute import __version__, build
from warmroute._kernel import TIME_BOUNDS_MS, RouteTraffic
from warmroute.app.alert_webhook import OUTCOMES, AlertWebhook
from warmroute.app.alerts import ActiveAlerts
from warmroute.app.hit_rate import HitRateAlerts
from warmroute.app.metrics import Metric, counter, declared, extension, gauge, histogram, process
from warmroute.app.metrics.exposition import (
    MergedBuckets,
    MetricLines,
    Page,
    Pauses,
    format_labels,
    label_value,
)
from warmroute.app.metrics.fleet_metrics import (
    ScalingStats,
    add_caches,
    add_index,
    add_islands,
    add_nodes,
    add_scaling,
)
from warmroute.app.process import LoopDelay
from warmroute.app.prompt_doctor import PromptComparison
from warmroute.config.routing import PRIORITY_NAMES
from warmroute.core.cache_view import CacheView
from warmroute.core.calls import OUTCOMES as SPLIT_OUTCOMES
from warmroute.core.fleet import Fleet
from warmroute.core.health import HealthState
from warmroute.core.queue import AdmissionQueue
from warmroute.core.traffic import MAX_TENANTS, OTHER, TRACE_DROPS, Counters, Traffic
from warmroute.edge.client_connection import Listener
from warmroute.edge.client_errors import COMMON
from warmroute.edge.trace_context import TraceSampling

# The metrics page. The router reads all values when Prometheus scrapes it, so counting costs requests nothing.


BUILD_INFO: Final = gauge("build_info", "Always 1. The labels are the running version and build.", "version", "build")


class MetricsPage:
    def __init__(
        self,
        fleet: Fleet,
        cache_view: CacheView,
        counters: Counters,
        connections: Callable[[], tuple[int, int]],
        waiting: Callable[[], tuple[int, int]],
        now: Callable[[], float] = time.monotonic,
        scaling: Callable[[], ScalingStats | None] = lambda: None,
        more: Sequence[Callable[[Page], None]] = (),
    ) -> None:
        """`connections`: open ones, and all accepted. `waiting`: waiting requests, and all that ever waited.
        `scaling`: None if the router does not scale the fleet. `more`: functions that add samples to the page."""
        self._fleet = fleet
        self._cache_view = cache_view
        self._counters = counters
        self._connections = connections
        self._waiting = waiting
        self._now = now
        self._scaling = scaling
        self._more = more

    def render(self, openmetrics: bool = False) -> list[bytes]:
        """Return the page in pieces, one for each metric. This takes milliseconds for a large fleet, with pauses: call
        it in a thread."""
        pause = Pauses()
        page = {metric: MetricLines(metric, pause) for metric in METRICS}
        page[BUILD_INFO].add(1, format_labels(version=__version__, build=build()))
        _add_requests(page, self._counters, self._connections, self._waiting)
        add_nodes(page, self._fleet)
        add_index(page, self._cache_view)
        add_caches(page, self._cache_view, self._now())
        add_islands(page, self._fleet.islands)
        if (stats := self._scaling()) is not None:
            add_scaling(page, stats)
        for add in self._more:
            add(page)
        return [*[lines.render(openmetrics) for lines in page.values()], b"# EOF\n" if openmetrics else b""]


RESPONSES: Final = counter("responses", "Complete responses of nodes.", "status")
ERRORS: Final = counter("errors", "Error responses of the router itself.", "code", "status")
REQUESTS_REJECTED: Final = counter("requests_rejected", "Requests that admission rejected.", "priority", "reason")
REQUESTS_WAITING: Final = gauge("requests_waiting", "Requests that wait in the router for a node.")
REQUESTS_QUEUED: Final = counter("requests_queued", "Requests that had to wait in the router.")
ROUTE_REQUESTS: Final = counter("route_requests", "Requests by route.", "route")
RESPONSES_INTERRUPTED: Final = counter("responses_interrupted", "Responses that failed after their first byte.")
CLIENT_DISCONNECTS: Final = counter(
    "client_disconnects", "Clients that disconnected before they had their whole response."
)
RETRIES: Final = counter("retries", "Attempts on another node after a failed one.")
HEDGES: Final = counter("hedges", "Requests sent to a second node because their first token was overdue.")
HEDGES_WON: Final = counter("hedges_won", "Hedged requests that the second node answered.")
SPLIT_REQUESTS: Final = counter(
    "split_requests",
    "Requests that one node prefilled for another one: transferred, or why the other node prefilled itself "
    "(prefill_failed, prefill_slow, not_supported, transfer_failed), or decode_failed.",
    "outcome",
)
CLIENT_CONNECTIONS: Final = gauge("client_connections", "Open client connections.")
CLIENT_CONNECTIONS_ACCEPTED: Final = counter("client_connections_accepted", "Accepted client connections.")
NODE_CONNECTIONS_STALE: Final = counter(
    "node_connections_stale", "Requests sent again because the node had closed the kept-alive connection."
)
PROMPTS: Final = counter("prompts", "Prompts that a policy needed, by how the router read them.", "model", "reading")
PROMPTS_IN_THREADS: Final = counter("prompts_tokenized_in_thread", "Prompts that a thread tokenized.")
PROMPTS_NOT_TOKENIZED: Final = counter(
    "prompts_not_tokenized", "Prompts routed by load because too many prompts waited for a thread."
)
JOURNAL_WRITTEN: Final = counter("journal_decisions_written", "Decisions written to the journal file.")
JOURNAL_DROPPED: Final = counter(
    "journal_decisions_dropped", "Decisions that could not be written to the journal file."
)
CAPTURE_WRITTEN: Final = counter("capture_requests_written", "Requests written to captures of traffic.")
CAPTURE_DROPPED: Final = counter("capture_requests_dropped", "Requests that could not be written to a capture.")
TRACES_EXPORTED: Final = counter("traces_exported", "Traces of requests that the collector received.")
TRACES_DROPPED: Final = counter("traces_dropped", "Recorded traces that the collector did not receive.", "reason")


def _add_requests(
    page: Page, counters: Counters, connections: Callable[[], tuple[int, int]], waiting: Callable[[], tuple[int, int]]
) -> None:
    for status, count in sorted(counters.responses.copy().items()):
        page[RESPONSES].add(count, format_labels(status=str(status)))
    for (status, code), count in sorted({**dict.fromkeys(COMMON, 0), **counters.errors.copy()}.items()):
        page[ERRORS].add(count, format_labels(code=code, status=str(status)))
    for (reason, priority), count in sorted(counters.rejected.copy().items()):
        labels = format_labels(priority=PRIORITY_NAMES[priority], reason=reason)
        page[REQUESTS_REJECTED].add(count, labels)
    for route, count in sorted(counters.route_requests.copy().items()):
        page[ROUTE_REQUESTS].add(count, format_labels(route=route))
    for (model, reading), count in sorted(counters.prompts.copy().items()):
        page[PROMPTS].add(count, format_labels(model=model, reading=reading))
    waits, queued = waiting()
    opened, accepted = connections()
    for metric, value in (
        (REQUESTS_WAITING, waits),
        (REQUESTS_QUEUED, queued),
        (RESPONSES_INTERRUPTED, counters.interrupted),
        (CLIENT_DISCONNECTS, counters.disconnects),
        (RETRIES, counters.retries),
        (HEDGES, counters.hedges),
        (HEDGES_WON, counters.hedges_won),
        (CLIENT_CONNECTIONS, opened),
        (CLIENT_CONNECTIONS_ACCEPTED, accepted),
        (NODE_CONNECTIONS_STALE, counters.stale_connections),
        (PROMPTS_IN_THREADS, counters.prompts_in_threads),
        (PROMPTS_NOT_TOKENIZED, counters.prompts_not_tokenized),
        (JOURNAL_WRITTEN, counters.journal_written),
        (JOURNAL_DROPPED, counters.journal_dropped),
        (CAPTURE_WRITTEN, counters.capture_written),
        (CAPTURE_DROPPED, counters.capture_dropped),
        (TRACES_EXPORTED, counters.traces_exported),
    ):
        page[metric].add(value)
    for outcome in SPLIT_OUTCOMES:
        page[SPLIT_REQUESTS].add(counters.split_requests[outcome], format_labels(outcome=outcome))
    for reason in TRACE_DROPS:
        page[TRACES_DROPPED].add(counters.traces_dropped[reason], format_labels(reason=reason))


# Adds the traffic to the metrics page: tokens by route, tenant and node, times and saved prefill time by route.

PROMPT_TOKENS: Final = counter("prompt_tokens", "Prompt tokens of complete responses.", "model", "route")
CACHED_TOKENS: Final = counter(
    "cached_tokens",
    "Prompt tokens that were cached: as nodes reported them, or as predicted where a node reports none.",
    "model",
    "route",
)
PREDICTED_TOKENS: Final = counter(
    "predicted_cached_tokens", "Cached prompt tokens as the router predicted them.", "model", "route"
)
REPORTED_TOKENS: Final = counter(
    "reported_cached_tokens", "Cached prompt tokens as nodes reported them.", "model", "route"
)
OUTPUT_TOKENS: Final = counter("output_tokens", "Output tokens, as nodes reported them.", "model", "route")
ROUND_ROBIN_TOKENS: Final = counter(
    "estimated_round_robin_cached_tokens",
    "An estimate of the prompt tokens that would have been cached under round robin: the mean over all candidates. "
    "Each counts at most the prompt tokens that the node reported.",
    "model",
    "route",
)
SHORT_REPORTS: Final = counter(
    "short_prompt_reports",
    "Responses whose nodes reported, for the whole prompt, less than 80 % of the tokens that the router expected to be "
    "cached. Estimates count no more than what the nodes reported.",
    "model",
    "route",
)
SAVED_PREFILL: Final = counter(
    "estimated_saved_prefill_seconds",
    "An estimate of the prefill time that cached tokens saved, compared with a fleet whose caches are cold.",
    "model",
    "route",
)
SAVED_GPU: Final = counter(
    "estimated_saved_gpu_seconds", "The same multiplied by the number of GPUs of the node.", "model", "route"
)
ROUND_ROBIN_SAVED_PREFILL: Final = counter(
    "estimated_round_robin_saved_prefill_seconds",
    "An estimate of the prefill time that round robin would have saved, compared with a fleet whose caches are cold.",
    "model",
    "route",
)
ROUND_ROBIN_SAVED_GPU: Final = counter(
    "estimated_round_robin_saved_gpu_seconds",
    "The same multiplied by the number of GPUs of the node.",
    "model",
    "route",
)
TTFT: Final = histogram(
    "time_to_first_token_seconds", "Time from arrival to first token of streamed responses.", "model", "route"
)
INTER_TOKEN: Final = histogram(
    "inter_token_latency_seconds",
    "Mean time between two output tokens of a streamed response that reports its number of tokens.",
    "model",
    "route",
)
QUEUE_WAIT: Final = histogram(
    "queue_wait_seconds", "Time in the router's queue, of requests that got a complete response.", "model", "route"
)
DURATION: Final = histogram(
    "request_duration_seconds", "Time from arrival to the end of a complete response.", "model", "route"
)
TENANT_REQUESTS: Final = counter("tenant_requests", "Complete responses by tenant.", "model", "tenant")
TENANT_REJECTED: Final = counter(
    "tenant_requests_rejected", "Requests of the tenant that admission rejected.", "tenant", "priority", "reason"
)
TENANT_PROMPT_TOKENS: Final = counter("tenant_prompt_tokens", "Prompt tokens by tenant.", "model", "tenant")
TENANT_CACHED_TOKENS: Final = counter("tenant_cached_tokens", "Cached prompt tokens by tenant.", "model", "tenant")
TENANT_PREDICTED_TOKENS: Final = counter(
    "tenant_predicted_cached_tokens", "Cached prompt tokens by tenant, as predicted.", "model", "tenant"
)
TENANT_REPORTED_TOKENS: Final = counter(
    "tenant_reported_cached_tokens", "Cached prompt tokens by tenant, as nodes reported them.", "model", "tenant"
)
TENANT_OUTPUT_TOKENS: Final = counter("tenant_output_tokens", "Output tokens by tenant.", "model", "tenant")
NODE_PROMPT_TOKENS: Final = counter("node_prompt_tokens", "Prompt tokens by node.", "model", "node")
NODE_CACHED_TOKENS: Final = counter("node_cached_tokens", "Cached prompt tokens by node.", "model", "node")
NODE_PREDICTED_TOKENS: Final = counter(
    "node_predicted_cached_tokens", "Cached prompt tokens by node, as predicted.", "model", "node"
)
NODE_REPORTED_TOKENS: Final = counter(
    "node_reported_cached_tokens", "Cached prompt tokens by node, as it reported them.", "model", "node"
)
NODE_OUTPUT_TOKENS: Final = counter("node_output_tokens", "Output tokens by node.", "model", "node")

WAIT_BUCKETS: Final = MergedBuckets(
    TIME_BOUNDS_MS, (1, 10, 25, 50, 100, 250, 500, 1000, 2500, 5000, 10_000, 25_000, 50_000, 100_000)
)
_TOKEN_TIMES: Final = MergedBuckets(TIME_BOUNDS_MS, (2.5, 5, 10, 16, 25, 40, 63, 100, 160, 250, 500, 1000, 2500))
_DURATIONS: Final = MergedBuckets(
    TIME_BOUNDS_MS, (50, 100, 250, 500, 1000, 2500, 5000, 10_000, 25_000, 50_000, 100_000, 250_000, 500_000, 1_000_000)
)
_HISTOGRAMS: Final = (
    (TTFT, "ttft", WAIT_BUCKETS),
    (INTER_TOKEN, "inter_token", _TOKEN_TIMES),
    (QUEUE_WAIT, "queue_wait", WAIT_BUCKETS),
    (DURATION, "duration", _DURATIONS),
)
_TOKENS: Final = ("prompt_tokens", "cached_tokens", "predicted_tokens", "reported_tokens", "output_tokens")
_BY_ROUTE: Final[tuple[Metric, ...]] = (
    PROMPT_TOKENS, CACHED_TOKENS, PREDICTED_TOKENS, REPORTED_TOKENS,
    OUTPUT_TOKENS,
)  # fmt: skip
_BY_TENANT: Final[tuple[Metric, ...]] = (
    TENANT_PROMPT_TOKENS, TENANT_CACHED_TOKENS, TENANT_PREDICTED_TOKENS,
    TENANT_REPORTED_TOKENS, TENANT_OUTPUT_TOKENS,
)  # fmt: skip
_BY_NODE: Final[tuple[Metric, ...]] = (
    NODE_PROMPT_TOKENS, NODE_CACHED_TOKENS, NODE_PREDICTED_TOKENS,
    NODE_REPORTED_TOKENS, NODE_OUTPUT_TOKENS,
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
        tenant_lines = [("requests", page[TENANT_REQUESTS]), *_lines(page, _BY_TENANT)]
        for (model, tenant), of_tenant in traffic.by_tenant.copy().items():
            labels = f'model="{label_value(model)}",tenant="{label_value(tenant)}"'
            for name, lines in tenant_lines:
                lines.add(getattr(of_tenant, name), labels)
        node_lines = _lines(page, _BY_NODE)
        for (model, node), of_node in traffic.by_node.copy().items():
            labels = f'model="{label_value(model)}",node="{label_value(node)}"'
            for name, lines in node_lines:
                lines.add(getattr(of_node, name), labels)
        self._add_rejected(page[TENANT_REJECTED])

    @staticmethod
    def _add_route(page: Page, of_route: RouteTraffic, labels: str) -> None:
        page[ROUND_ROBIN_TOKENS].add(of_route.round_robin_tokens, labels)
        page[SHORT_REPORTS].add(of_route.short_reports, labels)
        page[SAVED_PREFILL].add(of_route.saved_ms / 1000.0, labels)
        page[SAVED_GPU].add(of_route.saved_gpu_ms / 1000.0, labels)
        page[ROUND_ROBIN_SAVED_PREFILL].add(of_route.round_robin_saved_ms / 1000.0, labels)
        page[ROUND_ROBIN_SAVED_GPU].add(of_route.round_robin_saved_gpu_ms / 1000.0, labels)
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


# Adds the state of the router itself to the metrics page: reloads, event loop, decisions by reason, current alerts.


class Reloads:
    """How reloads of the configuration and of certificates ended."""

    def __init__(self, unix_time_s: Callable[[], float] = time.time) -> None:
        self._unix_time_s = unix_time_s
        self.succeeded = self.failed = 0
        self.last_succeeded = True
        self.last_success_s = unix_time_s()

    def record(self, success: bool) -> None:
        self.last_succeeded = success
        if success:
            self.succeeded += 1
            self.last_success_s = self._unix_time_s()
        else:
            self.failed += 1


DECISIONS: Final = counter(
    "decisions", "Requests sent to a first node, by why the policy chose it.", "policy", "reason"
)
TRACES_LIMITED: Final = counter(
    "traces_limited", "Requests not traced because clients asked for more than 100 per second."
)
LOOP_DELAY: Final = histogram("event_loop_delay_seconds", "How late the event loop ran a timer, ten times a second.")
LOOP_DELAY_MAX: Final = gauge(
    "event_loop_delay_max_seconds", "Longest delay of the event loop in the last one to two minutes."
)
ALERTS: Final = gauge("alerts", "Alerts that the live page shows now, by name.", "alert", "severity")
ALERTS_SENT: Final = counter(
    "alert_webhook_changes", "Alerts that began or ended, by what became of them at `alerts.webhook_url`.", "outcome"
)
CONFIG_RELOADS: Final = counter("config_reloads", "Reloads of configuration and certificates.", "result")
CONFIG_RELOAD_OK: Final = gauge(
    "config_last_reload_successful", "1 if the last reload succeeded, or there was none; 0 if it was rejected."
)
CONFIG_RELOADED: Final = gauge(
    "config_last_reload_success_timestamp_seconds", "Unix time of the last reload that succeeded, or of the start."
)


class RouterMetrics:
    def __init__(
        self, reloads: Reloads, loop_delay: LoopDelay, alerts: ActiveAlerts, decisions: Mapping[tuple[str, str], int],
        webhook: AlertWebhook | None, traces: TraceSampling | None,
    ) -> None:  # fmt: skip
        """`decisions`: by policy and reason. `traces`: None if tracing is off."""
        self._reloads = reloads
        self._loop_delay = loop_delay
        self._alerts = alerts
        self._decisions = decisions
        self._webhook = webhook
        self._traces = traces

    def __call__(self, page: Page) -> None:
        page[TRACES_LIMITED].add(self._traces.limited if self._traces is not None else 0)
        reloads, delay = self._reloads, self._loop_delay
        page[CONFIG_RELOADS].add(reloads.succeeded, 'result="success"')
        page[CONFIG_RELOADS].add(reloads.failed, 'result="failure"')
        page[CONFIG_RELOAD_OK].add(reloads.last_succeeded)
        page[CONFIG_RELOADED].add(reloads.last_success_s)
        page[LOOP_DELAY].add_histogram(
            WAIT_BUCKETS.labels, WAIT_BUCKETS.merge(delay.histogram.counts), delay.histogram.sum_ms / 1000.0
        )
        page[LOOP_DELAY_MAX].add(delay.max_s)
        for (policy, reason), count in sorted(dict(self._decisions).items()):
            page[DECISIONS].add(count, format_labels(policy=policy, reason=reason))
        alerts = Counter((alert.name, alert.severity) for alert in self._alerts.current)
        for (name, severity), count in sorted(alerts.items()):
            page[ALERTS].add(count, format_labels(alert=name, severity=severity))
        if self._webhook is not None:
            for outcome in OUTCOMES:
                page[ALERTS_SENT].add(self._webhook.counts[outcome], format_labels(outcome=outcome))


REQUEST_BODIES: Final = gauge("request_bodies_bytes", "Memory for request bodies; `limits.buffered_bytes` limits it.")
CLIENT_UNREAD: Final = gauge(
    "client_unread_bytes", "Memory for what clients have not read of their responses, at most 1 GiB."
)
CLIENTS_TOO_SLOW: Final = counter(
    "clients_too_slow", "Clients that the router disconnected because clients had left 1 GiB unread."
)


class ListenerMetrics:
    def __init__(self, listener: Listener) -> None:
        self._listener = listener

    def __call__(self, page: Page) -> None:
        listener = self._listener
        page[REQUEST_BODIES].add(listener.bodies.total_bytes)
        page[CLIENT_UNREAD].add(listener.unread.bytes)
        page[CLIENTS_TOO_SLOW].add(listener.too_slow)


class EdgeFigures(Protocol):
    """Of all edges in other processes."""

    @property
    def connected(self) -> int: ...
    def gauge(self, name: str) -> int: ...
    def total(self, name: str) -> int: ...


EDGES: Final = gauge("edges", "Edge processes whose link to the brain is up (`serve --edges`).")
EDGES_ENDED: Final = counter("edges_ended", "Edge processes that ended while clients may have been connected.")
EDGES_ALONE: Final = counter("edges_alone", "How often an edge had no brain for a second, and chose nodes by itself.")


class EdgeMetrics:
    def __init__(self, edges: EdgeFigures) -> None:
        self._edges = edges

    def __call__(self, page: Page) -> None:
        edges = self._edges
        page[REQUEST_BODIES].add(edges.gauge("body_bytes"))
        page[CLIENT_UNREAD].add(edges.gauge("unread_bytes"))
        page[CLIENTS_TOO_SLOW].add(edges.total("too_slow"))
        page[EDGES].add(edges.connected)
        page[EDGES_ENDED].add(edges.total("ended"))
        page[EDGES_ALONE].add(edges.total("times_alone"))


# Adds to the metrics page how requests left the admission queue.


QUEUE_ADMISSIONS: Final = counter(
    "queue_admissions", "Requests that left the router's queue for a node, by what gave them their turn.", "order"
)
QUEUE_GUARANTEE_EXCEEDED: Final = counter(
    "queue_guarantee_exceeded", "Requests that waited in the router's queue for longer than guaranteed."
)


class QueueMetrics:
    def __init__(self, queue: AdmissionQueue) -> None:
        self._queue = queue

    def __call__(self, page: Page) -> None:
        queue = self._queue
        page[QUEUE_ADMISSIONS].add(queue.admitted_by_work, 'order="work"')
        page[QUEUE_ADMISSIONS].add(queue.admitted_by_guarantee, 'order="guarantee"')
        page[QUEUE_GUARANTEE_EXCEEDED].add(queue.guarantee.exceeded)


# Adds the sources of nodes to the metrics page.


class DiscoverySource(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def up(self) -> bool: ...
    @property
    def targets(self) -> int: ...
    @property
    def failures(self) -> int: ...
    @property
    def changes(self) -> dict[str, int]: ...


DISCOVERY_UP: Final = gauge("discovery_up", "1 if the source could be read the last time.", "source")
DISCOVERY_TARGETS: Final = gauge("discovery_targets", "Engines that the source lists.", "source")
DISCOVERY_FAILURES: Final = counter("discovery_failures", "Failed attempts to read the source.", "source")
DISCOVERY_CHANGES: Final = counter(
    "discovery_changes", "Nodes that discovery added, drained and removed.", "source", "change"
)


class DiscoveryMetrics:
    def __init__(self, sources: Callable[[], Sequence[DiscoverySource]]) -> None:
        self._sources = sources

    def __call__(self, page: Page) -> None:
        for source in self._sources():
            name = format_labels(source=source.name)
            page[DISCOVERY_UP].add(source.up, name)
            page[DISCOVERY_TARGETS].add(source.targets, name)
            page[DISCOVERY_FAILURES].add(source.failures, name)
            for change, count in source.changes.copy().items():
                page[DISCOVERY_CHANGES].add(count, format_labels(change=change, source=source.name))


# Adds the hit rates, their baselines and drops, and what the prompt doctor found, to the metrics page.


HIT_RATIO: Final = gauge(
    "route_hit_ratio", "Fraction of the prompt tokens that was cached, in the last half minute.", "model", "route"
)
HIT_RATIO_BASELINE: Final = gauge(
    "route_hit_ratio_baseline", "The usual hit ratio of the route, decayed over about an hour.", "model", "route"
)
HIT_RATIO_DROPPED: Final = gauge(
    "route_hit_ratio_dropped",
    "1 while the hit ratio is far below its baseline, for the likely cause.",
    "model",
    "route",
    "cause",
)
HIT_RATIO_DROPS: Final = counter(
    "route_hit_ratio_drops", "Drops of the hit ratio below its baseline, by likely cause.", "model", "route", "cause"
)
HIT_RATIO_LOST: Final = counter(
    "route_hit_ratio_lost_gpu_seconds",
    "Prefill time during drops beyond that at the baseline's hit ratio.",
    "model",
    "route",
)
PROMPTS_LOST: Final = gauge(
    "prompt_doctor_lost_gpus",
    "GPU seconds per second spent because prompts differ before common text.",
    "model",
    "route",
    "kind",
)


class HitRateMetrics:
    def __init__(self, alerts: HitRateAlerts, doctor: PromptComparison) -> None:
        self._alerts = alerts
        self._doctor = doctor

    def __call__(self, page: Page) -> None:
        alerts = self._alerts
        for key, rate in sorted(alerts.rates.copy().items()):
            labels = format_labels(model=key[0], route=key[1])
            if rate.window is not None:
                page[HIT_RATIO].add(rate.window.hit_ratio, labels)
            if rate.baseline.is_mature:
                page[HIT_RATIO_BASELINE].add(rate.baseline.hit_ratio, labels)
            page[HIT_RATIO_LOST].add(alerts.lost_gpu_s(key), labels)
        for (model, route), cause in sorted(alerts.causes.copy().items()):
            page[HIT_RATIO_DROPPED].add(1, format_labels(model=model, route=route, cause=cause.kind))
        for (model, route, kind), count in sorted(alerts.drops.copy().items()):
            page[HIT_RATIO_DROPS].add(count, format_labels(model=model, route=route, cause=kind))
        lost: dict[tuple[str, str, str], float] = {}
        for finding in self._doctor.findings:
            of_kind = (finding.model, finding.route, finding.kind)
            lost[of_kind] = lost.get(of_kind, 0.0) + finding.gpus
        for (model, route, difference), gpus in sorted(lost.items()):
            page[PROMPTS_LOST].add(gpus, format_labels(model=model, route=route, kind=difference))


# Adds the picker's figures to the metrics page under the names of the Gateway API Inference Extension.
#
# Dashboards and autoscalers of the extension read these. They are computed when the page is rendered.


POOL_KV_USAGE: Final = extension(
    "pool_average_kv_cache_utilization",
    "Picker only: mean fraction of KV blocks in use, of nodes that are up.",
    "name",
)
POOL_QUEUE: Final = extension(
    "pool_average_queue_size", "Picker only: mean requests in the engines' own queues, of nodes that are up.", "name"
)
POOL_RUNNING: Final = extension(
    "pool_average_running_requests", "Picker only: mean requests that the engines run, of nodes that are up.", "name"
)
POOL_READY: Final = extension("pool_ready_pods", "Picker only: nodes that are up and not draining.", "name")
OBJECTIVE_RUNNING: Final = extension(
    "objective_running_requests", "Picker only: requests in flight on the nodes that serve the model.", "model_name"
)
EXTENSION_QUEUE: Final = extension(
    "extension_flow_control_queue_size", "Picker only: requests that wait in the picker for a node.", "inference_pool"
)


class InferencePoolMetrics:
    def __init__(self, fleet: Fleet, waiting: Callable[[], int], pool: Callable[[], str | None]) -> None:
        """`pool`: the name of the InferencePool; None if this is not a picker."""
        self._fleet = fleet
        self._waiting = waiting
        self._pool = pool

    def __call__(self, page: Page) -> None:
        pool = self._pool()
        if pool is None:
            return
        up = [node for node in self._fleet if node.health.state is HealthState.UP and not node.draining]
        count = max(1, len(up))
        name = format_labels(name=pool)
        page[POOL_KV_USAGE].add(sum(node.kv_usage or 0.0 for node in up) / count, name)
        page[POOL_QUEUE].add(sum(node.waiting for node in up) / count, name)
        page[POOL_RUNNING].add(sum(node.running for node in up) / count, name)
        page[POOL_READY].add(len(up), name)
        page[EXTENSION_QUEUE].add(self._waiting(), format_labels(inference_pool=pool))
        for model in self._fleet.models:
            group = self._fleet.group(model)
            if group is not None:
                page[OBJECTIVE_RUNNING].add(group.inflight, format_labels(model_name=model))


# Adds the router's own process to the metrics page: CPU time, memory, open files and start time.

_PROC: Final = Path("/proc")
_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")


PROCESS_CPU: Final = process("counter", "cpu_seconds_total", "User and system CPU time of the router's process.")
PROCESS_RSS: Final = process("gauge", "resident_memory_bytes", "Resident memory of the router's process.")
PROCESS_VIRTUAL: Final = process("gauge", "virtual_memory_bytes", "Virtual memory of the router's process.")
PROCESS_FDS: Final = process("gauge", "open_fds", "Open file descriptors.")
PROCESS_MAX_FDS: Final = process("gauge", "max_fds", "Maximum number of open file descriptors.")
PROCESS_START: Final = process("gauge", "start_time_seconds", "Unix time of the process's start.")


def add_process_metrics(page: Page) -> None:
    """Leaves out what /proc does not tell, for example in a sandbox without it."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    page[PROCESS_CPU].add(usage.ru_utime + usage.ru_stime)
    page[PROCESS_MAX_FDS].add(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    try:
        # The second field, the command in parentheses, may contain anything.
        fields = (_PROC / "self" / "stat").read_text().rpartition(")")[2].split()
        page[PROCESS_VIRTUAL].add(int(fields[20]))
        page[PROCESS_RSS].add(int(fields[21]) * _PAGE_BYTES)
        page[PROCESS_START].add(_boot_time_s() + int(fields[19]) / _TICKS_PER_S)
        page[PROCESS_FDS].add(len(os.listdir(_PROC / "self" / "fd")))
    except (OSError, ValueError, IndexError):
        pass


def _boot_time_s() -> float:
    for line in (_PROC / "stat").read_text().splitlines():
        if line.startswith("btime "):
            return float(line.split()[1])
    raise ValueError("/proc/stat has no btime")


# Of replicas. app/replicas reads these.

CLUSTER_PEERS: Final = gauge("cluster_peers", "Other router processes that this one hears.")
CLUSTER_MESSAGES: Final = counter("cluster_messages", "Messages between router processes.", "direction")
CLUSTER_LIMIT_FRACTION: Final = gauge(
    "cluster_limit_fraction",
    "Fraction of the rate limits that this router and those it hears may use: below 1 while others cannot be heard.",
)
CLUSTER_CONNECTED: Final = gauge("cluster_connected", "1 if messages of other replicas arrive through Redis, else 0.")
CLUSTER_WRITABLE: Final = gauge("cluster_writable", "1 if Redis takes writes, else 0: no replica scales.")
CLUSTER_DELAY: Final = gauge("cluster_delay_seconds", "How long the last message took through Redis.")

METRICS: Final = declared()
"""All of them: this module imports every other one that declares some."""
