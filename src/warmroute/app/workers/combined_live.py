"""GET /admin/live of `serve --workers`: the parent follows the feed of each worker while somebody looks, and sends
its viewers one feed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

import msgspec

from warmroute.app.live_page import FIRST_DECISIONS, INTERVAL_S, LiveViewers, server_sent_event
from warmroute.app.workers.combined_sections import combine_history, combine_points, combine_sections
from warmroute.edge.async_handler import Responder
from warmroute.edge.errors import HttpError
from warmroute.event_log import EventLog
from warmroute.http_client import open_response

log = EventLog("warmroute.console")

FIRST_S: Final = 0.9
"""How long a first viewer waits for the workers' feeds."""
RETRY_S: Final = 0.5
MAX_POINTS: Final = 400
"""Points of a history that are kept: those of the fine one and of the coarse one are fewer."""
_NO_SECTIONS: Final = ("history", "decisions", "fine", "coarse")


class _Feed:
    """The feed of one worker."""

    def __init__(self) -> None:
        self.sections: dict[str, Any] = {}
        self.history: dict[str, Any] = {}
        self.decisions: list[Any] = []
        self.new_points: dict[str, list[Any]] = {"fine": [], "coarse": []}
        self.new_decisions: list[Any] = []

    def apply(self, event: dict[str, Any]) -> None:
        self.sections.update({name: section for name, section in event.items() if name not in _NO_SECTIONS})
        self.history = event.get("history") or self.history
        for name, points in self.new_points.items():
            points += event.get(name, ())
            if self.history:
                kept = self.history[name]
                kept += event.get(name, ())
                del kept[:-MAX_POINTS]
        decisions = event.get("decisions", [])
        self.decisions = [*self.decisions, *decisions][-FIRST_DECISIONS:]
        if "history" not in event:
            self.new_decisions += decisions


class CombinedLive:
    def __init__(self, sockets: Callable[[], list[str]]) -> None:
        """`sockets` returns the admin sockets of the workers that answer."""
        self._sockets = sockets
        self._viewers = LiveViewers()
        self._feeds: dict[str, _Feed] = {}
        self._following: dict[str, asyncio.Task[None]] = {}
        self._task: asyncio.Task[None] | None = None
        self._sent: dict[str, bytes] = {}

    async def stream(self, responder: Responder) -> None:
        """Send the feed until the viewer leaves. Raises HttpError if there are too many viewers."""
        with self._viewers.joined(responder) as ended:
            try:
                if self._task is None:
                    self._task = asyncio.get_running_loop().create_task(self._run())
                await self._until_known()
                self._viewers.start(responder, self._snapshot())
                await ended.wait()
            finally:
                if len(self._viewers) == 1:  # it is the last one
                    self._stop()

    def _stop(self) -> None:
        for task in (self._task, *self._following.values()):
            if task is not None:
                task.cancel()
        self._task = None
        self._following.clear()
        self._feeds.clear()
        self._sent.clear()

    async def _until_known(self) -> None:
        for _ in range(int(FIRST_S / 0.05)):
            feeds = [self._feeds.get(socket) for socket in self._sockets()]
            if feeds and all(feed is not None and feed.history for feed in feeds):
                return
            await asyncio.sleep(0.05)
        if not any(feed.history for feed in self._feeds.values()):
            raise HttpError(
                503,
                "No worker serves at the moment.",
                code="no_worker",
                kind="server_error",
                headers=(("Retry-After", "1"),),
            )

    async def _run(self) -> None:
        while True:
            sockets = set(self._sockets())
            for socket in sockets - self._following.keys():
                self._following[socket] = asyncio.get_running_loop().create_task(self._follow(socket))
            for socket in self._following.keys() - sockets:
                self._following.pop(socket).cancel()
                self._feeds.pop(socket, None)
            try:
                self._send_update()
            except Exception:
                log.exception("live_feed_failed", "Viewers get the next update.")
            await asyncio.sleep(INTERVAL_S)

    async def _follow(self, socket: str) -> None:
        """Keep what a worker's feed sends."""
        while True:
            try:
                async with open_response("GET", "http://localhost/admin/live", unix_socket=socket) as response:
                    if response.status == 200:
                        feed = self._feeds[socket] = _Feed()
                        buffer = b""
                        async for piece in response.pieces():
                            *events, buffer = (buffer + piece).split(b"\n\n")
                            for event in events:
                                feed.apply(msgspec.json.decode(event.partition(b"\ndata: ")[2]))
            except (OSError, msgspec.DecodeError):
                pass
            await asyncio.sleep(RETRY_S)

    def _known(self) -> list[_Feed]:
        return [feed for feed in self._feeds.values() if feed.history]

    def _snapshot(self) -> bytes:
        feeds = self._known()
        first = feeds[0].history
        history = dict(first)
        for name in ("fine", "coarse"):
            points = [feed.history[name] for feed in feeds]
            history[name] = combine_history(first["fields"], first[f"{name}_s"], points)
        sections = combine_sections([feed.sections for feed in feeds])
        decisions = [decision for feed in feeds for decision in feed.decisions][-FIRST_DECISIONS:]
        return server_sent_event("snapshot", {**sections, "history": history, "decisions": decisions})

    def _send_update(self) -> None:
        feeds = self._known()
        if not feeds:
            return
        fields = feeds[0].history["fields"]
        more: dict[str, Any] = {}
        for name in ("fine", "coarse"):
            latest = [feed.new_points[name][-1] for feed in feeds if feed.new_points[name]]
            more[name] = [combine_points(fields, latest)] if latest else []
        decisions = [decision for feed in feeds for decision in feed.new_decisions]
        if decisions:
            more["decisions"] = decisions
        for feed in feeds:
            feed.new_points = {"fine": [], "coarse": []}
            feed.new_decisions = []
        sections = combine_sections([feed.sections for feed in feeds])
        encoded = {name: msgspec.json.encode(section) for name, section in sections.items()}
        changed = {name: sections[name] for name, text in encoded.items() if self._sent.get(name) != text}
        self._sent = encoded
        self._viewers.send(server_sent_event("update", {**changed, **more}))
