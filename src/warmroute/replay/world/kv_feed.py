"""KV events on their way from engines to a listener: late, in order, and now and then lost."""

from __future__ import annotations

from random import Random

from warmroute.fake_engine.core.events import KvEvent, KvEventSink
from warmroute.replay.world.calendar import Calendar
from warmroute.replay.world.conditions import Conditions
from warmroute.replay.world.listener import Listener
from warmroute.replay.world.node import SimNode


class KvFeed:
    """An engine that decodes in one stretch tells of the blocks it filled when the world next looks at it, which is
    at the next poll at the latest; events of prompts are told at the end of their step."""

    def __init__(self, calendar: Calendar, conditions: Conditions, listener: Listener) -> None:
        self._calendar = calendar
        self._lag_ms = conditions.kv_lag_ms
        self._loss = conditions.kv_loss
        self._random = Random(f"{conditions.seed} kv events")
        self._listener = listener

    def sink(self, sim: SimNode) -> KvEventSink:
        """What the node's next incarnation publishes to."""
        incarnation = sim.incarnation + 1

        def publish(at_ms: float, events: list[KvEvent]) -> None:
            sequence = sim.events_sent
            sim.events_sent += 1
            if self._loss and self._random.random() < self._loss:
                return
            due_ms = max(self._calendar.now_ms, at_ms + sim.one_way_ms + self._lag_ms)
            self._calendar.at(due_ms, self._deliver, sim, incarnation, sequence, events)

        return publish

    def _deliver(self, sim: SimNode, incarnation: int, sequence: int, events: list[KvEvent]) -> None:
        self._listener.kv_events(sim.node, incarnation, sequence, events, self._calendar.now_s)
