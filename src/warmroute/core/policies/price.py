"""price: the node where the request costs the least time, its own and that of other requests.

    own      wait         prefill work queued ahead of it on the node
           + prefill      of the tokens that are not cached with confidence, at the node's learned speed
           + room         waiting for KV memory for its new tokens and its output
           + contention   slower decoding in a large batch, and running requests that stall during its prefill
           + distance     round trip to the node's island, egress, and the queue for the island
           + adapter      loading the LoRA adapter, if the node has not loaded it
           + risk         probability of a late first token × penalty, if it has a deadline
    others'  memory       prefilling again what its new blocks evict × the probability that it is used again
           + congestion   its new work × the requests that wait behind it or arrive meanwhile

All terms are in milliseconds. The kernel computes them for all nodes at once; tests/routing/price_formulas.py defines
each of them as a small Python function. Prices within TIE of the lowest are equal: the node with the shorter context
window wins, then the less loaded one. Of idle nodes chance decides. Of busy ones the node with the least prefill work
left wins, then the one that got a request last: the others become idle sooner.

A prefix that crowds its node gets a second home if all of these hold:
1. The cheapest node has the prefix cached, and has more than CROWDED × the mean number of requests and
   CROWDED_REQUESTS more.
2. Another node of the same island has at most the mean number of requests, serving the request there takes at most
   `second_home_ms` longer, and with the prefix cached it would cost no more than the first node.
3. The copy saves more time than it costs (see `_copy_pays_off`).
"""

from __future__ import annotations

from random import Random
from typing import Final

from warmroute._kernel import RISK_POWER, STALLED_WEIGHT, CacheState, Prices, price_nodes
from warmroute.config import Pricing
from warmroute.core.cache_view import CacheView
from warmroute.core.decision import Decision
from warmroute.core.decision_record import ASSUMED_PROMPT_TOKENS, TIE, Price
from warmroute.core.group import Candidates
from warmroute.core.output_length import OutputLengthEstimate
from warmroute.core.prefill_work import work
from warmroute.core.routing_context import ContextFit, Query

BEHIND_SHARE: Final = 0.5
"""Fraction of the queue assumed to be behind this request."""
NO_DEADLINE: Final = (0.0, 0.0)
CROWDED: Final = 1.25
CROWDED_REQUESTS: Final = 3
PAYBACK_S: Final = 10.0
"""A second home has to pay for itself within this time."""
COPY_SHARE: Final = 0.5
"""Fraction of the coming requests for the prefix assumed to use the copy."""
MIN_INTERVAL_S: Final = 0.01
MAX_CACHE_LISTS: Final = 64
"""Candidate lists whose caches are remembered. Some lists are used by one request only."""


class PricePolicy:
    name = "price"
    wants_tokens = True
    queues_at_router = True

    def __init__(
        self, cache_view: CacheView, output_lengths: OutputLengthEstimate, config: Pricing, random: Random
    ) -> None:
        self._cache_view = cache_view
        self._output_lengths = output_lengths
        self._context_fit = ContextFit(cache_view, output_lengths)
        self._second_home_ms = config.second_home_ms
        self._late_penalty_ms = config.late_penalty_ms
        self.split = config.split
        """When another node prefills (see core/pairs.py)."""
        self._settings = (config.max_saving_ms, config.cache_weight, config.room, config.memory, config.congestion)
        self._cache_counts = config.cache_weight > 0.0
        self._random = random
        self._membership: object = None
        self._caches: dict[Candidates, tuple[CacheState | None, ...]] = {}
        """The caches of each candidate list. Cleared when a node joins or leaves the cache view."""

    def __copy__(self) -> PricePolicy:
        return self  # a decision changes nothing that counts for the next one

    def decide(self, query: Query) -> Decision:
        nodes = query.candidates.nodes
        prices = self.prices(query)
        reason = "cheapest"
        index = prices.clear_winner(TIE, CROWDED, CROWDED_REQUESTS)
        if index < 0:
            index = self._cheapest(prices, query)
            second = prices.second_home(index, CROWDED, CROWDED_REQUESTS, self._second_home_ms)
            same_island = second != index and nodes[second].island == nodes[index].island
            if same_island and self._copy_pays_off(query, prices, index, second):
                index, reason = second, "second home"
        return Decision(nodes[index], self.name, reason, None, prices, nodes, index, self._cache_counts)

    def _cheapest(self, prices: Prices, query: Query) -> int:
        tied = prices.cheapest(TIE)
        if len(tied) == 1:
            return tied[0]
        if query.group.windows is not None:
            tied = query.group.windows.tightest(query.candidates.nodes, tied)
        tied, nodes = prices.least_loaded(tied), query.candidates.nodes
        if len(tied) > 1 and nodes[tied[0]].load:
            return prices.least_work_left(tied, query.now_s)
        return tied[int(self._random.random() * len(tied))]

    def _copy_pays_off(self, query: Query, prices: Prices, home_index: int, second_index: int) -> bool:
        """Return whether copying this prefix to a second node saves more time than it costs.

        A node can be crowded by requests that do not share this prefix. The mean time between the latest requests for
        it estimates how many come within PAYBACK_S.
        """
        home, second = Price(*prices[home_index]), Price(*prices[second_index])
        nodes, lookup = query.candidates.nodes, query.lookup
        if lookup is None:
            return True
        prompts = lookup.batch.prompts if lookup.batch is not None else 1
        name, hits = nodes[home_index].name, query.known_hits
        hit = (hits if hits is not None else query.hits()).get(name)
        if hit is None:
            return True
        interval_s = self._cache_view.use_interval_s(query.group.model, lookup, name, hit, query.now_s)
        if interval_s is None:  # this router sent no request for it
            return True
        uses = PAYBACK_S / max(interval_s, MIN_INTERVAL_S)
        extra_work = work(second.new, second.cached, prompts) - work(home.new, home.cached, prompts)
        node = nodes[second_index]
        copy_ms = extra_work * node.speed.ms_per_token * (1.0 + STALLED_WEIGHT * node.load)
        saved_ms = home.own + home.contention - (second.own + second.contention - copy_ms)
        return COPY_SHARE * uses * saved_ms >= second.total - home.total

    def prices(self, query: Query, output: float | None = None) -> Prices:
        """Price all candidates. `output`: output tokens; None: as many as expected."""
        request, candidates, group, now_s = query.request, query.candidates, query.group, query.now_s
        lookup, adapter, windows, cache_view = query.lookup, group.adapter, group.windows, self._cache_view
        hits = query.known_hits
        if hits is None:
            hits = query.known_hits = cache_view.hits(group.model, lookup, now_s) if lookup is not None else {}
        if output is None:
            output = self._output_lengths.expected(request.model, request.tenant, request.max_output_tokens)
        caches = self._caches.get(candidates)
        if caches is None or self._membership is not cache_view.membership:
            caches = self._caches_of(candidates)
        return price_nodes(
            candidates.nodes,
            caches,
            hits,
            cache_view.reuse.chances,
            adapter.load_ms(candidates) if adapter is not None else None,
            windows.reserved_rates(candidates, self._context_fit.needed(request), now_s)
            if windows is not None
            else None,
            now_s,
            (ASSUMED_PROMPT_TOKENS if lookup is None else lookup.token_count, output, 1)
            if lookup is None or (batch := lookup.batch) is None
            else (batch.total_tokens, output * batch.prompts, batch.prompts),
            ((request.deadline_s - now_s) * 1000.0, self._late_penalty_ms) if request.deadline_s else NO_DEADLINE,
            BEHIND_SHARE * group.waiting / candidates.shared_by,
            group.decode_speed,
            self._settings,
        )

    def risk_ms(self, query: Query, own_ms: float) -> float:
        """Return the penalty for a late first token × its probability, if the request has a deadline."""
        due_s, late_ms = query.request.deadline_s, self._late_penalty_ms
        if not due_s or not late_ms:
            return 0.0
        due_ms = (due_s - query.now_s) * 1000.0
        if due_ms < 1.0:
            return late_ms
        power: float = min(own_ms / due_ms, 1e6) ** RISK_POWER
        return late_ms * power / (1.0 + power)

    def _caches_of(self, candidates: Candidates) -> tuple[CacheState | None, ...]:
        cache_view = self._cache_view
        if self._membership is not cache_view.membership or len(self._caches) >= MAX_CACHE_LISTS:
            self._membership = cache_view.membership
            self._caches.clear()
        found = self._caches[candidates] = tuple([cache_view.cache(node.name) for node in candidates.nodes])
        return found
