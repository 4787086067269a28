"""An ask: what a request wants, as far as routing cares. Made from the raw body, without building what it holds.

The body is read once by msgspec with every long value left raw: values are passed over and checked, not built, which
takes less than a hand-written scan would (0.8 µs for 1 KB, 6 µs for 16 KB; `make bench`). Where that reading is unsure
(a field of an unexpected type, escapes or non-ASCII text within the part that makes the key, parts lists), the value in
question is parsed for real. tests/prompt/test_ask.py holds both ways equal.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, Final

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

KEY_CHARACTERS: Final = 256
"""How much of the system prompt, and of the first user message, makes the routing key."""
_SYSTEM_ROLES: Final = (b"system", b"developer")


Parts = tuple[bytes | None, bytes | None]
"""The beginnings of the system prompt and of the first user message."""


class NotJson(ValueError):
    """The body is not a JSON object. The message says why, without the body's content."""


class _Message(Struct, gc=False):
    role: Raw | UnsetType = UNSET
    content: Raw | UnsetType = UNSET


class _Body(Struct, gc=False):
    model: str | None = None
    messages: list[_Message] | UnsetType = UNSET
    system: Raw | UnsetType = UNSET
    instructions: Raw | UnsetType = UNSET
    prompt: Raw | UnsetType = UNSET
    input: Raw | UnsetType = UNSET
    query: Raw | UnsetType = UNSET
    text_1: Raw | UnsetType = UNSET
    session_id: Raw | UnsetType = UNSET
    conversation_id: Raw | UnsetType = UNSET
    prompt_cache_key: Raw | UnsetType = UNSET
    user: Raw | UnsetType = UNSET


_decoder: Final = msgspec.json.Decoder(_Body)
_SESSION_FIELDS: Final = ("session_id", "conversation_id", "prompt_cache_key", "user")
_PROMPT_FIELDS: Final = ("prompt", "input", "query", "text_1")


class Ask:
    """One request's wishes. The parts that only some policies need are read when they are asked for."""

    __slots__ = ("_parts", "_session", "_source", "model", "session_header")

    def __init__(
        self,
        model: str,
        source: Any = None,
        parts: Callable[[Any], Parts] = lambda _source: (None, None),
        session: Callable[[Any], bytes] = lambda _source: b"",
    ) -> None:
        self.model = model
        """Empty where the body names none."""
        self.session_header = b""
        self._source = source
        self._parts = parts
        self._session = session

    def prefix_key(self) -> bytes | None:
        """Model, first characters of the system prompt and of the first user message; None where there is neither."""
        system, user = self._parts(self._source)
        if system is None and user is None:
            return None
        return b"%b\0%b\0%b" % (self.model.encode("utf-8", "surrogatepass"), system or b"", user or b"")

    def session(self) -> bytes:
        """What names the conversation: a header, else a field of the body; empty where nothing does."""
        return self.session_header or self._session(self._source)


def read_json(body: bytes) -> Ask:
    """Reads a JSON body. Raises NotJson."""
    try:
        fields = _decoder.decode(body)
    except (msgspec.ValidationError, msgspec.DecodeError, UnicodeDecodeError):
        return read_json_plainly(body)
    return Ask(fields.model or "", fields, _raw_parts, _raw_session)


def read_json_plainly(body: bytes) -> Ask:
    """The same by a real parser: slower, and the measure of `read_json`."""
    tree = _parse(body)
    model = tree.get("model")
    return Ask(model if isinstance(model, str) else "", tree, _tree_parts, _tree_session)


# From raw values.


def _raw_parts(body: _Body) -> Parts:
    system = user = None
    if body.system is not UNSET:
        system = _raw_text(body.system)
    elif body.instructions is not UNSET:
        system = _raw_text(body.instructions)
    if body.messages is not UNSET:
        for message in body.messages:
            role = _raw_role(message.role)
            if role == b"user":
                user = _raw_text(message.content)
                break
            if system is None and role in _SYSTEM_ROLES:
                system = _raw_text(message.content)
    if user is None:
        for name in _PROMPT_FIELDS:
            value = getattr(body, name)
            if value is not UNSET:
                user = _raw_text(value)
                break
    return system, user


def _raw_role(raw: Raw | UnsetType) -> bytes:
    if raw is UNSET:
        return b""
    role = bytes(raw)
    return role[1:-1] if b"\\" not in role else _tree_text(json.loads(role))


def _raw_text(raw: Raw | UnsetType) -> bytes:
    """The first characters of a text value, in UTF-8."""
    if raw is UNSET:
        return b""
    view = memoryview(raw)
    start = bytes(view[: KEY_CHARACTERS + 2])
    if start[:1] == b'"' and b"\\" not in start and start.isascii():
        return start[1:-1] if len(start) == KEY_CHARACTERS + 2 else start[1:].partition(b'"')[0]
    return _tree_text(json.loads(bytes(view)))


def _raw_session(body: _Body) -> bytes:
    for name in _SESSION_FIELDS:
        value = getattr(body, name)
        if value is not UNSET:
            session = _session_text(json.loads(bytes(value)))
            if session:
                return session
    return b""


# From a parsed tree.


def _parse(body: bytes) -> dict[str, Any]:
    try:
        tree = json.loads(body)
    except json.JSONDecodeError as error:
        raise NotJson(f"{error.msg} (line {error.lineno}, column {error.colno})") from None
    except UnicodeDecodeError:
        raise NotJson("it is not UTF-8 text") from None
    except RecursionError:
        raise NotJson("it is nested too deeply") from None
    if not isinstance(tree, dict):
        raise NotJson("it must be an object")
    return tree


def _tree_parts(tree: dict[str, Any]) -> Parts:
    system = user = None
    if "system" in tree:
        system = _tree_text(tree["system"])
    elif "instructions" in tree:
        system = _tree_text(tree["instructions"])
    messages = tree.get("messages")
    for message in messages if isinstance(messages, list) else ():
        role = message.get("role") if isinstance(message, dict) else None
        if role == "user":
            user = _tree_text(message.get("content"))
            break
        if system is None and role in ("system", "developer"):
            system = _tree_text(message.get("content"))
    if user is None:
        for name in _PROMPT_FIELDS:
            if name in tree:
                user = _tree_text(tree[name])
                break
    return system, user


def _tree_text(value: Any) -> bytes:
    """The first characters of a text, of a parts list's texts, of a batch's first prompt, or of token ids."""
    text = ""
    for piece in _texts(value):
        text += piece
        if len(text) >= KEY_CHARACTERS:
            break
    return text[:KEY_CHARACTERS].encode("utf-8", "surrogatepass")


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            if isinstance(item, int):
                yield f"{item},"
            else:
                yield from _texts(item)
    elif isinstance(value, dict):
        # a part ({"type": "text", "text": …}) or an item of the responses API ({"role": …, "content": …})
        yield from _texts(value.get("text", value.get("content")))


def _tree_session(tree: dict[str, Any]) -> bytes:
    return next(filter(None, (_session_text(tree.get(name)) for name in _SESSION_FIELDS)), b"")


def _session_text(value: Any) -> bytes:
    if isinstance(value, (str, int)) and not isinstance(value, bool):
        return str(value).encode("utf-8", "surrogatepass")
    return b""
