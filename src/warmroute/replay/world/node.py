"""A simulated node: an engine core, its place in the fleet, and what is measured of it."""

from __future__ import annotations

import enum
import math
from typing import NamedTuple

from warmroute.fake_engine.core.core import EngineCore
from warmroute.fake_engine.core.events import KvEventSink
from warmroute.fake_engine.core.stats import EngineStats
from warmroute.fleet.node import Node
from warmroute.replay.world.conditions import NodeSpec
from warmroute.replay.world.flight import Flight


class Life(enum.Enum):
    SERVING = "serving"
    HANGING = "hanging"  # takes connections and answers nothing
    DEAD = "dead"  # nobody listens


class Totals(NamedTuple):
    """Of one node's engines, over all incarnations."""

    busy_ms: float = 0.0
    queried_tokens: int = 0
    hit_tokens: int = 0
    prefilled_tokens: int = 0
    preemptions: int = 0


class SimNode:
    __slots__ = (
        "_before",
        "_changed_ms",
        "engine",
        "events_sent",
        "flights",
        "held_ms",
        "incarnation",
        "inflight_ms",
        "joined_ms",
        "life",
        "node",
        "one_way_ms",
        "past",
        "requests",
        "spec",
        "wakes_at_ms",
    )

    def __init__(self, spec: NodeSpec, node: Node, one_way_ms: float, now_ms: float) -> None:
        self.spec = spec
        self.node = node
        self.one_way_ms = one_way_ms
        self.joined_ms = now_ms
        # of one incarnation
        self.incarnation = 0
        self.life = Life.DEAD
        self.engine: EngineCore
        self.events_sent = 0
        self.wakes_at_ms = math.inf
        self.flights: dict[str, Flight] = {}
        """Requests that its engine has, by id."""
        # measured, over all incarnations
        self.past: list[EngineStats] = []
        self.requests = 0
        self.held_ms = 0.0
        self.inflight_ms = 0.0
        """Requests that the router had here × time."""
        self._changed_ms = now_ms
        self._before = Totals()

    def start(self, kv_events: KvEventSink | None) -> None:
        """A new process with an empty cache."""
        self.incarnation += 1
        self.life = Life.SERVING
        self.engine = EngineCore(self.spec.engine(), self.spec.profile.timing, kv_events)
        self.past.append(self.engine.stats)
        self.events_sent = 0
        self.wakes_at_ms = math.inf
        self.flights = {}

    def load_changes(self, now_ms: float) -> None:
        """To be called before the router opens or closes a ticket here."""
        self.inflight_ms += self.node.inflight * (now_ms - self._changed_ms)
        self._changed_ms = now_ms

    def measure_from(self, now_ms: float) -> None:
        """What was measured before does not count."""
        self.load_changes(now_ms)
        self.inflight_ms = self.held_ms = 0.0
        self.requests = 0
        self.joined_ms = now_ms
        self._before = self._totals()

    @property
    def totals(self) -> Totals:
        """What its engines did."""
        now, before = self._totals(), self._before
        return Totals(
            now.busy_ms - before.busy_ms,
            now.queried_tokens - before.queried_tokens,
            now.hit_tokens - before.hit_tokens,
            now.prefilled_tokens - before.prefilled_tokens,
            now.preemptions - before.preemptions,
        )

    def _totals(self) -> Totals:
        past = self.past
        return Totals(
            busy_ms=sum(stats.busy_ms for stats in past),
            queried_tokens=sum(stats.prefix_cache_queries for stats in past),
            hit_tokens=sum(stats.prefix_cache_hits + stats.reloaded_tokens for stats in past),
            prefilled_tokens=sum(stats.prompt_tokens_computed for stats in past),
            preemptions=sum(stats.preemptions for stats in past),
        )

    def left(self, now_ms: float) -> None:
        self.held_ms += now_ms - self.joined_ms
        self.joined_ms = now_ms
