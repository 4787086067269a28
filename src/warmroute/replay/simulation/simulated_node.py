"""A simulated node: a fake engine, its node in the router's fleet, and its measurements."""

from __future__ import annotations

import enum
import math
from typing import TYPE_CHECKING, NamedTuple

from warmroute.fake_engine.core.engine_core import EngineCore
from warmroute.fake_engine.core.engine_stats import EngineStats
from warmroute.fake_engine.core.kv_event_types import KvEventSink
from warmroute.fake_engine.core.shared_store import SharedStore
from warmroute.fleet.node import Node
from warmroute.replay.simulation.conditions import NodeSpec

if TYPE_CHECKING:
    from warmroute.replay.simulation.flight import Leg


class ProcessState(enum.Enum):
    SERVING = "serving"
    HANGING = "hanging"  # accepts connections and answers nothing
    DEAD = "dead"  # refuses connections


class EngineTotals(NamedTuple):
    """Sums over all incarnations of one node's engine."""

    busy_ms: float = 0.0
    queried_tokens: int = 0
    hit_tokens: int = 0
    prefilled_tokens: int = 0
    preemptions: int = 0


class SimulatedNode:
    def __init__(self, spec: NodeSpec, views: tuple[Node, ...], one_way_ms: float, now_ms: float) -> None:
        self.spec = spec
        self.views = views
        """The node in the fleet of each router."""
        self.node = views[0]
        self.one_way_ms = one_way_ms
        self.joined_ms = now_ms
        # Of the current incarnation:
        self.incarnation = 0
        self.state = ProcessState.DEAD
        self.engine: EngineCore
        self.next_event_sequence = 0
        self.wakes_at_ms = math.inf
        self.flights: dict[str, Leg] = {}
        """Requests in its engine, by id."""
        self.link_free_ms = 0.0
        """When the last KV transfer from this node ends."""
        # Measured over all incarnations:
        self.incarnation_stats: list[EngineStats] = []
        self.requests = 0
        self.held_ms = 0.0
        """Time in the fleet until it left."""
        self.inflight_ms = 0.0
        """The router's requests in flight on this node, integrated over time."""
        self._inflight = 0
        self._changed_ms = now_ms
        self._discarded = EngineTotals()

    def start(self, kv_events: KvEventSink | None, store: SharedStore | None = None) -> None:
        """Start a new process with an empty cache."""
        self.incarnation += 1
        self.state = ProcessState.SERVING
        self.engine = EngineCore(self.spec.engine(), self.spec.profile.timing, kv_events, store)
        self.incarnation_stats.append(self.engine.stats)
        self.next_event_sequence = 0
        self.wakes_at_ms = math.inf
        self.flights = {}

    def stop(self, state: ProcessState) -> list[Leg]:
        """Stop the process, and return the requests that it had."""
        flights = list(self.flights.values())
        self.state, self.wakes_at_ms, self.flights = state, math.inf, {}
        return flights

    @property
    def inflight(self) -> int:
        """Requests of all routers on the node."""
        return sum([node.own_inflight for node in self.views])

    def account_inflight(self, now_ms: float) -> None:
        """Update `inflight_ms`. Call this after the router opened or closed a ticket on this node."""
        self.inflight_ms += self._inflight * (now_ms - self._changed_ms)
        self._inflight = self.inflight
        self._changed_ms = now_ms

    def measure_from(self, now_ms: float) -> None:
        """Discard what was measured so far."""
        self.account_inflight(now_ms)
        self.inflight_ms = self.held_ms = 0.0
        self.requests = 0
        self.joined_ms = now_ms
        self._discarded = self._totals()

    @property
    def totals(self) -> EngineTotals:
        """What its engine did since `measure_from`."""
        return EngineTotals._make(now - before for now, before in zip(self._totals(), self._discarded, strict=True))

    def _totals(self) -> EngineTotals:
        all_stats = self.incarnation_stats
        return EngineTotals(
            busy_ms=sum(stats.busy_ms for stats in all_stats),
            queried_tokens=sum(stats.prefix_cache_queries for stats in all_stats),
            hit_tokens=sum(stats.prefix_cache_hits + stats.reloaded_tokens for stats in all_stats),
            prefilled_tokens=sum(stats.prompt_tokens_computed for stats in all_stats),
            preemptions=sum(stats.preemptions for stats in all_stats),
        )

    def record_departure(self, now_ms: float) -> None:
        self.held_ms += now_ms - self.joined_ms
        self.joined_ms = now_ms
