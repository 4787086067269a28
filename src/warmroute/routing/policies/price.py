"""price (spike)."""

from __future__ import annotations

from random import Random

from warmroute.fleet.node import Node
from warmroute.fleet.speed import work
from warmroute.index.beliefs import Beliefs
from warmroute.routing.decision import Decision
from warmroute.routing.dispatch import OUT
from warmroute.routing.query import Query


class Price:
    name = "price"
    wants_tokens = True

    def __init__(self, beliefs: Beliefs, random: Random, memory: float = 1.0, congestion: float = 1.0, own: float = 1.0, decode: float = 0.0, room: float = 1.0, grow: float = 0.3, power: float = 8) -> None:
        self._beliefs = beliefs
        self._random = random
        self._memory = memory
        self._congestion = congestion
        self._decode = decode
        self._room = room
        self._grow = grow
        self._power = power
        self._rate = 0.0  # arrivals per ms
        self._last_s = 0.0

    def decide(self, query: Query) -> Decision:
        now_s = query.now_s
        gap_ms = (now_s - self._last_s) * 1000.0
        self._last_s = now_s
        left = max(0.0, 1.0 - gap_ms / 10000.0)
        self._rate = self._rate * left + 1 / 10000.0
        hits = query.hits()
        nodes = query.candidates.nodes
        n = query.lookup.token_count if query.lookup is not None else 100
        rate = self._rate / len(nodes)
        prices = []
        for node in nodes:
            hit = hits.get(node.name)
            cached = hit.expected if hit is not None else 0.0
            speed = node.speed
            prefill = speed.floor_ms + speed.ms_per_token * work(n - cached, cached)
            wait = node.pending_work * speed.ms_per_token
            cache = self._beliefs.cache(node.name)
            service = prefill
            if self._room:
                capacity = cache.capacity_blocks * cache.block_size
                used = node.kv_usage * capacity + node.kv_delta
                out = OUT[0]
                need = n - cached + out
                drain = max(used, 1.0) / (out * node.token_ms)
                rho = min(0.999, (used + need + self._grow * out * node.inflight) / capacity)
                full = rho ** self._power / (1.02 - rho) * 0.1
                wait += self._room * full * need / drain
                service += self._room * full * need / drain
                deficit = used + need - capacity * 0.98
                if deficit > 0:
                    wait += self._room * deficit / drain
            price = wait + prefill
            price += self._congestion * rate * price * service
            if self._memory:
                r = cache.recency
                size = cache.block_size
                need = (n - cached) / size + 16
                over = need - (r.capacity - len(r))
                if over > 0:
                    oldest = r.oldest
                    chance = self._beliefs.reuse.chance(now_s - oldest)
                    price += self._memory * min(over, need) * size * speed.ms_per_token * 1.5 * chance * (1 + self._congestion * rate * wait)
            price += self._decode * node.load
            prices.append(price)
        least = min(prices)
        near = [i for i, p in enumerate(prices) if p <= least * 1.02]
        best = nodes[near[int(self._random.random() * len(near))] if len(near) > 1 else near[0]]

        def by_price() -> list[Node]:
            return [nodes[i] for i in sorted(range(len(nodes)), key=prices.__getitem__)]

        return Decision(best, self.name, "cheapest", by_price)
