"""The definition of the price, one small function per term. All terms are in milliseconds.

The router uses `_kernel/price.c`, which computes the same for all nodes in one call; test_price_kernel.py compares the
two.
"""

from __future__ import annotations

from math import exp

from warmroute._kernel import (
    ARRIVAL_DECAY_S,
    ATTENTION_WORK,
    DECODE_FACTOR_NOISE,
    EVICTED_WEIGHT,
    FIRST_TOKEN_STEPS,
    KV_FULL_MARGIN,
    KV_FULL_POWER,
    KV_FULL_SCALE,
    KV_GROWTH_SHARE,
    KV_MAX_FULL,
    KV_USABLE_SHARE,
    PREFILL_SPEED_NOISE,
    RISK_POWER,
    STALLED_MAX_WORK,
    STALLED_WEIGHT,
    STREAMED_WEIGHT,
)
from warmroute.config import Pricing
from warmroute.core.decision_record import Price
from warmroute.core.node import Node
from warmroute.core.node_cache import NodeCache
from warmroute.core.reuse import Reuse


def wait(pending_work: float, ms_per_token: float, queue_ms: float, room_ms: float) -> float:
    """Return the prefill work queued on the node [tokens] × its speed [ms/token].

    It is at least as long as requests have recently waited in the engine's own queue, as far as the lack of KV memory
    (`room_ms`) does not explain that; `queue_ms` is 0 while the engine has no queue.
    """
    wait_ms = max(0.0, pending_work) * ms_per_token  # the sum may have a rounding error
    return max(wait_ms, queue_ms - room_ms) if queue_ms else wait_ms


def work_of_prompts(new: float, cached: float, prompts: int) -> float:
    """Return the prefill work of several prompts of equal length: attention does not reach from one to the other."""
    return new * (1.0 + ATTENTION_WORK * (cached + 0.5 * new) / prompts)


def prefill(work: float, ms_per_token: float, token_ms: float) -> float:
    """Return the work of the uncached tokens × the node's speed, plus the steps of a running batch [ms]."""
    return FIRST_TOKEN_STEPS * token_ms + work * ms_per_token


def decode_factor(learned: float) -> float:
    """Return a node's decode time relative to its model's line. Deviations up to DECODE_FACTOR_NOISE count as noise."""
    return max(1.0, learned - DECODE_FACTOR_NOISE) if learned > 1.0 else min(1.0, learned + DECODE_FACTOR_NOISE)


def contention(output: float, token_ms: float, fastest_ms: float, stall_ms: float) -> float:
    """Return how much longer decoding takes than on the fastest node, for this request and for its batch, and how long
    other requests stall."""
    return STREAMED_WEIGHT * output * (token_ms - fastest_ms) + stall_ms


def stall(running: int, work: float, ms_per_token: float, fastest_ms_per_token: float) -> float:
    """Return what the node's running requests lose: they get no token while it prefills this prompt, and again what it
    preempts to make room. A prefill stops the batch for one step at a time, so a long one counts like one step.

    Differences of the nodes' prefill speeds up to PREFILL_SPEED_NOISE count as noise.
    """
    step_ms = min(work, STALLED_MAX_WORK) * max(fastest_ms_per_token, ms_per_token / PREFILL_SPEED_NOISE)
    return STALLED_WEIGHT * running * step_ms


def kv_used(node: Node, capacity: float, output: float) -> float:
    """Return the KV tokens in use: as polled and changed since, and at least what this router's requests need.

    A node that preempts requests is short of memory, whatever the poll saw: its pressure (0 to 1) fills it up.
    """
    usage = node.kv_usage + (1.0 - node.kv_usage) * node.kv_pressure
    return max(usage * capacity + node.kv_delta, node.kv_new + 0.5 * output * node.inflight)


def kv_freed_per_ms(used: float, output: float, token_ms: float) -> float:
    """Return how fast KV memory is freed [tokens/ms]: all that is in use, once per response."""
    return max(used, 1.0) / max(1.0, output * token_ms)


def missing_room(used: float, needed: float, growth: float, capacity: float) -> float:
    """Return the tokens of KV memory that the request has to wait for, or that running requests lose to it.

    The needed tokens × the probability that none is free (close to 0 up to three quarters of the capacity), plus
    what is missing now.

        needed · full(ρ) + max(0, used + needed − capacity)                   ρ = (used + needed + growth) / capacity
    """
    share = min(KV_MAX_FULL, (used + needed + growth) / capacity)
    full: float = KV_FULL_SCALE * share**KV_FULL_POWER / (KV_FULL_MARGIN - share)
    missing = used + needed - KV_USABLE_SHARE * capacity
    return needed * full + (missing if missing > 0.0 else 0.0)


def risk(own: float, due_ms: float, late_penalty_ms: float) -> float:
    """Return the penalty for a late first token × its probability, which is 1 if less than 1 ms is left.

    late_penalty · own⁴ / (own⁴ + due⁴)
    """
    if due_ms < 1.0:
        return late_penalty_ms
    power: float = min(own / due_ms, 1e6) ** RISK_POWER
    return late_penalty_ms * power / (1.0 + power)


def memory(evicted: float, ms_per_token: float, chance: float) -> float:
    """Return the prefill time of the evicted tokens × the probability that they would be used again."""
    return evicted * ms_per_token * EVICTED_WEIGHT * chance


def congestion(own: float, service: float, rate: float, behind: float) -> float:
    """Return what the request's work [ms] costs the requests behind it and those that arrive [1/ms] until it is done.

    A node with many arrivals has what they need cached: long work is better placed elsewhere.
    """
    return service * (rate * own + behind)


def arrivals_per_ms(node: Node, now_s: float) -> float:
    return node.arrival_rate * exp((node.arrival_s - now_s) / ARRIVAL_DECAY_S)


def price(
    node: Node, cache: NodeCache | None, reuse: Reuse, now_s: float, tokens: float, cached: float, output: float,
    token_ms: float, fastest_ms: float, fastest_ms_per_token: float, behind: float, config: Pricing,
    adapter_ms: float = 0.0, due_ms: float = 0.0, late_penalty_ms: float = 0.0, prompts: int = 1,
    reserved_rate: float = 0.0,
) -> Price:  # fmt: skip
    """Return the price for a prompt of `tokens` tokens of which `cached` are cached, with `output` output tokens.

    `token_ms`: decode time per token on this node; `fastest_ms`: on the fastest node. `fastest_ms_per_token`: prefill
    time per token on the fastest node. `adapter_ms`: time to load the LoRA adapter. `prompts`: number of prompts that
    the tokens are divided among. `reserved_rate`: arrivals [1/ms] that need a longer context window than this request,
    and may go to this node.
    """
    cached *= config.cache_weight
    ms_per_token = node.speed.ms_per_token
    new = tokens - cached
    new_work = work_of_prompts(new, cached, prompts)
    if cached:
        new_work = max(new_work, work_of_prompts(tokens, 0.0, prompts) - config.max_saving_ms / ms_per_token)
    prefill_ms = prefill(new_work, ms_per_token, token_ms if node.load else 0.0)
    missing = room_ms = memory_ms = congestion_ms = 0.0
    if cache is not None:
        capacity = cache.capacity_blocks * cache.block_size
        if capacity and config.room:
            used = kv_used(node, capacity, output)
            freed_per_ms = kv_freed_per_ms(used, output, token_ms)
            missing = missing_room(used, new + output, KV_GROWTH_SHARE * output * node.inflight, capacity)
            room_ms = missing / freed_per_ms
        recency = cache.recency
        evicted = new + output - (recency.capacity - len(recency)) * cache.block_size
        if evicted > 0.0 and config.memory and (oldest_s := recency.oldest) is not None:
            memory_ms = memory(min(evicted, new + output), ms_per_token, reuse.chance(now_s - oldest_s))
    stall_ms = stall(node.load, new_work + missing, ms_per_token, fastest_ms_per_token)
    contention_ms = contention(output, token_ms, fastest_ms, stall_ms)
    wait_ms = wait(node.pending_work, ms_per_token, node.queue_ms, room_ms)
    on_node_ms = wait_ms + prefill_ms + room_ms + adapter_ms
    own = on_node_ms + node.distance_ms
    risk_ms = risk(own, due_ms, late_penalty_ms) if late_penalty_ms else 0.0
    if config.congestion:
        service_ms = prefill_ms + room_ms + adapter_ms + memory_ms
        congestion_ms = congestion(on_node_ms, service_ms, arrivals_per_ms(node, now_s) + reserved_rate, behind)
    total = own + contention_ms + risk_ms + memory_ms + congestion_ms
    return Price(
        total, wait_ms, prefill_ms, room_ms, contention_ms, node.distance_ms, adapter_ms, risk_ms, memory_ms,
        congestion_ms, cached, new, output,
    )  # fmt: skip
