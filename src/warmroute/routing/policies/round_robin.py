"""round_robin: each node of a model in turn. It ignores load and cache; the baseline."""

from __future__ import annotations

from warmroute.routing.decision import Decision
from warmroute.routing.policy import Policy
from warmroute.routing.query import Query


class RoundRobin(Policy):
    name = "round_robin"

    def __init__(self) -> None:
        self._turns: dict[str, int] = {}

    def __copy__(self) -> RoundRobin:
        """Return a copy whose decisions do not advance this one."""
        twin = RoundRobin()
        twin._turns = self._turns.copy()
        return twin

    def decide(self, query: Query) -> Decision:
        group = query.group
        nodes = query.candidates.nodes
        turn = self._turns.get(group.model, 0)
        self._turns[group.model] = turn + 1
        index = turn % len(nodes)
        return Decision(nodes[index], self.name, "next in turn", lambda: nodes[index:] + nodes[:index])
