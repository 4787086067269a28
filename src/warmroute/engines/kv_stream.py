"""A node's KV events over ZMQ: one subscription for each source (a node, or a rank of it), with replay.

The sockets are read when their file descriptor says so, without a task for each message. All streams together get a
slice of a few milliseconds in each round of the loop, so that a flood of events never holds it. What the numbers mean
is kv_feed's to know.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Final

import zmq

from warmroute.engines.kv_feed import Feed

log = logging.getLogger("warmroute.engines")

SLICE_S: Final = 0.002
"""How long messages are taken in one round of the loop."""
REPLAY_S: Final = 2.0
"""How long a replay may be silent before it is given up."""
BREAK_S: Final = 0.2
"""How long it may be silent once it has begun: an engine that replays more than its socket takes loses the end."""
SETTLED_S: Final = 1.0
"""After so long a subscription has reached the engine: what was said meanwhile is asked for again."""
_END_OF_REPLAY: Final = b"\xff" * 8
_HIGH_WATER: Final = 100_000

Context = zmq.Context[zmq.Socket[bytes]]
Turn = Callable[[float], bool]
"""Works until a moment; True where something is left."""


class Turns:
    """Gives streams their turns: one slice of time for all of them in each round of the loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[Turn, None] = {}
        self._scheduled = False

    def want(self, turn: Turn) -> None:
        self._waiting[turn] = None
        self._schedule()

    def _schedule(self) -> None:
        if self._waiting and not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._round)

    def _round(self) -> None:
        self._scheduled = False
        until_s = time.monotonic() + SLICE_S
        for _ in range(len(self._waiting)):
            turn = next(iter(self._waiting))
            del self._waiting[turn]
            try:
                if turn(until_s):
                    self._waiting[turn] = None
            except Exception:
                log.exception("taking KV events failed")
            if time.monotonic() >= until_s:
                break
        self._schedule()


class KvStream:
    """Feeds one source's messages, live and replayed, to its Feed."""

    def __init__(
        self,
        context: Context,
        feed: Feed,
        endpoint: str,
        replay_endpoint: str,
        name: str,
        *,
        turns: Turns | None = None,
        work: Turn = lambda _until_s: False,
        heard: Callable[[bytes], None] = lambda _payload: None,
    ) -> None:
        """`work` does what the feed has queued; `heard` is told of each live message. Raises zmq.ZMQError."""
        self._context = context
        self._feed = feed
        self._name = name
        self.endpoints = (endpoint, replay_endpoint)
        self._replay_endpoint = replay_endpoint
        self._turns = turns or Turns()
        self._work = work
        self._on_heard = heard
        self._loop = asyncio.get_running_loop()
        self._replay: zmq.Socket[bytes] | None = None
        self._replay_timer: asyncio.TimerHandle | None = None
        self._settling: asyncio.TimerHandle | None = None
        self._replay_heard_s = 0.0
        self._replay_patience_s = REPLAY_S
        self._closed = False
        self.heard_s = -1e9
        """When the last live message came."""
        self._live = self._socket(zmq.SUB, endpoint)
        self._loop.add_reader(self._live.FD, self._wake)
        self._wake()
        self._begin()

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
        self._end_replay()
        if self._settling is not None:
            self._settling.cancel()

    def restarted(self) -> None:
        """The engine's process is another one: what it held is gone, and its numbers begin at 0."""
        self._end_replay()
        self._feed.replaying = False
        self._feed.began_anew()
        self._begin()

    def catch_up(self) -> None:
        """Asks for what the engine has said since the last message, should it not have arrived."""
        if not self._closed and self._replay_endpoint and not self._feed.replaying:
            self._ask_replay(self._feed.next_number)

    def _begin(self) -> None:
        if self._replay_endpoint:
            self._ask_replay(0)
            if self._settling is not None:
                self._settling.cancel()
            self._settling = self._loop.call_later(SETTLED_S, self.catch_up)

    # Turns.

    def _wake(self) -> None:
        self._turns.want(self._turn)

    def _turn(self, until_s: float) -> bool:
        if self._closed:
            return False
        more = self._take(self._live, self._live_message, until_s)
        if self._replay is not None:
            more = self._take(self._replay, self._replay_message, until_s) or more
        while (wanted := self._feed.wants_from) is not None:
            self._make_up_for(wanted)
        return self._work(until_s) or more

    def _take(self, source: zmq.Socket[bytes], deliver: Callable[[list[bytes]], None], until_s: float) -> bool:
        """Delivers what has come, and does what that brings; True where there may be more.

        The descriptor tells only of changes: a socket must be read until it has nothing, or be come back to.
        """
        while not self._work(until_s) and time.monotonic() < until_s:
            try:
                frames = source.recv_multipart(zmq.NOBLOCK)
            except zmq.ZMQError:
                return False
            try:
                deliver(frames)
            except Exception:
                log.exception("KV events of %s could not be taken", self._name)
            if source.closed:
                return False
        return True

    # Live messages.

    def _live_message(self, frames: list[bytes]) -> None:
        if len(frames) == 3 and len(frames[1]) == 8:
            self.heard_s = time.monotonic()
            self._on_heard(frames[2])
            self._feed.message(int.from_bytes(frames[1], "big"), frames[2])

    def _make_up_for(self, start: int) -> None:
        if self._replay_endpoint:
            self._ask_replay(start)
        else:
            self._feed.replay_began()
            self._feed.replay_ended()

    # Replay.

    def _ask_replay(self, start: int) -> None:
        self._end_replay()
        self._feed.replay_began()
        try:
            asking = self._replay = self._socket(zmq.DEALER, self._replay_endpoint)
            self._loop.add_reader(asking.FD, self._wake)
            asking.send_multipart([b"", start.to_bytes(8, "big")], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            log.warning("the replay of %s's KV events can't be asked for: %s", self._name, error)
            self._give_up_replay()
            return
        self._replay_heard_s = time.monotonic()
        self._replay_patience_s = REPLAY_S
        self._replay_timer = self._loop.call_later(BREAK_S, self._watch_replay)
        self._wake()

    def _replay_message(self, frames: list[bytes]) -> None:
        """["", topic, number, payload]; before 0.24 without the topic."""
        self._replay_heard_s = time.monotonic()
        self._replay_patience_s = BREAK_S
        if len(frames) < 3 or len(frames[-2]) != 8:
            return
        if frames[-2] == _END_OF_REPLAY:
            self._end_replay()
            self._feed.replay_ended(answered=True)
            self._wake()
        else:
            self._feed.replayed(int.from_bytes(frames[-2], "big"), frames[-1])

    def _watch_replay(self) -> None:
        left_s = self._replay_heard_s + self._replay_patience_s - time.monotonic()
        if left_s > 0:
            self._replay_timer = self._loop.call_later(min(left_s, BREAK_S), self._watch_replay)
            return
        if self._replay_patience_s == REPLAY_S:
            log.warning("the replay of %s's KV events did not answer; going on with what there is", self._name)
        self._give_up_replay()

    def _give_up_replay(self) -> None:
        self._end_replay()
        self._feed.replay_ended()
        self._wake()

    def _end_replay(self) -> None:
        if self._replay_timer is not None:
            self._replay_timer.cancel()
            self._replay_timer = None
        if self._replay is not None:
            self._loop.remove_reader(self._replay.FD)
            self._replay.close()
            self._replay = None
