"""The reference for `FirstTokenSearch` of `_kernel/first_token.c`, in Python. A property test compares the two.

It takes a whole stream. What it does not understand counts as the first token.
"""

from __future__ import annotations

import json
import re
from enum import IntEnum
from typing import Any

from warmroute._kernel import FIRST_TOKEN_EMPTY_CHUNKS, FIRST_TOKEN_SEARCH_BYTES

BEFORE_TOKENS = ("ping", "keepalive", "message_start", "content_block_start")
NOT_DONE = ("created", "queued", "in_progress", "added", "searching", "interpreting", "generating")


class Says(IntEnum):
    NOTHING = 0
    EMPTY_CHUNK = 1
    TOKEN = 2


def has_first_token(stream: bytes) -> bool:
    """Return whether the stream had its first token, where its last line may not have ended."""
    if len(stream) > FIRST_TOKEN_SEARCH_BYTES:
        return True
    empty_chunks = 0
    for line in re.split(rb"[\r\n]", stream)[:-1]:
        says = line_says(line)
        empty_chunks += says is Says.EMPTY_CHUNK
        if says is Says.TOKEN or empty_chunks == FIRST_TOKEN_EMPTY_CHUNKS:
            return True
    return False


def line_says(line: bytes) -> Says:
    field, _, value = line.partition(b":")
    if field in (b"", b"event", b"id", b"retry"):
        return Says.NOTHING
    if field != b"data":
        return Says.TOKEN
    value = value.lstrip(b" \t")
    if not value:
        return Says.NOTHING
    try:
        event = json.loads(value)
    except ValueError:
        return Says.TOKEN
    return event_says(event) if isinstance(event, dict) else Says.TOKEN


def event_says(event: dict[str, Any]) -> Says:
    if event.get("error") is not None:
        return Says.TOKEN
    if "choices" in event:
        choices = event["choices"]
        if not isinstance(choices, list):
            return Says.TOKEN
        return max((choice_says(choice) for choice in choices), default=Says.NOTHING)
    kind = event.get("type")
    if not isinstance(kind, str):
        return Says.TOKEN
    if kind in BEFORE_TOKENS:
        return Says.NOTHING
    delta = delta_says(event.get("delta"))
    if kind == "content_block_delta":
        return delta
    if not kind.startswith("response."):
        return Says.TOKEN
    last = kind.rpartition(".")[2]
    if last in NOT_DONE:
        return Says.NOTHING
    return delta if last == "delta" else Says.TOKEN


def choice_says(choice: Any) -> Says:
    if not isinstance(choice, dict) or has_content(choice.get("finish_reason")) or has_content(choice.get("token_ids")):
        return Says.TOKEN
    return max((delta_says(choice[name]) for name in ("delta", "text") if name in choice), default=Says.NOTHING)


def delta_says(delta: Any) -> Says:
    if not isinstance(delta, dict):
        return Says.TOKEN if has_content(delta) else Says.EMPTY_CHUNK
    if any(has_content(value) for name, value in delta.items() if name not in ("role", "type")):
        return Says.TOKEN
    return Says.NOTHING if "role" in delta else Says.EMPTY_CHUNK


def has_content(value: Any) -> bool:
    """Whether it is a string, list or object with something in it."""
    return isinstance(value, str | list | dict) and bool(value)
