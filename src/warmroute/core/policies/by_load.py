"""least_loaded: the node with the fewest requests (this router's exactly, others' as last polled).

Of several, the one with the shortest context window that holds the request, then any.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from warmroute.fleet.node import Node
from warmroute.routing.decision import Decision
from warmroute.routing.policy import Policy
from warmroute.routing.query import Query


class LeastLoaded(Policy):
    name = "least_loaded"

    def __init__(self, random: Random) -> None:
        self._random = random

    def decide(self, query: Query) -> Decision:
        nodes = query.candidates.nodes
        loads = [node.inflight + node.other_load for node in nodes]
        least = min(loads)
        if query.group.windows is not None:
            tied = [at for at, load in enumerate(loads) if load == least]
            tied = query.group.windows.tightest(nodes, tied)
            index = tied[int(self._random.random() * len(tied))]
            return Decision(nodes[index], self.name, "fewest requests", lambda: self.by_load(nodes))
        ties = loads.count(least)
        index = loads.index(least)
        for _ in range(int(self._random.random() * ties) if ties > 1 else 0):
            index = loads.index(least, index + 1)
        return Decision(nodes[index], self.name, "fewest requests", lambda: self.by_load(nodes))

    def by_load(self, nodes: Sequence[Node]) -> list[Node]:
        """Return the nodes, the least loaded first; ties at random."""
        return sorted(self._random.sample(nodes, len(nodes)), key=lambda node: node.load)
