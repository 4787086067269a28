"""A load test in steps of increasing rate, as inference-perf runs it. A step sends a fixed number of requests with
Poisson arrivals, waits until the last one is answered, and pauses. The next step runs on the same fleet with its warm
caches.

A step's rate is that of a short burst, not one that the fleet has to sustain. A fleet that cannot keep up answers the
rest after the last request was sent; output tokens per second are measured until then.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from random import Random

import msgspec

from warmroute.lab.run import Setup, build_world
from warmroute.lab.summary import Run, summary
from warmroute.lab.workloads import poisson

PAUSE_S = 1.0


class LoadStep(msgspec.Struct, frozen=True):
    rate: float
    """Requests per second."""
    duration_s: float
    measured: bool = True
    """False for a warm-up step."""

    @property
    def requests(self) -> int:
        return round(self.rate * self.duration_s)


def run_load_steps(setup: Setup, steps: Sequence[LoadStep]) -> Iterator[Run]:
    """Return a run for each measured step. The steps replace the setup's own rate and length."""
    world = build_world(setup)
    prompts = setup.workload.arrivals(setup.conditions.seed)
    random = Random(f"{setup.conditions.seed} ladder")
    for step in steps:
        world.measure_from_now()
        world.run(poisson(islice(prompts, step.requests), step.rate, random, start_ms=world.calendar.now_ms))
        if step.measured:
            yield {**setup.describe(), "rate": step.rate, **summary(world)}
        world.calendar.run(until_ms=world.calendar.now_ms + PAUSE_S * 1000.0)
