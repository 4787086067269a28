"""The workloads by name, and when their requests arrive."""

from __future__ import annotations

import difflib
import heapq
import math
from collections.abc import Iterable, Iterator, Sequence
from glob import has_magic
from itertools import islice
from math import pi, sin
from pathlib import Path
from random import Random
from typing import Any, ClassVar, Final, Protocol

import msgspec

from warmroute.lab.workloads import trace
from warmroute.lab.workloads.generators import (
    FewShot,
    HotPrefixStorm,
    LlmDBenchmark,
    MixedLengths,
    MultiTurnChat,
    PriorityMix,
    Rag,
    SharedSystemPrompts,
    ToolAgents,
    UniqueBatch,
)
from warmroute.lab.workloads.workload_prompt import WorkloadPrompt

# Arrival times: recorded in a trace, or random.
#
# Clients that wait for an answer before they send their next request are in `lab/world.py`.

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


# All workloads by name: `parse_workload(["llm_d", "groups=40"])`, `parse_workload(["trace.jsonl.gz"])`.

DEFAULT_REQUESTS = 2000
"""Number of requests that a generator makes by default."""


class BadWorkload(ValueError):
    """What is wrong with a workload's name or parameters."""


class Generator(Protocol):
    @property
    def rate(self) -> float: ...

    def generate(self, random: Random) -> Iterator[WorkloadPrompt]:
        """Return an endless sequence of prompts without arrival times."""


GENERATORS: dict[str, type[Generator]] = {
    "shared_system_prompts": SharedSystemPrompts,
    "multi_turn_chat": MultiTurnChat,
    "rag": Rag,
    "few_shot": FewShot,
    "tool_agents": ToolAgents,
    "unique_batch": UniqueBatch,
    "hot_prefix_storm": HotPrefixStorm,
    "priority_mix": PriorityMix,
    "mixed_lengths": MixedLengths,
    "llm_d": LlmDBenchmark,
}


class Trace(msgspec.Struct, frozen=True):
    """A trace file. A rate scales its arrival times and keeps their pattern."""

    path: Path
    speed: float = 1.0
    id_tokens: int | None = None
    """Tokens that one hash id covers; None to infer it from the prompt lengths."""
    model: str = ""
    """Read only the requests for this model from a capture; empty for all."""

    requests: ClassVar[int | None] = None
    """Number of requests to replay; None for all of a trace."""

    @property
    def name(self) -> str:
        return self.path.name.removesuffix(".gz").removesuffix(".jsonl")

    def arrivals(
        self, seed: int, rate: float | None = None, burst: int = 1, limit: int | None = None
    ) -> Iterator[WorkloadPrompt]:
        """Return the prompts in the order of arrival, `rate` per second on average."""
        speed = self.speed if rate is None else rate / trace.mean_rate(self.path, limit, self.model)
        return at_trace_times(trace.prompts(self.path, self.id_tokens, self.model), speed)


class Generated(msgspec.Struct, frozen=True):
    """A generator's prompts with Poisson arrivals, one at a time or in bursts."""

    name: str
    generator: Generator
    requests: ClassVar[int | None] = DEFAULT_REQUESTS

    def arrivals(
        self, seed: int, rate: float | None = None, burst: int = 1, limit: int | None = None
    ) -> Iterator[WorkloadPrompt]:
        prompts = self.generator.generate(Random(f"{seed} {self.name}"))
        return poisson(prompts, rate or self.generator.rate, Random(f"{seed} arrivals"), burst)


Workload = Trace | Generated


def parse_workload(words: Sequence[str], speed: float = 1.0) -> Workload:
    """Parse a generator's name or a trace file, followed by parameters (key=value). Raises BadWorkload."""
    name, *rest = words
    parameters: dict[str, str] = {}
    for word in rest:
        key, equals, value = word.partition("=")
        if not equals:
            raise BadWorkload(f"{word!r} is not a parameter of the form key=value")
        parameters[key] = value
    if name in GENERATORS:
        return Generated(name, _convert(parameters, GENERATORS[name], name))
    path = Path(name)
    if not path.exists() and not has_magic(name):
        near = difflib.get_close_matches(name, GENERATORS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"generators: {', '.join(GENERATORS)}"
        raise BadWorkload(f"{name}: not a file and not a generator; {hint}")
    model = parameters.pop("model", "")
    options = _convert(parameters, _TraceOptions, name)
    return Trace(path, speed, options.id_tokens, model)


class _TraceOptions(msgspec.Struct, forbid_unknown_fields=True):
    id_tokens: int | None = None


def _convert(parameters: dict[str, str], kind: Any, name: str) -> Any:
    fields = [field.name for field in msgspec.structs.fields(kind)]
    for key in parameters:
        if key not in fields:
            near = difflib.get_close_matches(key, fields, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}?" if near else f"its parameters: {', '.join(fields)}"
            raise BadWorkload(f"{name} has no parameter {key}; {hint}")
    converted: dict[str, float] = {}
    for field in msgspec.structs.fields(kind):
        text = parameters.get(field.name)
        if text is None:
            continue
        is_whole = field.type is not float
        try:
            value: float = int(text) if is_whole else float(text)
        except ValueError:
            value = math.nan
        expected = _expected(field.name, value)
        if expected:
            what = "a whole number" if is_whole else "a number"
            raise BadWorkload(f"{name}: {field.name} is {text!r}; expected {what} {expected}")
        converted[field.name] = value
    made = msgspec.convert(converted, kind)
    if isinstance(made, Rag) and made.per_request > made.documents:
        raise BadWorkload(f"{name}: per_request is {made.per_request}, but there are only {made.documents} documents")
    return made


_FRACTIONS: Final = ("spread", "high", "low", "stray", "hot_share", "long_share")
_MAX_NUMBER: Final = 1_000_000_000


def _expected(name: str, value: float) -> str:
    """Return the range of a parameter if the value is outside of it; empty if it is inside."""
    if name in _FRACTIONS:
        return "" if 0.0 <= value <= 1.0 else "from 0 to 1"
    may_be_zero = name in ("zipf", "think_s", "tool_s") or (name.endswith("_tokens") and name != "output_tokens")
    if may_be_zero:
        return "" if 0 <= value <= _MAX_NUMBER else "of at least 0"
    return "" if 0 < value <= _MAX_NUMBER else "above 0"
