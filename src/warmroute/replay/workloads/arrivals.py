"""When requests arrive: as the trace says (faster or slower), by chance, or in bursts. Open loop: nobody waits for an
answer. The closed loop, where each client does, is the world's (`sim.world.clients`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from random import Random

from warmroute.replay.workloads.prompt import Prompt


def as_told(prompts: Iterable[Prompt], speed: float = 1.0) -> Iterator[Prompt]:
    """At the times that the prompts bring, counted from the first one's, `speed` times as fast."""
    start_ms: float | None = None
    for prompt in prompts:
        if start_ms is None:
            start_ms = prompt.at_ms
        prompt.at_ms = (prompt.at_ms - start_ms) / speed
        yield prompt


def poisson(prompts: Iterable[Prompt], rate_per_s: float, random: Random) -> Iterator[Prompt]:
    """Independent of each other, `rate_per_s` on average."""
    at_ms = 0.0
    for prompt in prompts:
        at_ms += random.expovariate(rate_per_s) * 1000.0
        prompt.at_ms = at_ms
        yield prompt


def warmed(prompts: Iterator[Prompt], count: int, rate_per_s: float, random: Random) -> Iterator[Prompt]:
    """The first `count` by chance at a rate of their own; the others follow at their times, counted from there."""
    at_ms = 0.0
    for prompt in islice(prompts, count):
        at_ms += random.expovariate(rate_per_s) * 1000.0
        prompt.at_ms = at_ms
        yield prompt
    start_ms = at_ms
    offset_ms: float | None = None
    for prompt in prompts:
        offset_ms = prompt.at_ms if offset_ms is None else offset_ms
        prompt.at_ms = start_ms + prompt.at_ms - offset_ms
        yield prompt


def bursts(prompts: Iterable[Prompt], rate_per_s: float, size: int, random: Random) -> Iterator[Prompt]:
    """`size` at once, bursts by chance; `rate_per_s` requests on average."""
    at_ms = 0.0
    for number, prompt in enumerate(prompts):
        if number % size == 0:
            at_ms += random.expovariate(rate_per_s / size) * 1000.0
        prompt.at_ms = at_ms
        yield prompt
