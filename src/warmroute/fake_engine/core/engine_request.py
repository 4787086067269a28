"""Inputs and outputs of an engine core, as plain values. Times are in ms on the driver's clock."""

import msgspec

from warmroute.fake_engine.core.block_content import BlockContent


class EngineRequest(msgspec.Struct, frozen=True, gc=False):
    """One request. The driver decides the length of its output."""

    request_id: str
    prompt_tokens: int
    output_tokens: int
    content: BlockContent
    priority: int = 0
    """A lower number is served first, if the engine schedules by priority."""
    lora_name: str | None = None
    cache_salt: str | None = None
    session_id: str | None = None
    remote_tokens: int = 0
    """Prompt tokens whose KV cache another engine has computed and transferred."""


class FirstToken(msgspec.Struct, frozen=True, gc=False):
    """The first output token of a request."""

    request_id: str
    at_ms: float
    cached_tokens: int


class Token(msgspec.Struct, frozen=True, gc=False):
    """A further output token. Only engines with `every_token` emit it."""

    request_id: str
    at_ms: float


class Finished(msgspec.Struct, frozen=True, gc=False):
    """The end of a request, with its statistics. A time that the request did not reach is None."""

    request_id: str
    at_ms: float
    reason: str
    """`length` or `abort`."""
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens that were not computed, from the GPU cache or the CPU tier."""
    reloaded_tokens: int
    """Those of `cached_tokens` that came from the CPU tier."""
    output_tokens: int
    preemptions: int
    arrived_ms: float
    admitted_ms: float | None
    first_token_ms: float | None


EngineOutput = FirstToken | Token | Finished


class RequestTooLong(ValueError):
    """The request does not fit even into an empty engine."""
