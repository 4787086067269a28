"""Learns the speeds of nodes from the first tokens of all processes.

A node prefills the prompts of all processes together. A process that saw only its own first tokens would take the time
of the others' prompts for its own, and believe the node to be slower than it is. So processes publish their first
tokens, and each learns from all of them, in the order of time: HOLD_S late, when the others' messages have arrived.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import Final

from warmroute.cluster.messages import MAX_PREFILLS, Prefill
from warmroute.fleet.fleet import Fleet, UnknownNode
from warmroute.fleet.node import Node

HOLD_S: Final = 0.15

Sample = tuple[float, float, float, float, bool]
"""The arguments of `NodeSpeed.learn`."""


class SharedSpeeds:
    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._held: list[tuple[float, str, Sample]] = []
        """A heap: first tokens in the order of time."""

    def take_own(self) -> list[Prefill]:
        """Return the first tokens of this process since the last call."""
        found: list[Prefill] = []
        for node in self._fleet:
            samples = node.speed.samples
            if samples is None:
                node.speed.samples = []
            elif samples:
                found += [Prefill(node.name, *sample) for sample in samples]
                samples.clear()
        for prefill in found:
            self.add(prefill, prefill.sent_s, prefill.at_s)
        return found[:MAX_PREFILLS]

    def add(self, prefill: Prefill, sent_s: float, at_s: float) -> None:
        if len(self._held) < MAX_PREFILLS:
            heappush(self._held, (at_s, prefill.node, (prefill.work, prefill.step_ms, sent_s, at_s, prefill.lone)))

    def learn(self, now_s: float) -> None:
        held = self._held
        while held and held[0][0] <= now_s - HOLD_S:
            _, name, (work, step_ms, sent_s, at_s, lone) = heappop(held)
            node = self._node(name)
            if node is not None:
                at_s = max(at_s, node.speed._last_first_token_s)
                node.speed.learn(work, step_ms, sent_s, at_s, lone)

    def _node(self, name: str) -> Node | None:
        try:
            return self._fleet.node(name)
        except UnknownNode:
            return None

    def close(self) -> None:
        """Learn at once again."""
        for node in self._fleet:
            node.speed.samples = None
