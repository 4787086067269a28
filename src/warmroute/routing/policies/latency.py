"""latency: the node with the lowest (queued + in flight + 1) × average latency, in ms.

This is the time the request would take if the node served its requests one after the other. A node without an average
gets the mean of the others, so that it is tried; the average of a node without requests decays.
"""

from __future__ import annotations

from random import Random

from warmroute.fleet.node import Node
from warmroute.routing.decision import Decision
from warmroute.routing.policy import Policy
from warmroute.routing.query import Query


class Latency(Policy):
    name = "latency"

    def __init__(self, random: Random) -> None:
        self._random = random

    def decide(self, query: Query) -> Decision:
        nodes = query.candidates.nodes
        times_ms = _times_ms(nodes)
        lowest = min(times_ms)
        ties = [node for node, time_ms in zip(nodes, times_ms, strict=True) if time_ms == lowest]
        node = ties[int(self._random.random() * len(ties))]
        return Decision(node, self.name, "lowest load × latency", lambda: _by_time(nodes))


def _times_ms(nodes: tuple[Node, ...]) -> list[float]:
    known = [node.latency_ms for node in nodes if node.latency_ms]
    mean_ms = sum(known) / len(known) if known else 1.0
    return [(node.inflight + node.other_load + 1) * (node.latency_ms or mean_ms) for node in nodes]


def _by_time(nodes: tuple[Node, ...]) -> list[Node]:
    times_ms = dict(zip(nodes, _times_ms(nodes), strict=True))
    return sorted(nodes, key=times_ms.__getitem__)
