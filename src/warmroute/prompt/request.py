"""A request's body as an outline: where each field lies. Values are parsed only when somebody asks for them.

The outline is made with the ask, in the one pass that both take over the body.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import Any, Final

from warmroute._kernel._scan import Outline, outline_of
from warmroute.prompt.conversation import NotFollowed
from warmroute.prompt.message_spans import decode
from warmroute.prompt.prompt import Prompt
from warmroute.prompt.tokenizer import TOKEN_BYTES

_OUTPUT_FIELDS: Final = ("max_completion_tokens", "max_tokens", "max_output_tokens")
_PROMPT_FIELDS: Final = ("system", "instructions", "tools", "prompt", "input", "messages")
_COMPLETION_TOKENS: Final = 16
"""What a completion may have at most where it does not say."""
NO_TOKENIZER: Final = "the tokenizer is not known"


class Shape(Enum):
    CHAT = b"/v1/chat/completions"
    COMPLETION = b"/v1/completions"
    RESPONSES = b"/v1/responses"
    MESSAGES = b"/v1/messages"
    EMBEDDING = b"/v1/embeddings"

    __hash__ = object.__hash__  # Enum's own is slow


_SHAPES: Final = {shape.value: shape for shape in Shape}
_COMPLETION: Final = Shape.COMPLETION
"""An Enum takes its time to find a member."""


class Request:
    __slots__ = ("body", "fields", "outline", "shape")

    def __init__(self, shape: Shape, body: bytes, outline: Outline) -> None:
        self.shape = shape
        self.body = body
        self.outline = outline
        self.fields = outline.fields
        """Where the value of each field begins and ends."""

    def value(self, name: str) -> Any:
        """None where it has no such field. Raises NotFollowed."""
        where = self.fields.get(name)
        return None if where is None else decode(self.body[where[0] : where[1]])

    def values(self, names: Iterable[str]) -> dict[str, Any]:
        return {name: self.value(name) for name in names if name in self.fields}

    def about(self) -> Prompt:
        """What it says beside its prompt. Nonsense is the engine's to refuse."""
        found = self.outline.about(_COMPLETION_TOKENS if self.shape is _COMPLETION else None)
        if found is None:
            return self.about_plainly()
        model, most, priority, salt, stream = found
        return Prompt(model, b"", 0, True, "", (), most, priority, salt, stream)

    def about_plainly(self) -> Prompt:
        """The same by a real parser: slower, and the measure of `about`."""
        fields = self.fields
        about = Prompt("")
        if self.shape is _COMPLETION and "max_tokens" not in fields:
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
        fields = self.fields
        if not ("truncate_prompt_tokens" in fields or "truncation" in fields or "padding" in fields):
            return False
        given = self.values(("truncate_prompt_tokens", "truncation", "padding"))
        most = given.get("truncate_prompt_tokens")
        if self.shape is Shape.RESPONSES and given.get("truncation", "disabled") != "disabled":
            most = -1
        if most == -1:
            return max_model_len is None or tokens >= max_model_len
        return given.get("padding") == "max_length" or (most is not None and (type(most) is not int or tokens > most))

    def stand_in_plainly(self) -> bytes:
        """What `Outline.stand_in` makes: the prompt's own bytes, four to a token. What begins alike stands for equal
        tokens."""
        pieces = [self.body[slice(*self.fields[name])] for name in _PROMPT_FIELDS if name in self.fields]
        text = b"".join(pieces).rstrip(b']}" \r\n\t')
        return text + bytes(-len(text) % TOKEN_BYTES)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def request_of(path: bytes, body: bytes, outline: Outline | None = None) -> Request | None:
    """None for a path without prompts, or a body that is not to be understood."""
    shape = _SHAPES.get(path)
    if shape is None:
        return None
    if outline is None:
        outline = outline_of(body)
    return None if outline is None else Request(shape, body, outline)


def stand_in_of(path: bytes, body: bytes, outline: Outline | None = None) -> Prompt | None:
    """The prompt where there is no tokenizer: its text stands in for its tokens. None as for `request_of`."""
    shape = _SHAPES.get(path)
    if shape is None:
        return None
    if outline is None:
        outline = outline_of(body)
        if outline is None:
            return None
    found = outline.about(_COMPLETION_TOKENS if shape is _COMPLETION else None)
    if found is None:
        prompt = Request(shape, body, outline).about_plainly()
        prompt.tokens, prompt.exact, prompt.doubt = outline.stand_in(), False, NO_TOKENIZER
        return prompt
    model, most, priority, salt, stream = found
    return Prompt(model, outline.stand_in(), 0, False, NO_TOKENIZER, (), most, priority, salt, stream)
