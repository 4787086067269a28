"""Prompts made of segments: a system prompt, a document, a message, an answer. Segments with the same id have the same
tokens.

A block's hash is the identity of the last segment that reaches into it plus the block's position. A segment's identity
covers all segments before it, so two prompts share a block only if everything up to its last token is the same.
"""

from __future__ import annotations

from itertools import chain

from warmroute.fake_engine.core.block_content import BlockContent, mix64, seed64


class Segments:
    """Immutable. `followed_by` returns a longer one, so that a conversation grows without hashing its history again."""

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
