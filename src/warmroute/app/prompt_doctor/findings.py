"""Findings: what prevents reuse in the prompts of a route, where, in how much of its traffic, and what it costs.

A prompt of which `could` tokens could be reused and `cached` ones were cost this much more prefill time than necessary:

    lost = cost(cached) − cost(could)                                                                          [ms]

`could` is the text that other prompts have in common, or that an earlier request of the same conversation had. `cost`
is the prefill time of the prompt with this many cached tokens (telemetry/traffic.py).

Shares and means are over the samples after the first one that has the difference: those before it say nothing about it,
and a difference that has just begun is in all prompts, not in a tenth of the samples. Each sample counts with its
weight.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from warmroute.prompt_doctor.compare_prompts import DifferenceKind, Place, compare_prompts, value_at
from warmroute.prompt_doctor.masked_prompt import MaskedPrompt, common_prefix
from warmroute.prompt_doctor.prompt_parts import PartKind
from warmroute.prompt_doctor.prompt_samples import PromptSample
from warmroute.prompt_doctor.volatile_text import hide

MIN_SAMPLES: Final = 8
MIN_LOST_SHARE: Final = 0.02
"""Of the prompt tokens. A smaller loss is not a finding."""
EXCERPT: Final = 32
"""Characters shown before and after a difference."""

_PART_NAMES: Final = {"system": "the system prompt", "prompt": "the prompt"}
WHAT_DIFFERS: Final[Mapping[DifferenceKind, str]] = {
    "time": "a date or time",
    "id": "an id",
    "number": "a number, such as a counter",
    "order": "the order",
    "text": "text that differs from prompt to prompt",
    "history": "the messages that were dropped from the start of the conversation",
}
WHAT_TO_DO: Final[Mapping[DifferenceKind, str]] = {
    "time": "Move it to the end of the prompt, into the last user message, or round it to the day.",
    "id": "Remove it from the prompt, or move it into the last user message. The header X-Request-Id can carry it.",
    "number": "Remove it from the prompt, or move it behind the text that all prompts share.",
    "order": "Send tools and documents always in the same order, and JSON with sorted keys.",
    "text": "Move the text that differs behind the text that all prompts share.",
    "history": "Drop earlier messages seldom and many at once, for example half of them when the window is full.",
}


class Excerpt(msgspec.Struct, frozen=True):
    """Text of two prompts around a difference. It is shown only to an operator who asks for it."""

    before: str
    values: tuple[str, str]
    after: str

    def describe(self, show_text: bool) -> dict[str, Any]:
        shown = (lambda text: text) if show_text else hide
        return {
            "before": shown(self.before), "values": [shown(value) for value in self.values], "after": shown(self.after),
        }  # fmt: skip


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    route: str
    kind: DifferenceKind
    part: PartKind
    number: int
    """Of the message or tool, from 0."""
    role: str
    character: int
    """Within the message or tool."""
    token: int
    """Within the prompt."""
    share: float
    """Of the prompts since the first one that has it."""
    prompts: int
    values: int
    more_places: int
    cached_share: float
    """Of these prompts' tokens: those that were cached."""
    could_share: float
    """Of these prompts' tokens: those that could be cached without the difference, the cached ones included."""
    lost_tokens: float
    """Per request of the route."""
    lost_ms: float
    """Prefill time per request of the route."""
    excerpt: Excerpt
    losses: dict[int, float]
    """Number of each sample that has it → lost prefill time [ms] of the requests that it stands for."""
    counted: frozenset[int] = frozenset()
    """Numbers of the samples that `lost_gpu_s` counts."""
    since_s: float
    """When the first of these samples arrived."""
    lost_gpu_s: float = 0.0
    """Since `since_s`, over all requests."""
    gpus: float = 0.0
    """GPU seconds lost per second, lately."""

    @property
    def id(self) -> tuple[str, str, str, str, int]:
        """Stable while the finding lasts."""
        return self.model, self.route, self.kind, self.part, self.number

    @property
    def place(self) -> str:
        """Return where it is, as a part of a sentence."""
        if self.kind == "history":
            return f"message {self.number}"
        if self.part == "tool" and self.kind == "order":
            return f"tool {self.number}"
        return f"{describe_part(self.part, self.number, self.role)}, character {self.character}"

    def describe(self, wall_s: float, show_text: bool) -> dict[str, Any]:
        return {
            "model": self.model,
            "route": self.route,
            "kind": self.kind,
            "what_differs": self.what_differs,
            "part": self.part,
            "number": self.number,
            "role": self.role,
            "character": self.character,
            "token": self.token,
            "place": self.place,
            "share": round(self.share, 3),
            "prompts": self.prompts,
            "values": self.values,
            "more_places": self.more_places,
            "cached_share": round(self.cached_share, 3),
            "could_share": round(self.could_share, 3),
            "lost_tokens_per_request": round(self.lost_tokens),
            "lost_gpu_s": round(self.lost_gpu_s, 3),
            "gpus": round(self.gpus, 3),
            "since": round(wall_s + self.since_s),
            "excerpt": self.excerpt.describe(show_text),
            "what_to_do": self.what_to_do,
        }

    @property
    def what_to_do(self) -> str:
        return WHAT_TO_DO[self.kind]

    @property
    def what_differs(self) -> str:
        if self.kind == "order":
            return "the order of the tools" if self.part == "tool" else "the order of lines or documents"
        return WHAT_DIFFERS[self.kind]


def describe_part(part: PartKind, number: int, role: str) -> str:
    if part == "message":
        return f"message {number} ({role or 'no role'})"
    return f"tool {number}" if part == "tool" else _PART_NAMES.get(part, part)


def find(key: tuple[str, str], samples: Sequence[PromptSample]) -> tuple[list[Finding], list[int]]:
    """Compare the samples of a route. Return what costs reuse, and how far each prompt agrees with another one.

    Takes milliseconds: call it in a thread.
    """
    prompts = [sample.prompt for sample in samples if sample.prompt is not None]
    comparison = compare_prompts(prompts)
    if len(prompts) < MIN_SAMPLES:
        return [], comparison.shared
    found: list[Finding] = []
    for place in comparison.places:
        first = min(place.prompts)
        numbers = range(min(first + 1, len(samples) - 1), len(samples))
        weights = sum([samples[number].weight for number in numbers])
        total = sum([samples[number].weight * samples[number].prompt_tokens for number in numbers]) or 1
        cached = sum([samples[number].weight * _cached(samples[number]) for number in numbers])
        lost_tokens = 0.0
        losses: dict[int, float] = {}
        for number, characters in place.prompts.items():
            sample, prompt = samples[number], prompts[number]
            could = min(1.0, characters / max(1, prompt.characters)) * sample.prompt_tokens
            if could > _cached(sample):
                losses[sample.number] = sample.weight * (sample.cost_ms(_cached(sample)) - sample.cost_ms(could))
                lost_tokens += sample.weight * (could - _cached(sample)) if number in numbers else 0.0
        if lost_tokens < MIN_LOST_SHARE * total:
            continue
        part = place.position.part
        lost_ms = sum([losses.get(samples[number].number, 0.0) for number in numbers])
        found.append(
            Finding(
                model=key[0], route=key[1], kind=place.kind, part=part.kind, number=part.number, role=part.role,
                character=place.position.character, token=_token_of(place, samples, prompts),
                share=sum([samples[number].weight for number in numbers if number in place.prompts]) / weights,
                prompts=len(place.prompts), values=place.values, more_places=place.more_places,
                cached_share=cached / total, could_share=(cached + lost_tokens) / total,
                lost_tokens=lost_tokens / weights, lost_ms=lost_ms / weights, excerpt=_excerpt(place, prompts),
                losses=losses, since_s=min([samples[number].arrived_s for number in place.prompts]),
            )
        )  # fmt: skip
    return found, comparison.shared


def _cached(sample: PromptSample) -> int:
    return sample.cached_tokens or 0


def _token_of(place: Place, samples: Sequence[PromptSample], prompts: Sequence[MaskedPrompt]) -> int:
    """Return the first token in which the two examples differ; an estimate if the router did not read them."""
    one, other = (samples[number] for number in place.examples)
    if one.tokens and other.tokens:
        return common_prefix(one.tokens, other.tokens) // 4
    prompt = prompts[place.examples[0]]
    return round(one.prompt_tokens * prompt.raw_characters(place.at) / max(1, prompt.characters))


def _excerpt(place: Place, prompts: Sequence[MaskedPrompt]) -> Excerpt:
    (before, value, after), (_before, other, _after) = (_text_at(prompts[number], place) for number in place.examples)
    return Excerpt(before, (value, other), after)


def _text_at(prompt: MaskedPrompt, place: Place) -> tuple[str, str, str]:
    """Return the text before, at and after a place."""
    value = value_at(prompt, place, place.at)
    if place.kind == "order" and place.position.part.kind == "tool":
        return "", value, ""
    position = prompt.position(place.at)
    text, at = position.part.text, position.character
    end = at + (len(value) or EXCERPT)
    return text[max(0, at - EXCERPT) : at], text[at:end], text[end : end + EXCERPT]
