"""latency: lowest (queued + in flight + 1) × latency average, in ms: how long this request would take if each one
there took its turn. Queued and in flight together are the node's load. Nodes without an average yet are taken at the
mean of those that have one, so that they get tried.
"""

from __future__ import annotations

from random import Random

from warmroute.fleet.group import Candidates, Group
from warmroute.fleet.node import Node
from warmroute.prompt.ask import Ask
from warmroute.routing.decision import Decision


class Latency:
    name = "latency"

    def __init__(self, random: Random) -> None:
        self._random = random

    def decide(self, ask: Ask, candidates: Candidates, group: Group) -> Decision:
        ranked = self._by_time(candidates.nodes)
        return Decision(ranked[0], self.name, "lowest queue × latency", lambda: ranked)

    def _by_time(self, nodes: tuple[Node, ...]) -> list[Node]:
        known = [node.latency_ms for node in nodes if node.latency_ms]
        mean_ms = sum(known) / len(known) if known else 1.0
        chance = self._random.random
        return sorted(
            nodes,
            key=lambda node: ((node.load + 1) * (node.latency_ms or mean_ms), chance()),
        )
