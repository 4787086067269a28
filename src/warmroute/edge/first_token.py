"""Finds the first token in a node's event stream: content of the model, not a role, a comment or `response.created`.

`_kernel/first_token.c` has the rules. They apply to the payload, so the chunk framing is removed from a copy first.
"""

from __future__ import annotations

from warmroute._kernel import CHUNKED, ChunkReader, FirstTokenSearch, ResponseHead


class FirstTokenDetector:
    __slots__ = ("_frames", "_search")

    def __init__(self, chunked: bool) -> None:
        self._frames = ChunkReader() if chunked else None
        self._search = FirstTokenSearch()

    def feed(self, data: bytes) -> bool:
        """Take the next bytes of the body, with a framing that was checked; return whether it had its first token."""
        if self._frames is not None:
            pieces: list[bytes] = []
            self._frames.feed(data, pieces)
            data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        return self._search.feed(data)


def detector_for(head: ResponseHead) -> FirstTokenDetector | None:
    """Return a detector for an event stream that can be read; else None, and its first byte counts as its first token.

    An error and a response without streaming have no token to wait for; a compressed stream hides them."""
    if head.status >= 400 or head.length >= 0 or head.encoded:
        return None
    return FirstTokenDetector(head.length == CHUNKED)
