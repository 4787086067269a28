"""power_of_two: the less loaded of two random nodes.

Its result is close to least_loaded. Its cost does not depend on the fleet's size, and replicas with outdated loads do
not all choose the same idle node.
"""

from __future__ import annotations

from random import Random

from warmroute.routing.decision import Decision
from warmroute.routing.policies.least_loaded import LeastLoaded
from warmroute.routing.policy import Policy
from warmroute.routing.query import Query


class PowerOfTwo(Policy):
    name = "power_of_two"

    def __init__(self, random: Random) -> None:
        self._random = random
        self._least_loaded = LeastLoaded(random)

    def decide(self, query: Query) -> Decision:
        nodes = query.candidates.nodes
        count = len(nodes)
        first = int(self._random.random() * count)
        node = nodes[first]
        if count > 1:
            second = int(self._random.random() * (count - 1))
            other = nodes[second + (second >= first)]
            if other.load < node.load:
                node = other
        return Decision(node, self.name, "less loaded of two", lambda: self._least_loaded.by_load(nodes))
