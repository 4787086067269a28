"""One request of a workload, as the simulated engines, the router and the load generator need it, and prompts made of
segments: a system prompt, a document, a message, an answer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

import msgspec

from warmroute.config.priority import PriorityName
from warmroute.fake_engine.core.block_content import BlockContent, mix64, seed64


class Segments:
    """A prompt made of segments. Segments with the same id have the same tokens. Immutable: `followed_by` returns a
    longer one, so that a conversation grows without hashing its history again.

    A block's hash is the identity of the last segment that reaches into it plus the block's position. A segment's
    identity covers all segments before it, so two prompts share a block only if everything up to its last token is the
    same.
    """

    __slots__ = ("_ends", "_identities", "tokens")

    def __init__(self, ends: tuple[int, ...] = (), identities: tuple[int, ...] = ()) -> None:
        self._ends = ends
        self._identities = identities
        self.tokens = ends[-1] if ends else 0

    def followed_by(self, segment: int, tokens: int) -> Segments:
        if tokens < 1:
            return self
        before = self._identities[-1] if self._identities else 0
        identity = mix64(mix64(before, segment), tokens) >> 1  # leaves room to add positions
        return Segments((*self._ends, self.tokens + tokens), (*self._identities, identity))

    def content(self, block_size: int) -> BlockContent:
        return _SegmentContent(self._ends, self._identities, block_size)


@dataclass(slots=True)
class _SegmentContent:
    _ends: tuple[int, ...]
    _identities: tuple[int, ...]
    _block_size: int

    def hashes(self, start: int, stop: int) -> list[int]:
        pieces: list[range] = []
        size, at = self._block_size, start
        for end, identity in zip(self._ends, self._identities, strict=True):
            until = min(stop, end // size)  # blocks that end in this segment or before it
            if at < until:
                pieces.append(range(identity + at, identity + until))
                at = until
        if at < stop:  # past the end of the text
            tail = mix64(self._identities[-1] if self._identities else 0, -2) >> 1
            pieces.append(range(tail + at, tail + stop))
        return list(chain.from_iterable(pieces))

    def token_ids(self, start: int, stop: int) -> list[int]:
        return []


def segment_id(*parts: object) -> int:
    """Return a segment's id from words and numbers, the same in every process."""
    return seed64("\x1f".join(map(str, parts)))


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
    number: int = -1
    """Of a trace's request: its place in the trace."""
    follows: int = -1
    """Of a trace's request: the number of the request whose answer the client waited for; -1 if it waited for none."""
    think_ms: float = 0.0
    """Time between that answer and this request."""
    next_turn: Callable[[], FollowUp | None] | None = None
    """Returns the conversation's next turn. It is called when this one has been answered in full."""


class FollowUp(msgspec.Struct, gc=False):
    think_ms: float
    prompt: WorkloadPrompt
