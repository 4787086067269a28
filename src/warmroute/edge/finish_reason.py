"""Reads why an answer ended, of a response that is not streamed."""

from __future__ import annotations

import msgspec


class _Choice(msgspec.Struct):
    finish_reason: str | None = None


class _Answer(msgspec.Struct):
    """Of chat completions and completions, of /v1/messages, and of /v1/responses."""

    choices: list[_Choice] = []
    stop_reason: str | None = None
    status: str | None = None


def finish_reason_of(body: bytes) -> str | None:
    """Return the finish reason as chat completions have it; None if the body has none or is not valid JSON."""
    try:
        answer = msgspec.json.decode(body, type=_Answer)
    except (ValueError, RecursionError):
        return None
    if answer.choices:
        return answer.choices[0].finish_reason
    reason = answer.stop_reason or answer.status
    return "length" if reason in ("max_tokens", "incomplete") else reason
