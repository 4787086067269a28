"""Learns the speeds of nodes from the first tokens of all processes.

A node prefills the prompts of all processes together. A process that saw only its own first tokens would take the time
of the others' prompts for its own, and believe the node to be slower than it is. So processes publish their first
tokens, and each learns from all of them, in the order of time: HOLD_S late, when the others' messages have arrived.
"""

from __future__ import annotations

from typing import Final

from warmroute._kernel import FirstTokenOrder
from warmroute.core.cluster.messages import Update
from warmroute.core.fleet import Fleet

HOLD_S: Final = 0.15


class SharedSpeeds:
    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._order = FirstTokenOrder()

    def take_own(self) -> tuple[tuple[str, ...], bytes]:
        """Return the first tokens of this process since the last call: the names of their nodes, and their records."""
        self._order.join(self._fleet.by_name)
        return self._order.take()

    def add(self, update: Update, clock_offset_s: float, now_s: float) -> None:
        """Add the first tokens of a peer."""
        if update.first_tokens:
            self._order.add(self._fleet.by_name, update.first_token_nodes, update.first_tokens, clock_offset_s, now_s)

    def learn(self, now_s: float) -> None:
        self._order.learn(now_s - HOLD_S)

    def close(self) -> None:
        """Learn at once again."""
        for node in self._fleet:
            node.speed.first_tokens = None
        self._order.clear()
