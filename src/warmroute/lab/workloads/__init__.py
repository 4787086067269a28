"""All workloads by name: `parse_workload(["llm_d", "groups=40"])`, `parse_workload(["trace.jsonl.gz"])`."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Sequence
from glob import has_magic
from pathlib import Path
from random import Random
from typing import Any, ClassVar, Final, Protocol

import msgspec

from warmroute.replay.workloads import trace
from warmroute.replay.workloads.arrivals import at_trace_times, poisson
from warmroute.replay.workloads.conversations import MultiTurnChat, ToolAgents
from warmroute.replay.workloads.generators import (
    FewShot,
    HotPrefixStorm,
    LlmDBenchmark,
    MixedLengths,
    PriorityMix,
    Rag,
    SharedSystemPrompts,
    UniqueBatch,
)
from warmroute.replay.workloads.workload_prompt import WorkloadPrompt

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
    """Of a capture, only the requests for this model; empty for all."""

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
