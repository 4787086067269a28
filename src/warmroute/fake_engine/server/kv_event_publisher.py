"""KV events of one rank as vLLM 0.32 sends them: ZMQ PUB, and a ROUTER that replays the last 10,000 batches.

Published: topic, sequence (8 bytes, big-endian, from 0), msgpack `[ts, events, rank]`. Replay: a DEALER sends
`["", first sequence]` and gets `["", topic, sequence, payload]` for each batch that is still held, then
`["", "", ff × 8, ""]`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Final

import msgspec
import zmq
import zmq.asyncio

from warmroute.config import ConfigError
from warmroute.fake_engine.core import EventBatch, KvEvent, wire_events

log = logging.getLogger("warmroute.sim")

BUFFER_BATCHES: Final = 10_000
HIGH_WATER_MARK: Final = 100_000
BATCHES_AT_ONCE: Final = 100
"""Of a replay, before the engine gets its turn again."""
END_OF_REPLAY: Final = b"\xff" * 8


class EventPublisher:
    """The event and replay sockets of one rank. Publishing never blocks: a subscriber that is behind loses batches."""

    def __init__(self, topic: str, rank: int, lose: Callable[[], bool]) -> None:
        self.topic = topic
        self._topic = topic.encode()
        self._rank = rank
        self._lose = lose
        """Whether the next batch is lost on its way (its sequence number is used up all the same)."""
        self._encode = msgspec.msgpack.Encoder().encode
        self._next = 0
        self._held: deque[tuple[bytes, bytes]] = deque(maxlen=BUFFER_BATCHES)
        self._context = zmq.Context()
        self._events = self._context.socket(zmq.PUB)
        self._events.set_hwm(HIGH_WATER_MARK)
        self._events.linger = 0
        self._replays: zmq.asyncio.Socket | None = None
        self._task: asyncio.Task[None] | None = None
        self.port = 0
        self.replay_port = 0

    def listen(self, host: str, port: int, replay_port: int | None) -> None:
        """Binds; port 0 takes a free one. Raises ConfigError."""
        self.port = _bind(self._events, host, port)
        if replay_port is None:
            return
        replays = zmq.asyncio.Context.shadow(self._context.underlying).socket(zmq.ROUTER)
        replays.set_hwm(0)  # a ROUTER at its mark drops silently, and a whole replay is written at once
        replays.linger = 0
        self.replay_port = _bind(replays, host, replay_port)
        self._replays = replays
        self._task = asyncio.get_running_loop().create_task(self._answer_replays(replays))

    def publish(self, events: list[KvEvent]) -> None:
        payload = self._encode(EventBatch(time.time(), list(wire_events(events)), self._rank))
        sequence = self._next.to_bytes(8, "big")
        self._next += 1
        self._held.append((sequence, payload))
        if not self._lose():
            self._events.send_multipart((self._topic, sequence, payload), zmq.NOBLOCK)

    def restart(self) -> None:
        """As a new process would: the sequence begins at 0, and nothing is held for replay."""
        self._next = 0
        self._held.clear()

    @property
    def published(self) -> int:
        return self._next

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
        if self._replays is not None:
            self._replays.close(linger=0)
        self._events.close(linger=0)
        self._context.term()

    async def _answer_replays(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            frames = await socket.recv_multipart()
            if len(frames) != 3 or frames[1] != b"" or len(frames[2]) != 8:
                log.warning("a replay request of %d frames was passed over", len(frames))
                continue
            client, _, first = frames
            wanted = [held for held in self._held if held[0] >= first]  # big-endian: bytes sort as the numbers do
            for count, (sequence, payload) in enumerate(wanted, 1):
                await socket.send_multipart((client, b"", self._topic, sequence, payload))
                if count % BATCHES_AT_ONCE == 0:
                    await asyncio.sleep(0)  # a send that need not wait does not give way by itself
            await socket.send_multipart((client, b"", b"", END_OF_REPLAY, b""))


def _bind(socket: zmq.Socket[bytes] | zmq.asyncio.Socket, host: str, port: int) -> int:
    try:
        socket.bind(f"tcp://{host}:{port or '*'}")
    except zmq.ZMQError as error:
        raise ConfigError(
            f"can't publish events on {host}:{port}: {error.strerror}; is another process there? choose another port"
        ) from None
    return int(socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
