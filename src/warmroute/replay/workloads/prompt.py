"""One request of a workload: what its client would send, as far as an engine, a router or a load generator cares."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol

import msgspec

from warmroute.fake_engine.core.content import BlockContent

Priority = Literal["high", "normal", "low"]


class Blocks(Protocol):
    """What a prompt and its answer are made of, cut into blocks of any size."""

    def content(self, block_size: int) -> BlockContent: ...


class Prompt(msgspec.Struct, gc=False):
    prompt_tokens: int
    output_tokens: int
    blocks: Blocks
    at_ms: float = 0.0
    """When it arrives, where the workload says so; arrival processes set it."""
    system_tokens: int = 0
    """How long the system prompt is, where there is one: what a client sends as the system message."""
    user_tokens: int = 0
    """How long the first user message behind it is, where a conversation goes on after it; 0: all the rest."""
    session: bytes = b""
    """Names the conversation; empty where the client would not name it."""
    priority: Priority = "normal"
    tenant: str = ""
    lora_name: str | None = None
    cache_salt: str | None = None
    patience_ms: float | None = None
    """The client leaves if it has no first token by then."""
    then: Callable[[], FollowUp | None] | None = None
    """The conversation's next turn, asked for when this one has been answered in full."""


class FollowUp(msgspec.Struct, gc=False):
    think_ms: float
    prompt: Prompt
