"""The metrics page: read out of the books and counters when it is asked for, so that counting costs nothing more.

Labels are bounded: nodes, outcomes, statuses and error codes; never a tenant, a path or anything that a client sends.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from itertools import accumulate
from typing import Protocol

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from warmroute import __version__
from warmroute.fleet.fleet import Fleet
from warmroute.fleet.health import Standing
from warmroute.fleet.node import FIRST_BYTE_BOUNDS_MS, Outcome
from warmroute.index.beliefs import Beliefs
from warmroute.telemetry.counters import Counters


class ScalingFigures(Protocol):
    @property
    def desired_nodes(self) -> int: ...
    @property
    def states(self) -> dict[str, int]: ...
    @property
    def usd_per_hour(self) -> float: ...
    @property
    def utilisation(self) -> float: ...
    @property
    def leading(self) -> bool: ...


PRIORITY_NAMES = ("high", "normal", "low")
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class MetricsPage:
    """Implements prometheus_client's Collector."""

    def __init__(
        self,
        fleet: Fleet,
        beliefs: Beliefs,
        counters: Counters,
        connections: Callable[[], tuple[int, int]],
        waiting: Callable[[], tuple[int, int]],
        now: Callable[[], float] = time.monotonic,
        scaling: Callable[[], ScalingFigures | None] = lambda: None,
    ) -> None:
        """`connections`: open now, ever; `waiting`: requests that wait now, that had to wait ever; `scaling`: None
        where the fleet is not scaled."""
        self._scaling = scaling
        self._fleet = fleet
        self._beliefs = beliefs
        self._now = now
        self._counters = counters
        self._connections = connections
        self._waiting = waiting
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def render(self) -> bytes:
        """The page as text. Takes milliseconds on large fleets: call it off the loop."""
        return generate_latest(self._registry)

    def collect(self) -> Iterable[Metric]:
        yield self._info()
        yield from self._requests()
        yield from self._nodes()
        yield from self._index()
        yield from self._islands()
        yield from self._scaled()
        now, ever = self._waiting()
        yield GaugeMetricFamily("warmroute_waiting", "Requests that wait here for a node.", value=now)
        yield CounterMetricFamily("warmroute_held", "Requests that had to wait here for a node.", value=ever)
        now, ever = self._connections()
        yield GaugeMetricFamily("warmroute_connections", "Client connections open now.", value=now)
        yield CounterMetricFamily("warmroute_connections_accepted", "Client connections accepted.", value=ever)
        delay_s, self._counters.loop_delay_max_s = self._counters.loop_delay_max_s, 0.0
        yield GaugeMetricFamily(
            "warmroute_loop_delay_max_seconds", "Longest delay of the event loop since the last scrape.", value=delay_s
        )

    def _scaled(self) -> Iterable[Metric]:
        figures = self._scaling()
        states = GaugeMetricFamily(
            "warmroute_scaling_nodes", "Nodes of provisioners, by where they are in their life.", labels=["state"]
        )
        changes = CounterMetricFamily(
            "warmroute_scaling_changes", "Nodes that came, were given back, refused, or lost.", labels=["change"]
        )
        if figures is not None:
            yield GaugeMetricFamily(
                "warmroute_desired_nodes", "Nodes that the fleet should have.", value=figures.desired_nodes
            )
            yield GaugeMetricFamily(
                "warmroute_scaling_utilisation", "Share of the fleet's time that its work takes.",
                value=figures.utilisation,
            )  # fmt: skip
            yield GaugeMetricFamily(
                "warmroute_scaling_usd_per_hour", "What the fleet costs, as far as prices are known.",
                value=figures.usd_per_hour,
            )  # fmt: skip
            yield GaugeMetricFamily(
                "warmroute_scaling_leading", "Whether this process is the one that scales.", value=figures.leading
            )
            for state, count in figures.states.items():
                states.add_metric([state], count)
            for change in ("added", "given_back", "refused", "lost"):
                changes.add_metric([change], getattr(figures, change))
        yield states
        yield changes

    def _info(self) -> Metric:
        info = GaugeMetricFamily("warmroute_info", "The running version.", labels=["version"])
        info.add_metric([__version__], 1)
        return info

    def _requests(self) -> Iterable[Metric]:
        counters = self._counters
        answered = CounterMetricFamily(
            "warmroute_requests_answered", "Answers of nodes that reached clients whole.", labels=["status"]
        )
        for status, count in sorted(counters.answered.copy().items()):
            answered.add_metric([str(status)], count)
        yield answered
        refused = CounterMetricFamily(
            "warmroute_requests_refused", "Requests answered by the router with an error.", labels=["status", "code"]
        )
        for (status, code), count in sorted(counters.refused.copy().items()):
            refused.add_metric([str(status), code], count)
        yield refused
        shed = CounterMetricFamily(
            "warmroute_shed", "Requests that were not admitted, by reason and priority.", labels=["reason", "priority"]
        )
        for (reason, priority), count in sorted(counters.shed.copy().items()):
            shed.add_metric([reason, PRIORITY_NAMES[priority]], count)
        yield shed
        routed = CounterMetricFamily("warmroute_route_requests", "Requests of each route.", labels=["route"])
        for route, count in sorted(counters.routed.copy().items()):
            routed.add_metric([route], count)
        yield routed
        for name, help_text, value in (
            ("warmroute_requests_broken", "Answers that broke off after they had begun.", counters.broken),
            ("warmroute_requests_left", "Clients gone before their answer was complete.", counters.left),
            ("warmroute_retries", "Times a request went on to another node.", counters.retries),
            ("warmroute_stale_connections", "Requests sent again on a fresh connection.", counters.stale_connections),
            ("warmroute_prompts_threaded", "Prompts read in a thread.", counters.threaded_prompts),
            ("warmroute_prompts_unread", "Prompts not read: too many waited for a thread.", counters.unread_prompts),
            ("warmroute_journal_written", "Decisions written to the journal's file.", counters.journal_written),
            ("warmroute_journal_dropped", "Decisions that the journal's disk did not take.", counters.journal_dropped),
        ):
            yield CounterMetricFamily(name, help_text, value=value)

    def _index(self) -> Iterable[Metric]:
        stats = self._beliefs.index.stats()
        for name, text, value in (
            ("bytes", "Memory of the block index.", stats["bytes"]),
            ("budget_bytes", "Memory that the block index may have.", stats["budget_bytes"]),
            ("blocks", "Different blocks in the index.", stats["blocks"]),
            ("pairs", "Blocks × places that hold them.", stats["pairs"]),
        ):
            yield GaugeMetricFamily(f"warmroute_index_{name}", text, value=value)
        yield CounterMetricFamily("warmroute_index_evicted", "Pairs given up for the memory.", value=stats["evicted"])

        def gauge(name: str, text: str) -> GaugeMetricFamily:
            return GaugeMetricFamily(f"warmroute_node_cache_{name}", text, labels=["node"])

        def counter(name: str, text: str) -> CounterMetricFamily:
            return CounterMetricFamily(f"warmroute_node_cache_{name}", text, labels=["node"])

        told = gauge("told", "1 where the node's events are followed, and none was lost.")
        doubted = gauge("doubted", "1 where the node has another tokenizer than the router.")
        confidence = gauge("confidence_ratio", "How much a hit on the node counts.")
        agreement = gauge("agreement_ratio", "Cached tokens predicted and reported, of those predicted or reported.")
        lag = gauge("event_lag_seconds", "How late the node's events come.")
        predicted = counter("predicted_tokens", "Cached tokens that were predicted, where the node reported them.")
        reported = counter("reported_tokens", "Cached tokens that the node reported.")
        compared = counter("compared", "Answers that told how much was cached.")
        exact = counter("exact", "Answers that told just what was predicted.")
        gaps = counter("gaps", "Times that events were lost for good.")
        now_s, config = self._now(), self._beliefs.config
        for cache in list(self._beliefs):
            node, accuracy = [cache.name], cache.accuracy
            told.add_metric(node, int(cache.complete))
            doubted.add_metric(node, int(cache.doubted))
            confidence.add_metric(node, cache.confidence(now_s, config.stale_s, config.gone_s))
            agreement.add_metric(node, accuracy.agreement())
            lag.add_metric(node, cache.lag_s)
            predicted.add_metric(node, accuracy.predicted_tokens)
            reported.add_metric(node, accuracy.reported_tokens)
            compared.add_metric(node, accuracy.compared)
            exact.add_metric(node, accuracy.exact)
            gaps.add_metric(node, cache.gaps)
        yield from (told, doubted, confidence, agreement, lag, predicted, reported, compared, exact, gaps)

    def _islands(self) -> Iterable[Metric]:
        def gauge(name: str, text: str) -> GaugeMetricFamily:
            return GaugeMetricFamily(f"warmroute_island_{name}", text, labels=["island"])

        def counter(name: str, text: str, *labels: str) -> CounterMetricFamily:
            return CounterMetricFamily(f"warmroute_{name}", text, labels=labels)

        round_trip = gauge("round_trip_ms", "From here to the island and back, as configured or measured.")
        distance = gauge("distance_ms", "What its distance counts in a price: the way, its network's cost, the line.")
        line = gauge("line_ms", "How long those who wait here for the island keep its nodes busy.")
        for island in list(self._fleet.islands):
            round_trip.add_metric([island.name], island.round_trip_ms)
            distance.add_metric([island.name], island.told_ms)
            line.add_metric([island.name], island.line_ms)
        books = self._fleet.islands.books
        fresh = counter("conversations_fresh", "New conversations, by the island that they went to.", "island")
        stayed = counter("conversations_stayed", "Turns that were served at their conversation's home.", "island")
        away = counter("conversations_away", "Turns that were served elsewhere.", "island")
        home = counter("conversations_came_home", "Conversations that came back to their home.", "island")
        for family, counts in (
            (fresh, books.fresh), (stayed, books.stayed), (away, books.away), (home, books.came_home),
        ):  # fmt: skip
            for name, count in sorted(counts.copy().items()):
                family.add_metric([name], count)
        crossed = counter("conversations_crossed", "Conversations that left their home.", "island", "to", "reason")
        for labels, count in sorted(books.crossed.copy().items()):
            crossed.add_metric(list(labels), count)
        yield from (round_trip, distance, line, fresh, stayed, away, home, crossed)

    def _nodes(self) -> Iterable[Metric]:
        def gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
            return GaugeMetricFamily(f"warmroute_node_{name}", text, labels=["node", *labels])

        inflight = gauge("inflight", "Requests of this router on the node.")
        foreign = gauge("foreign", "Requests of others on the node, at the last poll.")
        waiting = gauge("waiting", "Requests that the engine has queued, at the last poll.")
        kv_usage = gauge("kv_usage_ratio", "Share of KV blocks in use, at the last poll.")
        latency = gauge("latency_ms", "Moving average of an answer's time.")
        prefill = gauge("prefill_ms_per_token", "Time to prefill a token of a short prompt, as learned.")
        token = gauge("token_ms", "Time between two tokens of an answer there, as learned and as it is loaded now.")
        adapters = gauge("adapters_loaded", "LoRA adapters that the node is believed to have loaded.")
        loads = CounterMetricFamily(
            "warmroute_node_adapter_loads", "Requests sent there that had to load their adapter.", labels=["node"]
        )
        state = gauge("state", "1 for the state that the node is in.", "state")
        requests = CounterMetricFamily(
            "warmroute_node_requests", "Requests sent to the node, by how they ended.", labels=["node", "outcome"]
        )
        first_byte = HistogramMetricFamily(
            "warmroute_node_first_byte_seconds", "Time to the answer's first byte.", labels=["node"]
        )
        for node in list(self._fleet):
            name = node.name
            inflight.add_metric([name], node.inflight)
            foreign.add_metric([name], node.foreign)
            waiting.add_metric([name], node.waiting)
            kv_usage.add_metric([name], node.kv_usage)
            latency.add_metric([name], node.latency_ms)
            prefill.add_metric([name], node.speed.ms_per_token)
            adapters.add_metric([name], len(node.loaded))
            loads.add_metric([name], node.loaded.loads)
            for group in node.groups[:1]:
                token.add_metric([name], node.speed.factor * group.pace.token_ms(node.context))
            for standing in Standing:
                is_it = node.health.standing is standing and not node.draining
                state.add_metric([name, standing.value], int(is_it))
            state.add_metric([name, "draining"], int(node.draining))
            for outcome in Outcome:
                requests.add_metric([name, outcome.name.lower()], node.outcomes[outcome])
            counts = list(accumulate(node.first_byte_counts))
            bounds = [*(str(bound / 1000) for bound in FIRST_BYTE_BOUNDS_MS), "+Inf"]
            first_byte.add_metric([name], list(zip(bounds, counts, strict=True)), node.first_byte_sum_ms / 1000)
        yield from (
            inflight, foreign, waiting, kv_usage, latency, prefill, token, adapters, loads, state, requests, first_byte,
        )  # fmt: skip
