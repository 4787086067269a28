"""A request's body as an outline: where each field lies. Values are parsed only when somebody asks for them."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import Any, Final

from warmroute._kernel._messages import outline
from warmroute.prompt.conversation import NotFollowed
from warmroute.prompt.prompt import Prompt
from warmroute.prompt.tokenizer import TOKEN_BYTES
from warmroute.prompt.units import decode

_OUTPUT_FIELDS: Final = ("max_completion_tokens", "max_tokens", "max_output_tokens")
_PROMPT_FIELDS: Final = ("system", "instructions", "tools", "prompt", "input", "messages")
_COMPLETION_TOKENS: Final = 16
"""What a completion may have at most where it does not say."""


class Shape(Enum):
    CHAT = b"/v1/chat/completions"
    COMPLETION = b"/v1/completions"
    RESPONSES = b"/v1/responses"
    MESSAGES = b"/v1/messages"
    EMBEDDING = b"/v1/embeddings"


_SHAPES: Final = {shape.value: shape for shape in Shape}


class Request:
    __slots__ = ("body", "digests", "fields", "shape", "spans")

    def __init__(
        self, shape: Shape, body: bytes, fields: dict[str, tuple[int, int]], spans: bytes, digests: bytes
    ) -> None:
        self.shape = shape
        self.body = body
        self.fields = fields
        """Where the value of each field begins and ends."""
        self.spans = spans
        """The same for each item of `messages`."""
        self.digests = digests

    def value(self, name: str) -> Any:
        """None where it has no such field. Raises NotFollowed."""
        where = self.fields.get(name)
        return None if where is None else decode(self.body[where[0] : where[1]])

    def values(self, names: Iterable[str]) -> dict[str, Any]:
        return {name: self.value(name) for name in names if name in self.fields}

    def about(self) -> Prompt:
        """What it says beside its prompt. Nonsense is the engine's to refuse."""
        fields = self.fields
        about = Prompt("")
        if self.shape is Shape.COMPLETION and "max_tokens" not in fields:
            about.max_output_tokens = _COMPLETION_TOKENS
        try:
            if "model" in fields:
                about.model = _text(self.value("model"))
            if "cache_salt" in fields:
                about.cache_salt = _text(self.value("cache_salt"))
            if "stream" in fields:
                about.stream = self.value("stream") is True
            if "priority" in fields and type(priority := self.value("priority")) is int:
                about.priority = priority
            for name in _OUTPUT_FIELDS:
                if name in fields and type(most := self.value(name)) is int:
                    about.max_output_tokens = most
                    break
        except NotFollowed:
            return Prompt("", max_output_tokens=about.max_output_tokens)
        return about

    def may_be_cut(self, tokens: int, max_model_len: int | None) -> bool:
        """Whether it asks for its prompt to be cut or filled, so that so many tokens would not stay as they are."""
        given = self.values(("truncate_prompt_tokens", "truncation", "padding"))
        most = given.get("truncate_prompt_tokens")
        if self.shape is Shape.RESPONSES and given.get("truncation", "disabled") != "disabled":
            most = -1
        if most == -1:
            return max_model_len is None or tokens >= max_model_len
        return given.get("padding") == "max_length" or (most is not None and (type(most) is not int or tokens > most))

    def stand_in(self) -> bytes:
        """The prompt's own bytes, four to a token: what begins alike stands for equal tokens."""
        pieces = [self.body[slice(*self.fields[name])] for name in _PROMPT_FIELDS if name in self.fields]
        text = b"".join(pieces).rstrip(b']}" \r\n\t')
        return text + bytes(-len(text) % TOKEN_BYTES)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def request_of(path: bytes, body: bytes) -> Request | None:
    """None for a path without prompts, or a body that is not to be understood."""
    shape = _SHAPES.get(path)
    if shape is None:
        return None
    found = outline(body, b"messages")
    return None if found is None else Request(shape, body, *found)
