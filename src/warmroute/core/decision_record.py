"""The terms of a price, what is kept of a decision, and the reason for it in words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import nsmallest
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from warmroute._kernel import Prices
from warmroute.core.node import Node
from warmroute.core.prefill_work import work

if TYPE_CHECKING:
    from warmroute.core.pairs import Pair


# The terms of the price of one node for one request.
#
# policies/price.py explains them, tests/routing/price_formulas.py has the formulas in Python, and
# _kernel/price.c computes them.

TIE: Final = 1.02
"""Prices up to this × the lowest one count as equal."""
ASSUMED_PROMPT_TOKENS: Final = 100.0
"""Length of a prompt that was not tokenized."""


class Price(NamedTuple):
    """All costs are in milliseconds."""

    total: float
    wait: float
    prefill: float
    room: float
    contention: float
    distance: float
    adapter: float
    risk: float
    memory: float
    congestion: float
    cached: float
    """Prompt tokens that the router expects to be cached on the node."""
    new: float
    """The other prompt tokens."""
    output: float
    """Expected output tokens."""

    @property
    def own(self) -> float:
        """The request's own time until its first token."""
        return self.wait + self.prefill + self.room + self.adapter + self.distance


TERMS: Final = Price._fields[1 : Price._fields.index("cached")]
"""The terms that add up to `total`."""


# What the journal keeps of a decision: numbers and names, nothing of the request's content.

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


# Explains a decision in one sentence, from what the journal keeps of it.
#
#     node-3: 6,144 of 8,210 tokens cached, saves 410 ms; node-1 is idle but has none of them cached
#
# The sentence names the chosen node, what speaks for it, and the best rival with the price term that cost it the
# choice. The record does not have the nodes' loads, so "idle" is a node without queued prefill of this router.

NEGLIGIBLE_MS: Final = 1.0
DERIVED_TERMS: Final = ("congestion", "risk")
"""Terms that grow with the others. Another term is the cause, if it has at least CAUSE_SHARE of their difference."""
CAUSE_SHARE: Final = 0.1


def explain_decision(
    record: DecisionRecord,
    *,
    queued_ms: float = 0.0,
    tried: int = 1,
    last: Node | None = None,
    failed: bool = False,
    poison: bool = False,
) -> str:
    """`queued_ms`: time in the admission queue. `tried`: number of nodes tried, `last` of them last. `failed`: all
    of them failed. `poison`: while they served other requests."""
    text = f"{record.node.name}: {_why(record)}"
    if queued_ms >= NEGLIGIBLE_MS:
        text += f"; queued for {_ms(queued_ms)} first"
        if most := record.node.max_inflight or record.node.concurrency.most:
            known = "max_inflight" if record.node.max_inflight else "learned"
            text += f" ({record.node.name} gets at most {_number(most, 'request')} at a time: {known})"
    if poison:
        nodes = f"{_number(tried, 'node')} that serve other requests answered it with an error"
        return (
            f"probably the request itself is at fault: {nodes}, so no further node was tried; first choice was {text}"
        )
    if failed:
        return f"no node answered ({_number(tried, 'node')} tried); first choice was {text}"
    if tried > 1 and last is not None:
        others = "" if tried == 2 else f" and {_number(tried - 2, 'other')}"
        return f"{last.name}: retry after {record.node.name}{others} failed; first choice was {text}"
    if record.pair is not None and last is not None and last is not record.node:
        text += f"; {last.name} decodes, which cost less when the prompt was prefilled"
    return text


def _why(record: DecisionRecord) -> str:
    if record.policy == "half_open":
        cheapest = record.ranked(1)
        return "trial request to a half-open node after failures" + (
            f"; the cheapest node is {cheapest[0][0].name}" if cheapest else ""
        )
    if record.pair is not None:
        return _by_pair(record, record.pair)
    if record.considered == 1 and ((record.policy, record.reason) in _BY_POLICY or record.reason in _PRICE_REASONS):
        return "the only candidate" + (f"; {_cached(record, ())}" if record.tokens else "")
    if record.price is None:
        return _BY_POLICY.get((record.policy, record.reason), _by_reason)(record)
    return _by_price(record, record.price)


def _by_pair(record: DecisionRecord, pair: Pair) -> str:
    price, name = pair.price, pair.prefill_node.name
    if price is None:
        return f"{name} prefills; the decode node needs a prefill node"
    parts = [
        f"{name} prefills ({price.cached:,.0f} of {_tokens(record.tokens)} cached there)",
        f"{_tokens(pair.transfer_tokens)} transferred in {_ms(pair.transfer_ms)}",
    ]
    more_ms = pair.alone_ms - price.total
    if more_ms >= NEGLIGIBLE_MS:
        parts.append(f"one node alone would cost {_ms(more_ms)} more")
    return "; ".join(parts)


# The policy `price`.

_PRICE_REASONS: Final = ("cheapest", "second home", "cheapest alone")
"""Reasons of the policy itself. Other reasons come from island affinity and admission."""


def _by_price(record: DecisionRecord, price: Price) -> str:
    ranked = record.ranked()
    others = [(node, other) for node, other in ranked if node is not record.node]
    if record.reason == "second home":
        home, home_price = ranked[0]
        return (
            f"second home for {_tokens(home_price.cached)} cached on {home.name}, which is crowded; "
            f"costs {_ms(price.total - home_price.total)} more this time"
        )
    parts = [_cached(record, others)]
    nearest = min(ranked, key=lambda one: one[1].distance)
    if record.reason not in _PRICE_REASONS:
        parts.append(record.reason)
    elif price.distance - nearest[1].distance >= NEGLIGIBLE_MS and nearest[0].island != record.node.island:
        parts.append(f"on {record.node.island or 'another island'}, {_ms(price.distance)} away")
    if not others:
        return "; ".join(parts)
    tied = record.tied or sum(1 for _, other in ranked if other.total <= ranked[0][1].total * TIE)
    if tied > 1 and price.total <= ranked[0][1].total * TIE:
        equals = others[0][0].name if tied == 2 else f"{others[0][0].name} and {_number(tied - 2, 'other')}"
        parts.append(f"same cost as {equals}, decided by load, then at random")
        if not record.tokens or price.cached >= 1.0 or all(other.cached < 1.0 for _, other in others[tied - 1 :]):
            return "; ".join(parts)
        parts.append(_rival(record, price, others[tied - 1 :]))
    else:
        parts.append(_rival(record, price, others))
    return "; ".join(parts)


def _cached(record: DecisionRecord, others: Sequence[tuple[Node, Price]]) -> str:
    price = record.price
    if not record.tokens or not record.cache_counts:
        queued = f"{_ms(price.wait)} of prefill" if price is not None and price.wait >= NEGLIGIBLE_MS else "no prefill"
        why = "caches do not count (cache_weight = 0)" if record.tokens else "the prompt was not looked up"
        return f"{why}, so load decided: {queued} queued"
    if record.cached >= 1.0:
        store = f" ({_tokens(record.store_tokens)} from the store {record.store})" if record.store_tokens else ""
        return f"{record.cached:,.0f} of {_tokens(record.tokens)} cached{store}, saves {_ms(record.saved_ms)}"
    excluded_some = record.reason not in _PRICE_REASONS  # nodes that may have the prefix cached
    if excluded_some or not others or any(other.cached >= 1.0 for _, other in others):
        return f"nothing cached, {_tokens(record.tokens)} to prefill"
    return f"no node has any of its {_tokens(record.tokens)} cached"


def _rival(record: DecisionRecord, price: Price, others: Sequence[tuple[Node, Price]]) -> str:
    """Say why the cheapest other node lost. If the chosen one has nothing cached, prefer a rival that has."""
    node, rival = others[0]
    if record.tokens and price.cached < 1.0:
        node, rival = next((other for other in others if other[1].cached >= 1.0), others[0])
    term = _decisive_term(rival, price)
    more_ms = getattr(rival, term) - getattr(price, term)
    if more_ms < NEGLIGIBLE_MS:
        return f"{node.name} costs {_ms(max(0.0, rival.total - price.total))} more"
    drawback = _DRAWBACKS[term](rival, price) if term in _DRAWBACKS else f"costs {_ms(more_ms)} more for {term}"
    advantage = ""
    if rival.cached >= price.cached + 1.0:
        advantage = f"has {_tokens(rival.cached)} cached"
    elif rival.wait < NEGLIGIBLE_MS and term != "wait":
        advantage = "is idle"
    if advantage and drawback[:3] == advantage[:3]:  # "is idle but 40 ms away": not "is" twice
        drawback = drawback.partition(" ")[2]
    return f"{node.name} {advantage} but {drawback}" if advantage else f"{node.name} {drawback}"


def _decisive_term(rival: Price, price: Price) -> str:
    """Return the term by which the rival is the most expensive."""
    more = {term: getattr(rival, term) - getattr(price, term) for term in TERMS}
    causes = {term: more_ms for term, more_ms in more.items() if term not in DERIVED_TERMS}
    cause, largest = max(causes, key=causes.__getitem__), max(more, key=more.__getitem__)
    return cause if causes[cause] >= CAUSE_SHARE * more[largest] else largest


def _prefill_drawback(rival: Price, price: Price) -> str:
    if rival.cached < 1.0 and price.cached >= 1.0:
        return "has none of them cached"
    if rival.cached < price.cached - 1.0:
        return f"has only {rival.cached:,.0f} of them cached"
    return f"takes {_ms(rival.prefill - price.prefill)} longer to prefill"


_DRAWBACKS: Final[dict[str, Callable[[Price, Price], str]]] = {
    "wait": lambda rival, _: f"has {_ms(rival.wait)} of prefill queued",
    "prefill": _prefill_drawback,
    "room": lambda rival, _: f"is short of KV memory ({_ms(rival.room)} until enough is free)",
    "contention": lambda _rival, _: "would decode more slowly in its larger batch",
    "distance": lambda rival, _: f"is {_ms(rival.distance)} away",
    "adapter": lambda rival, _: f"would have to load the LoRA adapter first ({_ms(rival.adapter)})",
    "risk": lambda _rival, _: "would be more likely to miss the deadline",
    "memory": lambda rival, _: f"would evict cached blocks that others are likely to need ({_ms(rival.memory)})",
    "congestion": lambda rival, price: f"would delay other requests by {_ms(rival.congestion - price.congestion)} more",
}


# Other policies.


def _by_reason(record: DecisionRecord) -> str:
    return f"{record.reason} ({record.policy})"


def _overlap(record: DecisionRecord) -> str:
    return f"longest cached prefix, {record.cached:,.0f} of {_tokens(record.tokens)}, among nodes with room"


_BY_POLICY: Final[dict[tuple[str, str], Callable[[DecisionRecord], str]]] = {
    ("overlap", "longest overlap"): _overlap,
    ("approximate", "longest overlap"): _overlap,
    ("round_robin", "next in turn"): lambda _: "next in turn (round_robin)",
    ("random", "random"): lambda _: "picked at random",
    ("least_loaded", "fewest requests"): lambda _: "no node has fewer requests",
    ("power_of_two", "less loaded of two"): lambda _: "no more requests than the other of two random nodes",
    ("latency", "lowest load × latency"): lambda _: "lowest (requests + 1) × average latency",
    ("session", "home"): lambda _: "home node of its session",
    ("session", "home overloaded"): lambda _: "next in order: the home node of its session is overloaded",
    ("prefix_hash", "home"): lambda _: "home node of its prefix",
    ("prefix_hash", "home overloaded"): lambda _: "next in order: the home node of its prefix is overloaded",
}


# Numbers.


def _ms(value: float) -> str:
    if value >= 10_000.0:
        return f"{value / 1000.0:,.1f} s"
    return f"{value:,.0f} ms" if value >= 9.5 or value < 0.05 else f"{value:.1f} ms"


def _tokens(count: float) -> str:
    return _number(round(count), "token")


def _number(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"
