"""One rank's KV events over ZMQ: a subscription to its live messages, and replay requests for missing ones.

The sockets are read when their file descriptor becomes readable, without a task for each message. All subscriptions
together get a slice of a few milliseconds in each iteration of the event loop. kv_sequence.py decides what the message
numbers mean.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

import zmq

from warmroute.engines.kv_rank import RankEvents
from warmroute.event_log import EventLog

log = EventLog("warmroute.engines")

SLICE_S: Final = 0.002
"""Time for messages in one iteration of the event loop."""
REPLAY_TIMEOUT_S: Final = 2.0
"""How long to wait for the first message of a replay."""
REPLAY_PAUSE_S: Final = 0.2
"""How long to wait for each further message: an engine that replays more than its socket holds drops the end."""
SUBSCRIBED_S: Final = 1.0
"""Time after which a subscription has reached the engine. Then the router requests what was sent before."""
_END_OF_REPLAY: Final = b"\xff" * 8
_HIGH_WATER: Final = 100_000

Context = zmq.Context[zmq.Socket[bytes]]
Task = Callable[[float], bool]
"""Work until a moment of `time.monotonic`. Return whether work is left."""


class SliceScheduler:
    """Runs tasks in turn, in one slice of time in each iteration of the event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._ready: dict[Task, None] = {}
        self._scheduled = False

    def add(self, task: Task) -> None:
        self._ready[task] = None
        self._schedule()

    def _schedule(self) -> None:
        if self._ready and not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._run_slice)

    def _run_slice(self) -> None:
        self._scheduled = False
        until_s = time.monotonic() + SLICE_S
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
        self._schedule()


class KvSubscription:
    """Delivers one rank's messages, live and replayed, to its RankEvents."""

    def __init__(
        self,
        context: Context,
        events: RankEvents[bytes],
        endpoint: str,
        replay_endpoint: str,
        scheduler: SliceScheduler | None = None,
    ) -> None:
        """Raises zmq.ZMQError."""
        self._context = context
        self._events = events
        self._sequence = events.sequence
        self.endpoints = (endpoint, replay_endpoint)
        self._replay_endpoint = replay_endpoint
        self._scheduler = scheduler or SliceScheduler()
        self._loop = asyncio.get_running_loop()
        self._replay: zmq.Socket[bytes] | None = None
        self._replay_timer: asyncio.TimerHandle | None = None
        self._catch_up_timer: asyncio.TimerHandle | None = None
        self._replay_received_s = 0.0
        self._replay_wait_s = REPLAY_TIMEOUT_S
        self._closed = False
        self._live = self._socket(zmq.SUB, endpoint)
        self._loop.add_reader(self._live.FD, self._wake)
        self._wake()
        self.read_from_start()

    def _socket(self, kind: int, endpoint: str) -> zmq.Socket[bytes]:
        made = self._context.socket(kind)
        try:
            made.setsockopt(zmq.RCVHWM, _HIGH_WATER)
            made.setsockopt(zmq.LINGER, 0)
            made.setsockopt(zmq.IPV6, 1)
            if kind == zmq.SUB:
                made.setsockopt(zmq.SUBSCRIBE, b"")
            made.connect(endpoint)
        except zmq.ZMQError:
            made.close()
            raise
        return made

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._live.FD)
        self._live.close()
        self._close_replay()
        if self._catch_up_timer is not None:
            self._catch_up_timer.cancel()

    def read_from_start(self) -> None:
        """Request all messages of the engine's process, now and once the subscription has reached the engine."""
        self._close_replay()
        if self._replay_endpoint:
            self._request_replay(0)
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
            if self._replay_endpoint:
                self._request_replay(start)
            else:
                self._sequence.skip_missing()
        return self._events.work(until_s) or more

    def _receive(self, source: zmq.Socket[bytes], deliver: Callable[[list[bytes]], None], until_s: float) -> bool:
        """Deliver and apply received messages. Return whether there may be more.

        The file descriptor signals only changes: a socket must be read until it is empty, or be scheduled again.
        """
        while not self._events.work(until_s) and time.monotonic() < until_s:
            try:
                frames = source.recv_multipart(zmq.NOBLOCK)
            except zmq.ZMQError:
                return False
            try:
                deliver(frames)
            except Exception:
                log.exception("kv_events_failed", "The router skips this message.", **self._events.log_fields)
            if source.closed:
                return False
        return True

    def _on_live_message(self, frames: list[bytes]) -> None:
        if len(frames) == 3 and len(frames[1]) == 8:
            self._events.receive(int.from_bytes(frames[1], "big"), frames[2])

    # Replay.

    def _request_replay(self, start: int) -> None:
        self._close_replay()
        self._sequence.start_replay()
        try:
            request = self._replay = self._socket(zmq.DEALER, self._replay_endpoint)
            self._loop.add_reader(request.FD, self._wake)
            request.send_multipart([b"", start.to_bytes(8, "big")], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            self._warn_of_replay(str(error))
            self._give_up_replay()
            return
        self._replay_received_s = time.monotonic()
        self._replay_wait_s = REPLAY_TIMEOUT_S
        self._replay_timer = self._loop.call_later(REPLAY_PAUSE_S, self._check_replay)
        self._wake()

    def _on_replayed_message(self, frames: list[bytes]) -> None:
        """Frames: ["", topic, number, payload]; vLLM before 0.24 sends no topic."""
        self._replay_received_s = time.monotonic()
        self._replay_wait_s = REPLAY_PAUSE_S
        if len(frames) < 3 or len(frames[-2]) != 8:
            return
        if frames[-2] == _END_OF_REPLAY:
            self._close_replay()
            self._sequence.end_replay(finished=True)
            self._wake()
        else:
            self._sequence.receive_replayed(int.from_bytes(frames[-2], "big"), frames[-1])

    def _check_replay(self) -> None:
        left_s = self._replay_received_s + self._replay_wait_s - time.monotonic()
        if left_s > 0:
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
            self._loop.remove_reader(self._replay.FD)
            self._replay.close()
            self._replay = None
