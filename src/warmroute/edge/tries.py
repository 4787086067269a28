"""One try at the edge: its request to one node, and what a prefill node hands to a decode node."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from warmroute._kernel import CHUNKED, ChunkReader, ResponseHead, read_usage
from warmroute.core.calls import SplitRequest
from warmroute.core.failed_tries import NodeError
from warmroute.core.messages import KvTransfer, Outcome
from warmroute.core.node import Ticket
from warmroute.edge.connection_pool import ConnectionPool
from warmroute.edge.first_token import FirstTokenDetector, detector_for
from warmroute.edge.node_connection import ConnectFailure, NodeConnection
from warmroute.edge.response import ErrorBody, finish_reason_of, whole_error

if TYPE_CHECKING:
    from warmroute.edge.exchange import ProxyExchange


# The I/O of one attempt: sends a request to one node, and tells the exchange what comes back.
#
# An exchange has one attempt at a time, or two while the request is hedged. A withdrawn attempt closes its connection,
# so that the engine stops generating.


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


# The I/O of a request that one node prefills and another one decodes.
#
# A `PrefillAttempt` sends the prefill request and reads its whole response, which is small. A `DecodeAttempt` sends the
# decode request. It holds the beginning of a stream until its first token: an engine that cannot fetch the KV cache may
# say so in an event, after it has sent a status of 200 and an event with a role. The client sees none of that.

MAX_PREFILL_RESPONSE_BYTES: Final = 16 << 20
"""A longer response of a prefill node counts as a failure. Block ids of 100,000 tokens take about 50 KB."""
MAX_HELD_BYTES: Final = 1 << 20
_ERROR_EVENT: Final = re.compile(
    rb'(?m)^(?:event:[ \t]*(?:error|response\.failed)[ \t]*$|data:[ \t]*\{[ \t]*"(?:error"|type"[ \t]*:[ \t]*"error"))'
)
"""Also those of /v1/messages and /v1/responses."""


class PrefillAttempt(NodeAttempt):
    """Implements node_connection.ResponseHandler. Its connection is that of an attempt; its outcome is the split's."""

    split: SplitRequest
    transfer: KvTransfer
    _frames: ChunkReader | None = None
    _received: list[bytes]
    _received_bytes: int = 0
    _readable: bool = True

    def __init__(
        self, exchange: ProxyExchange, ticket: Ticket, pool: ConnectionPool, split: SplitRequest, transfer: KvTransfer
    ) -> None:
        NodeAttempt.__init__(self, exchange, ticket, pool)
        self.split = split
        self.transfer = transfer
        self._received = []

    # From the connection.

    def connect_failed(self, failure: ConnectFailure, reason: str) -> None:
        if self._withdrawn:
            return
        if failure is ConnectFailure.REFUSED:
            self.split.prefill_refused(reason, self._exchange.now())
        else:  # a local failure, such as too many open files, says nothing about the node
            outcome = Outcome.BUSY if failure is ConnectFailure.LOCAL else Outcome.FAILED
            self.split.prefill_failed(outcome, reason, self._exchange.now())

    def response_failed(self, reason: str, stale: bool) -> None:
        if stale and not self._retried_stale:
            NodeAttempt.response_failed(self, reason, stale)
        else:
            self.connection = None
            self.split.prefill_failed(Outcome.FAILED, reason, self._exchange.now())

    def response_started(
        self, head: ResponseHead, first: bytes, whole: bool, now_s: float
    ) -> Callable[[bytes], object] | None:
        status = head.status
        if status >= 400:
            connection, self.connection = self.connection, None
            self._begin_error(head, first, whole)
            outcome = Outcome.REJECTED if status < 500 and status != 429 else Outcome.FAILED
            if status in (429, 503):
                outcome = Outcome.BUSY
            self.split.prefill_failed(outcome, f"HTTP status {status}", now_s, status, self.error)
            return None if whole else self._read_rest(connection, now_s)
        self._readable = not head.encoded
        if head.length == CHUNKED:
            self._frames = ChunkReader()
        self._receive(first)
        return self._receive

    def _receive(self, data: bytes) -> None:
        self._received_bytes += len(data)
        if self._received_bytes > MAX_PREFILL_RESPONSE_BYTES:
            self.withdraw()
            self.split.prefill_failed(Outcome.FAILED, "the response is too large", self._exchange.now())
        elif self._frames is not None:
            self._frames.feed(data, self._received)
        else:
            self._received.append(data)

    def response_ended(self, now_s: float) -> None:
        self.connection = None
        if self._withdrawn:
            return
        body, self._received = b"".join(self._received), []
        self.body = b""  # it will not be sent again
        usage = transfer = finish_reason = None
        if self._readable:
            usage = read_usage(body)
            if usage is not None:
                usage = self.split.prefill_ticket.node.reported.usage(*usage)
            transfer = self.transfer.read_transfer(body)
            if transfer is None:
                finish_reason = finish_reason_of(body)
        self.split.prefill_ended(transfer, usage, now_s, finish_reason)

    def response_broke(self, reason: str, frames: ChunkReader | None) -> None:
        self.connection = None
        self.split.prefill_failed(Outcome.FAILED, reason, self._exchange.now())

    def internal_error(self, error: Exception, frames: ChunkReader | None) -> None:
        self._exchange.internal_error(error, None)


class DecodeAttempt(NodeAttempt):
    """Implements node_connection.ResponseHandler."""

    split: SplitRequest
    _head: ResponseHead | None = None
    """Set while the beginning of a stream is held."""
    _held: list[bytes]
    _held_bytes: int = 0
    _detector: FirstTokenDetector

    def __init__(self, exchange: ProxyExchange, ticket: Ticket, pool: ConnectionPool, split: SplitRequest) -> None:
        NodeAttempt.__init__(self, exchange, ticket, pool)
        self.split = split
        self._held = []

    def response_started(
        self, head: ResponseHead, first: bytes, whole: bool, now_s: float
    ) -> Callable[[bytes], object] | None:
        status = head.status
        if self._is_about_the_transfer(status):
            connection, self.connection = self.connection, None
            self._begin_error(head, first, whole)
            reason = f"the decode node answered with HTTP status {status}"
            self.split.transfer_failed(reason, now_s, status, self.error)
            return None if whole else self._read_rest(connection, now_s)
        detector = detector_for(head) if head.content_type[:17].lower() == b"text/event-stream" else None
        if detector is None:
            return NodeAttempt.response_started(self, head, first, whole, now_s)
        self._head, self._detector = head, detector
        if not self._hold(first) and not whole:
            return self._receive
        return self._release(whole, now_s)

    def _is_about_the_transfer(self, status: int) -> bool:
        """Whether the node may answer otherwise to the request alone. The parameters may be what it rejects; but a node
        that cannot prefill has no other way."""
        if status >= 500:
            return status != 503
        return status >= 400 and status != 429 and not self.ticket.node.needs_partner

    def _hold(self, data: bytes) -> bool:
        """Keep these bytes. Return whether the first token is among them."""
        self._held.append(data)
        self._held_bytes += len(data)
        return self._detector.feed(data) or self._held_bytes > MAX_HELD_BYTES

    def _receive(self, data: bytes) -> None:
        if self._hold(data):
            connection = self.connection
            sink = self._release(False, self._exchange.now())
            if sink is not None and connection is not None:
                connection.replace_sink(sink)

    def _release(self, whole: bool, now_s: float) -> Callable[[bytes], object] | None:
        """Pass on what was held, unless it is an error of the transfer."""
        head, self._head = self._head, None
        assert head is not None
        held, self._held = b"".join(self._held), []
        if _has_error(head, held):
            self.split.transfer_failed("the decode node's stream began with an error", now_s)
            return None
        self.body = b""  # it will not be sent again, and the stream may take minutes
        return NodeAttempt.response_started(self, head, held, whole, now_s)

    def response_ended(self, now_s: float) -> None:
        if self._head is not None and self._release(True, now_s) is None:
            return
        if not self._withdrawn:
            NodeAttempt.response_ended(self, now_s)

    def response_broke(self, reason: str, frames: ChunkReader | None) -> None:
        if self._head is not None:  # the client has received nothing
            self.connection = None
            self._exchange.response_failed(self, reason)
        else:
            NodeAttempt.response_broke(self, reason, frames)


def _has_error(head: ResponseHead, held: bytes) -> bool:
    if b"error" not in held and b"response.failed" not in held:
        return False
    if head.length == CHUNKED:
        pieces: list[bytes] = []
        ChunkReader().feed(held, pieces)
        held = b"".join(pieces)
    return _ERROR_EVENT.search(held) is not None
