"""The definition of the price, one small function per term. All terms are in milliseconds.

The router uses `_kernel/price.c`, which computes the same for all nodes in one call; test_price_kernel.py compares the
two.
"""

from __future__ import annotations

from math import exp
from typing import Final

from accounting_reference import STEPS

from warmroute.config import Pricing
from warmroute.fleet.arrival_rate import DECAY_S
from warmroute.fleet.node import Node
from warmroute.fleet.node_speed import work
from warmroute.index.node_cache import NodeCache
from warmroute.index.reuse import Reuse
from warmroute.routing.price import Price

FULL_POWER: Final = 8
FULL_SCALE: Final = 0.1
FULL_MARGIN: Final = 1.02
USABLE_KV_SHARE: Final = 0.98
"""Share of its KV memory that a node can use."""
GROWTH_SHARE: Final = 0.3
"""Share of their outputs that running requests still have to generate, beyond what ending requests free."""
DECODE_WEIGHT: Final = 0.2
"""A millisecond of decoding counts a tenth of one before the first token, since the output can be read meanwhile. The
same again counts for the other requests of the batch, which the request slows down."""
EVICTED_COST: Final = 2.5
"""A block from within a long prompt costs this much more to prefill again than one of a short prompt."""
RISK_POWER: Final = 4
"""How reliable an expected time is: a request expected at half its deadline misses it once in 17 times."""


def wait(pending_work: float, ms_per_token: float) -> float:
    """Return the prefill work queued on the node [tokens] × its speed [ms/token]."""
    return pending_work * ms_per_token


def prefill(work: float, ms_per_token: float, token_ms: float) -> float:
    """Return the work of the uncached tokens × the node's speed, plus the steps of a running batch [ms]."""
    return STEPS * token_ms + work * ms_per_token


def contention(output: float, token_ms: float, fastest_ms: float) -> float:
    """Return how much longer decoding takes than on the fastest node, for this request and for its batch."""
    return DECODE_WEIGHT * output * (token_ms - fastest_ms)


def kv_used(node: Node, capacity: float, output: float) -> float:
    """Return the KV tokens in use: as polled and changed since, and at least what this router's requests need."""
    return max(node.kv_usage * capacity + node.kv_delta, node.kv_new + 0.5 * output * node.inflight)


def kv_freed_per_ms(used: float, output: float, token_ms: float) -> float:
    """Return how fast KV memory is freed [tokens/ms]: all that is in use, once per response."""
    return max(used, 1.0) / max(1.0, output * token_ms)


def room(used: float, needed: float, growth: float, capacity: float, freed_per_ms: float) -> float:
    """Return the time to wait for `needed` tokens of KV memory.

    The time in which as much is freed, × the probability that none is free by then (close to 0 up to three quarters
    of the capacity), plus the time until what is missing now is freed.

        needed / freed · full(ρ) + max(0, used + needed − capacity) / freed     ρ = (used + needed + growth) / capacity
    """
    share = min(0.999, (used + needed + growth) / capacity)
    full = FULL_SCALE * share**FULL_POWER / (FULL_MARGIN - share)
    missing = used + needed - USABLE_KV_SHARE * capacity
    return (needed * full + (missing if missing > 0.0 else 0.0)) / freed_per_ms


def risk(own: float, due_ms: float, late_penalty_ms: float) -> float:
    """Return the penalty for a late first token × its probability, which is 1 if less than 1 ms is left.

    late_penalty · own⁴ / (own⁴ + due⁴)
    """
    if due_ms < 1.0:
        return late_penalty_ms
    power = min(own / due_ms, 1e6) ** RISK_POWER
    return late_penalty_ms * power / (1.0 + power)


def memory(evicted: float, ms_per_token: float, chance: float) -> float:
    """Return the prefill time of the evicted tokens × the probability that they would be used again."""
    return evicted * ms_per_token * EVICTED_COST * chance


def congestion(own: float, service: float, rate: float, behind: float) -> float:
    """Return what the request's work [ms] costs the requests behind it and those that arrive [1/ms] until it is done.

    A node with many arrivals has what they need cached: long work is better placed elsewhere.
    """
    return service * (rate * own + behind)


def arrivals_per_ms(node: Node, now_s: float) -> float:
    return node.arrival_rate * exp((node.arrival_s - now_s) / DECAY_S)


def price(
    node: Node, cache: NodeCache | None, reuse: Reuse, now_s: float, tokens: float, cached: float, output: float,
    token_ms: float, fastest_ms: float, behind: float, config: Pricing, adapter_ms: float = 0.0,
    due_ms: float = 0.0, late_penalty_ms: float = 0.0,
) -> Price:  # fmt: skip
    """Return the price for a prompt of `tokens` tokens of which `cached` are cached, with `output` output tokens.

    `token_ms`: decode time per token on this node; `fastest_ms`: on the fastest node. `adapter_ms`: time to load the
    LoRA adapter.
    """
    cached *= config.cache_weight
    ms_per_token = node.speed.ms_per_token
    new = tokens - cached
    new_work = work(new, cached)
    if cached:
        new_work = max(new_work, work(tokens, 0.0) - config.max_saving_ms / ms_per_token)
    wait_ms = wait(node.pending_work, ms_per_token)
    prefill_ms = prefill(new_work, ms_per_token, token_ms if node.load else 0.0)
    contention_ms = contention(output, token_ms, fastest_ms)
    room_ms = memory_ms = congestion_ms = 0.0
    if cache is not None:
        capacity = cache.capacity_blocks * cache.block_size
        if capacity and config.room:
            used = kv_used(node, capacity, output)
            freed_per_ms = kv_freed_per_ms(used, output, token_ms)
            room_ms = room(used, new + output, GROWTH_SHARE * output * node.inflight, capacity, freed_per_ms)
        recency = cache.recency
        evicted = new + output - (recency.capacity - len(recency)) * cache.block_size
        if evicted > 0.0 and config.memory and (oldest_s := recency.oldest) is not None:
            memory_ms = memory(min(evicted, new + output), ms_per_token, reuse.chance(now_s - oldest_s))
    on_node_ms = wait_ms + prefill_ms + room_ms + adapter_ms
    own = on_node_ms + node.distance_ms
    risk_ms = risk(own, due_ms, late_penalty_ms) if late_penalty_ms else 0.0
    if config.congestion:
        service_ms = prefill_ms + room_ms + adapter_ms + memory_ms
        congestion_ms = congestion(on_node_ms, service_ms, arrivals_per_ms(node, now_s), behind)
    total = own + contention_ms + risk_ms + memory_ms + congestion_ms
    return Price(
        total, wait_ms, prefill_ms, room_ms, contention_ms, node.distance_ms, adapter_ms, risk_ms, memory_ms,
        congestion_ms, cached, new, output,
    )  # fmt: skip
