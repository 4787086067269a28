"""Delivery of KV events from simulated engines to a listener: delayed, in order, and sometimes lost."""

from __future__ import annotations

from random import Random

from warmroute.fake_engine.core.kv_event_types import KvEvent, KvEventSink
from warmroute.replay.simulation.calendar import Calendar
from warmroute.replay.simulation.conditions import Conditions
from warmroute.replay.simulation.policy_listener import PolicyListener
from warmroute.replay.simulation.simulated_node import SimulatedNode


class KvEventDelivery:
    """An engine publishes the events of a prompt at the end of its step. It publishes the blocks filled while decoding
    when the simulation next advances the engine, at the next poll at the latest."""

    def __init__(self, calendar: Calendar, conditions: Conditions, listener: PolicyListener) -> None:
        self._calendar = calendar
        self._lag_ms = conditions.kv_lag_ms
        self._loss = conditions.kv_loss
        self._random = Random(f"{conditions.seed} kv events")
        self._listener = listener

    def sink(self, sim: SimulatedNode) -> KvEventSink:
        """Return where the node's next incarnation publishes its events."""
        incarnation = sim.incarnation + 1

        def publish(at_ms: float, events: list[KvEvent]) -> None:
            sequence = sim.next_event_sequence
            sim.next_event_sequence += 1
            if self._loss and self._random.random() < self._loss:
                return
            due_ms = max(self._calendar.now_ms, at_ms + sim.one_way_ms + self._lag_ms)
            self._calendar.at(due_ms, self._deliver, sim, incarnation, sequence, events)

        return publish

    def _deliver(self, sim: SimulatedNode, incarnation: int, sequence: int, events: list[KvEvent]) -> None:
        self._listener.kv_events(sim.node, incarnation, sequence, events, self._calendar.now_s)
