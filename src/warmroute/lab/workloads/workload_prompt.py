"""The prompt of a workload's request: segments, text, blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import Final, Literal, Protocol

import msgspec

from warmroute.config.routing import PriorityName
from warmroute.core.messages import KEY_CHARACTERS
from warmroute.lab.engine.blocks import BlockContent, mix64, seed64

# One request of a workload, as the simulated engines, the router and the load generator need it, and prompts made of
# segments: a system prompt, a document, a message, an answer.


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
    """Place of a trace's request in the trace."""
    follows: int = -1
    """Of a trace's request: the number of the request whose answer the client waited for; -1 if it waited for none."""
    think_ms: float = 0.0
    """Time between that answer and this request."""
    next_turn: Callable[[], FollowUp | None] | None = None
    """Returns the conversation's next turn. It is called when this one has been answered in full."""


class FollowUp(msgspec.Struct, gc=False):
    think_ms: float
    prompt: WorkloadPrompt


# The text of a workload's prompt: one word for each token, the same word for the same token.
#
# The load generator sends this text, and the simulated router reads the same leading text, so that both give a request
# the same routing key. tests/replay/test_prompt_text.py checks this.

Form = Literal["chat", "completion", "tokens"]
"""How clients send a prompt: as chat messages, as text, or as token ids."""

_SYLLABLES = "a e i o u an en in on un ar er ir or ur al el il ol ul".split()  # noqa: SIM905
WORDS = tuple(first + last for first in "bdfgklmnprstvwz" for last in _SYLLABLES)
"""Short words: one token each for many tokenizers, and always for the fake engine's."""

MAX_TOKEN_ID: Final = 30_000
"""Token ids are drawn from 1,000 up to here: ordinary words in every common vocabulary."""

KEY_TOKENS: Final = -(-(KEY_CHARACTERS + 1) // 3)
"""Enough tokens for a routing key: a word and its space have at least 3 characters, an id and its comma at least 5."""

_CACHE_SIZE = 4096
_cache: dict[tuple[int, int, Form], bytes] = {}
"""Leading texts by their first and last token. A token's identity covers all tokens before it, so these two suffice."""


def words(prompt: WorkloadPrompt, start: int, stop: int) -> str:
    """Return the text of the prompt's tokens [start, stop)."""
    identities = prompt.blocks.content(1).hashes(start, stop)
    return " ".join([WORDS[mix64(identity, 0) % len(WORDS)] for identity in identities])


def token_ids(prompt: WorkloadPrompt, start: int, stop: int) -> list[int]:
    """Return the prompt's tokens [start, stop) as token ids."""
    identities = prompt.blocks.content(1).hashes(start, stop)
    return [1000 + mix64(identity, 0) % (MAX_TOKEN_ID - 1000) for identity in identities]


def system_end(prompt: WorkloadPrompt) -> int:
    """Return where the first user message begins. It has at least one token."""
    return min(prompt.system_tokens, prompt.prompt_tokens - 1)


def leading_text(prompt: WorkloadPrompt, form: Form) -> tuple[bytes | None, bytes]:
    """Return the leading text of the system prompt and of the first user message, as the router reads them."""
    if form != "chat":
        return None, _leading_part(prompt, 0, prompt.prompt_tokens, form)
    start = system_end(prompt)
    stop = start + prompt.user_tokens if prompt.user_tokens else prompt.prompt_tokens
    system = _leading_part(prompt, 0, start, form) if start else None
    return system, _leading_part(prompt, start, stop, form)


def _leading_part(prompt: WorkloadPrompt, start: int, stop: int, form: Form) -> bytes:
    stop = min(stop, start + KEY_TOKENS)
    first, last = (prompt.blocks.content(1).hashes(at, at + 1)[0] for at in (start, stop - 1))
    found = _cache.get((first, last, form))
    if found is None:
        if form == "tokens":
            text = "".join(f"{token}," for token in token_ids(prompt, start, stop))
        else:
            text = words(prompt, start, stop)
        if len(_cache) >= _CACHE_SIZE:
            _cache.clear()
        found = _cache[first, last, form] = text[:KEY_CHARACTERS].encode()
    return found
