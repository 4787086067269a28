"""A node's KV events over ZMQ: one subscription for each source (a node, or a rank of it), with replay.

The sockets are read when their file descriptor says so, without a task for each message; a slice of a few milliseconds
at a time, so that a flood of events never holds the loop. What the numbers mean is kv_feed's to know.
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
"""How long messages are taken in one go."""
REPLAY_S: Final = 2.0
"""How long a replay may be silent before it is given up."""
_END_OF_REPLAY: Final = b"\xff" * 8
_HIGH_WATER: Final = 100_000


class KvStream:
    """Feeds one source's messages, live and replayed, to its Feed."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], feed: Feed, endpoint: str, replay_endpoint: str, name: str
    ) -> None:
        self._context = context
        self._feed = feed
        self._name = name
        self._replay_endpoint = replay_endpoint
        self._loop = asyncio.get_running_loop()
        self._live = context.socket(zmq.SUB)
        self._live.setsockopt(zmq.RCVHWM, _HIGH_WATER)
        self._live.setsockopt(zmq.LINGER, 0)
        self._live.setsockopt(zmq.SUBSCRIBE, b"")
        self._live.connect(endpoint)
        self._replay: zmq.Socket[bytes] | None = None
        self._replay_timer: asyncio.TimerHandle | None = None
        self._replay_heard_s = 0.0
        self._closed = False
        self.heard_s = -1e9
        """When the last message came."""
        self._loop.add_reader(self._live.FD, self._read_live)
        self._read_live()
        if replay_endpoint:
            self._ask_replay(0)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._live.FD)
        self._live.close()
        self._end_replay()

    def restarted(self) -> None:
        """The engine's process is another one: what it held is gone, and its numbers begin at 0."""
        self._end_replay()
        self._feed.began_anew()
        if self._replay_endpoint:
            self._ask_replay(0)

    # Live messages.

    def _read_live(self) -> None:
        if self._closed:
            return
        if self._take(self._live, self._live_message):
            self._loop.call_soon(self._read_live)
        wanted = self._feed.wants_from
        if wanted is not None:
            self._make_up_for(wanted)

    def _live_message(self, frames: list[bytes]) -> None:
        if len(frames) == 3 and len(frames[1]) == 8:
            self.heard_s = time.monotonic()
            self._feed.message(int.from_bytes(frames[1], "big"), frames[2])

    def _make_up_for(self, start: int) -> None:
        if self._replay_endpoint:
            self._ask_replay(start)
        else:
            self._feed.replay_began()
            self._feed.replay_ended()

    def _take(self, source: zmq.Socket[bytes], deliver: Callable[[list[bytes]], None]) -> bool:
        """Delivers what has come, for a slice of time; True where there may be more.

        The descriptor tells only of changes: a socket must be read until it has nothing, or be come back to.
        """
        until_s = time.monotonic() + SLICE_S
        while time.monotonic() < until_s:
            try:
                frames = source.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return False
            except zmq.ZMQError:
                return False
            try:
                deliver(frames)
            except Exception:
                log.exception("KV events of %s could not be taken", self._name)
            if source.closed:
                return False
        return True

    # Replay.

    def _ask_replay(self, start: int) -> None:
        self._end_replay()
        self._feed.replay_began()
        asking = self._replay = self._context.socket(zmq.DEALER)
        asking.setsockopt(zmq.LINGER, 0)
        asking.setsockopt(zmq.RCVHWM, _HIGH_WATER)
        asking.connect(self._replay_endpoint)
        self._loop.add_reader(asking.FD, self._read_replay)
        asking.send_multipart([b"", start.to_bytes(8, "big")], zmq.NOBLOCK)
        self._replay_heard_s = time.monotonic()
        self._replay_timer = self._loop.call_later(REPLAY_S, self._watch_replay)
        self._loop.call_soon(self._read_replay)

    def _read_replay(self) -> None:
        if self._replay is not None and self._take(self._replay, self._replay_message):
            self._loop.call_soon(self._read_replay)

    def _replay_message(self, frames: list[bytes]) -> None:
        """["", topic, number, payload]; before 0.24 without the topic."""
        self._replay_heard_s = time.monotonic()
        if len(frames) < 3 or len(frames[-2]) != 8:
            return
        if frames[-2] == _END_OF_REPLAY:
            self._end_replay()
            self._feed.replay_ended()
            self._read_live()
        else:
            self._feed.replayed(int.from_bytes(frames[-2], "big"), frames[-1])

    def _watch_replay(self) -> None:
        silent_s = time.monotonic() - self._replay_heard_s
        if silent_s < REPLAY_S:
            self._replay_timer = self._loop.call_later(REPLAY_S - silent_s, self._watch_replay)
            return
        log.warning("the replay of %s's KV events did not answer; going on with what there is", self._name)
        self._end_replay()
        self._feed.replay_ended()

    def _end_replay(self) -> None:
        if self._replay_timer is not None:
            self._replay_timer.cancel()
            self._replay_timer = None
        if self._replay is not None:
            self._loop.remove_reader(self._replay.FD)
            self._replay.close()
            self._replay = None
