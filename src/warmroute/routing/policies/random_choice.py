"""random: any node with the same chance."""

from __future__ import annotations

from random import Random

from warmroute.fleet.group import Candidates, Group
from warmroute.prompt.ask import Ask
from warmroute.routing.decision import Decision


class RandomChoice:
    name = "random"

    def __init__(self, random: Random) -> None:
        self._random = random

    def decide(self, ask: Ask, candidates: Candidates, group: Group) -> Decision:
        nodes = candidates.nodes
        node = nodes[int(self._random.random() * len(nodes))]
        return Decision(node, self.name, "by chance", lambda: self._random.sample(nodes, len(nodes)))
