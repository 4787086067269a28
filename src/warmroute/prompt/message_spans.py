"""The units of a conversation: the items of the request's list of messages, read only where they are needed.

Each unit has a digest of everything up to it. Two requests with equal digests begin with the same bytes, so what was
made of one holds for the other, and nobody has to parse them again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

import msgspec

from warmroute._kernel._messages import digest
from warmroute.prompt.chat_template import Message
from warmroute.prompt.conversation import NotFollowed

DIGEST_BYTES: Final = 16
Convert = Callable[[Any], list[Message]]
"""From an item to the messages of the conversation that it stands for. Raises NotFollowed."""


class Units(Protocol):
    count: int

    def digest(self, count: int) -> bytes:
        """Of the first so many units; at least one."""

    def messages(self, start: int, end: int) -> list[Message]:
        """What these units stand for. Raises NotFollowed."""

    def size_bytes(self, start: int, end: int) -> int: ...


class ListedUnits:
    """Items of a list in the body."""

    def __init__(self, body: bytes, where: tuple[int, int], spans: bytes, digests: bytes, convert: Convert) -> None:
        self._body = body
        self._where = where
        self._spans = memoryview(spans).cast("I")
        self._digests = digests
        self._convert = convert
        self.count = len(digests) // DIGEST_BYTES

    def digest(self, count: int) -> bytes:
        return self._digests[DIGEST_BYTES * (count - 1) : DIGEST_BYTES * count]

    def messages(self, start: int, end: int) -> list[Message]:
        if start == 0 and end == self.count:
            items = decode(self._body[slice(*self._where)])
        else:
            spans = self._spans
            items = [decode(self._body[spans[2 * i] : spans[2 * i + 1]]) for i in range(start, end)]
        convert = self._convert
        return [message for item in items for message in convert(item)]

    def size_bytes(self, start: int, end: int) -> int:
        return self._spans[2 * end - 1] - self._spans[2 * start] if end > start else 0


class MadeUnits:
    """Messages that had to be put together from the whole request."""

    def __init__(self, messages: Sequence[Message], convert: Convert) -> None:
        self._made = messages
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
        return [message for made in self._made[start:end] for message in self._convert(made)]

    def size_bytes(self, start: int, end: int) -> int:
        return self._sizes[end] - self._sizes[start]


def decode(text: bytes) -> Any:
    """JSON. Raises NotFollowed for what is none, or not for msgspec and json alike."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise NotFollowed("a body that is no JSON") from None
