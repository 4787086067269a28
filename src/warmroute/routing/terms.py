"""The price of a node for a request, term by term. Everything is in milliseconds: what the request pays itself, and
what it makes others pay. Each term is one small function; `price` adds them up.

This is the definition. Decisions take it from `_kernel/_price.c`, which works it out for all nodes in one call;
tests/routing/test_price_kernel.py holds both equal.
"""

from __future__ import annotations

from typing import Final

from warmroute.config import Pricing
from warmroute.fleet.node import Node
from warmroute.fleet.speed import STEPS, work
from warmroute.index.node_cache import NodeCache
from warmroute.index.reuse import Reuse
from warmroute.routing.price import Price

FULL_POWER: Final = 8
FULL_SCALE: Final = 0.1
FULL_MARGIN: Final = 1.02
MEMORY_FULL: Final = 0.98
"""Share of its KV memory that a node can really use."""
GROWTH: Final = 0.3
"""Share of their answers that running requests still have to write, beyond what those that end give back meanwhile."""
STREAMED: Final = 0.2
"""A millisecond while an answer flows counts a tenth of one before it begins: it can be read meanwhile. As much again
counts for the answers beside it, which flow slower for its sake."""
EVICTED_DEARER: Final = 2.5
"""A block from within a long prompt is dearer to compute again than one of a short prompt."""
RISK_POWER: Final = 4
"""How surely an expected time is met: half of it is missed once in 17 times, twice of it 16 in 17."""


def wait(pending_work: float, ms_per_token: float) -> float:
    """Prefill work that is ahead of it there [tokens] × the node's speed [ms/token]."""
    return pending_work * ms_per_token


def prefill(work: float, ms_per_token: float, token_ms: float) -> float:
    """What is not cached: work [tokens] × the node's speed [ms/token], beside the steps of its batch [ms],
    where one runs."""
    return STEPS * token_ms + work * ms_per_token


def contention(output: float, token_ms: float, quickest_ms: float) -> float:
    """How much longer its answer takes there than on the quickest node: its tokens × the difference [ms], and
    as much for the answers beside it."""
    return STREAMED * output * (token_ms - quickest_ms)


def drain(used: float, output: float, token_ms: float) -> float:
    """How fast KV memory comes free [tokens/ms]: what is in use, once in the time that an answer takes."""
    return max(used, 1.0) / max(1.0, output * token_ms)


def room(used: float, need: float, growth: float, capacity: float, drained: float) -> float:
    """What it costs to find `need` tokens of KV memory free: the time in which as much comes free, × how likely it is
    that there is none by then (next to nothing up to three quarters, everything when full), and the time until what is
    lacking now comes free.

        need / drained · full(ρ) + max(0, used + need − capacity) / drained      ρ = (used + need + growth) / capacity
    """
    share = min(0.999, (used + need + growth) / capacity)
    full = FULL_SCALE * share**FULL_POWER / (FULL_MARGIN - share)
    lacking = used + need - MEMORY_FULL * capacity
    return (need * full + (lacking if lacking > 0.0 else 0.0)) / drained


def distance(round_trip_ms: float, egress_ms: float) -> float:
    """The way to the node's island and back, and what its network takes in money, as time [ms]."""
    return round_trip_ms + egress_ms


def adapter(load_ms: float, loaded: bool) -> float:
    """Loading a LoRA adapter [ms], where the node has not done so."""
    return 0.0 if loaded else load_ms


def risk(own: float, due_ms: float, late_ms: float) -> float:
    """What a late first token costs [ms] × how likely it is to be late, by what is expected and what is left [ms].

    late · own⁴ / (own⁴ + due⁴)                                certain where less than 1 ms is left
    """
    if due_ms < 1.0:
        return late_ms
    power = min(own / due_ms, 1e6) ** RISK_POWER
    return late_ms * power / (1.0 + power)


def memory(pushed_out: float, ms_per_token: float, chance: float) -> float:
    """What it pushes out of the cache [tokens]: their prefill × the chance that they would have been used again."""
    return pushed_out * ms_per_token * EVICTED_DEARER * chance


def congestion(own: float, service: float, rate: float, behind: float) -> float:
    """What its new work [ms] costs those who wait behind it, and those who arrive there [1/ms] until it is done. Where
    many come, they come for what is cached there: long work is better put where few do."""
    return service * (rate * own + behind)


def price(
    node: Node, cache: NodeCache | None, reuse: Reuse, now_s: float, tokens: float, cached: float, output: float,
    token_ms: float, quickest_ms: float, behind: float, config: Pricing, adapter_ms: float = 0.0,
    due_ms: float = 0.0, late_ms: float = 0.0,
) -> Price:  # fmt: skip
    """Of a prompt of so many `tokens`, of which so many are `cached`, with an answer of `output` tokens. `token_ms` is
    what one takes there, `quickest_ms` on the quickest node; `behind` as in `congestion`; `adapter_ms` as
    in `adapter`, `due_ms` and `late_ms` as in `risk`."""
    cached *= config.locality
    ms_per_token = node.speed.ms_per_token
    new = tokens - cached
    cost = work(new, cached)
    if cached:
        cost = max(cost, work(tokens, 0.0) - config.max_saving_ms / ms_per_token)
    waits = wait(node.pending_work, ms_per_token)
    prefills = prefill(cost, ms_per_token, token_ms if node.load else 0.0)
    contends = contention(output, token_ms, quickest_ms)
    finds_room = evicts = congests = 0.0
    if cache is not None:
        capacity = cache.capacity_blocks * cache.block_size
        if capacity and config.room:
            used = node.kv_used(capacity, output)
            drained = drain(used, output, token_ms)
            finds_room = room(used, new + output, GROWTH * output * node.inflight, capacity, drained)
        recency = cache.recency
        pushed_out = new + output - (recency.capacity - len(recency)) * cache.block_size
        if pushed_out > 0.0 and config.memory and (oldest_s := recency.oldest) is not None:
            evicts = memory(min(pushed_out, new + output), ms_per_token, reuse.chance(now_s - oldest_s))
    there = waits + prefills + finds_room + adapter_ms
    own = there + node.distance_ms
    risks = risk(own, due_ms, late_ms) if late_ms else 0.0
    if config.congestion:
        congests = congestion(there, prefills + finds_room + adapter_ms + evicts, node.rate(now_s), behind)
    total = own + contends + risks + evicts + congests
    return Price(
        total, waits, prefills, finds_room, contends, node.distance_ms, adapter_ms, risks, evicts, congests,
        cached, new, output,
    )  # fmt: skip
