"""Collects a request body from the pieces in which it arrives, within the limits on size and memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from warmroute._kernel import BodyBuffer
from warmroute.edge import errors
from warmroute.edge.http1 import BadChunk, ChunkReader

if TYPE_CHECKING:
    from warmroute.edge.listener import Listener

_BURST_BYTES: Final = 1 << 20


class BodyReader:
    __slots__ = ("_burst_bytes", "_data", "_frames", "_listener", "_missing_bytes", "held_bytes")

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._data = BodyBuffer()
        self._burst_bytes = 0
        self._frames: ChunkReader | None = None
        self._missing_bytes = 0
        """Of a chunked body: how many more bytes the limit allows."""
        self.held_bytes = 0
        """This body's part of `listener.buffered_bytes`."""

    def start(self, length: int) -> None:
        """Expect a body of this length; a negative length: a chunked body."""
        if length >= 0:
            self._frames = None
            self._missing_bytes = length
        else:
            self._frames = ChunkReader()
            self._missing_bytes = self._listener.limits.body_bytes

    def feed(self, data: bytes) -> int:
        """Add bytes. Return how many of them belong to the body if it ends in them, else -1. Raises HttpError."""
        frames = self._frames
        if frames is None:
            end = min(len(data), self._missing_bytes)
            payload = data if end == len(data) else data[:end]
            self.reserve(end)
            self._missing_bytes -= end
            if self._missing_bytes:
                end = -1
        else:
            pieces: list[bytes] = []
            try:
                end = frames.feed(data, pieces)
            except BadChunk as bad:
                raise errors.bad_request(f"The chunked body is malformed: {bad}.") from None
            payload = b"".join(pieces)
            self._missing_bytes -= len(payload)
            if self._missing_bytes < 0:
                raise errors.body_too_large(self._listener.limits.body_bytes)
            self.reserve(len(payload))
        self._data.append(payload, 0 if frames is not None else self._missing_bytes)
        self._burst_bytes += len(data)
        return end

    def ends_burst(self) -> bool:
        """Return whether so much has arrived that other connections should have their turn: the event loop would read
        8 MB of one connection at once, which takes up to 20 ms."""
        if self._burst_bytes < _BURST_BYTES:
            return False
        self._burst_bytes = 0
        return True

    def take(self) -> bytes:
        """Return the complete body. Its memory stays counted until `release`."""
        return self._data.take()

    def reserve(self, size: int) -> None:
        """Count bytes against the memory limit of all bodies. Raises HttpError if it is reached."""
        listener = self._listener
        if listener.buffered_bytes + size > listener.limits.buffered_bytes:
            raise errors.request_buffer_full()
        listener.buffered_bytes += size
        self.held_bytes += size

    def release(self) -> None:
        """The body is no longer needed."""
        self._listener.buffered_bytes -= self.held_bytes
        self.held_bytes = 0
        if self._data:
            self._data.take()
