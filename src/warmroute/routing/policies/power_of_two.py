"""power_of_two: the less loaded of two nodes picked by chance. Close to least_loaded, in time that does not grow with
the fleet, and without the herd that runs to one idle node when replicas see stale loads.
"""

from __future__ import annotations

from random import Random

from warmroute.routing.decision import Decision
from warmroute.routing.policies.least_loaded import LeastLoaded
from warmroute.routing.query import Query


class PowerOfTwo:
    name = "power_of_two"
    wants_tokens = False
    holds = False

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
        return Decision(node, self.name, "fewer requests of two", lambda: self._least_loaded.by_load(nodes))
