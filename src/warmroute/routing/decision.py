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
    """The order of the fallbacks is worked out only when one is needed, the price when it is looked at, and the reason
    in words when somebody asks."""

    __slots__ = ("_others", "_price", "at", "cache_counts", "candidates", "node", "policy", "prices", "query", "reason")

    def __init__(
        self, node: Node, policy: str, reason: str, others: Callable[[], Sequence[Node]] | None = None,
        prices: Prices | None = None, candidates: tuple[Node, ...] = (), at: int = -1, cache_counts: bool = True,
    ) -> None:  # fmt: skip
        """`others`: all nodes in their order, the best first; None where that is the order of the prices."""
        self.node = node
        self.policy = policy
        self.reason = reason
        self._others = others
        self.prices = prices
        """Of each of the `candidates`, where they were worked out."""
        self.candidates = candidates
        self.at = at
        """The number of the chosen node among them; -1 where prices did not decide."""
        self._price: Price | None = None
        self.cache_counts = cache_counts
        """Whether prices had to do with what nodes hold of the prompt."""
        self.query: Query | None = None
        """What was known when it was taken."""

    @property
    def price(self) -> Price | None:
        """Of the chosen node, where prices decided."""
        if self._price is None and self.at >= 0:
            assert self.prices is not None
            self._price = Price(*self.prices[self.at])
        return self._price

    def fallbacks(self) -> list[Node]:
        """The other candidates, best first."""
        others = self._others() if self._others is not None else self._by_price()
        return [node for node in others if node is not self.node]

    def _by_price(self) -> list[Node]:
        prices, nodes = self.prices, self.candidates
        assert prices is not None
        return [nodes[at] for at in sorted(range(len(nodes)), key=prices.__getitem__)]

    def with_more(self, nodes: Sequence[Node]) -> Decision:
        """The same, with more nodes to stand in behind the others."""

        def all_of_them() -> list[Node]:
            ranked = self.fallbacks()
            return [*ranked, *(node for node in nodes if node not in ranked)]

        return Decision(
            self.node, self.policy, self.reason, all_of_them, self.prices, self.candidates, self.at, self.cache_counts
        )

    def grounds(self) -> Grounds:
        """What it was taken on, to be kept: nothing of the request itself is in it."""
        node, query = self.node, self.query
        candidates, reason = self.candidates, self.reason
        tokens, expected = 0, 0.0
        if query is not None:
            if not candidates:
                candidates = query.candidates.nodes
            elif query.stay is not None and reason == "cheapest" and len(candidates) < len(query.candidates):
                reason = f"stays on {node.island}, its conversation's home"
            lookup = query.lookup
            if lookup is not None:
                tokens = lookup.token_count
                if self.at < 0 and (hit := query.hits().get(node.name)) is not None:
                    expected = hit.expected
        return Grounds(
            node, self.policy, reason, tokens, expected, self.at, (self.prices, candidates), len(candidates),
            node.speed.ms_per_token, self.cache_counts,
        )  # fmt: skip

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
