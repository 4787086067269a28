"""A small GET or POST over the nodes' own connection pools: for health checks, metrics and model lists."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from warmroute.edge.chunked import BadChunk, ChunkFrames
from warmroute.edge.head import CHUNKED, ResponseHead
from warmroute.edge.pools import Pools
from warmroute.edge.upstream import ConnectFault, Connection, NodePool
from warmroute.fleet.node import Node


class _Fetch:
    """Implements edge.upstream.ResponseHandler."""

    def __init__(self, pool: NodePool, head: bytes, body: bytes, limit_bytes: int) -> None:
        self._pool = pool
        self._head = head
        self._body = body
        self._retried_stale = False
        self._limit_bytes = limit_bytes
        self._pieces: list[bytes] = []
        self._size = 0
        self._frames: ChunkFrames | None = None
        self._status = 0
        self._connection: Connection | None = None
        self.done: asyncio.Future[tuple[int, bytes]] = asyncio.get_running_loop().create_future()

    def connected(self, connection: Connection) -> bool:
        if self.done.done():
            return False
        self.send_on(connection)
        return True

    def send_on(self, connection: Connection) -> None:
        self._connection = connection
        connection.begin(self, self._head, self._body)

    def connect_failed(self, fault: ConnectFault, reason: str) -> None:
        errors = {ConnectFault.REFUSED: ConnectionRefusedError, ConnectFault.OURS: OSError}
        self._fail(errors.get(fault, ConnectionError)(reason))

    def answer_began(
        self, head: ResponseHead, first: bytes, whole: bool, now_s: float
    ) -> Callable[[bytes], object] | None:
        self._status = head.status
        if head.length == CHUNKED:
            self._frames = ChunkFrames()
        self._take(first)
        return self._take

    def _take(self, data: bytes) -> None:
        self._size += len(data)
        if self._size > self._limit_bytes:
            self.cancel()
            self._fail(ConnectionError("the answer is too large"))
        elif self._frames is None:
            self._pieces.append(data)
        elif data:
            try:
                self._frames.feed(data, self._pieces)
            except BadChunk:
                self._fail(ConnectionError("the answer's framing is broken"))

    def answer_ended(self, now_s: float) -> None:
        self._connection = None
        if not self.done.done():
            self.done.set_result((self._status, b"".join(self._pieces)))

    def answer_failed(self, reason: str, stale: bool) -> None:
        self._connection = None
        if stale and not self._retried_stale and not self.done.done():
            self._retried_stale = True
            self._pool.open(self)
        else:
            self._fail(ConnectionError(reason))

    def answer_broke(self, reason: str, frames: ChunkFrames | None) -> None:
        self._fail(ConnectionError(reason))

    def _fail(self, error: OSError) -> None:
        self._connection = None
        if not self.done.done():
            self.done.set_exception(error)

    def cancel(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.cancel()


async def fetch(
    pools: Pools, node: Node, path: str, timeout_s: float, limit_bytes: int = 8_388_608
) -> tuple[int, bytes]:
    """Status and body of GET path. Raises ConnectionRefusedError where nobody listens, ConnectionError where the answer
    broke, TimeoutError where the node is slow, another OSError where this machine lacks something."""
    pool = pools.of(node)
    head = b"GET %b HTTP/1.1\r\n%b%bAccept: */*\r\n\r\n" % (path.encode(), pool.host_line, pool.key_line)
    return await _request(_Fetch(pool, head, b"", limit_bytes), pool, timeout_s)


async def post(
    pools: Pools, node: Node, path: str, body: bytes, timeout_s: float, limit_bytes: int = 33_554_432
) -> tuple[int, bytes]:
    """The same with a POST of JSON."""
    pool = pools.of(node)
    head = b"POST %b HTTP/1.1\r\n%b%bAccept: */*\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % (
        path.encode(),
        pool.host_line,
        pool.key_line,
        len(body),
    )
    return await _request(_Fetch(pool, head, body, limit_bytes), pool, timeout_s)


async def _request(asking: _Fetch, pool: NodePool, timeout_s: float) -> tuple[int, bytes]:
    connection = pool.take()
    if connection is not None:
        asking.send_on(connection)
    else:
        pool.open(asking)
    try:
        async with asyncio.timeout(timeout_s):
            return await asking.done
    finally:
        asking.cancel()
        asking.done.cancel()
