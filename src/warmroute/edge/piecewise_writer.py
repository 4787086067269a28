"""Writes a large body to a TLS connection piece by piece: to encrypt 32 MB at once takes 120 ms on the event loop."""

from __future__ import annotations

import asyncio
from typing import Final

PIECE_BYTES: Final = 1 << 20


class PiecewiseWriter:
    def __init__(self, transport: asyncio.Transport, body: bytes) -> None:
        self._transport = transport
        self._rest = memoryview(body)
        self._paused = False
        self._write()

    @property
    def finished(self) -> bool:
        return not self._rest

    def stop(self) -> None:
        """Write no more."""
        self._rest = memoryview(b"")

    def pause(self) -> None:
        """The node reads more slowly than this writes."""
        self._paused = True

    def resume(self) -> None:
        self._paused = False
        self._write()

    def _write(self) -> None:
        if self._paused or not self._rest or self._transport.is_closing():
            return
        piece, self._rest = self._rest[:PIECE_BYTES], self._rest[PIECE_BYTES:]
        self._transport.write(piece)
        if self._rest and not self._paused:
            asyncio.get_running_loop().call_soon(self._write)
