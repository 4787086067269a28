"""Finds the places at which prompts differ although they have much text in common after the difference.

Prompts that differ where a user's message begins are healthy: everything before it is shared, and nothing after it is
common. A place costs reuse if at least MIN_COMMON characters after it are the same in several prompts: the engine
computes them again for each, because a cached prefix ends at the first different token. The same holds for volatile
text in a system prompt or tool in front of a conversation's history.

    volatile   the masked texts agree beyond it: a time, an id, a number
    order      the same tools, or the same lines of text, in another order
    text       other text, before lines that many prompts of the route have
    history    messages of a conversation at another position, because its client dropped earlier ones

In sorted order, the prompt that has the longest prefix in common with another one is its neighbour. So all pairs need
not be compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final, Literal

from warmroute.prompt_doctor.common_lines import CommonLines, MovedMessages
from warmroute.prompt_doctor.masked_prompt import MaskedPrompt, Position, common_prefix
from warmroute.prompt_doctor.volatile_text import MARK

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
    """Its position in the masked text of the first example."""
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
    """For each prompt: leading characters of the masked text that another prompt has, too."""
    places: list[Place]
    """Those with the most prompts first."""


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
