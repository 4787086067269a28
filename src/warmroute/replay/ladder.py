"""A ladder of rates, climbed as inference-perf does: a fixed number of requests by chance at the rate of the step, then
a wait until the last of them is answered, a pause, and the next step on the same fleet with its caches as they are.

So a step's rate is that of a short burst, not one that the fleet has to hold: a fleet that can't keep up answers the
rest after the last request was sent, and output tokens a second count the time until then.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from random import Random

import msgspec

from warmroute.replay.run import Setup, world_of
from warmroute.replay.summary import Run, summary
from warmroute.replay.workloads.prompt import Prompt

PAUSE_S = 1.0


class Step(msgspec.Struct, frozen=True):
    rate: float
    """Requests a second."""
    duration_s: float
    counts: bool = True
    """False: to warm up."""

    @property
    def requests(self) -> int:
        return round(self.rate * self.duration_s)


def climb(setup: Setup, steps: Sequence[Step]) -> Iterator[Run]:
    """A run for each step that counts; the setup's own rate and length do not matter."""
    world = world_of(setup)
    prompts = setup.workload.arrive(setup.conditions.seed)
    random = Random(f"{setup.conditions.seed} ladder")
    for step in steps:
        world.measure_from_now()
        world.run(_at_rate(islice(prompts, step.requests), step.rate, world.calendar.now_ms, random))
        if step.counts:
            yield {**setup.said(), "rate": step.rate, **summary(world)}
        world.calendar.run_until(world.calendar.now_ms + PAUSE_S * 1000.0)


def _at_rate(prompts: Iterable[Prompt], rate_per_s: float, at_ms: float, random: Random) -> Iterator[Prompt]:
    for prompt in prompts:
        at_ms += random.expovariate(rate_per_s) * 1000.0
        prompt.at_ms = at_ms
        yield prompt
