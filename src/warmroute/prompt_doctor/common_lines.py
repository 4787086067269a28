"""Text that prompts have in common after the point up to which they agree: lines of an application, and messages that
stand at another place in a later request of the same conversation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final, NamedTuple

from warmroute.prompt_doctor.masked_prompt import MaskedPrompt

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
    """A prompt with the same text."""


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
