"""least_loaded: the node with the fewest requests (ours exactly, others' as last polled); ties by chance."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from warmroute.fleet.node import Node
from warmroute.routing.decision import Decision
from warmroute.routing.query import Query


class LeastLoaded:
    name = "least_loaded"
    wants_tokens = False
    holds = False

    def __init__(self, random: Random) -> None:
        self._random = random

    def decide(self, query: Query) -> Decision:
        nodes = query.candidates.nodes
        loads = [node.inflight + node.other_load for node in nodes]
        least = min(loads)
        ties = loads.count(least)
        at = loads.index(least)
        for _ in range(int(self._random.random() * ties) if ties > 1 else 0):
            at = loads.index(least, at + 1)
        return Decision(nodes[at], self.name, "fewest requests", lambda: self.by_load(nodes))

    def by_load(self, nodes: Sequence[Node]) -> list[Node]:
        """All of them, the least loaded first; ties by chance."""
        return sorted(self._random.sample(nodes, len(nodes)), key=lambda node: node.load)
