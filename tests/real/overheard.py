"""A real engine's KV events, listened to beside the router: what was told when, and a relay that loses some of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType

import msgspec
import zmq
from real_engine import free_port

Message = list[bytes]


class _Listener:
    """A subscription in a thread of its own."""

    def __init__(self, port: int, take: Callable[[Message], None]) -> None:
        self._take = take
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._listen, args=(port,), daemon=True)
        self._thread.start()

    def _listen(self, port: int) -> None:
        with zmq.Context() as context, context.socket(zmq.SUB) as socket:
            socket.linger = 0
            socket.subscribe(b"")
            socket.connect(f"tcp://127.0.0.1:{port}")
            while not self._end.is_set():
                if socket.poll(50):
                    self._take(socket.recv_multipart())

    def close(self) -> None:
        self._end.set()
        self._thread.join()


class Overheard:
    """What an engine said when, and how many blocks it evicted."""

    def __init__(self, port: int) -> None:
        self.evicted = 0
        self.last_event_s = time.monotonic()
        self._said: list[tuple[int, float]] = []
        self._listener = _Listener(port, self._take)

    def _take(self, message: Message) -> None:
        self.last_event_s = time.monotonic()
        sent_s, events, *_ = msgspec.msgpack.decode(message[2])
        self._said.append((int.from_bytes(message[1], "big"), sent_s))
        self.evicted += sum(len(event["block_hashes"]) for event in events if event["type"] == "BlockRemoved")

    def said_by(self, at_s: float, first: int) -> bool:
        """Whether the engine had said anything from a number on by then (by the wall clock)."""
        return any(number >= first and sent_s < at_s for number, sent_s in self._said)

    def __enter__(self) -> Overheard:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._listener.close()


class Relay:
    """Passes an engine's events on, at another port; loses the next one when told to."""

    def __init__(self, port: int) -> None:
        self.port = free_port()
        self.lost = 0
        self._lose = 0
        self._context = zmq.Context()
        self._out = self._context.socket(zmq.PUB)
        self._out.linger = 0
        self._out.bind(f"tcp://127.0.0.1:{self.port}")
        self._listener = _Listener(port, self._take)

    def lose_next(self) -> None:
        self._lose += 1

    def _take(self, message: Message) -> None:
        if self._lose:
            self._lose -= 1
            self.lost += 1
        else:
            self._out.send_multipart(message)

    def __enter__(self) -> Relay:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._listener.close()
        self._out.close()
        self._context.term()
