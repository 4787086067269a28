"""A decision: the chosen node, the fallbacks in order, and the reason."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from warmroute._kernel import Prices
from warmroute.fleet.node import Node
from warmroute.routing.decision_record import DecisionRecord
from warmroute.routing.price_terms import Price
from warmroute.routing.query import Query

if TYPE_CHECKING:
    from warmroute.routing.pairs import Pair


class Decision:
    """The price and the order of the fallbacks are computed when first needed."""

    node: Node
    policy: str
    reason: str
    order: Callable[[], Sequence[Node]] | None
    """Returns all nodes, the best first; None: they are ordered by price."""
    prices: Prices | None
    """One for each of the `candidates`; None if the policy has no prices."""
    candidates: tuple[Node, ...]
    index: int
    """The chosen node's index in `candidates`; -1 if it was not chosen by price."""
    cache_counts: bool
    """Whether cached prefixes lowered the prices."""
    query: Query | None = None
    """What the decision is based on."""
    pair: Pair | None
    """Set if another node prefills the prompt, and `node` decodes."""
    _price: Price | None = None

    def __init__(
        self,
        node: Node,
        policy: str,
        reason: str,
        order: Callable[[], Sequence[Node]] | None = None,
        prices: Prices | None = None,
        candidates: tuple[Node, ...] = (),
        index: int = -1,
        cache_counts: bool = True,
        pair: Pair | None = None,
    ) -> None:
        self.node = node
        self.policy = policy
        self.reason = reason
        self.order = order
        self.prices = prices
        self.candidates = candidates
        self.index = index
        self.cache_counts = cache_counts
        self.pair = pair

    @property
    def price(self) -> Price | None:
        """The chosen node's price; None if it was not chosen by price."""
        if self._price is None and self.index >= 0:
            if self.pair is not None and self.pair.price is not None:
                return self.pair.price
            assert self.prices is not None
            self._price = tuple.__new__(Price, self.prices[self.index])
        return self._price

    @property
    def entry_node(self) -> Node:
        """The node that gets the request first: its queue is the one to wait for."""
        return self.node if self.pair is None else self.pair.prefill_node

    @property
    def is_full(self) -> bool:
        """Whether a node that the request would be sent to has as many requests as it may have."""
        return self.is_limited and (self.node.is_full or self.entry_node.is_full)

    @property
    def is_limited(self) -> bool:
        """Whether a node that the request would be sent to has a limit of its requests."""
        return self.node.is_limited or (self.pair is not None and self.pair.prefill_node.is_limited)

    def fallbacks(self) -> list[Node]:
        """Return the other candidates, the best first."""
        order = self.order() if self.order is not None else self._by_price()
        return [node for node in order if node is not self.node]

    def _by_price(self) -> list[Node]:
        prices, nodes = self.prices, self.candidates
        assert prices is not None
        return [nodes[index] for index in sorted(range(len(nodes)), key=prices.__getitem__)]

    def with_fallbacks(self, nodes: Sequence[Node]) -> Decision:
        """Return the same decision with `nodes` as further fallbacks, behind its own."""

        def order() -> list[Node]:
            ranked = self.fallbacks()
            return [*ranked, *(node for node in nodes if node not in ranked)]

        return Decision(
            self.node, self.policy, self.reason, order, self.prices, self.candidates, self.index, self.cache_counts,
            pair=self.pair,
        )  # fmt: skip

    def record(self) -> DecisionRecord:
        """Return what the journal keeps."""
        node, query = self.node, self.query
        candidates, reason = self.candidates, self.reason
        tokens, expected_cached = 0, 0.0
        if query is not None:
            if not candidates:
                candidates = query.candidates.nodes
            elif query.conversation is not None and reason == "cheapest" and len(candidates) < len(query.candidates):
                reason = f"stays on {node.island}, its conversation's island"
            lookup = query.lookup
            if lookup is not None:
                tokens = lookup.token_count if lookup.special is None else lookup.special.total_tokens
                if self.index < 0 and (hit := query.hits().get(node.name)) is not None:
                    expected_cached = hit.expected
        record = DecisionRecord(
            node, self.policy, reason, tokens, expected_cached, self.index, (self.prices, candidates), len(candidates),
            self.entry_node.speed.ms_per_token, self.cache_counts, pair=self.pair,
        )  # fmt: skip
        if tokens and query is not None and query.cache_view.stores and query.lookup is not None:
            name = self.entry_node.name
            found = query.cache_view.from_store(query.group.model, query.lookup, name, query.hits().get(name))
            record.store, record.store_tokens = found
        return record
