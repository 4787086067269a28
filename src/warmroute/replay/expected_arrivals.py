"""When the requests of a setup would arrive, known before anything is simulated: an answer is assumed to take
ANSWER_MS_PER_TOKEN for each token, and the next turn of a conversation follows it."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

from warmroute.replay.run import Setup
from warmroute.replay.workloads.arrivals import with_follow_ups
from warmroute.replay.workloads.catalog import Trace
from warmroute.replay.workloads.workload_prompt import WorkloadPrompt

ANSWER_MS_PER_TOKEN = 20.0
RISING = 1.25
"""The load rises if the second half of the measured time has this many times as many requests as the first half."""
ERRORS = 3.0
"""A difference of the two by fewer standard errors is chance."""


def expected_arrivals(setup: Setup) -> Iterator[tuple[float, WorkloadPrompt]]:
    """Return the measured requests of the setup in the order of their times."""
    measured, most = 0, setup.requests
    end_ms = inf
    for number, (at_ms, prompt) in enumerate(with_follow_ups(setup.arrivals(), ANSWER_MS_PER_TOKEN)):
        if number < setup.warm_up or at_ms < 1000.0 * setup.warm_up_s:
            continue
        if not measured and setup.duration_s is not None:
            end_ms = at_ms + 1000.0 * setup.duration_s
        if measured == most or at_ms > end_ms:
            return
        measured += 1
        yield at_ms, prompt


def load_rises(setup: Setup) -> bool:
    """Return whether the load of a generator still rises while it is measured: as many conversations begin as before,
    but the earlier ones have not ended."""
    if isinstance(setup.workload, Trace) or setup.concurrency is not None or setup.day_s is not None:
        return False
    measured = list(expected_arrivals(setup))
    if not any(prompt.next_turn is not None for _, prompt in measured):
        return False
    middle_ms = (measured[0][0] + measured[-1][0]) / 2
    first = sum(at_ms < middle_ms for at_ms, _ in measured)
    second = len(measured) - first
    return second > RISING * first and second - first > ERRORS * len(measured) ** 0.5
