"""Prompts made of segments: a system prompt, a document, a message, an answer. Segments of one name have the same
tokens; blocks are shared as far as the segments before and in them are the same.

A block is named by the last segment that reaches into it and by its place. That segment's running identity covers
all segments before it, so two prompts share a block only where everything up to its last token is the same.
"""

from __future__ import annotations

from itertools import chain

from warmroute.fake_engine.core.content import BlockContent, mix64, namespace_offset, seed64

_MASK63 = (1 << 63) - 1


class Segments:
    """Immutable; `followed_by` makes a longer one, so that a conversation grows without hashing its past again."""

    __slots__ = ("_ends", "_identities", "tokens")

    def __init__(self, ends: tuple[int, ...] = (), identities: tuple[int, ...] = ()) -> None:
        self._ends = ends
        self._identities = identities
        self.tokens = ends[-1] if ends else 0

    def followed_by(self, name: int, tokens: int) -> Segments:
        if tokens < 1:
            return self
        before = self._identities[-1] if self._identities else 0
        identity = mix64(mix64(before, name), tokens) >> 1  # room above it for places
        return Segments((*self._ends, self.tokens + tokens), (*self._identities, identity))

    def in_namespace(self, lora_name: str | None, cache_salt: str | None) -> Segments:
        """The same text where no block is shared with other adapters or salts."""
        offset = namespace_offset(lora_name, cache_salt)
        return Segments(self._ends, tuple((value + offset) & _MASK63 for value in self._identities)) if offset else self

    def content(self, block_size: int) -> BlockContent:
        return _SegmentContent(self._ends, self._identities, block_size)


class _SegmentContent:
    __slots__ = ("_block_size", "_ends", "_identities")

    def __init__(self, ends: tuple[int, ...], identities: tuple[int, ...], block_size: int) -> None:
        self._ends = ends
        self._identities = identities
        self._block_size = block_size

    def hashes(self, start: int, stop: int) -> list[int]:
        pieces: list[range] = []
        size, at = self._block_size, start
        for end, identity in zip(self._ends, self._identities, strict=True):
            until = min(stop, end // size)  # blocks whose last token lies in this segment or before it
            if at < until:
                pieces.append(range(identity + at, identity + until))
                at = until
        if at < stop:  # past what is planned: nobody will ask for it
            tail = mix64(self._identities[-1] if self._identities else 0, -2) >> 1
            pieces.append(range(tail + at, tail + stop))
        return list(chain.from_iterable(pieces))

    def token_ids(self, start: int, stop: int) -> list[int]:
        return []


def named(*parts: object) -> int:
    """A segment's name from words and numbers: the same in every process."""
    return seed64("\x1f".join(map(str, parts)))
