"""An ask: what a request wants, as far as routing cares. Made from the raw body, without building what it holds.

_kernel/_scan.c goes over the bytes once and picks out what routing needs, and where things lie, for those who read on
(the outline). With the key made: 1.1 µs for 1 KB, 2.5 µs for 16 KB, 10 µs for 128 KB (timeit, least of 80, on an EPYC
core at 2.6 GHz with AVX2; chats, in the longer ones an escape for every 60 bytes). Where the scan is unsure (a body is
malformed, a name is escaped, a number is NaN, …), the real parser reads the body. tests/prompt/test_ask.py holds both
ways equal.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

import msgspec

from warmroute._kernel._scan import Outline, scan

KEY_CHARACTERS: Final = 256
"""How much of the system prompt, and of the first user message, makes the routing key. _scan.c has the same."""
_PROMPT_FIELDS: Final = ("prompt", "input", "query", "text_1")
_SESSION_FIELDS: Final = ("session_id", "conversation_id", "prompt_cache_key", "user")


class _Model(msgspec.Struct):
    model: str | None = None


_model_reader: Final = msgspec.json.Decoder(_Model)
PARSED_BYTES: Final = 1_000_000
"""Up to this a body that the scan is unsure of is parsed for real."""


HIGH, NORMAL, LOW = range(3)
"""Priorities: the lower goes first."""


class NotJson(ValueError):
    """The body is not a JSON object. The message says why, without the body's content."""


class RoutingRequest:
    """One request's wishes."""

    __slots__ = (
        "_session",
        "_system",
        "_user",
        "arrived_s",
        "deadline_s",
        "highest",
        "max_output_tokens",
        "may_queue",
        "model",
        "outline",
        "priority",
        "priority_said",
        "route",
        "session_header",
        "streams",
        "tenant",
        "total_deadline_s",
    )

    def __init__(
        self,
        model: str,
        system: bytes | None = None,
        user: bytes | None = None,
        session: bytes = b"",
        outline: Outline | None = None,
    ) -> None:
        self.model = model
        """Empty where the body names none."""
        self.tenant = ""
        """Whose request it is; empty where nobody has to say."""
        self.max_output_tokens: int | None = None
        """What the answer may have at most, where the request says so."""
        self.streams = True
        """Whether the answer's first byte comes with its first token; else all of it comes at its end."""
        self.priority = NORMAL
        self.priority_said = False
        """Whether a header asks for it, which goes before what the body says."""
        self.highest = HIGH
        """The highest priority that it may have."""
        self.arrived_s = 0.0
        """When it came in; told only where the fleet is scaled."""
        self.deadline_s = 0.0
        """When its first token is due, on the router's clock; 0 where it has time."""
        self.total_deadline_s = 0.0
        """When its whole answer is due, likewise."""
        self.may_queue = True
        """False where it would rather be refused than wait."""
        self.route = ""
        """The name of the route whose settings count for it; empty where there is none."""
        self.session_header = b""
        self.outline = outline
        """Of its body, for who reads the prompt; None where there is none, or it is no longer needed."""
        self._system = system
        self._user = user
        self._session = session

    @property
    def says_nothing(self) -> bool:
        """Neither a system prompt nor anything of a user was found."""
        return self._system is None and self._user is None

    def prefix_key(self) -> bytes | None:
        """Model, first characters of the system prompt and of the first user message; None where there is neither."""
        if self.says_nothing:
            return None
        return b"%b\0%b\0%b" % (self.model.encode("utf-8", "surrogatepass"), self._system or b"", self._user or b"")

    def session(self) -> bytes:
        """What names the conversation: a header, else a field of the body; empty where nothing does."""
        return self.session_header or self._session


def read_json(body: bytes) -> RoutingRequest:
    """Reads a JSON body. Raises NotJson."""
    found = scan(body)
    if found is not None:
        return RoutingRequest(*found)
    return read_json_plainly(body) if len(body) <= PARSED_BYTES else _read_model(body)


def _read_model(body: bytes) -> RoutingRequest:
    """The model alone, the rest passed over unbuilt: parsing an odd body of this size for real would hold the loop."""
    try:
        return RoutingRequest(_model_reader.decode(body).model or "")
    except RecursionError:
        raise NotJson("it is nested too deeply") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise NotJson(str(error)) from None


def read_json_plainly(body: bytes) -> RoutingRequest:
    """The same by a real parser: slower, and the measure of `read_json`."""
    try:
        tree = _parse(body)
        model = tree.get("model")
        return RoutingRequest(model if isinstance(model, str) else "", *_parts(tree), _session(tree))
    except RecursionError:
        raise NotJson("it is nested too deeply") from None


def lacks(body: bytes, name: str) -> bool:
    """Whether a body that `read_json` has read lacks a field. Parses it for real: for the rare doubtful case."""
    return len(body) <= PARSED_BYTES and name not in _parse(body)


def _parse(body: bytes) -> dict[str, Any]:
    try:
        tree = json.loads(body)
    except json.JSONDecodeError as error:
        raise NotJson(f"{error.msg} (line {error.lineno}, column {error.colno})") from None
    except UnicodeDecodeError:
        raise NotJson("it is not UTF-8 text") from None
    except ValueError:
        raise NotJson("a number in it has too many digits") from None
    if not isinstance(tree, dict):
        raise NotJson("it must be an object")
    return tree


def _parts(tree: dict[str, Any]) -> tuple[bytes | None, bytes | None]:
    """The beginnings of the system prompt and of the first user message."""
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
        for name in _PROMPT_FIELDS:
            if name in tree:
                user = _text(tree[name])
                break
    return system, user


def _text(value: Any) -> bytes:
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


def _session(tree: dict[str, Any]) -> bytes:
    return next(filter(None, (_session_text(tree.get(name)) for name in _SESSION_FIELDS)), b"")


def _session_text(value: Any) -> bytes:
    if isinstance(value, (str, int)) and not isinstance(value, bool):
        return str(value).encode("utf-8", "surrogatepass")
    return b""
