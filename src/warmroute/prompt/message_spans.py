"""The messages of a request, decoded only where they are needed.

Each message has a digest of the list up to and including it. Two requests with equal digests start with the same bytes,
so the tokens of one are valid for the other, and these messages need not be decoded again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

from warmroute._kernel import DIGEST_BYTES, MAX_LOOP_BYTES, decode_ms, digest, prefix_digests
from warmroute.prompt.chat_template import Message
from warmroute.prompt.template_messages import UnsupportedRequest

MAX_DECODE_MS: Final = 15.0
"""A value that takes longer to parse is not parsed: a JSON parser holds the interpreter lock, and so stops the event
loop even if it runs in a thread."""
_UNCHECKED_BYTES: Final = 32_768
"""A value of this size is parsed in less time than that."""
_MAX_LIST_BYTES: Final = 1 << 20
"""The items of a longer list are parsed one by one."""

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

    def __init__(self, messages: Sequence[Message], convert: ConvertItem) -> None:
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
            return json.loads(text)  # it accepts some texts that msgspec refuses
    except (ValueError, RecursionError):
        pass
    raise UnsupportedRequest("the body is not valid JSON")
