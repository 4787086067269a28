"""The viewers of GET /admin/live: how many there may be, and what happens to one that reads too slowly."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import msgspec

from warmroute.edge.async_handler import Responder
from warmroute.edge.errors import HttpError
from warmroute.event_log import EventLog

log = EventLog("warmroute.console")

MAX_VIEWERS: Final = 16
MAX_UNREAD_BYTES: Final = 1_048_576
"""What a viewer may leave unread before it is disconnected."""
HEADERS: Final = (("Cache-Control", "no-store"), ("X-Accel-Buffering", "no"))


class LiveViewers:
    def __init__(self) -> None:
        self._viewers: dict[Responder, asyncio.Event] = {}
        """Each with the event that ends its response."""

    def __len__(self) -> int:
        return len(self._viewers)

    @contextmanager
    def joined(self, responder: Responder) -> Iterator[asyncio.Event]:
        """Count a viewer, and yield the event that ends its response. It gets no updates before `start`.

        Raises HttpError if there are too many viewers."""
        if len(self._viewers) >= MAX_VIEWERS:
            raise HttpError(
                503, f"The live feed has its maximum of {MAX_VIEWERS} viewers. Close another page.",
                code="too_many_viewers", headers=(("Retry-After", "10"),),
            )  # fmt: skip
        ended = self._viewers[responder] = asyncio.Event()
        try:
            yield ended
        finally:
            self._viewers.pop(responder, None)

    def start(self, responder: Responder, snapshot: bytes) -> None:
        responder.start(200, "text/event-stream; charset=utf-8", HEADERS)
        responder.write(snapshot)

    def send(self, event: bytes) -> None:
        for responder, ended in list(self._viewers.items()):
            if not responder.started:
                continue
            if responder.unread_bytes > MAX_UNREAD_BYTES:
                log.info("live_viewer_too_slow", "The router disconnected it.", unread_bytes=responder.unread_bytes)
                responder.abort()
                ended.set()
            else:
                responder.write(event)


def server_sent_event(name: str, fields: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode(fields))
