"""Reads why an answer ended, of a response that is not streamed."""

from __future__ import annotations

import msgspec


class _Choice(msgspec.Struct):
    finish_reason: str | None = None


class _Answer(msgspec.Struct):
    choices: list[_Choice] = []


def finish_reason_of(body: bytes) -> str | None:
    """Return the first choice's finish reason; None if the body has none or is not valid JSON."""
    try:
        choices = msgspec.json.decode(body, type=_Answer).choices
    except (ValueError, RecursionError):
        return None
    return choices[0].finish_reason if choices else None
