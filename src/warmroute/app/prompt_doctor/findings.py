"""Where prompts differ that could share their cache, and what that costs."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median_low
from typing import Any, Final, Literal, NamedTuple

import msgspec

from warmroute.app.prompt_doctor.samples import (
    MARK,
    MaskedPrompt,
    PartKind,
    Position,
    PromptSample,
    common_prefix,
    hide,
)

# Text that prompts have in common after the point up to which they agree: lines of an application, and messages that
# stand at another place in a later request of the same conversation.

MIN_LINE: Final = 32
"""Shorter lines may be equal by chance."""
COMMON_SHARE: Final = 0.3
"""Lines that this share of the prompts has belong to the application, not to one user's request."""
MAX_LINES: Final = 1000
"""Lines of one prompt that are compared."""
MIN_LINES_CHARACTERS: Final = 512
COMPARED: Final = 12
"""Other prompts whose order of the lines is compared."""
REORDERED_SHARE: Final = 0.3
"""Share of these with another order, from which the order is what differs."""
MIN_MESSAGE: Final = 64


class CommonText(NamedTuple):
    characters: int
    reordered: bool
    """Whether other prompts have the same lines in another order."""
    other: int
    """Another prompt with the same text."""


class CommonLines:
    def __init__(self, prompts: Sequence[MaskedPrompt]) -> None:
        self._lines = [_lines(prompt) for prompt in prompts]
        counts: Counter[str] = Counter()
        for lines in self._lines:
            counts.update({line for _at, line in lines})
        least = max(3.0, COMMON_SHARE * len(prompts))
        self._common = {line for line, count in counts.items() if count >= least}

    def after(self, number: int, at: int) -> CommonText | None:
        """Return the common lines of a prompt after a position; None if they are too few."""
        common = self._common
        own = [line for start, line in self._lines[number] if start >= at and line in common]
        characters = sum([len(line) + 1 for line in own])
        if characters < MIN_LINES_CHARACTERS:
            return None
        wanted = set(own)
        compared = reordered = 0
        best = number
        for other, lines in enumerate(self._lines):
            if other == number or compared == COMPARED:
                continue
            theirs = [line for _start, line in lines if line in wanted]
            if len(theirs) >= len(wanted):
                best = other
                compared += 1
                reordered += theirs != own
        return CommonText(characters, reordered > REORDERED_SHARE * compared, best)


def _lines(prompt: MaskedPrompt) -> list[tuple[int, str]]:
    """Return the long lines of the masked text, and where each starts. Answers of the model do not count."""
    found: list[tuple[int, str]] = []
    for part in prompt.parts:
        if part.part.role == "assistant":
            continue
        at = part.start
        for line in part.text.split("\n"):
            if len(line) >= MIN_LINE:
                found.append((at, line))
            at += len(line) + 1
        if len(found) >= MAX_LINES:
            break
    return found[:MAX_LINES]


class MovedMessages:
    """Finds messages that another prompt has at another position: the client dropped earlier ones."""

    def __init__(self, prompts: Sequence[MaskedPrompt]) -> None:
        self._prompts = prompts
        self._where: dict[str, list[tuple[int, int]]] = {}
        for number, prompt in enumerate(prompts):
            for place, part in enumerate(prompt.parts):
                if part.part.kind == "message" and part.part.number and len(part.raw) >= MIN_MESSAGE:
                    self._where.setdefault(part.raw, []).append((number, place))

    def after(self, number: int, at: int) -> CommonText | None:
        """Return the messages of a prompt from the part at this position on that another prompt has elsewhere."""
        prompt = self._prompts[number]
        first = prompt.part_at(at)
        own = [part.raw for part in prompt.parts]
        for start in (first, first + 1):
            for other, place in self._where.get(own[start], ()) if start < len(own) else ():
                theirs = [part.raw for part in self._prompts[other].parts[place:]]
                if other == number or place == start:
                    continue
                same = next((n for n, (a, b) in enumerate(zip(own[start:], theirs, strict=False)) if a != b), None)
                count = min(len(own) - start, len(theirs)) if same is None else same
                characters = sum([len(one) for one in own[start : start + count]])
                if count >= 2 and characters >= MIN_LINES_CHARACTERS:
                    return CommonText(characters, False, other)
        return None


# Finds the places at which prompts differ although they have much text in common after the difference.
#
# Prompts that differ where a user's message begins are healthy: everything before it is shared, and nothing after it is
# common. A place costs reuse if at least MIN_COMMON characters after it are the same in several prompts: the engine
# computes them again for each, because a cached prefix ends at the first different token. The same holds for volatile
# text in a system prompt or tool in front of a conversation's history.
#
#     volatile   the masked texts agree beyond it: a time, an id, a number
#     order      the same tools, or the same lines of text, in another order
#     text       other text, before lines that many prompts of the route have
#     history    messages of a conversation at another position, because its client dropped earlier ones
#
# In sorted order, the prompt that has the longest prefix in common with another one is its neighbour. So all pairs need
# not be compared.

MIN_COMMON: Final = 256
"""Characters that follow a difference and are common: about 64 tokens, 4 blocks."""
MIN_PROMPTS: Final = 4
"""Prompts at a place below which it may be chance."""
MIN_SHARE: Final = 0.1
"""The same as a share of the sample, from the first prompt at the place on: it may be new."""

DifferenceKind = Literal["time", "id", "number", "order", "text", "history"]


@dataclass(slots=True, eq=False)
class Place:
    """A place at which prompts differ before common text."""

    kind: DifferenceKind
    position: Position
    examples: tuple[int, int]
    """Two prompts that differ there."""
    at: int
    """Position of the place in the masked text of the first example."""
    prompts: dict[int, int] = field(default_factory=dict)
    """Number of each prompt that has it → characters of the prompt that could be reused without the difference."""
    values: int = 0
    """Different values there."""
    heads: dict[str, int] = field(default_factory=dict)
    """Masked texts up to the end of what follows the difference, one for each application that has it → where the
    difference is in them."""
    more_places: int = 0
    """Further differences after it that have to be removed, too."""

    def is_common(self, prompts: int) -> bool:
        """Return whether enough of this many prompts, the oldest first, have it."""
        since = prompts - min(self.prompts, default=0)
        return len(self.prompts) >= max(MIN_PROMPTS, MIN_SHARE * since)


@dataclass(slots=True, eq=False)
class Comparison:
    shared: list[int]
    """Leading characters of each prompt's masked text that another prompt has, too."""
    places: list[Place]
    """The places, those with the most prompts first."""


def compare_prompts(prompts: Sequence[MaskedPrompt]) -> Comparison:
    """`prompts`: the oldest first. Takes milliseconds for some dozens of prompts: call it in a thread."""
    ranked = sorted(range(len(prompts)), key=lambda number: prompts[number].text)
    shared = [0] * len(prompts)
    places: dict[tuple[str, int, str], Place] = {}
    for one, other in pairwise(ranked):
        common = common_prefix(prompts[one].text, prompts[other].text)
        shared[one], shared[other] = max(shared[one], common), max(shared[other], common)
        differences = list(_differences(prompts[one], prompts[other], common))
        if not differences:
            continue
        kind, at = differences[0]
        reach = _reach(prompts[one], at)
        if common < reach:
            continue
        if kind == "order":
            at, position = _first_moved_tool(prompts[one], prompts[other])
        else:
            position = prompts[one].position(at)
        part = position.part
        key = (part.kind, 0 if kind == "order" else part.number, kind)
        place = places.get(key)
        if place is None:
            place = places[key] = Place(kind, position, (one, other), at)
        place.heads.setdefault(prompts[one].text[:reach], at)
        place.more_places = max(place.more_places, len(differences) - 1)
    found = [place for place in places.values() if _spread(place, prompts, shared) and place.is_common(len(prompts))]
    taken = {number for place in found for number in place.prompts}
    rest = [number for number in range(len(prompts)) if number not in taken]
    found += [place for place in _line_places(prompts, rest, shared) if place.is_common(len(prompts))]
    found.sort(key=lambda place: (-len(place.prompts), place.at))
    return Comparison(shared, found)


def _differences(one: MaskedPrompt, other: MaskedPrompt, common: int) -> Iterator[tuple[DifferenceKind, int]]:
    """Yield what two prompts differ in within their common masked text: its kind and its position. The first one
    comes first."""
    for mine, others in zip(one.parts, other.parts, strict=False):
        if mine.start >= common:
            return
        if mine.part.kind == "tool" and mine.part.number != others.part.number:
            yield "order", mine.start
        elif mine.raw == others.raw:
            if mine.part.text != others.part.text:
                yield "order", mine.start
            continue
        shift = 0
        for number, (span, theirs) in enumerate(zip(mine.spans, others.spans, strict=False)):
            at = mine.start + span.start - shift
            if at >= common:
                return
            shift += span.end - span.start - 1
            if mine.value(number) != others.value(number):
                kind = span.kind if span.kind == theirs.kind or span.kind != "number" else theirs.kind
                yield kind, at


def _first_moved_tool(one: MaskedPrompt, other: MaskedPrompt) -> tuple[int, Position]:
    """Return the first tool, in the order as sent, that the other prompt has elsewhere, or with its fields in another
    order."""
    tools = [part for part in one.parts if part.part.kind == "tool"]
    others = {part.part.number: part.part.text for part in other.parts if part.part.kind == "tool"}
    moved = [part for part in tools if others.get(part.part.number) != part.part.text]
    first = min(moved or tools, key=lambda part: part.part.number)
    return tools[0].start, Position(first.part, 0)


def _reach(prompt: MaskedPrompt, at: int) -> int:
    """Return how far the masked texts of two prompts must agree for a difference at `at` to count."""
    part = prompt.parts[prompt.part_at(at)]
    if part.part.role in ("user", "assistant", "tool") or part.part.kind == "prompt":
        return at + MIN_COMMON
    return min(at + MIN_COMMON, part.start + len(part.text))  # a history may follow


def _spread(place: Place, prompts: Sequence[MaskedPrompt], shared: Sequence[int]) -> int:
    """Find all prompts that have the place. Return how many."""
    lengths = sorted({len(head) for head in place.heads})
    values: Counter[str] = Counter()
    for number, prompt in enumerate(prompts):
        heads = [prompt.text[:length] for length in lengths if length <= shared[number]]
        at = next((place.heads[head] for head in heads if head in place.heads), None)
        if at is None:
            continue
        place.prompts[number] = max(prompt.raw_characters(shared[number]), prompt.history_end)
        values[value_at(prompt, place, at)] += 1
    place.values = len(values)
    return len(place.prompts) if place.values > 1 else 0


def value_at(prompt: MaskedPrompt, place: Place, at: int) -> str:
    """Return what a prompt has there: its volatile text, or the order of its tools; empty for other text."""
    if place.kind == "order" and place.position.part.kind == "tool":
        return ", ".join(map(str, prompt.sent_tools))
    part = prompt.parts[prompt.part_at(at)]
    offset = at - part.start
    return part.value(part.text.count(MARK, 0, offset)) if part.text[offset : offset + 1] == MARK else ""


def _line_places(prompts: Sequence[MaskedPrompt], numbers: Sequence[int], shared: Sequence[int]) -> Iterator[Place]:
    """Yield the places after which prompts have text that others have, too."""
    chosen = [prompts[number] for number in numbers]
    lines, moved = CommonLines(chosen), MovedMessages(chosen)
    found: dict[tuple[str, str, int], Place] = {}
    reordered: Counter[tuple[str, str, int]] = Counter()
    for local, number in enumerate(numbers):
        prompt, at = prompts[number], shared[number]
        kind: DifferenceKind = "text"
        match = lines.after(local, at)
        if match is None:
            kind, match = "history", moved.after(local, at)
        if match is None:
            continue
        position = prompt.position(at)
        part = position.part
        key: tuple[str, str, int] = (kind, part.kind, part.number) if kind != "history" else (kind, "", 0)
        place = found.get(key)
        if place is None:
            place = found[key] = Place(kind, position, (number, numbers[match.other]), at)
        elif at < place.at:
            place.position, place.examples, place.at = position, (number, numbers[match.other]), at
        place.prompts[number] = prompt.raw_characters(at) + match.characters
        place.values += 1
        reordered[key] += match.reordered
    for key, place in found.items():
        if 2 * reordered[key] > len(place.prompts):
            place.kind = "order"
        yield place


# Findings: what prevents reuse in the prompts of a route, where, in how much of its traffic, and what it costs.
#
# A prompt of which `could` tokens could be reused and `cached` ones were cost this much more prefill time than
# necessary:
#
#     lost = cost(cached) − cost(could)                                                                          [ms]
#
# `could` is the text that other prompts have in common, or that an earlier request of the same conversation had. `cost`
# is the prefill time of the prompt with this many cached tokens (core/traffic.py).
#
# Shares and means are over the samples after the first one that has the difference: those before it say nothing about
# it, and a difference that has just begun is in all prompts, not in a tenth of the samples. Each sample counts with its
# weight.

MIN_SAMPLES: Final = 8
"""A share of fewer prompts says too little."""
MIN_LOST_SHARE: Final = 0.02
"""Least loss of a finding, as a share of the prompt tokens."""
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
    """Number of the message or tool, from 0."""
    role: str
    character: int
    """Within the message or tool."""
    token: int
    """Within the prompt."""
    share: float
    """Share of the prompts with the difference, since the first one that has it."""
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
    """GPU seconds that were lost since `since_s`, over all requests."""
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


# How the prompts of a route differ from those of the last hour: changed at a place, or new altogether.

MIN_OLDER: Final = 3
MIN_RECENT: Final = 6
RECENT_S: Final = 60.0
NEW_WITHIN: Final = 64
"""A prompt that differs from all earlier ones within this many characters is new, not changed."""


class PromptChange(NamedTuple):
    changed_share: float
    """Recent prompts that agree with earlier ones much less far than those agreed with each other, but begin alike."""
    new_share: float
    """Recent prompts that begin like no earlier one."""
    new_tenant_share: float
    """Recent prompts of tenants that earlier samples do not have."""
    place: str
    """Where changed prompts differ from the earlier ones; empty without any."""


def find_change(recent: Sequence[PromptSample], older: Sequence[PromptSample]) -> PromptChange | None:
    """Compare the prompts of the last minute with the older ones. Return None without enough of both."""
    if not recent:
        return None
    since_s = recent[-1].arrived_s - RECENT_S
    now = [sample for sample in recent if sample.arrived_s >= since_s and sample.prompt is not None]
    before = [sample for sample in (*older, *recent) if sample.arrived_s < since_s and sample.prompt is not None]
    if len(now) < MIN_RECENT or len(before) < MIN_OLDER:
        return None
    earlier = sorted([sample.prompt for sample in before if sample.prompt is not None], key=lambda prompt: prompt.text)
    usual = median_low([_agreement(one, earlier[:at] + earlier[at + 1 :]) for at, one in enumerate(earlier)])
    changed: list[tuple[int, MaskedPrompt]] = []
    new = 0
    for sample in now:
        prompt = sample.prompt
        assert prompt is not None
        agreement = _agreement(prompt, earlier)
        if agreement > usual - MIN_COMMON:
            continue
        first = prompt.parts[0]
        if agreement < first.start + min(NEW_WITHIN, len(first.text)):
            new += 1
        else:
            changed.append((agreement, prompt))
    tenants = {sample.tenant for sample in before}
    place = ""
    if changed:
        at, prompt = sorted(changed, key=lambda one: one[0])[len(changed) // 2]
        position = prompt.position(at)
        part = position.part
        place = f"{describe_part(part.kind, part.number, part.role)}, character {position.character}"
    strangers = sum([sample.tenant not in tenants for sample in now])
    return PromptChange(len(changed) / len(now), new / len(now), strangers / len(now), place)


def _agreement(prompt: MaskedPrompt, ordered: Sequence[MaskedPrompt]) -> int:
    """Return how many characters of the masked text a prompt has in common with the most similar one of `ordered`."""
    at = bisect_left(ordered, prompt.text, key=lambda other: other.text)
    near = ordered[max(0, at - 1) : at + 1]
    return max([common_prefix(prompt.text, other.text) for other in near], default=0)
