"""What the edge reads in an answer: first token, usage, last event, finish reason, Retry-After."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from email.utils import parsedate_to_datetime
from typing import Any, Final

import msgspec

from warmroute._kernel import CHUNKED, BadChunk, ChunkReader, FirstTokenSearch, ResponseHead
from warmroute.core.messages import NodeError
from warmroute.edge.node_connection import NodeConnection
from warmroute.event_log import EventLog, where_it_failed

# Finds the first token in a node's event stream: content of the model, not a role, a comment or `response.created`.
#
# `_kernel/first_token.c` has the rules. They apply to the payload, so the chunk framing is removed from a copy first.


class FirstTokenDetector:
    __slots__ = ("_frames", "_search")

    def __init__(self, chunked: bool) -> None:
        self._frames = ChunkReader() if chunked else None
        self._search = FirstTokenSearch()

    def feed(self, data: bytes) -> bool:
        """Take the next bytes of the body, with a framing that was checked; return whether it had its first token."""
        if self._frames is not None:
            pieces: list[bytes] = []
            self._frames.feed(data, pieces)
            data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        return self._search.feed(data)


def detector_for(head: ResponseHead) -> FirstTokenDetector | None:
    """Return a detector for an event stream that can be read; else None, and its first byte counts as its first token.

    An error and a response without streaming have no token to wait for; a compressed stream hides them."""
    if head.status >= 400 or head.length >= 0 or head.encoded:
        return None
    return FirstTokenDetector(head.length == CHUNKED)


# Whether an event stream has come to its last event. A client may leave then: it has the whole response.
#
# OpenAI's Python client does so after `[DONE]`, without waiting for the end of the HTTP response.

_LAST: Final = re.compile(
    rb"(?:^|\n)(?:data: ?\[DONE\]|event: ?(?:message_stop|response\.(?:completed|incomplete|failed))\r?\ndata:[^\n]*\n)"
    rb"[\s0-9a-f]*\Z"
)
"""What follows may be an empty line, and the framing of chunks."""
_MARKERS: Final = (b"[DONE]", b"message_stop", b"response.completed", b"response.incomplete", b"response.failed")
MAX_TAIL_BYTES: Final = 65_536
"""How much of a stream's end is kept for the search."""


def may_end(piece: bytes) -> bool:
    """Return whether the last event may be in this piece. Cheap, for each piece of a stream."""
    return any(marker in piece for marker in _MARKERS)


def has_last_event(tail: bytes) -> bool:
    """`tail`: the end of a response's body."""
    return _LAST.search(tail) is not None


# Reads why an answer ended, of a response that is not streamed.


def finish_reason_of(body: bytes) -> str | None:
    """Return the finish reason as chat completions have it; None if the body has none or is not valid JSON. It may be a
    response of chat completions and completions, of /v1/messages, or of /v1/responses."""
    try:
        answer = msgspec.json.decode(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(answer, dict):
        return None
    choices = answer.get("choices")
    if isinstance(choices, list) and choices:
        reason = choices[0].get("finish_reason") if isinstance(choices[0], dict) else None
    else:
        reason = answer.get("stop_reason") or answer.get("status")
        if reason in ("max_tokens", "incomplete"):
            return "length"
    return reason if isinstance(reason, str) else None


# Reads the Retry-After header of a node.

MAX_RETRY_AFTER_S: Final = 3600
"""Longer times of nodes are cut to this."""


def seconds_of(retry_after: bytes) -> int | None:
    """Return the time in a Retry-After header, which is a number of seconds or a date; None if it is neither."""
    if not retry_after or len(retry_after) > 40:
        return None
    if retry_after.isdigit():
        return min(int(retry_after), MAX_RETRY_AFTER_S)
    try:
        left_s = parsedate_to_datetime(retry_after.decode("ascii")).timestamp() - time.time()
    except (ValueError, OverflowError):
        return None
    return max(1, min(int(left_s), MAX_RETRY_AFTER_S))


# Whether a node's 404 means that the engine lacks the path.
#
# Web frameworks answer 404 with a text of their own, such as `{"detail":"Not Found"}`, which OpenAI's clients cannot
# read as an error. An engine that serves the path, and knows no such model or response, says so in an error of OpenAI's
# form.

MAX_JUDGED_BYTES: Final = 16_384
"""A longer body is no framework's."""
_SAYS_NOTHING: Final = ("", "not found", "file not found")
"""Messages of frameworks that write their own 404 in OpenAI's form."""


def lacks_path(head: ResponseHead, body: bytes) -> bool:
    """Return whether a complete response with status 404 is not an error of the engine's API. `body`: as it arrived."""
    if head.encoded:
        return False
    if head.length == CHUNKED:
        pieces: list[bytes] = []
        try:
            ChunkReader().feed(body, pieces)
        except BadChunk:
            return False
        body = b"".join(pieces)
    try:
        tree = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return True
    if not isinstance(tree, dict):
        return True
    error = tree if tree.get("object") == "error" else tree.get("error")  # older engines put the fields at the top
    message = error.get("message") if isinstance(error, dict) else error
    return not isinstance(message, str) or message.strip(" .").lower() in _SAYS_NOTHING


# Reads the beginning of a node's error response: what the router keeps of it, and what the engine's text is about.
#
# The request goes to another node at once. If the body has not arrived by then, the connection stays open for it, for
# at most READ_S, and only so many of a node at a time.

log = EventLog("warmroute.edge")

MAX_ERROR_BYTES: Final = 8192
"""Of a body, as it is on the wire. The rest is not read."""
MAX_TEXT: Final = 1000
"""Characters that are kept with `journal.error_text`."""
MAX_NAME: Final = 64
MAX_KNOWN: Final = 1024
READ_S: Final = 1.0
_NOT_IN_NAMES: Final = re.compile(r"[^A-Za-z0-9_.-]+")

OTHER: Final = NodeError().kind
OUT_OF_MEMORY: Final = "out_of_memory"
BAD_TEMPLATE: Final = "bad_template"
UNKNOWN_MODEL: Final = "unknown_model"
TIMEOUT: Final = "timeout"
_SIGNS: Final = (
    (
        OUT_OF_MEMORY,
        (b"out of memory", b"outofmemory", b"out_of_memory", b"memoryerror", b"cannot allocate", b"bad_alloc",
         b"not enough memory", b"insufficient memory", b"failed to allocate", b"no space left"),
    ),
    (BAD_TEMPLATE, (b"chat template", b"chat_template", b"jinja", b"templateerror", b"template error")),
    (
        UNKNOWN_MODEL,
        (b"model_not_found", b"unknown model", b"model not found", b"no such model", b"model does not exist"),
    ),
    (TIMEOUT, (b"timed out", b"timeout", b"time out", b"deadline exceeded", b"deadlineexceeded")),
)  # fmt: skip
"""What an engine's text says, in lower case. The first class counts whose sign it contains."""


_known: Final[dict[int, NodeError]] = {}
"""What whole bodies say, by hash: a node that fails says the same again and again. Without their text."""


def whole_error(head: ResponseHead, body: bytes, keeps_text: bool) -> NodeError:
    """Return what is kept of an error whose body has arrived with its head."""
    if len(body) > MAX_ERROR_BYTES or head.length < 0 or keeps_text or head.encoded:
        collected = ErrorBody(head.status, head.length, head.encoded, keeps_text)
        collected.feed(body, True)
        return collected.error
    key = hash(body) ^ head.status
    error = _known.get(key)
    if error is None:
        if len(_known) >= MAX_KNOWN:
            _known.clear()
        error = _known[key] = _read(NodeError(length=len(body)), head.status, body)
    return error


def _read(error: NodeError, status: int, body: bytes) -> NodeError:
    error.type, error.code = _names(body)
    error.kind = _class_of(status, body)
    return error


class ErrorBody:
    """Collects the body. Implements node_connection.ResponseReader for the rest of a response whose request has gone to
    another node."""

    def __init__(self, status: int, length: int, encoded: bool, keeps_text: bool) -> None:
        """`length`: as a ResponseHead has it."""
        self.error = NodeError(length=max(0, length))
        self._status = status
        self._keeps_text = keeps_text
        self._encoded = encoded
        self._counts = length < 0
        self._frames = ChunkReader() if length == CHUNKED else None
        self._pieces: list[bytes] = []
        self._received = 0
        self._connection: NodeConnection | None = None
        self._until_s = 0.0
        self._read = False

    def feed(self, data: bytes, whole: bool = False) -> None:
        """Take over what is still wanted of the bytes. `whole`: they are the last ones."""
        if self._read:
            return
        wanted = data[: MAX_ERROR_BYTES - self._received]
        self._received += len(wanted)
        if self._frames is None:
            self._pieces.append(wanted)
        else:
            try:
                self._frames.feed(wanted, self._pieces)
            except BadChunk:
                self.finish()
                return
        if whole or self._received >= MAX_ERROR_BYTES:
            self.finish()

    def finish(self) -> None:
        """No more of the body will be read: keep what the router may keep of it."""
        if self._read:
            return
        self._read = True
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.error_read()
        body, self._pieces = b"".join(self._pieces), []
        error = self.error
        if self._counts:
            error.length = len(body)
        if self._encoded:
            error.kind = _class_of(self._status, b"")
            return
        _read(error, self._status, body)
        if self._keeps_text:
            text = body[: 4 * MAX_TEXT].decode("utf-8", "replace")[:MAX_TEXT]
            error.text = "".join([character if character.isprintable() else " " for character in text])

    # As the reader of the rest of the response.

    def follow(self, connection: NodeConnection, now_s: float) -> Callable[[bytes], object] | None:
        """Read the rest. Return where it goes; None if the connection should rather be closed."""
        if self._read or not connection.read_error(self, now_s + READ_S):
            self.finish()
            return None
        self._connection, self._until_s = connection, now_s + READ_S
        return self._receive

    def _receive(self, data: bytes) -> None:
        connection = self._connection
        self.feed(data)
        if connection is not None and (self._read or connection.now_s >= self._until_s):
            connection.cancel()
            self.finish()

    def response_ended(self, _now_s: float) -> None:
        self.finish()

    def response_broke(self, _sign: int, _reason: str, _frames: ChunkReader | None) -> None:
        self.finish()

    def internal_error(self, error: Exception, _frames: ChunkReader | None) -> None:
        log.error("node_connection_failed", "The router closes the connection.", reason=where_it_failed(error))
        self.finish()


def _names(body: bytes) -> tuple[str, str]:
    """Return the error's `type` and `code`, which are in `error` or beside its message."""
    try:
        found = msgspec.json.decode(body)
    except (ValueError, RecursionError):
        return "", ""
    inner = found.get("error") if isinstance(found, dict) else None
    error = inner if isinstance(inner, dict) else found
    return (_name(error.get("type")), _name(error.get("code"))) if isinstance(error, dict) else ("", "")


def _name(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 10**9:
        return str(value)
    return _NOT_IN_NAMES.sub("", value[:4096])[:MAX_NAME] if isinstance(value, str) else ""


def _class_of(status: int, body: bytes) -> str:
    text = body.lower()
    for kind, signs in _SIGNS:
        for sign in signs:
            if sign in text:
                return kind
    if b"model" in text and (b"does not exist" in text or (status == 404 and b"not found" in text)):
        return UNKNOWN_MODEL
    return TIMEOUT if status == 504 else OTHER
