"""round_robin: each node of a model in turn. Knows neither load nor cache; the baseline."""

from __future__ import annotations

from warmroute.fleet.group import Candidates, Group
from warmroute.prompt.ask import Ask
from warmroute.routing.decision import Decision


class RoundRobin:
    name = "round_robin"

    def __init__(self) -> None:
        self._turns: dict[str, int] = {}

    def decide(self, ask: Ask, candidates: Candidates, group: Group) -> Decision:
        nodes = candidates.nodes
        turn = self._turns.get(group.model, 0)
        self._turns[group.model] = turn + 1
        at = turn % len(nodes)
        return Decision(nodes[at], self.name, "its turn", lambda: nodes[at:] + nodes[:at])
