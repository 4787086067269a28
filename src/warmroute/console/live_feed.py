"""GET /admin/live: the state of the router as server-sent events, for the live page and `warmroute top`.

    event: snapshot    all sections of LiveSnapshot, an hour of history, and some recent decisions
    event: update      every second: the sections that changed, the new points of the history, some new decisions

Each update is rendered once, in a thread, for all viewers. Without viewers nothing is rendered. A viewer that reads too
slowly is disconnected, so that no data piles up for it.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

import msgspec

from warmroute.console.live_snapshot import LiveSnapshot, LoopState
from warmroute.console.live_viewers import LiveViewers, server_sent_event
from warmroute.edge.async_handler import Responder
from warmroute.event_log import EventLog
from warmroute.telemetry.history import Point
from warmroute.telemetry.journal import Entry

log = EventLog("warmroute.console")

INTERVAL_S: Final = 1.0
DECISIONS_PER_UPDATE: Final = 2
"""Describing one takes 0.15 ms in a fleet of 64 nodes: more than anything else in an update."""
FIRST_DECISIONS: Final = 12


class LiveFeed:
    def __init__(self, snapshot: LiveSnapshot) -> None:
        self._snapshot = snapshot
        self._viewers = LiveViewers()
        self._lock = asyncio.Lock()
        """Held while an update is rendered and sent."""
        self._task: asyncio.Task[None] | None = None
        self._sent: dict[str, bytes] = {}
        """The sections as the viewers know them."""
        self._sent_fine: Point | None = None
        self._sent_coarse: Point | None = None
        self._ended_s = 0.0
        """When the last request ended whose decision was sent."""

    @property
    def viewers(self) -> int:
        return len(self._viewers)

    async def stream(self, responder: Responder) -> None:
        """Send the feed until the viewer leaves. Raises HttpError if there are too many viewers."""
        with self._viewers.joined(responder) as ended:
            try:
                await self._send_snapshot(responder)
                if self._task is None:
                    self._task = asyncio.get_running_loop().create_task(self._run())
                await ended.wait()
            finally:
                if len(self._viewers) == 1 and self._task is not None:  # it is the last one
                    self._task.cancel()
                    self._task = None

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(INTERVAL_S)
            try:
                await self.send_update()
            except Exception:
                log.exception("live_feed_failed", "Viewers get the next update.")

    async def send_update(self) -> None:
        """Render what changed and send it to all viewers."""
        async with self._lock:
            snapshot, history = self._snapshot, self._snapshot.history
            state = snapshot.read_on_loop()
            entries = snapshot.ended_since(self._ended_s, DECISIONS_PER_UPDATE)
            fine = history.fine[-1] if history.fine else None
            coarse = history.coarse[-1] if history.coarse else None
            points = (
                [fine] if fine is not None and fine is not self._sent_fine else [],
                [coarse] if coarse is not None and coarse is not self._sent_coarse else [],
            )
            render = self._render_update
            event, sections = await asyncio.get_running_loop().run_in_executor(None, render, state, entries, points)
            # From here on nothing is awaited: what counts as sent is sent, also if a viewer left meanwhile.
            self._sent, self._sent_fine, self._sent_coarse = sections, fine, coarse
            if entries:
                self._ended_s = max(entry.end[5] for entry in entries if entry.end is not None)
            self._viewers.send(event)

    def _render_update(
        self, state: LoopState, entries: list[Entry], points: tuple[list[Point], list[Point]]
    ) -> tuple[bytes, dict[str, bytes]]:
        snapshot = self._snapshot
        sections = {name: msgspec.json.encode(section) for name, section in snapshot.sections(state).items()}
        changed = {name: section for name, section in sections.items() if self._sent.get(name) != section}
        fine, coarse = points
        more: dict[str, Any] = {"fine": snapshot.describe_points(fine), "coarse": snapshot.describe_points(coarse)}
        if entries:
            more["decisions"] = snapshot.describe_decisions(entries)
        return _event("update", changed, more), sections

    async def _send_snapshot(self, responder: Responder) -> None:
        """Bring the other viewers up to date, so that all have the same sections, and send all to a new one."""
        await self.send_update()
        async with self._lock:
            sections, entries = self._sent, self._snapshot.ended_since(-1e9, FIRST_DECISIONS)

            def render() -> bytes:
                described = self._snapshot.describe_decisions(entries)
                return _event(
                    "snapshot", sections, {"history": self._snapshot.describe_history(), "decisions": described}
                )

            event = await asyncio.get_running_loop().run_in_executor(None, render)
            self._viewers.start(responder, event)


def _event(name: str, sections: dict[str, bytes], more: dict[str, Any]) -> bytes:
    fields = {key: msgspec.Raw(value) for key, value in sections.items()}
    return server_sent_event(name, {**fields, **more})
