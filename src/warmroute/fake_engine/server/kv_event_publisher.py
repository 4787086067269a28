"""Publishes the KV events of one rank as vLLM 0.32 does: a ZMQ PUB socket, and a ROUTER that replays 10,000 batches.

A published message has three frames: topic, sequence (8 bytes, big-endian, from 0), msgpack `[ts, events, rank]`. For a
replay, a DEALER sends `["", first sequence]`. It receives `["", topic, sequence, payload]` for each batch that the
engine still has, then `["", "", ff × 8, ""]`.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Final

import msgspec
import zmq
import zmq.asyncio

from warmroute.config import ConfigError
from warmroute.event_log import EventLog
from warmroute.fake_engine.core import EventBatch, KvEvent, wire_events

log = EventLog("warmroute.fake_engine")

BUFFER_BATCHES: Final = 10_000
HIGH_WATER_MARK: Final = 100_000
BATCHES_AT_ONCE: Final = 100
"""A replay sends this many batches before other tasks run."""
END_OF_REPLAY: Final = b"\xff" * 8


class EventPublisher:
    """The event and replay sockets of one rank. Publishing never blocks: a slow subscriber loses batches."""

    def __init__(self, topic: str, rank: int, drops_next: Callable[[], bool]) -> None:
        """`drops_next`: whether the next batch is lost. It uses up a sequence number all the same."""
        self.topic = topic
        self._topic = topic.encode()
        self._rank = rank
        self._drops_next = drops_next
        self._encode = msgspec.msgpack.Encoder().encode
        self._sequence = 0
        self._buffer: deque[tuple[bytes, bytes]] = deque(maxlen=BUFFER_BATCHES)
        self._context = zmq.Context()
        self._events = self._context.socket(zmq.PUB)
        self._events.set_hwm(HIGH_WATER_MARK)
        self._events.linger = 0
        self._replays: zmq.asyncio.Socket | None = None
        self._task: asyncio.Task[None] | None = None
        self.port = 0
        self.replay_port = 0

    def listen(self, host: str, port: int, replay_port: int | None) -> None:
        """Bind the sockets. Port 0 takes a free port. Raises ConfigError."""
        self.port = _bind(self._events, host, port)
        if replay_port is None:
            return
        replays = zmq.asyncio.Context.shadow(self._context.underlying).socket(zmq.ROUTER)
        replays.set_hwm(0)  # a ROUTER drops messages beyond its mark, and a replay may exceed it
        replays.linger = 0
        self.replay_port = _bind(replays, host, replay_port)
        self._replays = replays
        self._task = asyncio.get_running_loop().create_task(self._answer_replays(replays))

    def publish(self, events: list[KvEvent]) -> None:
        payload = self._encode(EventBatch(time.time(), list(wire_events(events)), self._rank))
        sequence = self._sequence.to_bytes(8, "big")
        self._sequence += 1
        self._buffer.append((sequence, payload))
        if not self._drops_next():
            self._events.send_multipart((self._topic, sequence, payload), zmq.NOBLOCK)

    def restart(self) -> None:
        """Start again at sequence 0 with an empty replay buffer, as a new process does."""
        self._sequence = 0
        self._buffer.clear()

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
                log.warning("replay_request_invalid", "The engine ignores it.", frames=len(frames))
                continue
            client, _, first = frames
            batches = [batch for batch in self._buffer if batch[0] >= first]  # big-endian bytes sort like numbers
            for count, (sequence, payload) in enumerate(batches, 1):
                await socket.send_multipart((client, b"", self._topic, sequence, payload))
                if count % BATCHES_AT_ONCE == 0:
                    await asyncio.sleep(0)  # lets other tasks run: a send that need not wait does not
            await socket.send_multipart((client, b"", b"", END_OF_REPLAY, b""))


def _bind(socket: zmq.Socket[bytes] | zmq.asyncio.Socket, host: str, port: int) -> int:
    try:
        socket.bind(f"tcp://{host}:{port or '*'}")
    except zmq.ZMQError as error:
        raise ConfigError(f"cannot publish KV events on {host}:{port}: {error.strerror}; choose another port") from None
    return int(socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
