"""GET and POST requests of the router itself to nodes, over the nodes' connection pools: health checks, metrics, model
lists, tokenization. Requests to other servers use warmroute/http_client.py."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from warmroute.edge.connection_pool import ConnectionPool, ConnectionPools
from warmroute.edge.http1 import CHUNKED, BadChunk, ChunkReader, ResponseHead
from warmroute.edge.node_connection import ConnectFailure, NodeConnection
from warmroute.event_log import where_it_failed
from warmroute.fleet.node import Node

MAX_GET_BYTES: Final = 8_388_608
MAX_POST_BYTES: Final = 33_554_432
"""The largest response that the router reads."""


class NodeClient:
    """Its methods return a response's status and body.

    They raise ConnectionRefusedError if no process listens, ConnectionError if the response is broken or too large,
    TimeoutError if the node is slow, and another OSError if this machine is out of files, ports or memory.
    """

    def __init__(self, pools: ConnectionPools) -> None:
        self._pools = pools

    async def get(self, node: Node, path: str, timeout_s: float) -> tuple[int, bytes]:
        pool = self._pools.for_node(node)
        head = b"GET %b HTTP/1.1\r\n%b%bAccept: */*\r\n\r\n" % (path.encode(), pool.host_line, pool.authorization_line)
        return await _fetch(pool, head, b"", timeout_s, MAX_GET_BYTES)

    async def post(self, node: Node, path: str, body: bytes, timeout_s: float) -> tuple[int, bytes]:
        """The body is JSON."""
        pool = self._pools.for_node(node)
        head = (
            b"POST %b HTTP/1.1\r\n%b%bAccept: */*\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
            % (path.encode(), pool.host_line, pool.authorization_line, len(body))
        )
        return await _fetch(pool, head, body, timeout_s, MAX_POST_BYTES)


async def _fetch(
    pool: ConnectionPool, head: bytes, body: bytes, timeout_s: float, limit_bytes: int
) -> tuple[int, bytes]:
    fetch = _Fetch(pool, head, body, limit_bytes)
    connection = pool.take_idle()
    if connection is not None:
        fetch.send_on(connection)
    else:
        pool.connect(fetch)
    try:
        async with asyncio.timeout(timeout_s):
            return await fetch.done
    finally:
        fetch.cancel()
        fetch.done.cancel()


class _Fetch:
    """One request. Implements node_connection.ResponseHandler."""

    def __init__(self, pool: ConnectionPool, head: bytes, body: bytes, limit_bytes: int) -> None:
        self._pool = pool
        self._head = head
        self._body = body
        self._retried_stale = False
        self._limit_bytes = limit_bytes
        self._pieces: list[bytes] = []
        self._size = 0
        self._frames: ChunkReader | None = None
        self._status = 0
        self._connection: NodeConnection | None = None
        self.done: asyncio.Future[tuple[int, bytes]] = asyncio.get_running_loop().create_future()

    def connected(self, connection: NodeConnection) -> bool:
        if self.done.done():
            return False
        self.send_on(connection)
        return True

    def send_on(self, connection: NodeConnection) -> None:
        self._connection = connection
        connection.send_request(self, self._head, self._body)

    def connect_failed(self, failure: ConnectFailure, reason: str) -> None:
        errors = {ConnectFailure.REFUSED: ConnectionRefusedError, ConnectFailure.LOCAL: OSError}
        self._fail(errors.get(failure, ConnectionError)(reason))

    def response_started(
        self, head: ResponseHead, first: bytes, whole: bool, now_s: float
    ) -> Callable[[bytes], object] | None:
        self._status = head.status
        if head.length == CHUNKED:
            self._frames = ChunkReader()
        self._collect(first)
        return self._collect

    def _collect(self, data: bytes) -> None:
        self._size += len(data)
        if self._size > self._limit_bytes:
            self.cancel()
            self._fail(ConnectionError(f"the response is larger than {self._limit_bytes:,} bytes"))
        elif self._frames is None:
            self._pieces.append(data)
        elif data:
            try:
                self._frames.feed(data, self._pieces)
            except BadChunk:
                self._fail(ConnectionError("the response's chunked encoding is malformed"))

    def response_ended(self, now_s: float) -> None:
        self._connection = None
        if not self.done.done():
            self.done.set_result((self._status, b"".join(self._pieces)))

    def response_failed(self, reason: str, stale: bool) -> None:
        self._connection = None
        if stale and not self._retried_stale and not self.done.done():
            self._retried_stale = True
            self._pool.connect(self)
        else:
            self._fail(ConnectionError(reason))

    def response_broke(self, reason: str, frames: ChunkReader | None) -> None:
        self._fail(ConnectionError(reason))

    def internal_error(self, error: Exception, frames: ChunkReader | None) -> None:
        self._fail(ConnectionError(where_it_failed(error)))

    def _fail(self, error: OSError) -> None:
        self._connection = None
        if not self.done.done():
            self.done.set_exception(error)

    def cancel(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.cancel()
