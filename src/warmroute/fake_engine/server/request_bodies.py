"""Request bodies of the OpenAI API, as far as a simulated engine heeds them. Fields it does not know pass unread."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct

from warmroute.fake_engine.server.vllm_errors import bad_body

MaxTokens = Annotated[int, Meta(ge=1)]


class StreamOptions(Struct):
    include_usage: bool = False


class Generate(Struct, kw_only=True):
    """What chat and completions have in common."""

    model: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    max_tokens: MaxTokens | None = None
    ignore_eos: bool = False
    n: int | None = 1
    seed: int | None = None
    priority: int = 0
    cache_salt: str | None = None


class Chat(Generate, kw_only=True):
    messages: Annotated[list[dict[str, Any]], Meta(min_length=1)]
    tools: list[dict[str, Any]] | None = None
    max_completion_tokens: MaxTokens | None = None
    add_generation_prompt: bool = True


class Completion(Generate, kw_only=True):
    prompt: str | list[Any]
    """A text or tokens, or a list of such."""
    max_tokens: MaxTokens | None = 16


class Tokenize(Struct):
    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    add_special_tokens: bool = True


class Detokenize(Struct):
    tokens: list[int]
    model: str | None = None


Body = TypeVar("Body", bound=Struct)


def read(body: bytes, kind: type[Body]) -> Body:
    """Raises ApiError 400."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise bad_body(f"The request body can't be used: {error}") from None


def check_messages(messages: list[dict[str, Any]]) -> None:
    """Raises ApiError 400 for a message that no template could write."""
    for number, message in enumerate(messages):
        if not isinstance(message.get("role"), str):
            raise bad_body(f"messages[{number}].role is missing or not a string")
        if not isinstance(message.get("content"), str | list | None):
            raise bad_body(f"messages[{number}].content is neither a string nor a list of parts")
