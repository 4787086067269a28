"""Why a request went where it went, in a sentence: "node-3: 6,144 of 8,210 tokens warm, saves 410 ms; node-1 is free
but cold". Worked out when somebody asks, from what was kept when the decision was taken.

A sentence says what was chosen, what speaks for it, and why the strongest rival lost: by the term of the price in which
it is the dearest. It says only what was known then. How many requests a node had is not kept, so "free" is a node with
no prefill of ours queued.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import nsmallest
from typing import Final

import msgspec

from warmroute._kernel._price import Prices
from warmroute.fleet.node import Node
from warmroute.fleet.speed import work
from warmroute.routing.price import TERMS, TIE, Price

WHOLE: Final = 128
"""Of so many candidates every price is kept; of more, only the best once the request has ended."""
SPREADS: Final = (1.1, 1.5, 4.0)
"""How far from the cheapest the best of many are looked for."""
FREE_MS: Final = 1.0
FOLLOWS: Final = ("congestion", "risk")
"""Terms that grow with the others: one of those is why, where there is one to speak of."""
OF_NOTE: Final = 0.1

Rows = Prices | Sequence[tuple[float, ...]]
"""What each candidate costs, term by term."""


class Grounds(msgspec.Struct, eq=False):
    """What a decision was taken on. Holds nothing of the request but numbers: it may be kept for long."""

    node: Node
    policy: str
    reason: str
    tokens: int
    """Of the prompt; 0 where it was not read."""
    expected: float
    """Of these, expected to be cached on the node, where no price says it."""
    at: int
    """The number of the node among the candidates; -1 where prices did not decide."""
    priced: tuple[Rows | None, tuple[Node, ...]]
    """The prices and whose they are: together, since a thread may read them while the request ends."""
    considered: int
    ms_per_token: float
    cache_counts: bool = True
    """Whether what is cached had a say; not with `locality = 0`."""
    tied: int = 0
    """Of those that `cut` has left out, too: how many cost the same as the cheapest."""

    @property
    def prices(self) -> Rows | None:
        """Of each candidate, where prices were worked out."""
        return self.priced[0]

    @property
    def price(self) -> Price | None:
        """Of the node, where prices decided."""
        prices, candidates = self.priced
        if self.at < 0 or prices is None:
            return None
        at = self.at if isinstance(prices, Prices) else candidates.index(self.node)
        return Price(*prices[at])

    @property
    def cached(self) -> float:
        """Of the tokens, expected to be cached on the node."""
        price = self.price if self.tokens else None
        return price.cached if price is not None else self.expected

    def cut(self, most: int) -> None:
        """Gives up the prices of all but the best, where there are very many."""
        prices, candidates = self.priced
        if isinstance(prices, Prices) and len(prices) > WHOLE:
            near = prices.cheapest(TIE)
            self.tied = len(near)
            among = near[: 2 * most] if self.tied >= most else _near(prices, most)
            best = self._best(most, among, prices, candidates)
            self.priced = ([prices[at] for at in best], tuple([candidates[at] for at in best]))

    def ranked(self, most: int | None = None) -> list[tuple[Node, Price]]:
        """The candidates, cheapest first; of more than `most`, the best and the chosen one."""
        prices, candidates = self.priced
        if prices is None:
            return []
        rows = [prices[at] for at in range(len(prices))]
        best = self._best(most or len(rows), range(len(rows)), rows, candidates)
        return [(candidates[at], Price(*rows[at])) for at in best]

    def _best(self, most: int, among: Sequence[int], prices: Rows, candidates: tuple[Node, ...]) -> list[int]:
        best = nsmallest(most, among, key=prices.__getitem__)
        try:
            at = candidates.index(self.node)
        except ValueError:  # on trial: it is none of them
            return best
        if at not in best:
            best[-1:] = [at] if len(best) == most else [*best[-1:], at]
        return best

    @property
    def saved_ms(self) -> float:
        """Prefill that what is cached there saves."""
        if not self.cached:
            return 0.0
        return (work(self.tokens, 0.0) - work(self.tokens - self.cached, self.cached)) * self.ms_per_token


def _near(prices: Prices, most: int) -> Sequence[int]:
    """At least so many of the cheapest, and not many more where that is easily found."""
    for spread in SPREADS:
        near = prices.cheapest(spread)
        if len(near) >= most:
            return near
    return range(len(prices))


def sentence(
    grounds: Grounds, *, held_ms: float = 0.0, tried: int = 1, last: Node | None = None, failed: bool = False
) -> str:
    """`held_ms`: how long it waited here. `tried`: nodes that it was sent to, of which `last` is the last, and `failed`
    as did the others."""
    text = f"{grounds.node.name}: {_why(grounds)}"
    if held_ms >= FREE_MS:
        text += f"; it waited here for {ms(held_ms)} first"
    if failed:
        return f"no node answered, {tried} tried; chosen was {text}"
    if tried > 1 and last is not None:
        others = "" if tried == 2 else f", as did {_number(tried - 2, 'other')}"
        return f"{last.name}: stands in for {grounds.node.name}, which failed{others}; chosen was {text}"
    return text


def _why(grounds: Grounds) -> str:
    if grounds.policy == "trial":
        instead = grounds.ranked(1)
        return "on trial after failures: it takes one request at a time until one succeeds" + (
            f"; by price it would have been {instead[0][0].name}" if instead else ""
        )
    if grounds.considered == 1 and ((grounds.policy, grounds.reason) in _OTHERS or grounds.reason in _USUAL):
        return "the only node that can take it" + (f"; {_warmth(grounds, ())}" if grounds.tokens else "")
    if grounds.price is None:
        return _OTHERS.get((grounds.policy, grounds.reason), _by_reason)(grounds)
    return _by_price(grounds, grounds.price)


# By price.

_USUAL: Final = ("cheapest", "second home")
"""Why the policy `price` itself decides; others are those of islands and of admission."""


def _by_price(grounds: Grounds, price: Price) -> str:
    ranked = grounds.ranked()
    others = [(node, other) for node, other in ranked if node is not grounds.node]
    if grounds.reason == "second home":
        home, at_home = ranked[0]
        return (
            f"a second home for {_tokens(at_home.cached)} that crowd {home.name}; "
            f"costs {ms(price.total - at_home.total)} more this time"
        )
    parts = [_warmth(grounds, others)]
    nearest = min(ranked, key=lambda one: one[1].distance)
    if grounds.reason not in _USUAL:
        parts.append(grounds.reason)
    elif price.distance - nearest[1].distance >= FREE_MS and nearest[0].island != grounds.node.island:
        parts.append(f"crosses to {grounds.node.island or 'another island'}, {ms(price.distance)} away")
    if not others:
        return "; ".join(parts)
    tied = grounds.tied or sum(1 for _, other in ranked if other.total <= ranked[0][1].total * TIE)
    if tied > 1 and price.total <= ranked[0][1].total * TIE:
        equals = others[0][0].name if tied == 2 else f"{others[0][0].name} and {_number(tied - 2, 'other')}"
        parts.append(f"{equals} {'costs' if tied == 2 else 'cost'} the same: fewer requests, then chance, decided")
        if not grounds.tokens or price.cached >= 1.0 or all(other.cached < 1.0 for _, other in others[tied - 1 :]):
            return "; ".join(parts)
        parts.append(_rival(grounds, price, others[tied - 1 :]))
    else:
        parts.append(_rival(grounds, price, others))
    return "; ".join(parts)


def _warmth(grounds: Grounds, others: Sequence[tuple[Node, Price]]) -> str:
    price = grounds.price
    if not grounds.tokens or not grounds.cache_counts:
        queued = f"{ms(price.wait)} of prefill" if price is not None and price.wait >= FREE_MS else "nothing"
        why = "caches do not count here (locality = 0)" if grounds.tokens else "its prompt was not read"
        return f"{why}, so load decides: {queued} is queued there"
    if grounds.cached >= 1.0:
        return f"{grounds.cached:,.0f} of {_tokens(grounds.tokens)} warm, saves {ms(grounds.saved_ms)}"
    passed_over = grounds.reason not in _USUAL  # somebody who may have it
    if passed_over or not others or any(other.cached >= 1.0 for _, other in others):
        return f"cold, {_tokens(grounds.tokens)} to prefill"
    return f"none of its {_tokens(grounds.tokens)} is warm anywhere"


def _rival(grounds: Grounds, price: Price, others: Sequence[tuple[Node, Price]]) -> str:
    """The cheapest of the others; where the chosen one is cold and another is not, the cheapest of those."""
    node, rival = others[0]
    if grounds.tokens and price.cached < 1.0:
        node, rival = next((other for other in others if other[1].cached >= 1.0), others[0])
    term = _dearest(rival, price)
    more_ms = getattr(rival, term) - getattr(price, term)
    if more_ms < FREE_MS:
        return f"{node.name} costs {ms(max(0.0, rival.total - price.total))} more"
    lost = _LOST[term](rival, price) if term in _LOST else f"costs {ms(more_ms)} more for {term}"
    good = ""
    if rival.cached >= price.cached + 1.0:
        good = f"has {_tokens(rival.cached)} warm"
    elif rival.wait < FREE_MS and term != "wait":
        good = "is free"
    if good and lost[:3] == good[:3]:  # "is free but is cold": once is enough
        lost = lost.partition(" ")[2]
    return f"{node.name} {good} but {lost}" if good else f"{node.name} {lost}"


def _dearest(rival: Price, price: Price) -> str:
    """The term in which the rival is the dearest."""
    more = {term: getattr(rival, term) - getattr(price, term) for term in TERMS}
    causes = {term: more_ms for term, more_ms in more.items() if term not in FOLLOWS}
    cause, follows = max(causes, key=causes.__getitem__), max(more, key=more.__getitem__)
    return cause if causes[cause] >= OF_NOTE * more[follows] else follows


def _prefill_lost(rival: Price, price: Price) -> str:
    if rival.cached < 1.0 and price.cached >= 1.0:
        return "is cold"
    if rival.cached < price.cached - 1.0:
        return f"has only {rival.cached:,.0f} of them warm"
    return f"takes {ms(rival.prefill - price.prefill)} longer to prefill"


_LOST: Final[dict[str, Callable[[Price, Price], str]]] = {
    "wait": lambda rival, _: f"has {ms(rival.wait)} of prefill queued",
    "prefill": _prefill_lost,
    "room": lambda rival, _: f"is short of KV memory ({ms(rival.room)} until there is room)",
    "contention": lambda _rival, _: "has a larger batch, beside which the answer would flow slower",
    "distance": lambda rival, _: f"is {ms(rival.distance)} away",
    "adapter": lambda rival, _: f"would have to load the adapter first ({ms(rival.adapter)})",
    "risk": lambda _rival, _: "would more likely miss the deadline",
    "memory": lambda rival, _: f"would push out what others will likely need ({ms(rival.memory)})",
    "congestion": lambda rival, price: f"would keep others waiting {ms(rival.congestion - price.congestion)} longer",
}


# By other policies.


def _by_reason(grounds: Grounds) -> str:
    return f"{grounds.reason} ({grounds.policy})"


def _overlap(grounds: Grounds) -> str:
    return f"holds the most of its prompt, {grounds.cached:,.0f} of {_tokens(grounds.tokens)}, among nodes with room"


_OTHERS: Final[dict[tuple[str, str], Callable[[Grounds], str]]] = {
    ("overlap", "longest overlap"): _overlap,
    ("approximate", "longest overlap"): _overlap,
    ("round_robin", "its turn"): lambda _: "it is its turn (round_robin)",
    ("random", "by chance"): lambda _: "picked by chance (random)",
    ("least_loaded", "fewest requests"): lambda _: "none has fewer requests",
    ("power_of_two", "fewer requests of two"): lambda _: "no more requests than the other of two picked by chance",
    ("latency", "lowest queue × latency"): lambda _: "the lowest (requests there + 1) × average latency",
    ("session", "home"): lambda _: "the home of its session",
    ("session", "home is full"): lambda _: "next in line: the home of its session has too many requests",
    ("prefix_hash", "home"): lambda _: "the home of prompts that begin like it",
    ("prefix_hash", "home is full"): lambda _: "next in line: the home of its prompt's beginning has too many requests",
}


# Numbers in words.


def ms(value: float) -> str:
    if value >= 10_000.0:
        return f"{value / 1000.0:,.1f} s"
    return f"{value:,.0f} ms" if value >= 9.5 or value < 0.05 else f"{value:.1f} ms"


def _tokens(count: float) -> str:
    return f"{count:,.0f} token{'' if round(count) == 1 else 's'}"


def _number(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"
