"""What a worker tells its parent about its connections: the last count is always the true one."""

from __future__ import annotations

import asyncio
import socket
from types import SimpleNamespace
from typing import Any, cast

from warmroute.app.workers.frames import MAX_UNSENT_BYTES, OPEN, FrameLink
from warmroute.app.workers.passed_connections import PassedConnections
from warmroute.app.workers.seat import Seat
from warmroute.app.workers.worker import Worker


class Connection(asyncio.Protocol):
    def __init__(self, listener: Any) -> None:
        self._listener = listener

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._listener.connections.add(self)

    def connection_lost(self, error: Exception | None) -> None:
        self._listener.connections.discard(self)
        self._listener.on_closed()


async def test_after_a_burst_of_connections_the_last_count_is_the_true_one() -> None:
    listener: Any = SimpleNamespace(connections=set(), on_closed=None)
    listener.protocol = lambda: Connection(listener)
    parent, worker = socket.socketpair()
    counts: list[int] = []

    def count() -> None:
        counts.append(passed.open)

    passed = PassedConnections(worker.detach(), listener, None, count, count)
    pairs = [socket.socketpair() for _ in range(50)]
    for _, theirs in pairs:
        socket.send_fds(parent, [b"c"], [theirs.fileno()])
        theirs.close()
    async with asyncio.timeout(10):
        while passed.received < 50 or passed._opening:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert counts[-1] == passed.open == 50
    for ours, _ in pairs[:20]:
        ours.close()
    async with asyncio.timeout(10):
        while len(listener.connections) > 30:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert counts[-1] == 30
    passed.close()
    parent.close()
    for ours, _ in pairs[20:]:
        ours.close()


async def test_a_count_that_could_not_be_sent_is_sent_again() -> None:
    frames: list[bytes] = []
    full = SimpleNamespace(get_write_buffer_size=lambda: MAX_UNSENT_BYTES + 1, write=frames.append)
    worker = Worker(cast(Seat, SimpleNamespace(number=0)))
    worker._connections = cast(PassedConnections, SimpleNamespace(received=3, open=2))
    link: FrameLink = worker._link
    link._transport = cast(asyncio.Transport, full)
    worker._report()
    assert not frames and link.lost == 1
    full.get_write_buffer_size = lambda: 0
    async with asyncio.timeout(10):
        while not frames:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    assert frames[0][4:5] == OPEN
    worker._report()
    assert len(frames) == 1, "it has not changed"
