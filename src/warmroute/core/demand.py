"""What the fleet was asked for, and how it served it."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import exp
from typing import Final

from warmroute._kernel import ARRIVAL_DECAY_S

# The demand meter: cumulative counters of the requests the fleet received and of how it served them.
#
# Counters only grow; the autoscaler computes rates from two readings. Work is counted independently of the hardware:
# prefill in tokens of a short prompt (see speeds.py), decode in output tokens × context.

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


# How often something arrives, and how fast queued requests are served.

MIN_WINDOW_S: Final = 5.0
MIN_SERVED: Final = 8
"""ServiceRate measures over the last MIN_WINDOW_S, and over more if fewer than MIN_SERVED requests left the queue."""
BATCH_S: Final = 0.25
"""Requests that leave the queue within this time are counted together."""
UNMEASURED_S: Final = 5.0
"""Estimate of a wait while no rate is measured."""
FORGET_S: Final = 600.0
"""A rate from before so long a time without a queue is no longer used: the fleet may be another one."""


@dataclass(slots=True, eq=False)
class ArrivalRate:
    _rate: float = 0.0
    _updated_s: float = 0.0

    def record(self, now_s: float) -> None:
        self._rate = self.per_ms(now_s) + 0.001 / ARRIVAL_DECAY_S
        self._updated_s = now_s

    def per_ms(self, now_s: float) -> float:
        """Return arrivals per millisecond, averaged over about the last ten seconds."""
        return self._rate * exp((self._updated_s - now_s) / ARRIVAL_DECAY_S)


@dataclass(slots=True, eq=False)
class ServiceRate:
    """How many requests per second leave a queue because a node takes them, while others wait.

    Its clock stands still while nobody waits. It starts with the first request that leaves, which does not count: how
    long that one waited says nothing about the time between two of them.
    """

    _batches: deque[list[float]] = field(default_factory=deque)
    """Time of the last request on this clock, and number of requests."""
    _served: int = 0
    """Sum of these numbers."""
    _start_s: float = 0.0
    """When the first of these batches began, on this clock."""
    _clock_s: float = 0.0
    _runs: bool = False
    _last_s: float = 0.0
    """When a request last left the queue, or came into the empty one, on the router's clock."""

    def begin(self, now_s: float) -> None:
        """A request came into the empty queue."""
        if now_s - self._last_s > FORGET_S:
            self._batches.clear()
            self._served, self._start_s = 0, self._clock_s
        self._last_s = now_s

    def record(self, now_s: float) -> None:
        """A node took a queued request."""
        if not self._runs:
            self._runs, self._last_s = True, now_s
            return
        self._clock_s += now_s - self._last_s
        self._last_s = now_s
        batches, clock_s = self._batches, self._clock_s
        if batches and clock_s - batches[-1][0] < BATCH_S and clock_s - self._batch_start_s() < BATCH_S:
            batches[-1][0] = clock_s
            batches[-1][1] += 1
        else:
            batches.append([clock_s, 1])
        self._served += 1
        while self._served - batches[0][1] >= MIN_SERVED and clock_s - batches[0][0] >= MIN_WINDOW_S:
            self._start_s, count = batches.popleft()
            self._served -= int(count)

    def _batch_start_s(self) -> float:
        """Return the time of the last request before the newest batch."""
        return self._batches[-2][0] if len(self._batches) > 1 else self._start_s

    def end(self) -> None:
        """Nobody waits any more."""
        self._runs = False

    def per_s(self, now_s: float) -> float:
        """Return the rate; 0.0 before the first measurement."""
        since_s = max(0.0, now_s - self._last_s)
        measured_s = self._clock_s - self._start_s + (since_s if self._runs else 0.0)
        if not self._served or measured_s <= 0.0:
            return 0.0
        rate = self._served / measured_s
        return min(rate, MIN_SERVED / since_s) if since_s else rate

    def time_for(self, requests: int, now_s: float) -> float:
        """Return after how many seconds so many requests will have left the queue. Call this while somebody waits."""
        per_s = self.per_s(now_s)
        return requests / per_s if per_s else max(UNMEASURED_S, now_s - self._last_s)


# How often long prompts come to a model whose nodes have roles, and how much prefill time they need.
#
# Both are averages over the recent past, in which what happened DECAY_S ago counts 1/e as much as what happens now.

LONG_MS: Final = 50.0
"""A prompt is long if its prefill takes longer than this: users notice such a gap between two tokens."""
DECAY_S: Final = 30.0
"""Long prompts are few: over a shorter time, chance decides."""
MIN_S: Final = 2.0
"""The averages are over at least this time."""


@dataclass(slots=True, eq=False)
class LongPrompts:
    _arrivals: float = 0.0
    _prefill_ms: float = 0.0
    _updated_s: float = 0.0
    _since_s: float = 0.0

    def record(self, prefill_ms: float, now_s: float) -> None:
        """A prompt was sent to a node, whose prefill takes this long."""
        if not self._arrivals:
            self._since_s = now_s
        left = self._left(now_s)
        self._arrivals = self._arrivals * left + 1.0
        self._prefill_ms = self._prefill_ms * left + prefill_ms
        self._updated_s = now_s

    def recent(self, now_s: float) -> tuple[float, float]:
        """Return arrivals per millisecond, and the number of nodes that their prefills keep busy."""
        if not self._arrivals:
            return 0.0, 0.0
        known_s = max(MIN_S, now_s - self._since_s)
        per_ms = self._left(now_s) * 0.001 / (DECAY_S * (1.0 - exp(-known_s / DECAY_S)))
        return self._arrivals * per_ms, self._prefill_ms * per_ms

    def _left(self, now_s: float) -> float:
        return exp(min(0.0, self._updated_s - now_s) / DECAY_S)
