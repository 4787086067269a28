"""The price of a node for a request, term by term. Everything is in milliseconds: what the request pays itself, and
what it makes others pay. Each term is one small function; `policies/price.py` adds them up.
"""

from __future__ import annotations

from typing import Final

from warmroute.fleet.speed import STEPS

FULL_POWER: Final = 8
FULL_SCALE: Final = 0.1
FULL_MARGIN: Final = 1.02
MEMORY_FULL: Final = 0.98
"""Share of its KV memory that a node can really use."""
GROWTH: Final = 0.3
"""Share of their answers that running requests still have to write, beyond what those that end give back meanwhile."""
STREAMED: Final = 0.1
EVICTED_DEARER: Final = 1.5
"""A block from within a long prompt is dearer to compute again than one of a short prompt."""


def wait(pending_work: float, ms_per_token: float) -> float:
    """Prefill work that is ahead of it there [tokens] × the node's speed [ms/token]."""
    return pending_work * ms_per_token


def prefill(work: float, ms_per_token: float, token_ms: float) -> float:
    """What is not cached: work [tokens] × the node's speed [ms/token], beside the steps of its batch [ms]."""
    return STEPS * token_ms + work * ms_per_token


def contention(output: float, token_ms: float, quickest_ms: float) -> float:
    """How much longer its answer takes there than on the quickest node: its tokens × the difference [ms]. A millisecond
    while an answer flows counts a tenth of one before it begins: it can be read meanwhile."""
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


def memory(pushed_out: float, ms_per_token: float, chance: float) -> float:
    """What it pushes out of the cache [tokens]: their prefill × the chance that they would have been used again."""
    return pushed_out * ms_per_token * EVICTED_DEARER * chance


def congestion(own: float, service: float, rate: float, behind: float) -> float:
    """What its new work [ms] costs those who wait behind it, and those who arrive [1/ms] until it is done."""
    return service * (rate * own + behind)
