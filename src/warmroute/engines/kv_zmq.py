"""One rank's KV events over ZMQ: a subscription to its live messages, and replay requests for missing ones.

All subscriptions together get a slice of a few milliseconds in each iteration of the event loop. kv_sequence.py decides
what the message numbers mean. zmtp.py limits the size of a message, byte_budget.py the memory of all.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final
from urllib.parse import urlsplit

from warmroute.engines import zmtp
from warmroute.engines.byte_budget import ByteBudget
from warmroute.engines.kv_rank import RankEvents
from warmroute.engines.zmtp_connection import DEALER, SUB, ZmtpConnection
from warmroute.event_log import EventLog
from warmroute.fleet.reported_values import MAX_SEQUENCE_NUMBER, ReportedValues

log = EventLog("warmroute.engines")

SLICE_S: Final = 0.002
"""Time for messages in one iteration of the event loop."""
MAX_SHARE: Final = 0.2
"""Share of the event loop's time for messages that take longer than a slice."""
REPLAY_TIMEOUT_S: Final = 2.0
"""How long to wait for the first message of a replay."""
REPLAY_PAUSE_S: Final = 0.2
"""How long to wait for each further message: an engine that replays more than its socket holds drops the end."""
REPLAY_MAX_S: Final = 60.0
"""How long a replay may take altogether."""
SUBSCRIBED_S: Final = 1.0
"""Time after which a subscription has reached the engine. Then the router requests what was sent before."""
MAX_REPLAYS: Final = 60
"""Replays that may follow each other at once. One more is allowed each second: an engine whose numbers jump back and
forth must not keep the router busy."""
_END_OF_REPLAY: Final = b"\xff" * 8
_SUBSCRIBE_TO_ALL: Final = zmtp.encode(b"\x01")

Task = Callable[[float], bool]
"""Work until a moment of `time.monotonic`. Return whether work is left."""


class SliceScheduler:
    """Runs tasks in turn, in one slice of time in each iteration of the event loop.

    A message is applied as a whole. After one that took longer than a slice, the tasks pause, so that messages take at
    most MAX_SHARE of the time."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._ready: dict[Task, None] = {}
        self._scheduled = False

    def add(self, task: Task) -> None:
        self._ready[task] = None
        self._schedule()

    def _schedule(self, pause_s: float = 0.0) -> None:
        if self._ready and not self._scheduled:
            self._scheduled = True
            if pause_s > 0.0:
                self._loop.call_later(pause_s, self._run_slice)
            else:
                self._loop.call_soon(self._run_slice)

    def _run_slice(self) -> None:
        self._scheduled = False
        started_s = time.monotonic()
        until_s = started_s + SLICE_S
        for _ in range(len(self._ready)):
            task = next(iter(self._ready))
            del self._ready[task]
            try:
                if task(until_s):
                    self._ready[task] = None
            except Exception:
                log.exception("kv_events_failed", "The router skips these KV events.")
            if time.monotonic() >= until_s:
                break
        took_s = time.monotonic() - started_s
        self._schedule(took_s * (1.0 / MAX_SHARE - 1.0) if took_s > 4 * SLICE_S else 0.0)


class KvSubscription:
    """Delivers one rank's messages, live and replayed, to its RankEvents."""

    def __init__(
        self,
        events: RankEvents[bytes],
        endpoint: str,
        replay_endpoint: str,
        scheduler: SliceScheduler | None = None,
        reported: ReportedValues | None = None,
        budget: ByteBudget | None = None,
    ) -> None:
        self._events = events
        self._sequence = events.sequence
        self.endpoints = (endpoint, replay_endpoint)
        self._replay_endpoint = replay_endpoint
        self._scheduler = scheduler or SliceScheduler()
        self._reported = reported or ReportedValues(str(events.log_fields["node"]))
        self._budget = budget or ByteBudget()
        self._loop = asyncio.get_running_loop()
        self._replay: ZmtpConnection | None = None
        self._replay_timer: asyncio.TimerHandle | None = None
        self._catch_up_timer: asyncio.TimerHandle | None = None
        self._replay_started_s = self._replay_received_s = 0.0
        self._replay_wait_s = REPLAY_TIMEOUT_S
        self._replays_left = float(MAX_REPLAYS)
        self._replays_counted_s = time.monotonic()
        self._closed = False
        self._live = self._connect(SUB, endpoint, _SUBSCRIBE_TO_ALL, self._catch_up_soon)
        self.read_from_start()

    def _connect(
        self, socket_type: bytes, endpoint: str, message: bytes, on_ready: Callable[[], object]
    ) -> ZmtpConnection:
        parts = urlsplit(endpoint)

        def on_error(reason: str) -> None:
            self._reported.ignore("kv_events", endpoint, reason)

        return ZmtpConnection(
            parts.hostname or "", parts.port or 0, socket_type, message, self._budget, self._wake, on_ready, on_error
        )

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._live.close()
        self._close_replay()
        if self._catch_up_timer is not None:
            self._catch_up_timer.cancel()

    def read_from_start(self) -> None:
        """Request all messages of the engine's process, now and once the subscription has reached the engine."""
        self._close_replay()
        if self._replay_endpoint:
            self._request_replay(0)
            self._catch_up_soon()

    def _catch_up_soon(self) -> None:
        if self._catch_up_timer is not None:
            self._catch_up_timer.cancel()
        self._catch_up_timer = self._loop.call_later(SUBSCRIBED_S, self.catch_up)

    def catch_up(self) -> None:
        """Request the messages that the engine has sent since the last one, in case they did not arrive."""
        if not self._closed and self._replay_endpoint and not self._sequence.replaying:
            self._request_replay(self._sequence.next_number)

    # Reading.

    def _wake(self) -> None:
        self._scheduler.add(self._read)

    def _read(self, until_s: float) -> bool:
        if self._closed:
            return False
        more = self._receive(self._live, self._on_live_message, until_s)
        if self._replay is not None:
            more = self._receive(self._replay, self._on_replayed_message, until_s) or more
        while (start := self._sequence.missing_from) is not None:
            if self._replay_endpoint and self._may_request_replay():
                self._request_replay(start)
            else:
                self._sequence.skip_missing()
        return self._events.work(until_s) or more

    def _receive(self, source: ZmtpConnection, deliver: Callable[[list[bytes]], None], until_s: float) -> bool:
        """Deliver and apply received messages. Return whether there may be more."""
        while not self._events.work(until_s) and time.monotonic() < until_s:
            frames = source.receive()
            if frames is None:
                return False
            try:
                deliver(frames)
            except Exception:
                log.exception("kv_events_failed", "The router skips this message.", **self._events.log_fields)
            if source.closed:
                return False
        return True

    def _on_live_message(self, frames: list[bytes]) -> None:
        if len(frames) == 3 and (number := self._number(frames[1])) is not None:
            self._events.receive(number, frames[2])

    def _number(self, frame: bytes) -> int | None:
        """Return a message's number; None if it is impossible."""
        number = int.from_bytes(frame, "big")
        if len(frame) == 8 and number <= MAX_SEQUENCE_NUMBER:
            return number
        self._reported.ignore("sequence_number", frame[:8].hex(), "not 8 bytes, or too large")
        return None

    # Replay.

    def _may_request_replay(self) -> bool:
        now_s = time.monotonic()
        self._replays_left = min(MAX_REPLAYS, self._replays_left + now_s - self._replays_counted_s)
        self._replays_counted_s = now_s
        if self._replays_left < 1.0:
            self._reported.ignore("kv_replay", MAX_REPLAYS, "its messages have too many gaps")
            return False
        self._replays_left -= 1.0
        return True

    def _request_replay(self, start: int) -> None:
        self._close_replay()
        self._sequence.start_replay()
        request = zmtp.encode(b"", start.to_bytes(8, "big"))
        self._replay = self._connect(DEALER, self._replay_endpoint, request, lambda: None)
        self._replay_started_s = self._replay_received_s = time.monotonic()
        self._replay_wait_s = REPLAY_TIMEOUT_S
        self._replay_timer = self._loop.call_later(REPLAY_PAUSE_S, self._check_replay)

    def _on_replayed_message(self, frames: list[bytes]) -> None:
        """Frames: ["", topic, number, payload]; vLLM before 0.24 sends no topic."""
        self._replay_received_s = time.monotonic()
        self._replay_wait_s = REPLAY_PAUSE_S
        if len(frames) < 3:
            return
        if frames[-2] == _END_OF_REPLAY:
            self._close_replay()
            self._sequence.end_replay(finished=True)
            self._wake()
        elif (number := self._number(frames[-2])) is not None:
            self._sequence.receive_replayed(number, frames[-1])

    def _check_replay(self) -> None:
        now_s = time.monotonic()
        left_s = self._replay_received_s + self._replay_wait_s - now_s
        if left_s > 0 and now_s - self._replay_started_s < REPLAY_MAX_S:
            self._replay_timer = self._loop.call_later(min(left_s, REPLAY_PAUSE_S), self._check_replay)
            return
        if self._replay_wait_s == REPLAY_TIMEOUT_S:
            self._warn_of_replay(f"no answer within {REPLAY_TIMEOUT_S:g} s")
        self._give_up_replay()

    def _warn_of_replay(self, reason: str) -> None:
        log.warning(
            "kv_replay_failed", "The router knows only the blocks of KV events that it received live.",
            **self._events.log_fields, endpoint=self._replay_endpoint, reason=reason,
        )  # fmt: skip

    def _give_up_replay(self) -> None:
        self._close_replay()
        self._sequence.end_replay()
        self._wake()

    def _close_replay(self) -> None:
        if self._replay_timer is not None:
            self._replay_timer.cancel()
            self._replay_timer = None
        if self._replay is not None:
            self._replay.close()
            self._replay = None
