"""The metrics page: read out of the books and counters when it is asked for, so that counting costs nothing more.

Labels are bounded: nodes, outcomes, statuses and error codes; never a tenant, a path or anything that a client sends.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Protocol

from warmroute import __version__
from warmroute.fleet.fleet import Fleet
from warmroute.fleet.health import Standing
from warmroute.fleet.node import FIRST_BYTE_BOUNDS_MS, Outcome
from warmroute.index.cache_view import CacheView
from warmroute.telemetry.counters import Counters
from warmroute.telemetry.exposition import Family, Histogram, counter, gauge, label_value, labels, page


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
_STANDINGS = [(standing, f',state="{standing.value}"') for standing in Standing]
_OUTCOMES = [(outcome, f',outcome="{outcome.name.lower()}"') for outcome in Outcome]


class MetricsPage:
    def __init__(
        self,
        fleet: Fleet,
        cache_view: CacheView,
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
        self._cache_view = cache_view
        self._now = now
        self._counters = counters
        self._connections = connections
        self._waiting = waiting

    def render(self) -> bytes:
        """The page as text. Takes milliseconds on large fleets: call it off the loop."""
        return page(self.collect())

    def collect(self) -> Iterable[Family]:
        info = gauge("warmroute_info", "The running version.")
        info.add(1, labels(version=__version__))
        yield info
        yield from self._requests()
        yield from self._nodes()
        yield from self._index()
        yield from self._caches()
        yield from self._islands()
        yield from self._scaled()
        now, ever = self._waiting()
        yield _one(gauge("warmroute_waiting", "Requests that wait here for a node."), now)
        yield _one(counter("warmroute_held", "Requests that had to wait here for a node."), ever)
        now, ever = self._connections()
        yield _one(gauge("warmroute_connections", "Client connections open now."), now)
        yield _one(counter("warmroute_connections_accepted", "Client connections accepted."), ever)
        delay_s, self._counters.loop_delay_max_s = self._counters.loop_delay_max_s, 0.0
        longest = gauge("warmroute_loop_delay_max_seconds", "Longest delay of the event loop since the last scrape.")
        yield _one(longest, delay_s)

    def _requests(self) -> Iterable[Family]:
        counters = self._counters
        answered = counter("warmroute_requests_answered", "Answers of nodes that reached clients whole.")
        for status, count in sorted(counters.answered.copy().items()):
            answered.add(count, labels(status=str(status)))
        yield answered
        refused = counter("warmroute_requests_refused", "Requests answered by the router with an error.")
        for (status, code), count in sorted(counters.refused.copy().items()):
            refused.add(count, labels(code=code, status=str(status)))
        yield refused
        shed = counter("warmroute_shed", "Requests that were not admitted, by reason and priority.")
        for (reason, priority), count in sorted(counters.shed.copy().items()):
            shed.add(count, labels(priority=PRIORITY_NAMES[priority], reason=reason))
        yield shed
        routed = counter("warmroute_route_requests", "Requests of each route.")
        for route, count in sorted(counters.routed.copy().items()):
            routed.add(count, labels(route=route))
        yield routed
        for name, help_text, value in (
            ("requests_broken", "Answers that broke off after they had begun.", counters.broken),
            ("requests_left", "Clients gone before their answer was complete.", counters.left),
            ("retries", "Times a request went on to another node.", counters.retries),
            ("stale_connections", "Requests sent again on a fresh connection.", counters.stale_connections),
            ("prompts_threaded", "Prompts read in a thread.", counters.threaded_prompts),
            ("prompts_unread", "Prompts not read: too many waited for a thread.", counters.unread_prompts),
            ("journal_written", "Decisions written to the journal's file.", counters.journal_written),
            ("journal_dropped", "Decisions that the journal's disk did not take.", counters.journal_dropped),
        ):
            yield _one(counter(f"warmroute_{name}", help_text), value)

    def _nodes(self) -> Iterable[Family]:
        inflight = gauge("warmroute_node_inflight", "Requests of this router on the node.")
        other_load = gauge("warmroute_node_foreign", "Requests of others on the node, at the last poll.")
        waiting = gauge("warmroute_node_waiting", "Requests that the engine has queued, at the last poll.")
        kv_usage = gauge("warmroute_node_kv_usage_ratio", "Share of KV blocks in use, at the last poll.")
        latency = gauge("warmroute_node_latency_ms", "Moving average of an answer's time.")
        prefill = gauge("warmroute_node_prefill_ms_per_token", "Time to prefill a token of a short prompt, as learned.")
        token = gauge(
            "warmroute_node_token_ms", "Time between two tokens of an answer there, as learned and as it is loaded now."
        )
        adapters = gauge("warmroute_node_adapters_loaded", "LoRA adapters that the node is believed to have loaded.")
        loads = counter("warmroute_node_adapter_loads", "Requests sent there that had to load their adapter.")
        state = gauge("warmroute_node_state", "1 for the state that the node is in.")
        requests = counter("warmroute_node_requests", "Requests sent to the node, by how they ended.")
        first_byte = Histogram(
            "warmroute_node_first_byte_seconds", "Time to the answer's first byte.",
            [bound / 1000 for bound in FIRST_BYTE_BOUNDS_MS],
        )  # fmt: skip
        for node in list(self._fleet):
            name = f'node="{label_value(node.name)}"'
            inflight.add(node.inflight, name)
            other_load.add(node.other_load, name)
            waiting.add(node.waiting, name)
            kv_usage.add(node.kv_usage, name)
            latency.add(node.latency_ms, name)
            prefill.add(node.speed.ms_per_token, name)
            adapters.add(len(node.loaded), name)
            loads.add(node.loaded.loads, name)
            for group in node.groups[:1]:
                token.add(node.speed.factor * group.pace.token_ms(node.context), name)
            draining, standing = node.draining, node.health.standing
            for one, labelled in _STANDINGS:
                state.add(one is standing and not draining, name + labelled)
            state.add(draining, name + ',state="draining"')
            for outcome, labelled in _OUTCOMES:
                requests.add(node.outcomes[outcome], name + labelled)
            first_byte.add_counts(node.first_byte_counts, node.first_byte_sum_ms / 1000, name)
        yield from (
            inflight, other_load, waiting, kv_usage, latency, prefill, token, adapters, loads, state, requests, first_byte,
        )  # fmt: skip

    def _index(self) -> Iterable[Family]:
        stats = self._cache_view.index.stats()
        for name, text in (
            ("bytes", "Memory of the block index."),
            ("budget_bytes", "Memory that the block index may have."),
            ("blocks", "Different blocks in the index."),
            ("pairs", "Blocks × places that hold them."),
        ):
            yield _one(gauge(f"warmroute_index_{name}", text), stats[name])
        yield _one(counter("warmroute_index_evicted", "Pairs given up for the memory."), stats["evicted"])

    def _caches(self) -> Iterable[Family]:
        told = _cache("told", "1 where the node's events are followed, and none was lost.")
        doubted = _cache("doubted", "1 where the node has another tokenizer than the router.")
        confidence = _cache("confidence_ratio", "How much a hit on the node counts.")
        agreement = _cache("agreement_ratio", "Cached tokens predicted and reported, of those predicted or reported.")
        lag = _cache("event_lag_seconds", "How late the node's events come.")
        predicted = _cache_count("predicted_tokens", "Cached tokens that were predicted, where the node reported them.")
        reported = _cache_count("reported_tokens", "Cached tokens that the node reported.")
        compared = _cache_count("compared", "Answers that told how much was cached.")
        exact = _cache_count("exact", "Answers that told just what was predicted.")
        gaps = _cache_count("gaps", "Times that events were lost for good.")
        now_s, config = self._now(), self._cache_view.config
        for cache in list(self._cache_view):
            node, accuracy = labels(node=cache.name), cache.accuracy
            told.add(cache.complete, node)
            doubted.add(cache.doubted, node)
            confidence.add(cache.confidence(now_s, config.stale_s, config.gone_s), node)
            agreement.add(accuracy.agreement(), node)
            lag.add(cache.lag_s, node)
            predicted.add(accuracy.predicted_tokens, node)
            reported.add(accuracy.reported_tokens, node)
            compared.add(accuracy.compared, node)
            exact.add(accuracy.exact, node)
            gaps.add(cache.gaps, node)
        yield from (told, doubted, confidence, agreement, lag, predicted, reported, compared, exact, gaps)

    def _islands(self) -> Iterable[Family]:
        round_trip = gauge(
            "warmroute_island_round_trip_ms", "From here to the island and back, as configured or measured."
        )
        distance = gauge(
            "warmroute_island_distance_ms",
            "What its distance counts in a price: the way, its network's cost, the line.",
        )
        line = gauge("warmroute_island_line_ms", "How long those who wait here for the island keep its nodes busy.")
        for island in list(self._fleet.islands):
            name = labels(island=island.name)
            round_trip.add(island.round_trip_ms, name)
            distance.add(island.told_ms, name)
            line.add(island.line_ms, name)
        yield from (round_trip, distance, line)
        books = self._fleet.islands.books
        for what, text, counts in (
            ("fresh", "New conversations, by the island that they went to.", books.fresh),
            ("stayed", "Turns that were served at their conversation's home.", books.stayed),
            ("away", "Turns that were served elsewhere.", books.away),
            ("came_home", "Conversations that came back to their home.", books.came_home),
        ):
            family = counter(f"warmroute_conversations_{what}", text)
            for island_name, count in sorted(counts.copy().items()):
                family.add(count, labels(island=island_name))
            yield family
        crossed = counter("warmroute_conversations_crossed", "Conversations that left their home.")
        for (left, to, reason), count in sorted(books.crossed.copy().items()):
            crossed.add(count, labels(island=left, reason=reason, to=to))
        yield crossed

    def _scaled(self) -> Iterable[Family]:
        figures = self._scaling()
        states = gauge("warmroute_scaling_nodes", "Nodes of provisioners, by where they are in their life.")
        changes = counter("warmroute_scaling_changes", "Nodes that came, were given back, refused, or lost.")
        if figures is not None:
            for name, text, value in (
                ("desired_nodes", "Nodes that the fleet should have.", figures.desired_nodes),
                ("scaling_utilisation", "Share of the fleet's time that its work takes.", figures.utilisation),
                ("scaling_usd_per_hour", "What the fleet costs, as far as prices are known.", figures.usd_per_hour),
                ("scaling_leading", "Whether this process is the one that scales.", figures.leading),
            ):
                yield _one(gauge(f"warmroute_{name}", text), value)
            for state, count in figures.states.items():
                states.add(count, labels(state=state))
            for change in ("added", "given_back", "refused", "lost"):
                changes.add(getattr(figures, change), labels(change=change))
        yield states
        yield changes


def _one(family: Family, value: float) -> Family:
    family.add(value)
    return family


def _cache(name: str, text: str) -> Family:
    return gauge(f"warmroute_node_cache_{name}", text)


def _cache_count(name: str, text: str) -> Family:
    return counter(f"warmroute_node_cache_{name}", text)
