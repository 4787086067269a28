"""random: any node with the same probability."""

from __future__ import annotations

from random import Random

from warmroute.routing.decision import Decision
from warmroute.routing.policy import Policy
from warmroute.routing.query import Query


class RandomChoice(Policy):
    name = "random"

    def __init__(self, random: Random) -> None:
        self._random = random

    def decide(self, query: Query) -> Decision:
        nodes = query.candidates.nodes
        node = nodes[int(self._random.random() * len(nodes))]
        return Decision(node, self.name, "random", lambda: self._random.sample(nodes, len(nodes)))
