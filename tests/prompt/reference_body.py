"""The reference for the scan of request bodies (_kernel/body_scan.c), with a JSON parser. Tests compare them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

from warmroute._kernel import KEY_CHARACTERS
from warmroute.prompt.request_body import Endpoint

Fields = tuple[str, bytes | None, bytes | None, bytes]
"""Model, first characters of the system prompt and of the first user message, session."""

MAX_DEPTH: Final = 256
MAX_DIGITS: Final = 640
MAX_FIELDS: Final = 1000
MAX_NAME_BYTES: Final = 1024
MAX_PARTS_DEPTH: Final = 4
PROMPT_FIELDS: Final = ("prompt", "input", "query", "text_1")
SESSION_FIELDS: Final = ("session_id", "conversation_id", "prompt_cache_key", "user")
OUTPUT_LIMITS: Final = {
    Endpoint.CHAT: ("max_completion_tokens", "max_tokens"),
    Endpoint.COMPLETION: ("max_tokens",),
    Endpoint.RESPONSES: ("max_output_tokens",),
    Endpoint.MESSAGES: ("max_tokens",),
    Endpoint.EMBEDDING: (),
}
ROUTER_FIELDS: Final = {
    "model", "messages", "system", "instructions", *PROMPT_FIELDS, *SESSION_FIELDS, "tools", "cache_salt", "stream",
    "priority", "max_completion_tokens", "max_tokens", "max_output_tokens",
}  # fmt: skip
"""Fields that must not be given twice."""


class Rejected(Exception):
    pass


def parse(body: bytes) -> dict[str, Any]:
    """Return the body's fields. Raises Rejected for what is no JSON object, or is ambiguous or too large."""
    pairs: list[tuple[str, Any]] = []

    def keep_pairs(found: list[tuple[str, Any]]) -> dict[str, Any]:
        nonlocal pairs
        pairs = found  # the object that ends last is the outermost one
        return dict(found)

    try:
        text = body.removeprefix(b"\xef\xbb\xbf").decode()
        tree = json.loads(text, object_pairs_hook=keep_pairs, parse_int=_integer, parse_float=_float)
    except (ValueError, RecursionError):
        raise Rejected from None
    if not isinstance(tree, dict) or len(pairs) > MAX_FIELDS or _depth(tree) > MAX_DEPTH:
        raise Rejected
    names = [name for name, _ in pairs if name in ROUTER_FIELDS]
    if len(names) != len(set(names)):
        raise Rejected
    return tree


def read_json(body: bytes) -> Fields:
    """Return what the scan returns, without the outline. Raises Rejected. A name of any length is accepted."""
    tree = parse(body)
    model = tree.get("model")
    if model is not None and not isinstance(model, str):
        raise Rejected
    return model or "", *_prompt_starts(tree), _session(tree)


def options(endpoint: Endpoint, tree: dict[str, Any]) -> tuple[int | None, int, str, bool]:
    """Return maximum output tokens, priority, cache salt, and whether the response streams. Raises Rejected."""
    limits = [_number(tree.get(name)) for name in ("max_completion_tokens", "max_tokens", "max_output_tokens")]
    by_name = dict(zip(("max_completion_tokens", "max_tokens", "max_output_tokens"), limits, strict=True))
    max_output_tokens = 16 if endpoint is Endpoint.COMPLETION and "max_tokens" not in tree else None
    for name in reversed(OUTPUT_LIMITS[endpoint]):
        if by_name[name] is not None:
            max_output_tokens = by_name[name]
    priority, salt, stream = _number(tree.get("priority")), tree.get("cache_salt"), tree.get("stream")
    if not isinstance(salt, str | None) or not isinstance(stream, bool | None):
        raise Rejected
    return max_output_tokens, priority or 0, salt or "", stream is True


def _number(value: Any) -> int | None:
    if value is None:
        return None
    if isinstance(value, str | bool | list | dict) or value != value or value in (float("inf"), -float("inf")):
        raise Rejected
    if isinstance(value, _Float):
        whole, _, fraction = value.text.partition(".")
        if fraction.strip("0") or "e" in value.text.lower():
            raise Rejected
        value = int(whole)
    return max(-(10**18), min(int(value), 10**18))


class _Float(float):
    text: str


def _integer(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise ValueError
    return int(text)


def _float(text: str) -> float:
    if len(text.partition(".")[0].lower().partition("e")[0]) > MAX_DIGITS:
        raise ValueError
    value = _Float(text)
    value.text = text
    return value


def _depth(tree: Any) -> int:
    """Return how many objects and lists lie in each other."""
    deepest, level = 0, [tree]
    while level:
        level = [
            inner
            for value in level
            for inner in (value.values() if isinstance(value, dict) else value)
            if isinstance(inner, (dict, list))
        ]
        deepest += 1
    return deepest


def _prompt_starts(tree: dict[str, Any]) -> tuple[bytes | None, bytes | None]:
    system = user = None
    if "system" in tree:
        system = _text(tree["system"])
    elif "instructions" in tree:
        system = _text(tree["instructions"])
    messages = tree.get("messages")
    for message in messages if isinstance(messages, list) else ():
        role = message.get("role") if isinstance(message, dict) else None
        if role == "user":
            user = _text(message.get("content"))
            break
        if system is None and role in ("system", "developer"):
            system = _text(message.get("content"))
    if user is None:
        for name in PROMPT_FIELDS:
            if name in tree:
                user = _text(tree[name])
                break
    return system, user


def _text(value: Any) -> bytes:
    """Return the first characters of a text, of a list of parts, of a batch's first prompt, or of token ids."""
    text = ""
    for piece in _texts(value, 0):
        text += piece
        if len(text) >= KEY_CHARACTERS:
            break
    return text[:KEY_CHARACTERS].encode("utf-8", "surrogatepass")


def _texts(value: Any, depth: int) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            if isinstance(item, int):
                yield f"{item},"
            elif depth < MAX_PARTS_DEPTH:
                yield from _texts(item, depth + 1)
    elif isinstance(value, dict) and depth < MAX_PARTS_DEPTH:
        # a part ({"type": "text", "text": …}) or an item of the responses API ({"role": …, "content": …})
        yield from _texts(value.get("text", value.get("content")), depth + 1)


def _session(tree: dict[str, Any]) -> bytes:
    return next(filter(None, (_session_text(tree.get(name)) for name in SESSION_FIELDS)), b"")


def _session_text(value: Any) -> bytes:
    if isinstance(value, (str, int)) and not isinstance(value, bool):
        return str(value)[:KEY_CHARACTERS].encode("utf-8", "surrogatepass")
    return b""
