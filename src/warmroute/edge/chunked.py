"""The chunked transfer coding, read strictly, without I/O: `ChunkReader` takes the payload out (request bodies),
`ChunkFrames` only follows the frames, so that a response can be passed on as it came.
"""

from __future__ import annotations

import re
from typing import Final

_SIZE_LINE: Final = re.compile(rb"([0-9A-Fa-f]{1,15})(?:[ \t]*;[\t\x20-\x7e\x80-\xff]*)?")
_TRAILER: Final = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+:[\t\x20-\x7e\x80-\xff]*")
MAX_LINE_BYTES: Final = 4096
MAX_TRAILERS: Final = 64


class BadChunk(Exception):
    """The framing is broken: where a chunk should begin or end, it does not."""


def _chunk_size(line: bytes) -> int:
    match = _SIZE_LINE.fullmatch(line)
    if match is None:
        raise BadChunk("malformed chunk size")
    return int(match[1], 16)


class ChunkFrames:
    """Follows chunk frames through a stream of bytes. `feed` says where the message ends."""

    __slots__ = ("_expect", "_in_trailer", "_line", "_trailers", "left")

    def __init__(self) -> None:
        self.left = 0
        """Bytes of the current chunk's data that are still to come."""
        self._expect = b""
        """What must come next: the rest of the CRLF behind a chunk."""
        self._line = b""
        self._in_trailer = False
        self._trailers = 0

    def between_chunks(self) -> bool:
        """Whether a new chunk may begin right here."""
        return not (self.left or self._expect or self._line or self._in_trailer)

    def feed(self, data: bytes, pieces: list[bytes] | None = None) -> int:
        """Takes bytes; returns how many of them belong to the message if it ends in them, else -1.

        The payload's slices are appended to `pieces`, where it is given. Raises BadChunk.
        """
        at, size = 0, len(data)
        while True:
            if self.left:
                take = size - at
                if take > self.left:
                    take = self.left
                if take and pieces is not None:
                    pieces.append(data[at : at + take])
                self.left -= take
                at += take
                if self.left:
                    return -1
            if self._expect:
                got = data[at : at + len(self._expect)]
                if not self._expect.startswith(got):
                    raise BadChunk("a chunk is longer than its size")
                self._expect = self._expect[len(got) :]
                at += len(got)
                if self._expect:
                    return -1
            if at == size:
                return -1
            line_end = data.find(b"\n", at)
            if line_end < 0:
                self._line += data[at:]
                if len(self._line) > MAX_LINE_BYTES:
                    raise BadChunk("a chunk's size line is too long")
                return -1
            line = self._line + data[at : line_end + 1] if self._line else data[at : line_end + 1]
            self._line = b""
            at = line_end + 1
            if not line.endswith(b"\r\n") or len(line) > MAX_LINE_BYTES:
                raise BadChunk("malformed line between chunks")
            if self._in_trailer:
                if line == b"\r\n":
                    self._in_trailer = False
                    return at
                self._trailers += 1
                if self._trailers > MAX_TRAILERS or _TRAILER.fullmatch(line, 0, len(line) - 2) is None:
                    raise BadChunk("malformed trailer")
                continue
            self.left = _chunk_size(line[:-2])
            if self.left:
                self._expect = b"\r\n"
            else:
                self._in_trailer = True

    def rest_of_chunk(self) -> bytes | None:
        """Blank text that completes the chunk at hand, so that another may follow; None within a line of the framing."""
        if self._line or self._in_trailer:
            return None
        return b"\n" * self.left + self._expect
