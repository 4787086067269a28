"""What goes into an engine and what comes out: plain values. Times are in ms on the driver's clock."""

import msgspec

from warmroute.fake_engine.core.block_content import BlockContent


class EngineRequest(msgspec.Struct, frozen=True, gc=False):
    """One request. How long its answer will be is decided by whoever submits it."""

    request_id: str
    prompt_tokens: int
    output_tokens: int
    content: BlockContent
    priority: int = 0
    """Lower is earlier, where the engine schedules by priority."""
    lora_name: str | None = None
    cache_salt: str | None = None
    session_id: str | None = None


class FirstToken(msgspec.Struct, frozen=True, gc=False):
    """The first token of an answer."""

    request_id: str
    at_ms: float
    cached_tokens: int


class Token(msgspec.Struct, frozen=True, gc=False):
    """A further token (only from an engine that tells every token)."""

    request_id: str
    at_ms: float


class Finished(msgspec.Struct, frozen=True, gc=False):
    """The end of a request, with the story of its life. Times that were never reached are None."""

    request_id: str
    at_ms: float
    reason: str
    """`length`, or `abort`."""
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens that were not computed, from the GPU's cache or from the CPU tier."""
    reloaded_tokens: int
    """Those of them that came from the CPU tier."""
    output_tokens: int
    preemptions: int
    arrived_ms: float
    admitted_ms: float | None
    first_token_ms: float | None


EngineOutput = FirstToken | Token | Finished


class RequestTooLong(ValueError):
    """The request could not be served even by an empty engine."""
