"""A decision: the chosen node, who stands in for it and in which order, and why."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from warmroute._kernel._price import Prices
from warmroute.fleet.node import Node
from warmroute.routing.price import Price
from warmroute.routing.query import Query
from warmroute.routing.reasons import Grounds, sentence


class Decision:
    """The order of the fallbacks is worked out only when one is needed, and the reason in words when somebody asks."""

    __slots__ = ("_others", "cache_counts", "candidates", "node", "policy", "price", "prices", "query", "reason")

    def __init__(self, node: Node, policy: str, reason: str, others: Callable[[], Sequence[Node]]) -> None:
        self.node = node
        self.policy = policy
        self.reason = reason
        self._others = others
        self.price: Price | None = None
        """Of the chosen node, where prices decided."""
        self.prices: Prices | None = None
        """Of each of the `candidates`, where they were worked out."""
        self.candidates: tuple[Node, ...] = ()
        self.cache_counts = True
        """Whether prices had to do with what nodes hold of the prompt."""
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
        more.price, more.prices, more.candidates = self.price, self.prices, self.candidates
        more.cache_counts = self.cache_counts
        return more

    def grounds(self) -> Grounds:
        """What it was taken on, to be kept: nothing of the request itself is in it."""
        node, price, query = self.node, self.price, self.query
        candidates, reason = self.candidates, self.reason
        tokens, cached = 0, 0.0
        if query is not None:
            if not candidates:
                candidates = query.candidates.nodes
            elif query.stay is not None and reason == "cheapest" and len(candidates) < len(query.candidates):
                reason = f"stays on {node.island}, its conversation's home"
        if query is not None and query.lookup is not None:
            tokens = query.lookup.token_count
            if price is not None:
                cached = price.cached
            elif (hit := query.hits().get(node.name)) is not None:
                cached = hit.expected
        return Grounds(node, self.policy, reason, tokens, cached, price, self.prices, candidates, self.cache_counts)

    def sentence(self) -> str:
        """Why it was taken."""
        return sentence(self.grounds())


class Policy(Protocol):
    """Ranks candidates. A policy is one small file; it never sees an empty list of candidates."""

    name: str
    holds: bool
    """Whether requests wait here for the node it names, until that has room for them."""
    wants_tokens: bool
    """Whether it asks the index, so that prompts have to be read."""

    def decide(self, query: Query) -> Decision: ...
