"""Request bodies of the OpenAI API. The simulated engine ignores fields that are not listed here."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct

from warmroute.fake_engine.server.vllm_errors import bad_body

MaxTokens = Annotated[int, Meta(ge=1)]


class StreamOptions(Struct):
    include_usage: bool = False


class GenerationRequest(Struct, kw_only=True):
    """The common fields of chat and completion requests."""

    model: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    max_tokens: MaxTokens | None = None
    ignore_eos: bool = False
    n: int | None = 1
    seed: int | None = None
    priority: int = 0
    cache_salt: str | None = None
    kv_transfer_params: dict[str, Any] | None = None


class ChatRequest(GenerationRequest, kw_only=True):
    messages: Annotated[list[dict[str, Any]], Meta(min_length=1)]
    tools: list[dict[str, Any]] | None = None
    max_completion_tokens: MaxTokens | None = None
    add_generation_prompt: bool = True


class CompletionRequest(GenerationRequest, kw_only=True):
    prompt: str | list[Any]
    """A text, a list of token ids, or a list of texts or token lists."""
    max_tokens: MaxTokens | None = 16


class TokenizeRequest(Struct):
    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    add_special_tokens: bool = True


class DetokenizeRequest(Struct):
    tokens: list[int]
    model: str | None = None


class FetchRequest(Struct):
    """Asks for the KV cache of a request."""

    request_id: str


Body = TypeVar("Body", bound=Struct)


def decode_body(body: bytes, kind: type[Body]) -> Body:
    """Raises ApiError 400."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise bad_body(f"The request body is invalid: {error}") from None


def check_messages(messages: list[dict[str, Any]]) -> None:
    """Raises ApiError 400 for a message that no template can render."""
    for number, message in enumerate(messages):
        if not isinstance(message.get("role"), str):
            raise bad_body(f"messages[{number}].role is missing or not a string")
        if not isinstance(message.get("content"), str | list | None):
            raise bad_body(f"messages[{number}].content is neither a string nor a list of parts")
