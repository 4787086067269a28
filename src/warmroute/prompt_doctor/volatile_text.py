"""Text that changes from request to request by its form: dates and times, ids, numbers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final, Literal, NamedTuple

Volatile = Literal["time", "id", "number"]
MARK: Final = "\ue0f1"
"""Replaces volatile text. One mark for all forms: an id may happen to have only digits."""

_MONTH: Final = (
    r"(?:Jan(?:uary)?|Feb(?:ruary)?|Mar(?:ch)?|Apr(?:il)?|May|June?|July?|Aug(?:ust)?|Sept?(?:ember)?|Oct(?:ober)?"
    r"|Nov(?:ember)?|Dec(?:ember)?)"
)
_DAY: Final = r"(?:Mon|Tue|Tues|Wed|Wednes|Thu|Thurs|Fri|Sat|Satur|Sun)(?:day)?"
_DATE: Final = (
    r"(?:\d{4}[-/.]\d{1,2}[-/.]\d{1,2}|\d{1,2}[/.]\d{1,2}[/.]\d{2,4}"
    rf"|\d{{1,2}}(?:st|nd|rd|th)?[ -]{_MONTH}\.?,?[ -]\d{{2,4}}|{_MONTH}\.? \d{{1,2}}(?:st|nd|rd|th)?(?:,? \d{{4}})?"
    rf"|{_MONTH}\.?,? \d{{4}}|{_DAY}\b|1[5-9]\d{{8}}(?:\.\d+|\d{{3}}(?:\d{{3}})?(?:\d{{3}})?)?(?![\w-]))"
)
_TIME: Final = (
    r"(?:\d{1,2}:\d{2}(?::\d{2}(?:[.,]\d+)?)?(?: ?[AaPp]\.?[Mm]\b\.?)?(?: ?(?:UTC|GMT|CES?T|[ECMP][SD]T|Z\b)"
    r"|[+-]\d{2}:?\d{2}\b)?|\d{1,2} ?[AaPp]\.?[Mm]\b\.?)"
)
_WHEN: Final = rf"(?:{_DATE}|{_TIME})(?:(?:,? (?:at )?|T|,)(?:{_DATE}|{_TIME}))*"
_ID: Final = (
    r"[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}"
    r"|(?=[A-Za-z_-]{0,64}\d)(?=[\d_-]{0,64}[A-Za-z])[A-Za-z0-9_-]{8,}"
)
_GATE: Final = r"(?=\d|[A-Za-z_-]{1,64}\d|[JFMASOND][a-z]{2,8}\.?,? \d|[MTWFS][a-z]{1,5}day)"
"""Words that may be volatile. It rules out most words at once. Its repeats are bounded: the search is linear."""
_VOLATILE: Final = re.compile(
    rf"(?<![A-Za-z0-9]){_GATE}(?:(?P<time>{_WHEN})(?![A-Za-z0-9])|(?P<id>{_ID})|(?P<number>\d+(?:[.,]\d+)*))"
)
_CHUNK: Final = 4096
"""Characters that are searched at once: the search holds the interpreter lock."""


class Span(NamedTuple):
    start: int
    end: int
    kind: Volatile


def volatile_spans(text: str) -> Iterator[Span]:
    """Yield the volatile parts of a text, in order."""
    start = 0
    while start < len(text):
        end = start + _CHUNK
        if end < len(text):  # cut between words
            cut = max(text.rfind("\n", start, end), text.rfind(" ", start, end))
            end = cut + 1 if cut > start else end
        for match in _VOLATILE.finditer(text, start, end):
            kind: Volatile = "time" if match["time"] else "id" if match["id"] else "number"
            yield Span(match.start(), match.end(), kind)
        start = end


def hide(text: str) -> str:
    """Return the text with its letters as x and its digits as 0: its form, not its content."""
    return "".join(["0" if one.isdigit() else "x" if one.isalnum() else one for one in text])
