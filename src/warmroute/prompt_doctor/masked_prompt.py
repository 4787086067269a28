"""A prompt's text with volatile text replaced by marks and tools in a fixed order: what prompts may have in common.

Two prompts whose masked texts agree further than their own could share more of the cache if the volatile text, or the
order of the tools, did not change. Positions in a masked text lead back to the part and the character.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from itertools import accumulate
from typing import Final, NamedTuple

from warmroute.prompt_doctor.prompt_parts import Part, PromptParts
from warmroute.prompt_doctor.volatile_text import MARK, Span, volatile_spans

_PART_START: Final = "\ue0f2"


class Position(NamedTuple):
    """A place in a prompt, as its client's author finds it."""

    part: Part
    character: int


class MaskedPart(NamedTuple):
    part: Part
    """As sent."""
    raw: str
    """Its text: that of a tool with its fields sorted."""
    spans: list[Span]
    """Volatile text in `raw`."""
    text: str
    """`raw` with marks in place of volatile text."""
    start: int
    """Where `text` starts in the prompt's masked text."""

    def value(self, number: int) -> str:
        """Return the text that a mark stands for."""
        span = self.spans[number]
        return self.raw[span.start : span.end]

    def character(self, offset: int) -> int:
        """Return the character of the part as sent for an offset in `text`."""
        at = _raw_offset(self, offset)
        if self.raw is self.part.text:
            return at
        length = next((span.end - at for span in self.spans if span.start == at), 24)
        return max(0, self.part.text.find(self.raw[at : at + length]))


class MaskedPrompt:
    __slots__ = ("_raw_ends", "_starts", "history_end", "is_cut", "parts", "sent_tools", "size_bytes", "text")

    def __init__(self, prompt: PromptParts) -> None:
        self.is_cut = prompt.is_cut
        parts = _sorted_tools(prompt.parts)
        self.sent_tools = [part.number for _raw, part in parts if part.kind == "tool"]
        """Positions of the tools as sent, in the order of the masked text."""
        self.parts: list[MaskedPart] = []
        pieces: list[str] = []
        at = 0
        for raw, part in parts:
            head = f"{_PART_START}{part.kind}/{part.role}\n"
            spans = list(volatile_spans(raw))
            text = _masked(raw, spans)
            self.parts.append(MaskedPart(part, raw, spans, text, at + len(head)))
            pieces += (head, text)
            at += len(head) + len(text)
        self.text = "".join(pieces)
        self._starts = [part.start for part in self.parts]
        self._raw_ends = list(accumulate(len(part.raw) for part in self.parts))
        last = max((number for number, one in enumerate(self.parts) if one.part.role == "assistant"), default=None)
        self.history_end = 0 if last is None or last == len(self.parts) - 1 else self._raw_ends[last]
        """Characters up to the last message of the assistant: a conversation's earlier request had nearly all of
        them. 0 for a prompt without."""
        self.size_bytes = 2 * len(self.text) * (1 if self.text.isascii() else 2) + 256 * len(self.parts)

    @property
    def characters(self) -> int:
        return self._raw_ends[-1] if self._raw_ends else 0

    def part_at(self, at: int) -> int:
        """Return the number of the part that a position in the masked text belongs to."""
        return max(0, bisect_right(self._starts, at) - 1)

    def position(self, at: int) -> Position:
        """Return where a position of the masked text is in the prompt as sent."""
        part = self.parts[self.part_at(at)]
        return Position(part.part, part.character(min(max(0, at - part.start), len(part.text))))

    def raw_characters(self, at: int) -> int:
        """Return how many characters of the prompt as sent lie before a position of the masked text."""
        number = self.part_at(at)
        before = self._raw_ends[number - 1] if number else 0
        part = self.parts[number]
        return before + _raw_offset(part, min(max(0, at - part.start), len(part.text)))


def common_prefix(one: str | bytes, other: str | bytes) -> int:
    """Return how many leading characters, or bytes, are equal."""
    low, high = 0, min(len(one), len(other))
    if one[:high] == other[:high]:
        return high
    step = 64
    while low + step < high and one[low : low + step] == other[low : low + step]:
        low += step
        step *= 2
    high = min(high, low + step)
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _masked(text: str, spans: list[Span]) -> str:
    pieces: list[str] = []
    at = 0
    for span in spans:
        pieces += (text[at : span.start], MARK)
        at = span.end
    pieces.append(text[at:])
    return "".join(pieces)


def _raw_offset(part: MaskedPart, offset: int) -> int:
    """Return the character of the part as sent for an offset in its masked text."""
    shift = 0
    for span in part.spans:
        if span.start - shift >= offset:
            break
        shift += span.end - span.start - 1
    return max(0, offset + shift)


def _sorted_tools(parts: list[Part]) -> list[tuple[str, Part]]:
    """Return each part's text and the part, with the tools, and the fields within each, in a fixed order."""
    tools = [(_sorted_json(part.text), part) for part in parts if part.kind == "tool"]
    tools.sort(key=lambda tool: _masked(tool[0], list(volatile_spans(tool[0]))))
    sent = [(part.text, part) for part in parts]
    if not tools:
        return sent
    first = next(number for number, part in enumerate(parts) if part.kind == "tool")
    return [*sent[:first], *tools, *sent[first + len(tools) :]]


def _sorted_json(text: str) -> str:
    """Return the JSON with sorted fields; the very text if they are sorted already, or if it is none."""
    try:
        ordered = json.dumps(json.loads(text), sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    except (ValueError, RecursionError):
        return text
    return text if ordered == text else ordered
