"""A connection to a node: one request at a time, whose response is relayed as it comes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Protocol

from warmroute._kernel import (
    CHUNKED,
    UNTIL_CLOSE,
    BadChunk,
    ChunkReader,
    ResponseHead,
    SocketTransport,
    read_response_head,
)
from warmroute.core.messages import CLOSED as NODE_CLOSED
from warmroute.core.messages import MALFORMED, SILENT
from warmroute.edge.http1 import BrokenResponse
from warmroute.edge.timer_wheel import NEVER, TICK_S
from warmroute.event_log import EventLog, where_it_failed
from warmroute.http_client import MAX_INFORMATIONAL

if TYPE_CHECKING:
    from warmroute.edge.connection_pool import ConnectionPool


# Writes a large body to a TLS connection piece by piece: to encrypt 32 MB at once takes 120 ms on the event loop.

PIECE_BYTES: Final = 1 << 20


class PiecewiseWriter:
    def __init__(self, transport: asyncio.Transport, body: bytes) -> None:
        self._transport = transport
        self._rest = memoryview(body)
        self._paused = False
        self._write()

    @property
    def finished(self) -> bool:
        return not self._rest

    def stop(self) -> None:
        """Write no more."""
        self._rest = memoryview(b"")

    def pause(self) -> None:
        """The node reads more slowly than this writes."""
        self._paused = True

    def resume(self) -> None:
        self._paused = False
        self._write()

    def _write(self) -> None:
        if self._paused or not self._rest or self._transport.is_closing():
            return
        piece, self._rest = self._rest[:PIECE_BYTES], self._rest[PIECE_BYTES:]
        self._transport.write(piece)
        if self._rest and not self._paused:
            asyncio.get_running_loop().call_soon(self._write)


# One connection to a node. It carries one request at a time.
#
# The connection reads the response's head, follows its framing, and passes the bytes on unchanged. Engines send the
# head of a stream when they accept the request, long before the first token. The connection keeps that head until a
# byte of the body arrives, so that a node that fails in between has not responded yet and the router can try another
# node.

log = EventLog("warmroute.edge")

IDLE: Final = 0
AWAITING_HEAD: Final = 1
AWAITING_BODY: Final = 2
SIZED_BODY: Final = 3
CHUNKED_BODY: Final = 4
BODY_UNTIL_CLOSE: Final = 5
CLOSED: Final = 6
MAX_HEAD_BYTES: Final = 65_536
"""Maximum size of a response head."""
MAX_READING_ERRORS: Final = 32
"""Connections to one node that wait for the rest of an error's body."""
_JOIN_BYTES: Final = 4_096
"""Up to this size, head and body are written as one piece: a copy costs less than a second buffer."""


def _no_sink(_data: bytes) -> None:
    """The sink between two responses."""


class ResponseReader(Protocol):
    """Receives the rest of a response that has begun. Signs are those of core/messages.py; reasons are the router's own
    words."""

    def response_ended(self, now_s: float) -> None: ...

    def response_broke(self, sign: int, reason: str, frames: ChunkReader | None) -> None:
        """The response ended too early. `frames`: the position in a chunked body, up to the last byte passed on."""

    def internal_error(self, error: Exception, frames: ChunkReader | None) -> None:
        """The router itself failed at this response. `frames`: as for `response_broke`."""


class ResponseHandler(ResponseReader, Protocol):
    """Sends one request to a node and receives its response."""

    def connected(self, connection: NodeConnection) -> bool:
        """A connection is open. Return False if it is no longer needed."""

    def connect_failed(self, sign: int, reason: str) -> None: ...

    def response_started(
        self, head: ResponseHead, first: bytes, whole: bool, now_s: float
    ) -> Callable[[bytes], object] | None:
        """The head arrived, and `first` of the body; `whole`: that is all. Return where the rest of the body goes, or
        None to cancel the request."""

    def response_failed(self, sign: int, reason: str, stale: bool) -> None:
        """No byte of a response arrived. `stale`: the node closed a reused connection before it read the request."""


class NodeConnection:
    __slots__ = (
        "_buffer", "_frames", "_handler", "_held_head", "_informational", "_keep_alive", "_missing_bytes", "_now",
        "_paused", "_pool", "_relays", "_served_before", "_silence_timeout_s", "_sink", "_state", "_writer", "bucket",
        "deadline_s", "reader", "transport",
    )  # fmt: skip

    def __init__(self, pool: ConnectionPool) -> None:
        # per connection
        self._pool = pool
        self._now = pool.timers.now
        self.transport: Any  # an asyncio.Transport, or uvloop's, which does not inherit from it
        self.deadline_s = NEVER
        self.bucket = -1
        self._state = IDLE
        self._served_before = False
        # per response
        self._handler: ResponseHandler | None = None
        """Set until the response has begun."""
        self.reader: ResponseReader | None = None
        """Is told how the response goes on: whoever sent the request, until it gives the response to another one; None:
        nobody wants to know."""
        self._sink: Callable[[bytes], object] = _no_sink
        self._buffer = b""
        self._informational = 0
        """1xx responses so far."""
        self._held_head: ResponseHead | None = None
        """A head that arrived without a byte of its body."""
        self._frames: ChunkReader | None = None
        self._missing_bytes = 0
        self._keep_alive = True
        self._paused = False
        self._relays = False
        """The kernel passes chunks to the client."""
        self._silence_timeout_s = 0.0
        self._writer: PiecewiseWriter | None = None
        """Writes the rest of a large body."""

    # The request.

    def send_request(self, handler: ResponseHandler, head: bytes, body: bytes) -> None:
        self._handler = self.reader = handler
        self._state = AWAITING_HEAD
        self._informational = 0
        self._pool.busy.add(self)
        if len(body) <= _JOIN_BYTES:
            self.transport.write(head + body)
        elif len(body) > PIECE_BYTES and self._pool.uses_tls:
            self.transport.write(head)
            self._writer = PiecewiseWriter(self.transport, body)
        else:
            self.transport.writelines((head, body))
        upstream = self._pool.config
        self._silence_timeout_s = upstream.between_chunks_timeout_s
        deadline_s = self._now() + upstream.first_byte_timeout_s
        if 0.0 <= self.bucket * TICK_S <= deadline_s:  # as in `arm`, without a call
            self.deadline_s = deadline_s
        else:
            self._pool.timers.arm(self, deadline_s)

    def pause_writing(self) -> None:
        if self._writer is not None:
            self._writer.pause()

    def resume_writing(self) -> None:
        if self._writer is not None:
            self._writer.resume()

    def replace_sink(self, sink: Callable[[bytes], object]) -> None:
        """Pass the rest of the response's body to `sink`."""
        self._sink = sink

    def read_error(self, reader: ResponseReader, until_s: float) -> bool:
        """Let `reader` read the rest of an error's body. Return False if too many connections to the node do so."""
        pool = self._pool
        if len(pool.reading_errors) >= MAX_READING_ERRORS or self._state == CLOSED:
            return False
        pool.reading_errors.add(self)
        self.reader = reader
        self._silence_timeout_s = until_s - self._now()
        pool.timers.arm(self, until_s)
        return True

    def error_read(self) -> None:
        self._pool.reading_errors.discard(self)

    @property
    def now_s(self) -> float:
        return self._now()

    def relay(self, client: object, keep: Callable[[bytes], object] | None) -> None:
        """Let the kernel pass the chunks that do not end the response to `keep` and to this transport of a client,
        where it can. The last bytes, and what breaks the response, still come here, and go to the sink."""
        transport = self.transport
        if self._frames is None or not isinstance(transport, SocketTransport):
            return
        if isinstance(client, SocketTransport):
            transport.relay(client, self._frames, keep)
            self._relays = True

    def pause(self) -> None:
        """Stop reading until `resume`: the client reads more slowly than the node sends."""
        self.deadline_s = NEVER
        self._paused = True
        self.transport.pause_reading()

    def resume(self) -> None:
        self._pool.timers.arm(self, self._now() + self._silence_timeout_s)
        self._resume_reading()

    def _resume_reading(self) -> None:
        if self._paused:
            self._paused = False
            self.transport.resume_reading()

    def cancel(self) -> None:
        """Close the connection. The engine notices and stops generating."""
        self._handler = self.reader = None
        self._close()

    # The response.

    def data_received(self, data: bytes) -> None:
        reader, now_s = self.reader, self._now()
        try:
            state = self._state
            if state == CHUNKED_BODY:  # most of what nodes send: the events of streams
                self.deadline_s = now_s + self._silence_timeout_s
                frames = self._frames
                assert frames is not None
                try:
                    end = frames.feed(data)
                except BadChunk as bad:
                    self._fail(MALFORMED, f"the node's chunked encoding is malformed: {bad}")
                    return
                if end < 0:
                    self._sink(data)
                    return
                if end != len(data):
                    self._keep_alive = False
                    data = data[:end]
                self._sink(data)
                self._complete(now_s)
            elif state == AWAITING_HEAD:
                buffered = len(self._buffer)
                self._read_head(self._buffer + data if buffered else data, buffered, now_s)
            else:
                self._receive(data, now_s)
        except Exception as error:
            self._fail_internally(reader, error)

    def _receive(self, data: bytes, now_s: float) -> None:
        state = self._state
        if state == SIZED_BODY:
            self.deadline_s = now_s + self._silence_timeout_s
            self._missing_bytes -= len(data)
            if self._missing_bytes > 0:
                self._sink(data)
                return
            if self._missing_bytes < 0:
                self._keep_alive = False
                data = data[: self._missing_bytes]
            self._sink(data)
            self._complete(now_s)
        elif state == BODY_UNTIL_CLOSE:
            self.deadline_s = now_s + self._silence_timeout_s
            self._sink(data)
        elif state == AWAITING_BODY:
            head, self._held_head = self._held_head, None
            assert head is not None
            self._start_response(head, data, now_s)
        elif state == IDLE:
            self._pool.remove_idle(self)
            self._close()  # the node sends without a request

    def _read_head(self, data: bytes, searched: int, now_s: float) -> None:
        """Read a head. `searched`: how many bytes were searched for its end before."""
        self._buffer = b""
        start = 0
        try:
            while True:
                end = data.find(b"\r\n\r\n", max(start, searched - 3))
                if (end if end >= 0 else len(data)) - start > MAX_HEAD_BYTES:
                    raise BrokenResponse("the head is too large")
                if end < 0:
                    self._buffer = data[start:]
                    return
                head = read_response_head(data[start : end + 4] if start else data, end - start)
                if isinstance(head, int):
                    raise BrokenResponse("malformed head")
                if head.status >= 200:
                    break
                if head.status == 101:
                    raise BrokenResponse("an upgrade without a request for it")
                self._informational += 1
                if self._informational > MAX_INFORMATIONAL:
                    raise BrokenResponse(f"more than {MAX_INFORMATIONAL} 1xx responses")
                start = end + 4
        except BrokenResponse as broken:
            self._fail(MALFORMED, f"the node's response is not valid HTTP: {broken}")
            return
        first = data[end + 4 :]
        if first or not head.length or head.status >= 400:
            self._start_response(head, first, now_s)
        else:
            self._held_head = head
            self._state = AWAITING_BODY

    def _start_response(self, head: ResponseHead, first: bytes, now_s: float) -> None:
        """Pass on the head with the part of the body that has arrived."""
        length = head.length
        try:
            self._keep_alive = head.keep_alive
            if length >= 0:
                self._missing_bytes = length - len(first)
                whole = self._missing_bytes <= 0
                if self._missing_bytes < 0:
                    self._keep_alive = False
                    first = first[:length]
                self._state = SIZED_BODY
            elif length == CHUNKED:
                self._frames = frames = ChunkReader()
                at = frames.feed(first) if first else -1
                whole = at >= 0
                if whole and at != len(first):
                    self._keep_alive = False
                    first = first[:at]
                self._state = CHUNKED_BODY
            else:
                assert length == UNTIL_CLOSE
                whole = False
                self._state = BODY_UNTIL_CLOSE
        except BadChunk as bad:
            self._state = AWAITING_HEAD
            self._fail(MALFORMED, f"the node's chunked encoding is malformed: {bad}")
            return
        handler, self._handler = self._handler, None
        assert handler is not None
        if whole:
            sink = handler.response_started(head, first, True, now_s)
            if sink is None:
                self.reader = None
            self._complete(now_s)
            return
        deadline_s = now_s + self._silence_timeout_s
        if 0.0 <= self.bucket * TICK_S <= deadline_s:
            self.deadline_s = deadline_s
        else:
            self._pool.timers.arm(self, deadline_s)
        sink = handler.response_started(head, first, False, now_s)
        if sink is None:
            self.cancel()
        else:
            self._sink = sink

    def _complete(self, now_s: float) -> None:
        reader, self.reader = self.reader, None
        self._frames = None
        self._sink = _no_sink
        if self._relays:
            self._relays = False
            self.transport.stop_relay()
        writer, self._writer = self._writer, None
        if writer is not None and not writer.finished:
            writer.stop()
            self._keep_alive = False
        # A node that responds before it has read the whole request leaves an unusable connection.
        if self._keep_alive and self._state != CLOSED and not self.transport.get_write_buffer_size():
            self._state = IDLE
            self._served_before = True
            if self._paused:
                self._resume_reading()
            self._pool.busy.discard(self)
            self._pool.release(self, now_s)
        else:
            self._close()
        if reader is not None:
            reader.response_ended(now_s)

    @property
    def frames(self) -> ChunkReader | None:
        """The position in a chunked body, up to the last byte passed on."""
        return self._frames

    @property
    def last_byte_s(self) -> float:
        """When the last byte of a running response arrived; -inf before its first byte."""
        if self._state <= AWAITING_BODY or self.deadline_s == NEVER:
            return -NEVER
        return max(self.deadline_s - self._silence_timeout_s, self._last_relayed_s)

    @property
    def _last_relayed_s(self) -> float:
        transport = self.transport
        return transport.last_read_s if isinstance(transport, SocketTransport) else 0.0

    # Failures and the end.

    def _fail(self, sign: int, reason: str) -> None:
        """Close the connection and tell whose response it is that it failed or broke."""
        state, frames, handler, reader = self._state, self._frames, self._handler, self.reader
        self.cancel()
        if state in (AWAITING_HEAD, AWAITING_BODY):
            if handler is not None:
                handler.response_failed(sign, reason, stale=False)
        elif reader is not None:
            reader.response_broke(sign, reason, frames)

    def _close(self) -> None:
        self._state = CLOSED
        self._pool.busy.discard(self)
        self._pool.timers.disarm(self)
        self.transport.abort()

    def _fail_internally(self, reader: ResponseReader | None, error: Exception) -> None:
        """The router itself failed at something that happened on this connection. `reader`: whose response it was."""
        frames, self._handler, self.reader = self._frames, None, None
        if self._state != IDLE:
            self._close()
        if reader is not None:
            reader.internal_error(error, frames)
        else:
            log.error("node_connection_failed", "The router closes the connection.", reason=where_it_failed(error))

    def timed_out(self) -> None:
        reader = self.reader
        try:
            if self._state == IDLE:
                self._pool.remove_idle(self)
                self._close()
            elif self._state in (AWAITING_HEAD, AWAITING_BODY):
                self._fail(SILENT, f"the node sent no response within {self._pool.config.first_byte_timeout_s:g} s")
            elif self._last_relayed_s + self._silence_timeout_s > self._now():
                self._pool.timers.arm(self, self._last_relayed_s + self._silence_timeout_s)
            else:
                reason = f"the node sent nothing for {self._silence_timeout_s:g} s in the middle of its response"
                self._fail(SILENT, reason)
        except Exception as error:
            self._fail_internally(reader, error)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def eof_received(self) -> None:
        reader = self.reader
        try:
            if self._state == AWAITING_BODY and self._held_head is not None and self._held_head.length == UNTIL_CLOSE:
                head, self._held_head = self._held_head, None
                self._start_response(head, b"", self._now())
            if self._state == BODY_UNTIL_CLOSE:
                self._keep_alive = False
                self._complete(self._now())
        except Exception as error:
            self._fail_internally(reader, error)

    def connection_lost(self, exc: Exception | None) -> None:
        state, self._state = self._state, CLOSED
        handler, reader, self._handler, self.reader = self._handler, self.reader, None, None
        try:
            self._pool.busy.discard(self)
            self._pool.timers.disarm(self)
            if state == IDLE:
                self._pool.remove_idle(self)
            elif state in (AWAITING_HEAD, AWAITING_BODY):
                began = self._buffer or self._informational
                stale = state == AWAITING_HEAD and self._served_before and not began
                if handler is not None:
                    handler.response_failed(NODE_CLOSED, "the node closed the connection before its response", stale)
            elif reader is not None:
                reason = "the node closed the connection in the middle of its response"
                reader.response_broke(NODE_CLOSED, reason, self._frames)
        except Exception as error:
            self._fail_internally(reader, error)
