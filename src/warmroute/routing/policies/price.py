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
second home where that costs little and pays for itself soon: it has it from then on, and has to be as good a home then.
A slow node is none.
"""

from __future__ import annotations

from random import Random
from typing import Final

from warmroute._kernel._price import CacheState, Prices, price_nodes
from warmroute.config import Pricing
from warmroute.fleet.group import Candidates
from warmroute.fleet.speed import work
from warmroute.index.cache_view import CacheView
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
PAYS_WITHIN_S: Final = 10.0
"""A second home has to pay for itself within this time, by the half of those who come that find it."""
LEAST_APART_S: Final = 0.01
MOST_KEPT: Final = 64
"""Sets of candidates whose caches are known: some are of one request only."""


class PricePolicy:
    name = "price"
    wants_tokens = True
    holds = True

    def __init__(self, cache_view: CacheView, outputs: OutputLengths, config: Pricing, random: Random) -> None:
        self._cache_view = cache_view
        self._outputs = outputs
        self._second_home_ms = config.second_home_ms
        self._late_ms = config.late_ms
        self._settings = (config.max_saving_ms, config.locality, config.room, config.memory, config.congestion)
        self._cache_counts = config.locality > 0.0
        self._random = random
        self._roster: object = None
        self._caches: dict[Candidates, tuple[CacheState | None, ...]] = {}
        """Of each candidate; looked up anew when a cache has come or gone."""

    def decide(self, query: Query) -> Decision:
        nodes = query.candidates.nodes
        prices = self.prices(query)
        reason = "cheapest"
        at = prices.beyond_doubt(TIE, CROWDED, CROWDED_REQUESTS)
        if at < 0:
            at = self._cheapest(prices)
            home = prices.second_home(at, CROWDED, CROWDED_REQUESTS, self._second_home_ms)
            nearby = home != at and nodes[home].island == nodes[at].island
            if nearby and self._pays(query, prices, at, home):
                at, reason = home, "second home"
        return Decision(nodes[at], self.name, reason, None, prices, nodes, at, self._cache_counts)

    def _cheapest(self, prices: Prices) -> int:
        tied = prices.cheapest(TIE)
        if len(tied) == 1:
            return tied[0]
        tied = prices.lightest(tied)
        return tied[int(self._random.random() * len(tied))]

    def _pays(self, query: Query, prices: Prices, at: int, other: int) -> bool:
        """Whether those who come for the same beginning get back what a second home costs, by how long ago the last one
        came. A node may be crowded by many that have little to do with this one."""
        home, second = Price(*prices[at]), Price(*prices[other])
        nodes, lookup = query.candidates.nodes, query.lookup
        if lookup is None:
            return True
        used_s = self._cache_view.last_used_s(query.request.model, lookup, nodes[at].name, home.cached)
        if used_s is None:  # by others' requests alone
            return True
        uses = PAYS_WITHIN_S / max(query.now_s - used_s, LEAST_APART_S)
        invested = (work(second.new, second.cached) - work(home.new, home.cached)) * nodes[other].speed.ms_per_token
        saved = home.own + home.contention - (second.own + second.contention - invested)
        return 0.5 * uses * saved >= second.total - home.total

    def prices(self, query: Query) -> Prices:
        """Of each candidate."""
        request, candidates, group, now_s = query.request, query.candidates, query.group, query.now_s
        lookup, adapter, cache_view = query.lookup, group.adapter, self._cache_view
        hits = query.known_hits
        output = self._outputs.expected(request.model, request.tenant, request.max_output_tokens)
        caches = self._caches.get(candidates)
        if caches is None or self._roster is not cache_view.roster:
            caches = self._caches_of(candidates)
        return price_nodes(
            candidates.nodes,
            caches,
            hits if hits is not None else query.hits(),
            cache_view.reuse.chances,
            adapter.load_ms(candidates) if adapter is not None else None,
            now_s,
            (lookup.token_count if lookup is not None else SHORT_TOKENS, output),
            ((request.deadline_s - now_s) * 1000.0, self._late_ms) if request.deadline_s else NO_DEADLINE,
            BEHIND * group.waiting / candidates.of,
            group.pace,
            self._settings,
        )

    def _caches_of(self, candidates: Candidates) -> tuple[CacheState | None, ...]:
        cache_view = self._cache_view
        if self._roster is not cache_view.roster or len(self._caches) >= MOST_KEPT:
            self._roster = cache_view.roster
            self._caches.clear()
        found = self._caches[candidates] = tuple([cache_view.cache(node.name) for node in candidates.nodes])
        return found
