"""One request of a workload, as the simulated engines, the router and the load generator need it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import msgspec

from warmroute.config.priority import PriorityName
from warmroute.fake_engine.core.block_content import BlockContent


class Blocks(Protocol):
    """The content of a prompt and its answer, which can be cut into blocks of any size."""

    def content(self, block_size: int) -> BlockContent: ...


class WorkloadPrompt(msgspec.Struct, gc=False):
    prompt_tokens: int
    output_tokens: int
    blocks: Blocks
    at_ms: float = 0.0
    """Arrival time. Traces and arrival processes set it."""
    system_tokens: int = 0
    """Length of the system prompt, which a client sends as the system message; 0 if there is none."""
    user_tokens: int = 0
    """Length of the first user message, if other messages follow it; 0 if it is the rest of the prompt."""
    session: bytes = b""
    """Name of the conversation; empty if the client does not send one."""
    priority: PriorityName = "normal"
    tenant: str = ""
    lora_name: str | None = None
    cache_salt: str | None = None
    patience_ms: float | None = None
    """The client disconnects if it has no first token by then."""
    next_turn: Callable[[], FollowUp | None] | None = None
    """Returns the conversation's next turn. It is called when this one has been answered in full."""


class FollowUp(msgspec.Struct, gc=False):
    think_ms: float
    prompt: WorkloadPrompt
