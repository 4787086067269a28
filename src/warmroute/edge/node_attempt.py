"""The I/O of one attempt: sends a request to one node, and tells the exchange what comes back.

An exchange has one attempt at a time, or two while the request is hedged. A withdrawn attempt closes its connection, so
that the engine stops generating.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from warmroute.edge.connection_pool import ConnectionPool
from warmroute.edge.error_body import ErrorBody, whole_error
from warmroute.edge.http1 import ChunkReader, ResponseHead
from warmroute.edge.node_connection import ConnectFailure, NodeConnection
from warmroute.fleet.failed_tries import NodeError
from warmroute.fleet.ticket import Ticket

if TYPE_CHECKING:
    from warmroute.edge.exchange import ProxyExchange


class NodeAttempt:
    """Implements node_connection.ResponseHandler."""

    _exchange: ProxyExchange
    ticket: Ticket
    pool: ConnectionPool
    connection: NodeConnection | None = None
    _retried_stale: bool = False
    _withdrawn: bool = False
    error: NodeError | None = None
    """Set if the node answers with an error."""
    error_body: ErrorBody | None = None
    """Set until its whole body has arrived."""
    body: bytes | None = None
    """What the node gets; None: the client's body as it is."""

    def __init__(self, exchange: ProxyExchange, ticket: Ticket, pool: ConnectionPool) -> None:
        self._exchange = exchange
        self.ticket = ticket
        self.pool = pool

    def start(self) -> None:
        connection = self.pool.take_idle()
        if connection is None:
            self.pool.connect(self)
        else:
            self._send(connection)

    def _send(self, connection: NodeConnection) -> None:
        self.connection = connection
        exchange = self._exchange
        body = exchange.body if self.body is None else self.body
        connection.send_request(self, exchange.request_head(self.pool, self.ticket, len(body)), body)

    def withdraw(self) -> None:
        self._withdrawn = True
        connection, self.connection = self.connection, None
        if connection is not None:
            connection.cancel()

    # From the connection.

    def connected(self, connection: NodeConnection) -> bool:
        if self._withdrawn:
            return False
        self._send(connection)
        return True

    def connect_failed(self, failure: ConnectFailure, reason: str) -> None:
        if not self._withdrawn:
            self._exchange.connect_failed(self, failure, reason)

    def response_failed(self, reason: str, stale: bool) -> None:
        self.connection = None
        if stale and not self._retried_stale:
            # The node closed a kept-alive connection just as it was used: not the node's fault, and not an attempt.
            self._retried_stale = True
            self._exchange.count_stale_connection()
            self.pool.connect(self)
        else:
            self._exchange.response_failed(self, reason)

    def response_started(
        self, head: ResponseHead, first: bytes, whole: bool, now_s: float
    ) -> Callable[[bytes], object] | None:
        if head.status < 400:
            return self._exchange.response_started(self, head, first, whole, now_s)
        connection = self.connection
        if whole:
            self.error = whole_error(head, first, self._exchange.keeps_error_text)
        else:
            self._begin_error(head, first, whole)
        if head.status >= 500 or head.status == 429:
            self.connection = None  # it closes itself, or is kept alive
        sink = self._exchange.response_started(self, head, first, whole, now_s)
        return sink if sink is not None or whole else self._read_rest(connection, now_s)

    def _begin_error(self, head: ResponseHead, first: bytes, whole: bool) -> None:
        keeps_text = self._exchange.keeps_error_text
        if whole:
            self.error = whole_error(head, first, keeps_text)
        else:
            self.error_body = body = ErrorBody(head.status, head.length, head.encoded, keeps_text)
            self.error = body.error
            body.feed(first)

    def _read_rest(self, connection: NodeConnection | None, now_s: float) -> Callable[[bytes], object] | None:
        """The request has gone on: read the rest of the error's body, if that is worth it."""
        body = self.error_body
        return body.follow(connection, now_s) if body is not None and connection is not None else None

    def response_ended(self, now_s: float) -> None:
        self.connection = None
        if self.error_body is not None:
            self.error_body.finish()
        self._exchange.response_ended(now_s)

    def response_broke(self, reason: str, frames: ChunkReader | None) -> None:
        self.connection = None
        if self.error_body is not None:
            self.error_body.finish()
        self._exchange.response_broke(reason, frames)

    def internal_error(self, error: Exception, frames: ChunkReader | None) -> None:
        self._exchange.internal_error(error, frames)
