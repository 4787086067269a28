"""Arrival times: recorded in a trace, or random.

Clients that wait for an answer before they send their next request are in `simulation/clients.py`.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from itertools import islice
from math import pi, sin
from random import Random

from warmroute.replay.workloads.workload_prompt import WorkloadPrompt

DEPTH = 0.6
"""Of the daily curve: its peak is (1 + DEPTH) × mean, its lowest rate (1 − DEPTH) × mean, a ratio of four."""


def at_trace_times(prompts: Iterable[WorkloadPrompt], speed: float = 1.0) -> Iterator[WorkloadPrompt]:
    """Keep the prompts' own times, counted from the first one, `speed` times as fast."""
    start_ms: float | None = None
    for prompt in prompts:
        if start_ms is None:
            start_ms = prompt.at_ms
        prompt.at_ms = (prompt.at_ms - start_ms) / speed
        prompt.think_ms /= speed
        yield prompt


def poisson(
    prompts: Iterable[WorkloadPrompt], rate_per_s: float, random: Random, burst: int = 1, start_ms: float = 0.0
) -> Iterator[WorkloadPrompt]:
    """Set Poisson arrival times with a mean of `rate_per_s` requests, of which `burst` arrive at once."""
    at_ms = start_ms
    for number, prompt in enumerate(prompts):
        if number % burst == 0:
            at_ms += random.expovariate(rate_per_s / burst) * 1000.0
        prompt.at_ms = at_ms
        yield prompt


def with_warm_up(
    prompts: Iterator[WorkloadPrompt], count: int, rate_per_s: float, random: Random
) -> Iterator[WorkloadPrompt]:
    """Set Poisson arrival times for the first `count` prompts. The others keep their times, shifted to follow them."""
    start_ms = 0.0
    for prompt in poisson(islice(prompts, count), rate_per_s, random):
        start_ms = prompt.at_ms
        yield prompt
    offset_ms: float | None = None
    for prompt in prompts:
        offset_ms = prompt.at_ms if offset_ms is None else offset_ms
        prompt.at_ms = start_ms + prompt.at_ms - offset_ms
        yield prompt


def with_follow_ups(
    prompts: Iterator[WorkloadPrompt], answer_ms_per_token: float = 0.0
) -> Iterator[tuple[float, WorkloadPrompt]]:
    """Return first requests and the following turns of conversations in the order of time, without simulating engines:
    an answer takes `answer_ms_per_token` for each token."""
    pending: list[tuple[float, int, WorkloadPrompt]] = []
    scheduled = 0
    upcoming = next(prompts, None)
    while upcoming is not None or pending:
        if pending and (upcoming is None or pending[0][0] < upcoming.at_ms):
            at_ms, _, prompt = heapq.heappop(pending)
        else:
            assert upcoming is not None
            at_ms, prompt = upcoming.at_ms, upcoming
            upcoming = next(prompts, None)
        yield at_ms, prompt
        follow_up = prompt.next_turn() if prompt.next_turn is not None else None
        if follow_up is not None:
            scheduled += 1
            answered_ms = at_ms + prompt.output_tokens * answer_ms_per_token
            heapq.heappush(pending, (answered_ms + follow_up.think_ms, scheduled, follow_up.prompt))


def follow_daily_curve(prompts: Iterable[WorkloadPrompt], day_s: float) -> Iterator[WorkloadPrompt]:
    """Shift evenly spread arrivals within days of `day_s` seconds. Their number and order stay the same.

    rate(t) = mean · (1 − DEPTH · cos(2π · t / day)); t = 0 is the quietest hour.
    """
    day_ms = day_s * 1000.0
    for prompt in prompts:
        days, even = divmod(prompt.at_ms / day_ms, 1.0)
        prompt.at_ms = (days + _time_of(even)) * day_ms
        yield prompt


def _time_of(fraction: float) -> float:
    """Return when in a day this fraction of its requests has arrived; both are from 0 to 1."""
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        if middle - DEPTH * sin(2 * pi * middle) / (2 * pi) < fraction:
            low = middle
        else:
            high = middle
    return (low + high) / 2
