"""A decision: the chosen node, who stands in for it and in which order, and why."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from warmroute.fleet.node import Node
from warmroute.routing.price import Price
from warmroute.routing.query import Query


class Decision:
    """The order of the fallbacks is worked out only when one is needed."""

    __slots__ = ("_others", "node", "policy", "price", "query", "reason")

    def __init__(self, node: Node, policy: str, reason: str, others: Callable[[], Sequence[Node]]) -> None:
        self.node = node
        self.policy = policy
        self.reason = reason
        self._others = others
        self.price: Price | None = None
        """Of the chosen node, where prices decided."""
        self.query: Query | None = None
        """What was known when it was taken."""

    def fallbacks(self) -> list[Node]:
        """The other candidates, best first."""
        return [node for node in self._others() if node is not self.node]

    def with_more(self, nodes: Sequence[Node]) -> Decision:
        """The same, with more nodes to stand in behind the others."""

        def all_of_them() -> list[Node]:
            ranked = self.fallbacks()
            return [*ranked, *(node for node in nodes if node not in ranked)]

        more = Decision(self.node, self.policy, self.reason, all_of_them)
        more.price = self.price
        return more


class Policy(Protocol):
    """Ranks candidates. A policy is one small file; it never sees an empty list of candidates."""

    name: str
    holds: bool
    """Whether requests wait here for the node it names, until that has room for them."""
    wants_tokens: bool
    """Whether it asks the index, so that prompts have to be read."""

    def decide(self, query: Query) -> Decision: ...
