"""What a request's body says, read without parsing all of it, and fields spliced into it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from enum import Enum
from typing import Any, Final

import msgspec

from warmroute._kernel import (
    DIGEST_BYTES,
    MAX_LOOP_BYTES,
    BadBody,
    Outline,
    decode_ms,
    digest,
    outline_body,
    prefix_digests,
    scan_body,
)
from warmroute.prompt.chat_template import Message
from warmroute.prompt.prompt import Prompt, text_prompts
from warmroute.prompt.template_messages import UnsupportedRequest

# Read the fields of a JSON body that routing needs (model, start of the prompt, session) without parsing all of it.
#
# _kernel/body_scan.c scans the bytes once, and rejects what an engine might read in another way. It also returns the
# outline: the position of each field. With the routing key this takes 1.1 µs for 1 KB, 2.5 µs for
# 16 KB, 10 µs for 128 KB (timeit, least of 80, on an EPYC core at 2.6 GHz with AVX2; chats, the longer ones with an
# escape every 60 bytes).

BodyFields = tuple[str, bytes | None, bytes | None, bytes, Outline, int | None, int, bool]
"""Model (empty where the body names none), first characters of the system prompt and of the first user message, session
(empty where the body names none), the outline, maximum output tokens (None: not set), the priority as vLLM reads it (a
lower number is served first), and whether the response streams."""

MAX_EXPLAINED_BYTES: Final = 65_536
"""The largest rejected body that a JSON parser reads to find out what is wrong: it may take a millisecond."""


def read_json(path: bytes, body: bytes) -> BodyFields:
    """Read what routing needs of a body. A request to a path without prompts counts as streaming. Raises BadBody, whose
    message says what is wrong without the body's content."""
    try:
        model, system, user, session, outline = scan_body(body)
        most_tokens, priority, streams = outline.parameters(*_OUTPUT_LIMITS.get(path, _NO_OUTPUT_LIMIT))
        return model, system, user, session, outline, most_tokens, priority, streams or path not in _ENDPOINTS
    except BadBody as bad:
        problem, field = bad.args
        raise BadBody(problem if field else _explain(body, problem), field) from None


def _explain(body: bytes, problem: str) -> str:
    """Say in more detail what is wrong with a body."""
    if len(body) > MAX_EXPLAINED_BYTES:
        return problem
    try:
        text = body.decode("utf-8-sig", "surrogatepass")
        tree = json.loads(text)
    except UnicodeDecodeError:
        return "it is not UTF-8 text"
    except json.JSONDecodeError as error:
        return f"{error.msg} (line {error.lineno}, column {error.colno})"
    except RecursionError:
        return "it is nested too deeply"
    except ValueError:
        return "a number in it has too many digits"
    return problem if isinstance(tree, dict) else "it must be an object"


# The messages of a request, decoded only where they are needed.
#
# Each message has a digest of the list up to and including it. Two requests with equal digests start with the same
# bytes, so the tokens of one are valid for the other, and these messages need not be decoded again.

MAX_DECODE_MS: Final = 15.0
"""A value that takes longer to parse is not parsed: a JSON parser holds the interpreter lock, and so stops the event
loop even if it runs in a thread."""
_UNCHECKED_BYTES: Final = 32_768
"""A value up to this size is parsed without an estimate: it takes less than MAX_DECODE_MS in any case."""
_MAX_LIST_BYTES: Final = 1 << 20
"""The items of a longer list are parsed one by one, so that other threads get their turn between them."""

ConvertItem = Callable[[Any], list[Message]]
"""Convert one item of the request's list to messages for the chat template. Raises UnsupportedRequest."""


class BodyMessages:
    """The items of a list in the request body."""

    def __init__(self, body: bytes, list_span: tuple[int, int], item_spans: bytes, convert: ConvertItem) -> None:
        self._body = body
        self._list_span = list_span
        self._spans = item_spans
        self._item_spans = memoryview(item_spans).cast("I")
        self._digests: bytes | None = None
        self._convert = convert
        self.count = len(self._item_spans) // 2

    def digest(self, count: int) -> bytes:
        """Return the digest of the first `count` items; `count` is at least 1."""
        if self._digests is None:
            self._digests = prefix_digests(self._body, self._spans)
        return self._digests[DIGEST_BYTES * (count - 1) : DIGEST_BYTES * count]

    def messages(self, start: int, end: int) -> list[Message]:
        """Return the template messages for these items. Raises UnsupportedRequest."""
        list_start, list_end = self._list_span
        if start == 0 and end == self.count and list_end - list_start <= _MAX_LIST_BYTES:
            items = decode_json(self._body, list_start, list_end)
        else:
            spans = self._item_spans
            items = [decode_json(self._body, spans[2 * i], spans[2 * i + 1]) for i in range(start, end)]
        convert = self._convert
        return [message for item in items for message in convert(item)]

    def size_bytes(self, start: int, end: int) -> int:
        return self._item_spans[2 * end - 1] - self._item_spans[2 * start] if end > start else 0


class ConvertedMessages:
    """Messages that were built from the whole parsed request (the responses API, embeddings of chats)."""

    def __init__(self, messages: Sequence[Any], convert: ConvertItem) -> None:
        # A client may have sent anything in the place of a message: what it is shows when it is rendered.
        self._messages = messages
        self._convert = convert
        self.count = len(messages)
        self._digests = [b""]
        self._sizes = [0]
        for message in messages:
            text = self._digests[-1] + msgspec.json.encode(message)
            self._digests.append(digest(text, 0, len(text)))
            self._sizes.append(self._sizes[-1] + len(text))

    def digest(self, count: int) -> bytes:
        return self._digests[count]

    def messages(self, start: int, end: int) -> list[Message]:
        return [message for item in self._messages[start:end] for message in self._convert(item)]

    def size_bytes(self, start: int, end: int) -> int:
        return self._sizes[end] - self._sizes[start]


MessageList = BodyMessages | ConvertedMessages


def decode_json(body: bytes, start: int, end: int) -> Any:
    """Decode body[start:end]. Raises UnsupportedRequest, also for a value that would take too long."""
    if end - start > _UNCHECKED_BYTES and decode_ms(body, start, end) > MAX_DECODE_MS:
        raise UnsupportedRequest("a value in the body is too large to parse")
    text = body[start:end]
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass
    try:
        if len(text) <= MAX_LOOP_BYTES:
            # Engines parse bodies with Python's own parser.
            return json.loads(text)  # it accepts some texts that msgspec refuses
    except (ValueError, RecursionError):
        pass
    raise UnsupportedRequest("the body is not valid JSON")


# A request body with the positions of its fields. A field's value is parsed only when it is read.
#
# The C scan finds the positions (the outline) in the same pass in which it reads the fields for routing.

_MAX_COMPLETION_TOKENS, _MAX_TOKENS, _MAX_OUTPUT_TOKENS = 1, 2, 4
"""Fields that limit the output, for Outline.parameters."""
_DEFAULT_COMPLETION_TOKENS: Final = 16
"""The maximum output of a completion that does not set max_tokens."""
NO_TOKENIZER: Final = "no tokenizer for this model"
_OPTIONS_OF_THE_PROMPT: Final = ("prompt_logprobs", "echo", "truncate_prompt_tokens", "truncation", "padding")
"""Fields that change how the engine uses its cache, or which tokens of the prompt it keeps."""


class Endpoint(Enum):
    CHAT = b"/v1/chat/completions"
    COMPLETION = b"/v1/completions"
    RESPONSES = b"/v1/responses"
    MESSAGES = b"/v1/messages"
    EMBEDDING = b"/v1/embeddings"

    __hash__ = object.__hash__  # Enum's own is slow


_PROMPT_LISTS: Final = {Endpoint.COMPLETION: "prompt", Endpoint.EMBEDDING: "input"}
"""The fields that may contain several prompts."""
_ENDPOINTS: Final = {endpoint.value: endpoint for endpoint in Endpoint}
_OUTPUT_LIMITS: Final[dict[bytes, tuple[int, int | None]]] = {
    Endpoint.CHAT.value: (_MAX_COMPLETION_TOKENS | _MAX_TOKENS, None),
    Endpoint.COMPLETION.value: (_MAX_TOKENS, _DEFAULT_COMPLETION_TOKENS),
    Endpoint.RESPONSES.value: (_MAX_OUTPUT_TOKENS, None),
    Endpoint.MESSAGES.value: (_MAX_TOKENS, None),
}
"""The fields that limit the output, and the limit where there is no `max_tokens`, by path."""
_NO_OUTPUT_LIMIT: Final = (0, None)


class RequestBody:
    __slots__ = ("body", "endpoint", "fields", "outline")

    def __init__(self, endpoint: Endpoint, body: bytes, outline: Outline) -> None:
        self.endpoint = endpoint
        self.body = body
        self.outline = outline
        self.fields = outline.fields
        """Start and end of each field's value in the body."""

    def value(self, name: str) -> Any:
        """Return the field's value, None where the body has no such field. Raises UnsupportedRequest."""
        span = self.fields.get(name)
        return None if span is None else decode_json(self.body, *span)

    def values(self, names: Iterable[str]) -> dict[str, Any]:
        return {name: self.value(name) for name in names if name in self.fields}

    def cache_salt(self) -> str:
        return self.outline.cache_salt

    def skips_cache(self) -> bool:
        """Return whether the engine computes the whole prompt whatever is cached, because it returns the logprobs of
        the prompt's tokens. Follows vLLM 0.32."""
        fields = self.fields
        if "prompt_logprobs" in fields and self.value("prompt_logprobs") is not None:
            return True
        if "echo" not in fields or not self.value("echo"):
            return False
        if self.endpoint is Endpoint.CHAT:
            return "top_logprobs" not in fields or self.value("top_logprobs") is not None
        return self.value("logprobs") is not None

    def may_be_truncated(self, token_count: int, max_model_len: int | None) -> bool:
        """Return whether the request asks the engine to truncate or pad a prompt of this many tokens."""
        fields = self.fields
        if not ("truncate_prompt_tokens" in fields or "truncation" in fields or "padding" in fields):
            return False
        values = self.values(("truncate_prompt_tokens", "truncation", "padding"))
        limit = values.get("truncate_prompt_tokens")
        if self.endpoint is Endpoint.RESPONSES and values.get("truncation", "disabled") != "disabled":
            limit = -1
        if limit == -1:
            return max_model_len is None or token_count >= max_model_len
        if values.get("padding") == "max_length":
            return True
        return limit is not None and (type(limit) is not int or token_count > limit)


def read_request_body(path: bytes, body: bytes, outline: Outline | None = None) -> RequestBody | None:
    """Return None for a path without prompts, or for a body that the scan cannot read."""
    endpoint = _ENDPOINTS.get(path)
    if endpoint is None:
        return None
    if outline is None:
        try:
            outline = outline_body(body)
        except BadBody:
            return None
    return RequestBody(endpoint, body, outline)


def has_prompt(path: bytes) -> bool:
    """Return whether requests to this path have a prompt that the router can read."""
    return path in _ENDPOINTS


def text_prompt(path: bytes, body: bytes, outline: Outline | None = None) -> Prompt | None:
    """Return the prompt for text matching, without a tokenizer: `tokens` are bytes of the prompt's text.

    Return None in the same cases as `read_request_body`.
    """
    endpoint = _ENDPOINTS.get(path)
    if endpoint is None:
        return None
    if outline is None:
        try:
            outline = outline_body(body)
        except BadBody:
            return None
    salt = outline.cache_salt
    if endpoint in _PROMPT_LISTS or outline.has_any(_OPTIONS_OF_THE_PROMPT):
        return text_prompt_of(RequestBody(endpoint, body, outline), NO_TOKENIZER, salt)
    return Prompt(outline.text_as_tokens(), 0, False, NO_TOKENIZER, (), salt)


def text_prompt_of(request: RequestBody, inexact_reason: str, salt: str) -> Prompt:
    """Return the prompt for text matching of any request."""
    prompt = None
    span = request.fields.get(_PROMPT_LISTS.get(request.endpoint, ""))
    if span is not None and span[1] - span[0] <= _MAX_LIST_BYTES:
        prompt = text_prompts(request.body, *span)
    if prompt is None:
        prompt = Prompt(request.outline.text_as_tokens(), 0, False)
    prompt.inexact_reason, prompt.cache_salt = inexact_reason, salt
    for other in prompt.others:
        other.cache_salt = salt
    with suppress(UnsupportedRequest):
        prompt.truncated = request.may_be_truncated(2 * prompt.token_count, None)  # there may be two bytes to a token
        prompt.skips_cache = request.skips_cache()
    return prompt


# Changes a request's JSON body by splicing the values of some fields into its bytes. All other bytes stay.


def splice(body: bytes, outline: Outline, values: Mapping[str, bytes]) -> bytes:
    """Return the body with these fields. `outline`: that of the body.

    A field that the body has gets its new value in its place; the others are appended. A parser that finds a field
    twice takes the last one, and so does the outline.
    """
    fields = outline.fields
    pieces: list[bytes | memoryview] = []
    view, at = memoryview(body), 0
    known = sorted((fields[name], value) for name, value in values.items() if name in fields)
    for (start, end), value in known:
        pieces += (view[at:start], value)
        at = end
    # The scan has checked that the body is one object: its last brace closes it.
    close = body.rindex(b"}")
    pieces.append(view[at:close])
    separator = b"" if _is_empty(body, close) else b","
    for name, value in values.items():
        if name not in fields:
            pieces.append(b'%b"%b":%b' % (separator, name.encode("ascii"), value))
            separator = b","
    pieces.append(view[close:])
    return b"".join(pieces)


def _is_empty(body: bytes, close: int) -> bool:
    """Return whether nothing but space is between the braces. The outline does not list every field."""
    while body[close - 1] in b" \t\r\n":
        close -= 1
    return body[close - 1] == ord("{")
