"""The metrics page. The router reads all values when Prometheus scrapes it, so counting costs requests nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

from warmroute import __version__
from warmroute.build_info import build
from warmroute.config.priority import PRIORITY_NAMES
from warmroute.fleet.engine_rates import EngineRates
from warmroute.fleet.fleet import Fleet
from warmroute.fleet.health import HealthState
from warmroute.fleet.node import TTFT_BOUNDS_MS, Outcome
from warmroute.index.cache_view import EVENT_AGES_S, CacheView
from warmroute.routing.split_request import OUTCOMES as SPLIT_OUTCOMES
from warmroute.telemetry import metric_definitions as metrics
from warmroute.telemetry.client_errors import COMMON
from warmroute.telemetry.counters import TRACE_DROPS, Counters
from warmroute.telemetry.exposition import MetricLines, Page, Pauses, bucket_bounds, format_labels, label_value
from warmroute.telemetry.metric_definitions import METRICS


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
            (metrics.TRACES_LIMITED, counters.traces_limited),
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
