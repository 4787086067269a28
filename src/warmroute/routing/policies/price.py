"""price: the node where the request costs the least, its own time and everybody else's together.

    its own    wait         prefill work that is ahead of it there
             + prefill      of the tokens that are not a confident hit, at the node's learned speed
             + room         finding KV memory for its new tokens and its answer
             + contention   its answer flows slower beside a large batch
             + distance     the way to the node's island, and what its network costs
             + adapter      loading the LoRA adapter, where the node has not done so
             + risk         how likely its first token comes late, where it has a deadline
    others'  + memory       what its new blocks push out of the cache, by the chance that they would be used again
             + congestion   its new work × how many wait behind it or arrive meanwhile

All terms are in milliseconds; `routing/terms.py` has a function for each, and the kernel works them out for all nodes.
Prices within TIE of the lowest are equal: the less loaded node wins, then chance. A beginning that crowds a node gets a
second home where that costs little.
"""

from __future__ import annotations

from random import Random
from typing import Final
from weakref import WeakKeyDictionary

from warmroute._kernel._price import CacheState, Prices, price_nodes
from warmroute.config import Pricing
from warmroute.fleet.group import Candidates
from warmroute.fleet.node import Node
from warmroute.index.beliefs import Beliefs
from warmroute.routing.decision import Decision
from warmroute.routing.outputs import OutputLengths
from warmroute.routing.price import TIE, Price
from warmroute.routing.query import Query

BEHIND: Final = 0.5
"""Of those who wait for a node, so many will be behind this one."""
SHORT_TOKENS: Final = 100.0
"""A prompt that was not read is taken to be so long."""
NO_DEADLINE: Final = (0.0, 0.0)
CROWDED: Final = 1.25
CROWDED_REQUESTS: Final = 3
"""A node is crowded with more than this × the mean of requests, and so many above."""


class PricePolicy:
    name = "price"
    wants_tokens = True
    holds = True

    def __init__(self, beliefs: Beliefs, outputs: OutputLengths, config: Pricing, random: Random) -> None:
        self._beliefs = beliefs
        self._outputs = outputs
        self._second_home_ms = config.second_home_ms
        self._late_ms = config.late_ms
        self._settings = (config.max_saving_ms, config.locality, config.room, config.memory, config.congestion)
        self._cache_counts = config.locality > 0.0
        self._random = random
        self._roster: object = None
        self._caches: WeakKeyDictionary[Candidates, tuple[CacheState | None, ...]] = WeakKeyDictionary()
        """Of each candidate; looked up anew when a cache has come or gone."""

    def decide(self, query: Query) -> Decision:
        nodes = query.candidates.nodes
        prices = self.prices(query)
        at = self._cheapest(prices)
        price = Price(*prices[at])
        reason = "cheapest"
        if price.cached:
            home = self._second_home(prices, at, nodes[at].load, price.own)
            if home != at and nodes[home].island == nodes[at].island:  # a second home is nearby
                at, price, reason = home, Price(*prices[home]), "second home"

        def by_price() -> list[Node]:
            return [nodes[other] for other in sorted(range(len(nodes)), key=prices.__getitem__)]

        decision = Decision(nodes[at], self.name, reason, by_price)
        decision.price, decision.prices, decision.candidates = price, prices, nodes
        decision.cache_counts = self._cache_counts
        return decision

    def _cheapest(self, prices: Prices) -> int:
        tied = prices.cheapest(TIE)
        if len(tied) == 1:
            return tied[0]
        tied = prices.lightest(tied)
        return tied[int(self._random.random() * len(tied))]

    def _second_home(self, prices: Prices, home: int, load: int, own_ms: float) -> int:
        """Where a crowded node is the cheapest by what it has cached: another one, if that costs little more. It has it
        from then on, and has to be as good a home then: a slow node is none."""
        mean = prices.mean_load
        if load <= CROWDED * mean + CROWDED_REQUESTS:
            return home
        other = prices.second_home(home, mean, own_ms + self._second_home_ms)
        return other if other >= 0 else home

    def prices(self, query: Query) -> Prices:
        """Of each candidate."""
        ask, candidates, group, now_s = query.ask, query.candidates, query.group, query.now_s
        tokens = query.lookup.token_count if query.lookup is not None else SHORT_TOKENS
        output = self._outputs.expected(ask.model, ask.tenant, ask.max_output_tokens)
        return price_nodes(
            candidates.nodes,
            self._caches_of(candidates),
            query.hits(),
            self._beliefs.reuse.chances,
            query.adapter_ms,
            now_s,
            (tokens, output),
            ((ask.deadline_s - now_s) * 1000.0, self._late_ms) if ask.deadline_s else NO_DEADLINE,
            BEHIND * group.waiting / candidates.of,
            group.pace.line,
            self._settings,
        )

    def _caches_of(self, candidates: Candidates) -> tuple[CacheState | None, ...]:
        beliefs = self._beliefs
        if self._roster is not beliefs.roster:
            self._roster = beliefs.roster
            self._caches.clear()
        found = self._caches.get(candidates)
        if found is None:
            found = self._caches[candidates] = tuple([beliefs.cache(node.name) for node in candidates.nodes])
        return found
