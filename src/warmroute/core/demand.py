"""The demand meter: cumulative counters of the requests the fleet received and of how it served them.

Counters only grow; the autoscaler computes rates from two readings. Work is counted independently of the hardware:
prefill in tokens of a short prompt (see node_speed.py), decode in output tokens × context.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

TIME_BOUNDS_MS: Final = tuple(2.0 * 1.15**step for step in range(90))
"""Histogram bounds from 2 ms to 8 minutes, 15 % apart, which is the precision of a percentile."""

GOOD_MS: Final = 2000.0
GOOD_MS_PER_TOKEN: Final = 0.5
"""Goodput counts a first token that arrives within GOOD_MS + GOOD_MS_PER_TOKEN × prompt tokens."""

COUNTERS: Final = (
    "arrived", "shed", "sent", "prompt_tokens", "cached_tokens", "prefill_work", "prefill_squares", "responses",
    "decode_context", "prefill_pool_sent", "prefill_pool_tokens", "prefill_pool_cached", "prefill_pool_work",
    "prefill_pool_squares",
)  # fmt: skip
"""The fields of a demand meter that are not histograms."""


def _empty_histogram() -> array[int]:
    return array("q", bytes(8 * (len(TIME_BOUNDS_MS) + 1)))


@dataclass(slots=True, eq=False)
class DemandMeter:
    arrived: int = 0
    shed: int = 0
    sent: int = 0
    prompt_tokens: float = 0.0
    cached_tokens: float = 0.0
    """Prompt tokens that the router expected to be cached on the chosen node."""
    prefill_work: float = 0.0
    """Work of the other prompt tokens."""
    prefill_squares: float = 0.0
    """Sum of the squared work per request: how much requests vary."""
    responses: int = 0
    decode_context: float = 0.0
    """Output tokens × the mean context of their own request."""
    prefill_pool_sent: int = 0
    """The part of these counts that nodes with the role `prefill` got."""
    prefill_pool_tokens: float = 0.0
    prefill_pool_cached: float = 0.0
    prefill_pool_work: float = 0.0
    prefill_pool_squares: float = 0.0
    ttft_counts: array[int] = field(default_factory=_empty_histogram)
    latency_counts: array[int] = field(default_factory=_empty_histogram)
    inter_token_counts: array[int] = field(default_factory=_empty_histogram)
    """Of streamed responses: the mean time between their tokens."""
    peers: DemandMeter | None = None
    """What the other processes of a cluster counted since this one heard from them."""

    def record_sent(self, tokens: float, cached: float, work: float, in_prefill_pool: bool = False) -> None:
        self.sent += 1
        self.prompt_tokens += tokens
        self.cached_tokens += cached
        self.prefill_work += work
        self.prefill_squares += work * work
        if in_prefill_pool:
            self.prefill_pool_sent += 1
            self.prefill_pool_tokens += tokens
            self.prefill_pool_cached += cached
            self.prefill_pool_work += work
            self.prefill_pool_squares += work * work

    def record_ttft(self, ttft_ms: float) -> None:
        """`ttft_ms` counts from the request's arrival at the router, queueing included."""
        self.ttft_counts[bisect_left(TIME_BOUNDS_MS, ttft_ms)] += 1

    def record_output(self, prompt_tokens: float, output_tokens: float) -> None:
        self.responses += 1
        self.decode_context += output_tokens * (prompt_tokens + 0.5 * output_tokens)

    def record_latency(self, latency_ms: float) -> None:
        self.latency_counts[bisect_left(TIME_BOUNDS_MS, latency_ms)] += 1

    def record_inter_token(self, inter_token_ms: float) -> None:
        self.inter_token_counts[bisect_left(TIME_BOUNDS_MS, inter_token_ms)] += 1

    def own_counts(self) -> list[float]:
        """Return the values of COUNTERS in this process."""
        return [float(getattr(self, name)) for name in COUNTERS]

    def counts(self) -> list[float]:
        """Return the values of COUNTERS in all processes."""
        own = self.own_counts()
        return own if self.peers is None else [a + b for a, b in zip(own, self.peers.own_counts(), strict=True)]

    @property
    def own_times(self) -> tuple[array[int], array[int], array[int]]:
        """The histograms of TTFT, latency and inter-token time in this process."""
        return self.ttft_counts, self.latency_counts, self.inter_token_counts

    def times(self) -> tuple[array[int], array[int], array[int]]:
        """Return the histograms of TTFT, latency and inter-token time of all processes."""
        ttft, latency, inter_token = (counts[:] for counts in self.own_times)
        if self.peers is not None:
            for counts, of_peers in zip((ttft, latency, inter_token), self.peers.own_times, strict=True):
                for at, count in enumerate(of_peers):
                    counts[at] += count
        return ttft, latency, inter_token


def percentile_ms(counts: Sequence[int], share: float) -> float | None:
    """Return the bound that at least this share of the times stay within; None without any."""
    total = sum(counts)
    if total <= 0:
        return None
    wanted, seen = share * total, 0
    for at, count in enumerate(counts):
        seen += count
        if seen >= wanted:
            return TIME_BOUNDS_MS[min(at, len(TIME_BOUNDS_MS) - 1)]
    return TIME_BOUNDS_MS[-1]


def share_within(counts: Sequence[int], limit_ms: float) -> float | None:
    """Return the fraction of the times that stay within this limit; None without any."""
    total = sum(counts)
    return sum(counts[: bisect_right(TIME_BOUNDS_MS, limit_ms) + 1]) / total if total > 0 else None


def good_ttft_ms(prompt_tokens: float) -> float:
    return GOOD_MS + GOOD_MS_PER_TOKEN * prompt_tokens
