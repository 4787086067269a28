"""GET /admin/capture/stream: a capture that lasts as long as its client reads it, one JSON object per line.

An empty line comes every second, so that a client without traffic notices that the router is still there.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, Final

from warmroute.capture.capture import Capture
from warmroute.edge.async_handler import Responder
from warmroute.edge.errors import HttpError
from warmroute.event_log import EventLog

log = EventLog("warmroute.capture")

MAX_STREAMS: Final = 4
MAX_UNREAD_BYTES: Final = 64 << 20
"""What the client has not read. Beyond it, the stream lacks requests."""
KEEP_ALIVE_S: Final = 1.0


class CaptureStreams:
    def __init__(self, capture: Capture) -> None:
        self._capture = capture
        self._open = 0

    def describe(self) -> dict[str, Any]:
        return self._capture.describe()

    async def stream(self, responder: Responder) -> None:
        """Send requests until the client disconnects. Raises HttpError."""
        if self._open >= MAX_STREAMS:
            raise HttpError(
                503, f"{MAX_STREAMS} clients read a capture already.", code="too_many_captures",
                headers=(("Retry-After", "10"),),
            )  # fmt: skip
        self._open += 1
        responder.start(200, "application/x-ndjson", (("Cache-Control", "no-store"),))
        target = self._capture.start(_ResponseSink(responder, asyncio.get_running_loop()))
        log.info("capture_stream_started", "A client of the admin API captures traffic.")
        try:
            while not responder.ended:
                responder.write(b"\n")
                await asyncio.sleep(KEEP_ALIVE_S)
        finally:
            self._open -= 1
            self._capture.stop(target)
            log.info("capture_stream_ended", requests=target.written, dropped=target.dropped)


class _ResponseSink:
    """Hands lines from the capture's thread to the event loop, which sends them."""

    def __init__(self, responder: Responder, loop: asyncio.AbstractEventLoop) -> None:
        self.path = Path("admin API")
        self._responder = responder
        self._loop = loop
        self._unsent_bytes = 0

    def write(self, lines: bytes) -> None:
        if self._unsent_bytes + self._responder.unread_bytes > MAX_UNREAD_BYTES:
            raise OSError(0, "the client reads too slowly")
        self._unsent_bytes += len(lines)
        self._loop.call_soon_threadsafe(self._send, lines)

    def _send(self, lines: bytes) -> None:
        self._unsent_bytes -= len(lines)
        if not self._responder.ended:
            self._responder.write(lines)
