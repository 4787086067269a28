"""latency: lowest (queued + in flight + 1) × latency average, in ms: how long this request would take if each one
there took its turn. Queued and in flight together are the node's load. Nodes without an average yet are taken at the
mean of those that have one, so that they get tried; an average that no request confirms fades.
"""

from __future__ import annotations

from random import Random

from warmroute.fleet.node import Node
from warmroute.routing.decision import Decision
from warmroute.routing.query import Query


class Latency:
    name = "latency"
    wants_tokens = False
    holds = False

    def __init__(self, random: Random) -> None:
        self._random = random

    def decide(self, query: Query) -> Decision:
        nodes = query.candidates.nodes
        times_ms = _times_ms(nodes)
        lowest = min(times_ms)
        ties = [node for node, time_ms in zip(nodes, times_ms, strict=True) if time_ms == lowest]
        node = ties[int(self._random.random() * len(ties))]
        return Decision(node, self.name, "lowest queue × latency", lambda: _by_time(nodes))


def _times_ms(nodes: tuple[Node, ...]) -> list[float]:
    known = [node.latency_ms for node in nodes if node.latency_ms]
    mean_ms = sum(known) / len(known) if known else 1.0
    return [(node.inflight + node.other_load + 1) * (node.latency_ms or mean_ms) for node in nodes]


def _by_time(nodes: tuple[Node, ...]) -> list[Node]:
    times_ms = dict(zip(nodes, _times_ms(nodes), strict=True))
    return sorted(nodes, key=times_ms.__getitem__)
