"""What the journal keeps of a decision: numbers and names, nothing of the request's content."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import nsmallest
from typing import TYPE_CHECKING, Final

import msgspec

from warmroute._kernel import Prices
from warmroute.fleet.node import Node
from warmroute.fleet.prefill_work import work
from warmroute.routing.price_terms import TIE, Price

if TYPE_CHECKING:
    from warmroute.routing.pairs import Pair

KEEP_ALL_UP_TO: Final = 128
"""With more candidates than this, the journal keeps only the best prices once the request has ended."""
SPREADS: Final = (1.1, 1.5, 4.0)
"""Multiples of the lowest price within which `keep_best` searches, one after the other."""

PriceRows = Prices | Sequence[tuple[float, ...]]
"""The terms of each candidate's price."""


class DecisionRecord(msgspec.Struct, eq=False):
    node: Node
    policy: str
    reason: str
    tokens: int
    """Prompt tokens; 0 if the prompt was not looked up."""
    expected_cached: float
    """Prompt tokens expected to be cached on the node, if it was not chosen by price."""
    index: int
    """The node's index in the candidates; -1 if it was not chosen by price."""
    priced: tuple[PriceRows | None, tuple[Node, ...]]
    """Prices and candidates, in one tuple: a thread may read them while `keep_best` replaces them."""
    considered: int
    """Number of candidates."""
    ms_per_token: float
    cache_counts: bool = True
    """Whether cached prefixes lowered the prices; not with `cache_weight = 0`."""
    tied: int = 0
    """Number of candidates with the lowest price, counted by `keep_best`."""
    pair: Pair | None = None
    """Set if another node prefills the prompt, and `node` decodes."""
    store: str = ""
    """The shared KV store from which the node loads `store_tokens` of the prompt."""
    store_tokens: int = 0

    @property
    def price(self) -> Price | None:
        """The node's price; None if it was not chosen by price."""
        if self.pair is not None and self.pair.price is not None:
            return self.pair.price
        prices, candidates = self.priced
        if self.index < 0 or prices is None:
            return None
        index = self.index if isinstance(prices, Prices) else candidates.index(self.node)
        return Price(*prices[index])

    @property
    def cached(self) -> float:
        """Prompt tokens expected to be cached on the node."""
        price = self.price if self.tokens else None
        return price.cached if price is not None else self.expected_cached

    @property
    def saved_ms(self) -> float:
        """Prefill time that the cached tokens save."""
        if not self.cached:
            return 0.0
        return (work(self.tokens, 0.0) - work(self.tokens - self.cached, self.cached)) * self.ms_per_token

    def keep_best(self, count: int) -> None:
        """Drop all but the `count` lowest prices of a very large fleet."""
        prices, candidates = self.priced
        if isinstance(prices, Prices) and len(prices) > KEEP_ALL_UP_TO:
            ties = prices.cheapest(TIE)
            self.tied = len(ties)
            among = ties[: 2 * count] if self.tied >= count else _cheapest(prices, count)
            best = self._best(count, among, prices, candidates)
            self.priced = ([prices[index] for index in best], tuple([candidates[index] for index in best]))

    def ranked(self, count: int | None = None) -> list[tuple[Node, Price]]:
        """Return the `count` cheapest candidates with their prices. The chosen one is always among them."""
        prices, candidates = self.priced
        if prices is None:
            return []
        rows = [prices[index] for index in range(len(prices))]
        best = self._best(count or len(rows), range(len(rows)), rows, candidates)
        return [(candidates[index], Price(*rows[index])) for index in best]

    def _best(self, count: int, among: Sequence[int], prices: PriceRows, candidates: tuple[Node, ...]) -> list[int]:
        best = nsmallest(count, among, key=prices.__getitem__)
        try:
            index = candidates.index(self.node)
        except ValueError:  # a half-open node is not a candidate
            return best
        if index not in best:
            best[-1:] = [index] if len(best) == count else [*best[-1:], index]
        return best


def _cheapest(prices: Prices, count: int) -> Sequence[int]:
    """Return the indexes of at least `count` of the cheapest nodes, and of few others if possible."""
    for spread in SPREADS:
        near = prices.cheapest(spread)
        if len(near) >= count:
            return near
    return range(len(prices))
