"""The metrics page: each metric's value, read from the part of the router that knows it."""

from __future__ import annotations

import os
import resource
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

from warmroute import __version__, build
from warmroute._kernel import TIME_BOUNDS_MS, TTFT_BOUNDS_MS, RouteTraffic
from warmroute.app import metrics
from warmroute.app.alert_webhook import OUTCOMES, AlertWebhook
from warmroute.app.alerts import Alerts
from warmroute.app.hit_rate import HitRateAlerts
from warmroute.app.metrics import METRICS, Metric
from warmroute.app.metrics.exposition import (
    MergedBuckets,
    MetricLines,
    Page,
    Pauses,
    bucket_bounds,
    format_labels,
    label_value,
)
from warmroute.app.process import LoopDelay
from warmroute.app.prompt_doctor import PromptDoctor
from warmroute.config.routing import PRIORITY_NAMES
from warmroute.core.cache_view import EVENT_AGES_S, CacheView
from warmroute.core.calls import OUTCOMES as SPLIT_OUTCOMES
from warmroute.core.fleet import Fleet
from warmroute.core.health import HealthState
from warmroute.core.messages import Outcome
from warmroute.core.node import EngineRates
from warmroute.core.queue import AdmissionQueue
from warmroute.core.traffic import MAX_TENANTS, OTHER, TRACE_DROPS, Counters, Traffic
from warmroute.edge.client_connection import Listener
from warmroute.edge.client_errors import COMMON
from warmroute.edge.trace_context import TraceSampling

# The metrics page. The router reads all values when Prometheus scrapes it, so counting costs requests nothing.


class PlannerStats(Protocol):
    """Of scaling by replay."""

    searches: int
    failures: int
    replays: int
    cpu_s: float
    predicted_ms: float
    observed_ms: float
    trusted: bool


class PoolStats(Protocol):
    @property
    def desired_nodes(self) -> int: ...
    @property
    def utilisation(self) -> float: ...


class ScalingStats(Protocol):
    @property
    def pools(self) -> Mapping[Any, PoolStats]: ...
    @property
    def desired_nodes(self) -> int: ...
    @property
    def states(self) -> dict[str, int]: ...
    @property
    def usd_per_hour(self) -> float: ...
    @property
    def utilisation(self) -> float: ...
    @property
    def added(self) -> int: ...
    @property
    def removed(self) -> int: ...
    @property
    def refused(self) -> int: ...
    @property
    def lost(self) -> int: ...
    @property
    def leading(self) -> bool: ...
    @property
    def replay(self) -> PlannerStats | None: ...


_HEALTH_STATES: Final = [(state, f',state="{state.value}"') for state in HealthState]
_OUTCOMES: Final = [(outcome, f',outcome="{outcome.name.lower()}"') for outcome in Outcome]
_TTFT_BOUNDS: Final = bucket_bounds(bound / 1000 for bound in TTFT_BOUNDS_MS)


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
        page[metrics.BUILD_INFO].add(1, format_labels(version=__version__, build=build()))
        self._add_requests(page)
        self._add_nodes(page)
        self._add_index(page)
        self._add_caches(page)
        self._add_islands(page)
        self._add_scaling(page)
        for add in self._more:
            add(page)
        return [*[lines.render(openmetrics) for lines in page.values()], b"# EOF\n" if openmetrics else b""]

    def _add_requests(self, page: Page) -> None:
        counters = self._counters
        for status, count in sorted(counters.responses.copy().items()):
            page[metrics.RESPONSES].add(count, format_labels(status=str(status)))
        for (status, code), count in sorted({**dict.fromkeys(COMMON, 0), **counters.errors.copy()}.items()):
            page[metrics.ERRORS].add(count, format_labels(code=code, status=str(status)))
        for (reason, priority), count in sorted(counters.rejected.copy().items()):
            labels = format_labels(priority=PRIORITY_NAMES[priority], reason=reason)
            page[metrics.REQUESTS_REJECTED].add(count, labels)
        for route, count in sorted(counters.route_requests.copy().items()):
            page[metrics.ROUTE_REQUESTS].add(count, format_labels(route=route))
        for (model, reading), count in sorted(counters.prompts.copy().items()):
            page[metrics.PROMPTS].add(count, format_labels(model=model, reading=reading))
        waiting, queued = self._waiting()
        connections, accepted = self._connections()
        for metric, value in (
            (metrics.REQUESTS_WAITING, waiting),
            (metrics.REQUESTS_QUEUED, queued),
            (metrics.RESPONSES_INTERRUPTED, counters.interrupted),
            (metrics.CLIENT_DISCONNECTS, counters.disconnects),
            (metrics.RETRIES, counters.retries),
            (metrics.HEDGES, counters.hedges),
            (metrics.HEDGES_WON, counters.hedges_won),
            (metrics.CLIENT_CONNECTIONS, connections),
            (metrics.CLIENT_CONNECTIONS_ACCEPTED, accepted),
            (metrics.NODE_CONNECTIONS_STALE, counters.stale_connections),
            (metrics.PROMPTS_IN_THREADS, counters.prompts_in_threads),
            (metrics.PROMPTS_NOT_TOKENIZED, counters.prompts_not_tokenized),
            (metrics.JOURNAL_WRITTEN, counters.journal_written),
            (metrics.JOURNAL_DROPPED, counters.journal_dropped),
            (metrics.CAPTURE_WRITTEN, counters.capture_written),
            (metrics.CAPTURE_DROPPED, counters.capture_dropped),
            (metrics.TRACES_EXPORTED, counters.traces_exported),
        ):
            page[metric].add(value)
        for outcome in SPLIT_OUTCOMES:
            page[metrics.SPLIT_REQUESTS].add(counters.split_requests[outcome], format_labels(outcome=outcome))
        for reason in TRACE_DROPS:
            page[metrics.TRACES_DROPPED].add(counters.traces_dropped[reason], format_labels(reason=reason))

    def _add_nodes(self, page: Page) -> None:
        in_flight, other_requests = page[metrics.NODE_IN_FLIGHT], page[metrics.NODE_OTHER_REQUESTS]
        waiting, kv_usage = page[metrics.NODE_WAITING], page[metrics.NODE_KV_USAGE]
        latency, prefill, decode = page[metrics.NODE_LATENCY], page[metrics.NODE_PREFILL], page[metrics.NODE_DECODE]
        adapters, adapter_loads = page[metrics.NODE_LORA_ADAPTERS], page[metrics.NODE_LORA_LOADS]
        states, requests = page[metrics.NODE_STATE], page[metrics.NODE_REQUESTS]
        ttft, implausible = page[metrics.NODE_TTFT], page[metrics.NODE_PREFILL_IMPLAUSIBLE]
        for node in list(self._fleet):
            name = f'node="{label_value(node.name)}"'
            in_flight.add(node.own_inflight, name)
            if node.max_inflight:
                page[metrics.NODE_MAX_IN_FLIGHT].add(node.max_inflight, name)
            if node.concurrency.most:
                page[metrics.NODE_CONCURRENCY_LIMIT].add(node.concurrency.most, name)
            other_requests.add(node.other_load, name)
            waiting.add(node.waiting, name)
            kv_usage.add(node.kv_usage, name)
            latency.add(node.latency_ms / 1000, name)
            prefill.add(node.speed.ms_per_token / 1000, name)
            implausible.add(bool(node.speed.implausible), name)
            for group in node.groups[:1]:
                decode.add(node.speed.factor * group.decode_speed.token_ms(node.context_tokens) / 1000, name)
            self._add_rates(page, node.rates, name)
            adapters.add(len(node.loaded_adapters), name)
            adapter_loads.add(node.loaded_adapters.load_count, name)
            draining, current = node.draining, node.health.state
            for state, label in _HEALTH_STATES:
                states.add(state is current and not draining, name + label)
            states.add(draining, name + ',state="draining"')
            for reason, count in node.recent_requests.ejections.copy().items():
                page[metrics.NODE_EJECTIONS].add(count, f'{name},reason="{reason}"')
            for outcome, label in _OUTCOMES:
                requests.add(node.outcomes[outcome], name + label)
            ttft.add_histogram(_TTFT_BOUNDS, node.ttft_counts, node.ttft_sum_ms / 1000, name)

    @staticmethod
    def _add_rates(page: Page, rates: EngineRates, name: str) -> None:
        if (hit_share := rates.hit_share) is not None:
            page[metrics.NODE_ENGINE_HITS].add(hit_share, name)
        if (predicted := rates.predicted_share) is not None:
            page[metrics.NODE_PREDICTED_HITS].add(predicted, name)
        page[metrics.NODE_PREEMPTIONS].add(rates.preemptions_per_s, name)
        for metric, total in (
            (metrics.NODE_ENGINE_QUERIES, rates.queries_total),
            (metrics.NODE_ENGINE_HIT_TOKENS, rates.hits_total),
            (metrics.NODE_ENGINE_PREEMPTIONS, rates.preemptions_total),
        ):
            if total is not None:
                page[metric].add(total, name)
        if (queue_ms := rates.queue_time_ms) is not None:
            page[metrics.NODE_QUEUE_TIME].add(queue_ms / 1000, name)

    def _add_index(self, page: Page) -> None:
        stats = self._cache_view.index.stats()
        page[metrics.INDEX_BYTES].add(stats["bytes"])
        page[metrics.INDEX_MAX_BYTES].add(stats["budget_bytes"])
        page[metrics.INDEX_BLOCKS].add(stats["blocks"])
        page[metrics.INDEX_BLOCK_COPIES].add(stats["pairs"])
        page[metrics.INDEX_EVICTIONS].add(stats["evicted"])
        page[metrics.LOOKUP_ERRORS].add(self._cache_view.lookup_errors)
        for store in list(self._cache_view.stores.values()):
            labels = format_labels(store=store.name)
            page[metrics.STORE_BLOCKS].add(store.blocks, labels)
            page[metrics.STORE_PREDICTED].add(store.accuracy.predicted_tokens, labels)
            page[metrics.STORE_LOADED].add(store.accuracy.reported_tokens, labels)

    def _add_caches(self, page: Page) -> None:
        now_s = self._now()
        for cache in list(self._cache_view):
            node, accuracy = format_labels(node=cache.name), cache.accuracy
            page[metrics.CACHE_EVENTS_COMPLETE].add(cache.complete, node)
            page[metrics.CACHE_TOKEN_MISMATCH].add(cache.token_mismatch, node)
            page[metrics.CACHE_CONFIDENCE].add(cache.confidence(now_s, *EVENT_AGES_S), node)
            page[metrics.CACHE_AGREEMENT].add(accuracy.agreement(), node)
            page[metrics.CACHE_EVENT_LAG].add(cache.event_lag_s, node)
            page[metrics.CACHE_PREDICTED].add(accuracy.predicted_tokens, node)
            page[metrics.CACHE_REPORTED].add(accuracy.reported_tokens, node)
            page[metrics.CACHE_PREDICTIONS].add(accuracy.compared, node)
            page[metrics.CACHE_EXACT].add(accuracy.exact, node)
            page[metrics.CACHE_EVENT_GAPS].add(cache.gaps, node)

    def _add_islands(self, page: Page) -> None:
        for island in list(self._fleet.islands):
            name = format_labels(island=island.name)
            page[metrics.ISLAND_ROUND_TRIP].add(island.round_trip_ms / 1000, name)
            page[metrics.ISLAND_DISTANCE].add(island.distance_ms / 1000, name)
            page[metrics.ISLAND_QUEUE].add(island.queue_ms / 1000, name)
        conversations = self._fleet.islands.conversations
        for metric, counts in (
            (metrics.CONVERSATIONS_STARTED, conversations.started),
            (metrics.TURNS_AT_HOME, conversations.served_at_home),
            (metrics.TURNS_AWAY, conversations.served_away),
            (metrics.CONVERSATIONS_RETURNED, conversations.returned),
        ):
            for name, count in sorted(counts.copy().items()):
                page[metric].add(count, format_labels(island=name))
        for (home, to, reason), count in sorted(conversations.moved.copy().items()):
            page[metrics.CONVERSATIONS_MOVED].add(count, format_labels(island=home, reason=reason, to=to))

    def _add_scaling(self, page: Page) -> None:
        stats = self._scaling()
        if stats is None:
            return
        page[metrics.SCALING_DESIRED_NODES].add(stats.desired_nodes)
        page[metrics.SCALING_UTILISATION].add(stats.utilisation)
        for role, pool in stats.pools.items():
            page[metrics.SCALING_POOL_DESIRED_NODES].add(pool.desired_nodes, format_labels(role=role))
            page[metrics.SCALING_POOL_UTILISATION].add(pool.utilisation, format_labels(role=role))
        page[metrics.SCALING_COST].add(stats.usd_per_hour)
        page[metrics.SCALING_LEADER].add(stats.leading)
        for state, count in stats.states.items():
            page[metrics.SCALING_NODES].add(count, format_labels(state=state))
        for change, count in (
            ("added", stats.added), ("removed", stats.removed), ("refused", stats.refused), ("lost", stats.lost),
        ):  # fmt: skip
            page[metrics.SCALING_CHANGES].add(count, format_labels(change=change))
        replay = stats.replay
        if replay is None:
            return
        page[metrics.SCALING_SEARCHES].add(replay.searches - replay.failures, format_labels(result="ended"))
        page[metrics.SCALING_SEARCHES].add(replay.failures, format_labels(result="failed"))
        page[metrics.SCALING_REPLAYS].add(replay.replays)
        page[metrics.SCALING_REPLAY_CPU].add(replay.cpu_s)
        page[metrics.SCALING_REPLAY_TRUSTED].add(replay.trusted)
        for source, ms in (("predicted", replay.predicted_ms), ("observed", replay.observed_ms)):
            page[metrics.SCALING_REPLAY_TTFT].add(ms / 1000.0, format_labels(source=source))


# Adds the traffic to the metrics page: tokens by route, tenant and node, times and saved prefill time by route.

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


class RouterMetrics:
    def __init__(
        self, reloads: Reloads, loop_delay: LoopDelay, alerts: Alerts, decisions: Mapping[tuple[str, str], int],
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
        page[metrics.TRACES_LIMITED].add(self._traces.limited if self._traces is not None else 0)
        reloads, delay = self._reloads, self._loop_delay
        page[metrics.CONFIG_RELOADS].add(reloads.succeeded, 'result="success"')
        page[metrics.CONFIG_RELOADS].add(reloads.failed, 'result="failure"')
        page[metrics.CONFIG_RELOAD_OK].add(reloads.last_succeeded)
        page[metrics.CONFIG_RELOADED].add(reloads.last_success_s)
        page[metrics.LOOP_DELAY].add_histogram(
            WAIT_BUCKETS.labels, WAIT_BUCKETS.merge(delay.histogram.counts), delay.histogram.sum_ms / 1000.0
        )
        page[metrics.LOOP_DELAY_MAX].add(delay.max_s)
        for (policy, reason), count in sorted(dict(self._decisions).items()):
            page[metrics.DECISIONS].add(count, format_labels(policy=policy, reason=reason))
        alerts = Counter((alert.name, alert.severity) for alert in self._alerts.current)
        for (name, severity), count in sorted(alerts.items()):
            page[metrics.ALERTS].add(count, format_labels(alert=name, severity=severity))
        if self._webhook is not None:
            for outcome in OUTCOMES:
                page[metrics.ALERTS_SENT].add(self._webhook.counts[outcome], format_labels(outcome=outcome))


class ListenerMetrics:
    def __init__(self, listener: Listener) -> None:
        self._listener = listener

    def __call__(self, page: Page) -> None:
        listener = self._listener
        page[metrics.REQUEST_BODIES].add(listener.bodies.total_bytes)
        page[metrics.CLIENT_UNREAD].add(listener.unread.bytes)
        page[metrics.CLIENTS_TOO_SLOW].add(listener.too_slow)


class EdgeFigures(Protocol):
    """Of all edges in other processes."""

    @property
    def connected(self) -> int: ...
    def gauge(self, name: str) -> int: ...
    def total(self, name: str) -> int: ...


class EdgeMetrics:
    def __init__(self, edges: EdgeFigures) -> None:
        self._edges = edges

    def __call__(self, page: Page) -> None:
        edges = self._edges
        page[metrics.REQUEST_BODIES].add(edges.gauge("body_bytes"))
        page[metrics.CLIENT_UNREAD].add(edges.gauge("unread_bytes"))
        page[metrics.CLIENTS_TOO_SLOW].add(edges.total("too_slow"))
        page[metrics.EDGES].add(edges.connected)
        page[metrics.EDGES_ENDED].add(edges.total("ended"))
        page[metrics.EDGES_ALONE].add(edges.total("times_alone"))


# Adds to the metrics page how requests left the admission queue.


class QueueMetrics:
    def __init__(self, queue: AdmissionQueue) -> None:
        self._queue = queue

    def __call__(self, page: Page) -> None:
        queue = self._queue
        page[metrics.QUEUE_ADMISSIONS].add(queue.admitted_by_work, 'order="work"')
        page[metrics.QUEUE_ADMISSIONS].add(queue.admitted_by_guarantee, 'order="guarantee"')
        page[metrics.QUEUE_GUARANTEE_EXCEEDED].add(queue.guarantee.exceeded)


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


class DiscoveryMetrics:
    def __init__(self, sources: Callable[[], Sequence[DiscoverySource]]) -> None:
        self._sources = sources

    def __call__(self, page: Page) -> None:
        for source in self._sources():
            name = format_labels(source=source.name)
            page[metrics.DISCOVERY_UP].add(source.up, name)
            page[metrics.DISCOVERY_TARGETS].add(source.targets, name)
            page[metrics.DISCOVERY_FAILURES].add(source.failures, name)
            for change, count in source.changes.copy().items():
                page[metrics.DISCOVERY_CHANGES].add(count, format_labels(change=change, source=source.name))


# Adds the hit rates, their baselines and drops, and what the prompt doctor found, to the metrics page.


class HitRateMetrics:
    def __init__(self, alerts: HitRateAlerts, doctor: PromptDoctor) -> None:
        self._alerts = alerts
        self._doctor = doctor

    def __call__(self, page: Page) -> None:
        alerts = self._alerts
        for key, rate in sorted(alerts.rates.copy().items()):
            labels = format_labels(model=key[0], route=key[1])
            if rate.window is not None:
                page[metrics.HIT_RATIO].add(rate.window.hit_ratio, labels)
            if rate.baseline.is_mature:
                page[metrics.HIT_RATIO_BASELINE].add(rate.baseline.hit_ratio, labels)
            page[metrics.HIT_RATIO_LOST].add(alerts.lost_gpu_s(key), labels)
        for (model, route), cause in sorted(alerts.causes.copy().items()):
            page[metrics.HIT_RATIO_DROPPED].add(1, format_labels(model=model, route=route, cause=cause.kind))
        for (model, route, kind), count in sorted(alerts.drops.copy().items()):
            page[metrics.HIT_RATIO_DROPS].add(count, format_labels(model=model, route=route, cause=kind))
        lost: dict[tuple[str, str, str], float] = {}
        for finding in self._doctor.findings:
            of_kind = (finding.model, finding.route, finding.kind)
            lost[of_kind] = lost.get(of_kind, 0.0) + finding.gpus
        for (model, route, difference), gpus in sorted(lost.items()):
            page[metrics.PROMPTS_LOST].add(gpus, format_labels(model=model, route=route, kind=difference))


# Adds the picker's figures to the metrics page under the names of the Gateway API Inference Extension.
#
# Dashboards and autoscalers of the extension read these. They are computed when the page is rendered.


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
        page[metrics.POOL_KV_USAGE].add(sum(node.kv_usage or 0.0 for node in up) / count, name)
        page[metrics.POOL_QUEUE].add(sum(node.waiting for node in up) / count, name)
        page[metrics.POOL_RUNNING].add(sum(node.running for node in up) / count, name)
        page[metrics.POOL_READY].add(len(up), name)
        page[metrics.EXTENSION_QUEUE].add(self._waiting(), format_labels(inference_pool=pool))
        for model in self._fleet.models:
            group = self._fleet.group(model)
            if group is not None:
                page[metrics.OBJECTIVE_RUNNING].add(group.inflight, format_labels(model_name=model))


# Adds the router's own process to the metrics page: CPU time, memory, open files and start time.

_PROC: Final = Path("/proc")
_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")


def add_process_metrics(page: Page) -> None:
    """Leaves out what /proc does not tell, for example in a sandbox without it."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    page[metrics.PROCESS_CPU].add(usage.ru_utime + usage.ru_stime)
    page[metrics.PROCESS_MAX_FDS].add(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    try:
        # The second field, the command in parentheses, may contain anything.
        fields = (_PROC / "self" / "stat").read_text().rpartition(")")[2].split()
        page[metrics.PROCESS_VIRTUAL].add(int(fields[20]))
        page[metrics.PROCESS_RSS].add(int(fields[21]) * _PAGE_BYTES)
        page[metrics.PROCESS_START].add(_boot_time_s() + int(fields[19]) / _TICKS_PER_S)
        page[metrics.PROCESS_FDS].add(len(os.listdir(_PROC / "self" / "fd")))
    except (OSError, ValueError, IndexError):
        pass


def _boot_time_s() -> float:
    for line in (_PROC / "stat").read_text().splitlines():
        if line.startswith("btime "):
            return float(line.split()[1])
    raise ValueError("/proc/stat has no btime")
