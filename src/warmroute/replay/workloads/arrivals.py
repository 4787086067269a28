"""Arrival times of an open loop, which does not wait for answers: recorded in a trace, or random.

The closed loop, in which each client waits for its answer, is in `simulation/clients.py`.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from itertools import islice
from random import Random

from warmroute.replay.workloads.workload_prompt import WorkloadPrompt


def at_trace_times(prompts: Iterable[WorkloadPrompt], speed: float = 1.0) -> Iterator[WorkloadPrompt]:
    """Keep the prompts' own times, counted from the first one, `speed` times as fast."""
    start_ms: float | None = None
    for prompt in prompts:
        if start_ms is None:
            start_ms = prompt.at_ms
        prompt.at_ms = (prompt.at_ms - start_ms) / speed
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
