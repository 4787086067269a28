"""price: the node where the request costs the least, its own time and everybody else's together.

    its own    wait         prefill work that is ahead of it there
             + prefill      of the tokens that are not a confident hit, at the node's learned speed
             + room         finding KV memory for its new tokens and its answer
             + contention   its answer flows slower beside a large batch
    others'  + memory       what its new blocks push out of the cache, by the chance that they would be used again
             + congestion   its new work × how many wait behind it or arrive meanwhile

All terms are in milliseconds; `routing/terms.py` has a function for each. Prices within TIE of the lowest are equal:
the less loaded node wins, then chance. A beginning that crowds a node gets a second home where that costs little.
"""

from __future__ import annotations

from random import Random
from typing import Final

from warmroute.config import Pricing
from warmroute.fleet.node import Node
from warmroute.fleet.speed import work
from warmroute.index.beliefs import Beliefs, Hit
from warmroute.routing import terms
from warmroute.routing.decision import Decision
from warmroute.routing.outputs import OutputLengths
from warmroute.routing.price import Price
from warmroute.routing.query import Query

TIE: Final = 1.02
BEHIND: Final = 0.5
"""Of those who wait for a node, so many will be behind this one."""
SHORT_TOKENS: Final = 100.0
"""A prompt that was not read is taken to be so long."""


CROWDED: Final = 1.25
CROWDED_REQUESTS: Final = 2
"""A node is crowded with more than this × the mean of requests, and so many above."""


class PricePolicy:
    name = "price"
    wants_tokens = True
    holds = True

    def __init__(self, beliefs: Beliefs, outputs: OutputLengths, config: Pricing, random: Random) -> None:
        self._beliefs = beliefs
        self._outputs = outputs
        self._config = config
        self._random = random

    def decide(self, query: Query) -> Decision:
        nodes = query.candidates.nodes
        prices = self.prices(query)
        at = self._cheapest(nodes, prices)
        if prices[at].cached:
            at = self._second_home(nodes, prices, at)

        def by_price() -> list[Node]:
            return [nodes[other] for other in sorted(range(len(nodes)), key=prices.__getitem__)]

        decision = Decision(nodes[at], self.name, "cheapest", by_price)
        decision.price = prices[at]
        return decision

    def _cheapest(self, nodes: tuple[Node, ...], prices: list[Price]) -> int:
        least = min(prices)[0] * TIE
        tied = [at for at, price in enumerate(prices) if price[0] <= least]
        if len(tied) == 1:
            return tied[0]
        light = min([nodes[at].load for at in tied])
        tied = [at for at in tied if nodes[at].load == light]
        return tied[int(self._random.random() * len(tied))]

    def _second_home(self, nodes: tuple[Node, ...], prices: list[Price], home: int) -> int:
        """Where a crowded node is the cheapest by what it has cached: another one, if that costs little more. It has it
        from then on."""
        mean = sum([node.load for node in nodes]) / len(nodes)
        if nodes[home].load <= CROWDED * mean + CROWDED_REQUESTS:
            return home
        most = prices[home].own + self._config.second_home_ms
        return min(
            (at for at in range(len(nodes)) if nodes[at].load <= mean and prices[at].own <= most),
            key=lambda at: prices[at].total,
            default=home,
        )

    def prices(self, query: Query) -> list[Price]:
        """Of each candidate."""
        hits, ask, now_s = query.hits(), query.ask, query.now_s
        tokens = float(query.lookup.token_count) if query.lookup is not None else SHORT_TOKENS
        output = self._outputs.expected(ask.model, ask.tenant, ask.max_output_tokens)
        nodes = query.candidates.nodes
        rate, behind = query.group.arrivals.rate(now_s) / len(nodes), BEHIND * query.waiting / len(nodes)
        pace = query.group.pace.token_ms
        token_ms = [node.speed.factor * pace(node.context) for node in nodes]
        quickest_ms = min(token_ms)
        of = self._of
        return [
            of(node, hits.get(node.name), tokens, output, own_ms, quickest_ms, rate, behind, now_s)
            for node, own_ms in zip(nodes, token_ms, strict=True)
        ]

    def _of(
        self, node: Node, hit: Hit | None, tokens: float, output: float, token_ms: float, quickest_ms: float,
        rate: float, behind: float, now_s: float,
    ) -> Price:  # fmt: skip
        config = self._config
        speed = node.speed
        ms_per_token = speed.ms_per_token
        cached = hit.expected if hit is not None else 0.0
        new = tokens - cached
        cost = work(new, cached)
        if cached:
            cost = max(cost, work(tokens, 0.0) - config.max_saving_ms / ms_per_token)
        wait = terms.wait(node.pending_work, ms_per_token)
        prefill = terms.prefill(cost, ms_per_token, token_ms)
        contention = terms.contention(output, token_ms, quickest_ms)
        room = memory = 0.0
        cache = self._beliefs.cache(node.name)
        if cache is not None:
            capacity = cache.capacity_blocks * cache.block_size
            if capacity and config.room:
                used = node.kv_used(capacity, output)
                drained = terms.drain(used, output, token_ms)
                room = terms.room(used, new + output, terms.GROWTH * output * node.inflight, capacity, drained)
            recency = cache.recency
            pushed_out = new + output - (recency.capacity - len(recency)) * cache.block_size
            if pushed_out > 0.0 and config.memory and (oldest := recency.oldest) is not None:
                chance = self._beliefs.reuse.chance(now_s - oldest)
                memory = terms.memory(min(pushed_out, new + output), ms_per_token, chance)
        own = wait + prefill + room
        congestion = terms.congestion(own, prefill + room + memory, rate, behind) if config.congestion else 0.0
        total = own + contention + memory + congestion
        return Price(total, wait, prefill, room, contention, memory, congestion, cached, new, output)
