"""A workload by its name: `choose(["llm_d", "groups=40"])`, `choose(["trace.jsonl.gz"])`."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any, Protocol

import msgspec

from warmroute.replay.workloads import arrivals, trace
from warmroute.replay.workloads.few_shot import FewShot
from warmroute.replay.workloads.hot_prefix_storm import HotPrefixStorm
from warmroute.replay.workloads.llm_d import LlmD
from warmroute.replay.workloads.multi_turn_chat import MultiTurnChat
from warmroute.replay.workloads.priority_mix import PriorityMix
from warmroute.replay.workloads.prompt import Prompt
from warmroute.replay.workloads.rag import Rag
from warmroute.replay.workloads.shared_system_prompts import SharedSystemPrompts
from warmroute.replay.workloads.tool_agents import ToolAgents
from warmroute.replay.workloads.unique_batch import UniqueBatch

DEFAULT_REQUESTS = 2000
"""Of a generator, where nobody says how many."""


class BadWorkload(ValueError):
    """What is wrong with a workload's name or parameters, as a sentence."""


class Generator(Protocol):
    @property
    def rate(self) -> float: ...

    def generate(self, random: Random) -> Iterator[Prompt]:
        """Prompts without end, without times."""


GENERATORS: dict[str, type[Generator]] = {
    "shared_system_prompts": SharedSystemPrompts,
    "multi_turn_chat": MultiTurnChat,
    "rag": Rag,
    "few_shot": FewShot,
    "tool_agents": ToolAgents,
    "unique_batch": UniqueBatch,
    "hot_prefix_storm": HotPrefixStorm,
    "priority_mix": PriorityMix,
    "llm_d": LlmD,
}


class Workload(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def requests(self) -> int | None:
        """How many there are, or how many to take where there is no end; None where only the end tells."""

    def arrive(
        self, seed: int, rate: float | None = None, burst: int = 1, limit: int | None = None
    ) -> Iterator[Prompt]:
        """Prompts in the order and at the times of their arrival; `rate` a second on average."""


class Trace(msgspec.Struct, frozen=True):
    """A recorded trace, at its own times; a rate stretches or squeezes them, and leaves their shape."""

    path: Path
    speed: float = 1.0
    id_tokens: int | None = None
    """Tokens that a hash id stands for; None to tell it from the lengths."""

    @property
    def name(self) -> str:
        return self.path.name.removesuffix(".gz").removesuffix(".jsonl")

    @property
    def requests(self) -> int | None:
        return None

    def arrive(
        self, seed: int, rate: float | None = None, burst: int = 1, limit: int | None = None
    ) -> Iterator[Prompt]:
        speed = self.speed if rate is None else rate / trace.mean_rate(self.path, limit)
        return arrivals.as_told(trace.prompts(self.path, self.id_tokens), speed)


class Generated(msgspec.Struct, frozen=True):
    """A generator's prompts, by chance or in bursts."""

    name: str
    generator: Generator

    @property
    def requests(self) -> int | None:
        return DEFAULT_REQUESTS

    def arrive(
        self, seed: int, rate: float | None = None, burst: int = 1, limit: int | None = None
    ) -> Iterator[Prompt]:
        prompts = self.generator.generate(Random(f"{seed} {self.name}"))
        random, rate = Random(f"{seed} arrivals"), rate or self.generator.rate
        return arrivals.bursts(prompts, rate, burst, random) if burst > 1 else arrivals.poisson(prompts, rate, random)


def choose(words: Sequence[str], speed: float = 1.0) -> Workload:
    """The first word names a generator or a trace file, the others are parameters, key=value. Raises BadWorkload."""
    name, *rest = words
    parameters: dict[str, str] = {}
    for word in rest:
        key, equals, value = word.partition("=")
        if not equals:
            raise BadWorkload(f"{word!r} is not a parameter like key=value")
        parameters[key] = value
    if name in GENERATORS:
        return Generated(name, _converted(parameters, GENERATORS[name], name))
    path = Path(name)
    if not path.exists():
        near = difflib.get_close_matches(name, GENERATORS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"generators: {', '.join(GENERATORS)}"
        raise BadWorkload(f"{name}: neither a file nor a generator; {hint}")
    options = _converted(parameters, _TraceOptions, name)
    return Trace(path, speed, options.id_tokens)


class _TraceOptions(msgspec.Struct, forbid_unknown_fields=True):
    id_tokens: int | None = None


def _converted(parameters: dict[str, str], kind: Any, name: str) -> Any:
    fields = [field.name for field in msgspec.structs.fields(kind)]
    for key in parameters:
        if key not in fields:
            near = difflib.get_close_matches(key, fields, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}?" if near else f"it takes {', '.join(fields)}"
            raise BadWorkload(f"{name} has no parameter {key}; {hint}")
    try:
        return msgspec.convert(parameters, kind, strict=False)
    except msgspec.ValidationError as error:
        raise BadWorkload(f"{name}: {error}") from None
