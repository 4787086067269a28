"""least_loaded: the node with the fewest requests (ours exactly, others' as last polled); ties by chance."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from warmroute.fleet.group import Candidates, Group
from warmroute.fleet.node import Node
from warmroute.prompt.ask import Ask
from warmroute.routing.decision import Decision


class LeastLoaded:
    name = "least_loaded"

    def __init__(self, random: Random) -> None:
        self._random = random

    def decide(self, ask: Ask, candidates: Candidates, group: Group) -> Decision:
        nodes = candidates.nodes
        # One pass from a random start: the first of the least loaded from there. Ties spread.
        start = int(self._random.random() * len(nodes))
        best = nodes[start]
        least = best.inflight + best.foreign
        if least:
            for node in nodes[start + 1 :] + nodes[:start]:
                load = node.inflight + node.foreign
                if load < least:
                    best, least = node, load
                    if not load:
                        break
        return Decision(best, self.name, "fewest requests", lambda: self.by_load(nodes))

    def by_load(self, nodes: Sequence[Node]) -> list[Node]:
        """All of them, the least loaded first; ties by chance."""
        return sorted(self._random.sample(nodes, len(nodes)), key=lambda node: node.load)
