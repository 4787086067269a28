"""The client's side: one connection, from bytes to requests, and from answers to bytes.

A connection reads one request at a time (head, then body, whole), hands it to its handler, and reads the next when that
one has been answered. While a request is being answered it goes on reading, so that a client that leaves is noticed.
"""

from __future__ import annotations

import asyncio
import re
import socket
import struct
from typing import TYPE_CHECKING, Final, Protocol, cast

from warmroute.edge import errors
from warmroute.edge.chunked import BadChunk, ChunkFrames
from warmroute.edge.deadlines import NEVER
from warmroute.edge.errors import Refusal
from warmroute.edge.head import RequestHead, read_request_head
from warmroute.edge.replies import CLOSE_LINE, render_refusal, render_reply, with_id

if TYPE_CHECKING:
    from warmroute.edge.server import Listener

HEAD, SIZED_BODY, CHUNKED_BODY, BUSY, BEHIND, LINGER, CLOSED = range(7)
"""What a connection is at. BEHIND: answered, but the client has yet to read most of it."""
_BARE_LINE_END: Final = re.compile(rb"(?<!\r)\n|\r(?!\n)(?!\Z)")
_KEEP_ALIVE_LINE: Final = b"Connection: keep-alive\r\n"
_CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
_AHEAD_BYTES: Final = 524_288
"""Requests sent ahead that are held while one is being answered."""
_RESET: Final = struct.pack("ii", 1, 0)
_CR: Final = 13
_LINGER_S: Final = 2.0
"""How long what a refused client still sends is read and thrown away, so that it gets to read its error."""


class Exchange(Protocol):
    """Whoever answers the request at hand; told what happens to its client."""

    def client_left(self) -> None: ...
    def client_full(self) -> None:
        """The client reads more slowly than it is written to: stop for now."""

    def client_ready(self) -> None:
        """The client has caught up."""


class Client(asyncio.Protocol):
    __slots__ = (
        "_ahead_bytes",
        "_body",
        "_exchange",
        "_frames",
        "_head",
        "_held_bytes",
        "_keep_alive",
        "_listener",
        "_missing",
        "_overran",
        "_paused",
        "_pending",
        "_phase",
        "_searched",
        "_unread_bytes",
        "bucket",
        "deadline_s",
        "peer",
        "tenant",
        "transport",
        "write",
    )

    def __init__(self, listener: Listener) -> None:
        # per connection
        self._listener = listener
        self.transport: asyncio.Transport
        self.peer = b""
        self.tenant = ""
        self.deadline_s = NEVER
        self.bucket = -1
        self._phase = HEAD
        self._pending: bytearray | None = None
        """A head that has not wholly arrived, or requests sent ahead."""
        self._paused = False
        """The client reads more slowly than it is written to."""
        self._unread_bytes = 0
        """What it had yet to read when its time to do so began."""
        self._searched = 0
        """How much of a head that has not wholly arrived was looked through."""
        self._ahead_bytes = 0
        self._overran = False
        """It has sent more ahead than is held."""
        # per request
        self._head: RequestHead
        self._body = bytearray()
        self._missing = 0
        self._held_bytes = 0
        self._frames: ChunkFrames | None = None
        self._exchange: Exchange | None = None
        self._keep_alive = True

    # The connection.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's does not inherit from it
        self.write = self.transport.write
        listener = self._listener
        listener.accepted += 1
        listener.connections.add(self)
        peer = transport.get_extra_info("peername")
        self.peer = peer[0].encode() if isinstance(peer, tuple) else b""
        if len(listener.connections) > listener.limits.connections:
            self._refuse_and_close(errors.too_many_connections())
            return
        deadlines = listener.deadlines
        deadlines.arm(self, deadlines.now() + listener.limits.idle_timeout_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._phase = CLOSED
        self._listener.gone(self)
        self._listener.deadlines.disarm(self)
        self.release_body()
        self._let_go_ahead()
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.client_left()

    def eof_received(self) -> None:
        # Half-closed is taken for gone: an answer can't be told from a stream that nobody reads.
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.client_left()
        self._close()

    def pause_writing(self) -> None:
        self._paused = True
        self._arm_stall()
        if self._exchange is not None:
            self._exchange.client_full()

    def resume_writing(self) -> None:
        self._paused = False
        if self._phase == BEHIND:
            self._wait_for_request()
        elif self._exchange is not None:
            self.deadline_s = NEVER
            self._exchange.client_ready()

    def _arm_stall(self) -> None:
        self._unread_bytes = self.transport.get_write_buffer_size()
        deadlines = self._listener.deadlines
        deadlines.arm(self, deadlines.now() + self._listener.limits.stall_timeout_s)

    def timed_out(self) -> None:
        limits = self._listener.limits
        if self._phase == HEAD and self._pending:
            self._refuse_and_close(errors.header_timeout(limits.header_timeout_s))
        elif self._phase in (SIZED_BODY, CHUNKED_BODY):
            self._refuse_and_close(errors.body_timeout(limits.body_timeout_s), self._head.request_id)
        elif self._phase == HEAD and not self.transport.get_write_buffer_size():
            self._close()  # idle
        elif self.transport.get_write_buffer_size() < self._unread_bytes:
            self._arm_stall()  # it reads, if slowly
        else:
            self.abort()  # it has stopped reading, or does not go

    def abort(self) -> None:
        self.transport.abort()

    @property
    def busy(self) -> bool:
        return self._phase == BUSY

    def close_if_idle(self) -> None:
        if self._phase == HEAD and not self._pending:
            self._close()

    # From bytes to a request.

    def data_received(self, data: bytes) -> None:
        phase = self._phase
        if phase == HEAD:
            if self._pending is None:
                end = data.find(b"\r\n\r\n")
                if end > 0 and data[0] != _CR:
                    self._take_head(data, end)
                    return
                self._pending = bytearray()
                deadlines = self._listener.deadlines
                deadlines.arm(self, deadlines.now() + self._listener.limits.header_timeout_s)
            self._pending += data
            self._seek_head()
        elif phase == SIZED_BODY:
            self._take_sized(data)
        elif phase == CHUNKED_BODY:
            self._take_chunks(data)
        elif phase in (BUSY, BEHIND):
            self._keep_for_later(data)

    def _keep_for_later(self, data: bytes) -> None:
        """Holds what is sent ahead of its turn. Who sends more than that is read on, or its leaving would go unnoticed,
        but only to throw it away: after the answer at hand the connection ends, and the rest is the client's to repeat.
        """
        if not self._keep_alive:
            return
        listener = self._listener
        if self._pending is None:
            self._pending = bytearray()
        self._pending += data
        self._ahead_bytes += len(data)
        listener.buffered_bytes += len(data)
        if len(self._pending) > _AHEAD_BYTES or listener.buffered_bytes > listener.limits.buffered_bytes:
            self._keep_alive = False
            self._overran = True
            self._let_go_ahead()

    def _let_go_ahead(self) -> None:
        self._pending = None
        self._listener.buffered_bytes -= self._ahead_bytes
        self._ahead_bytes = 0

    def _seek_head(self) -> None:
        pending = self._pending
        assert pending is not None
        if pending[:2] == b"\r\n":  # an empty line before a request is to be passed over (RFC 9112, 2.2)
            del pending[:2]
        start = max(0, self._searched - 3)
        end = pending.find(b"\r\n\r\n", start)
        self._searched = len(pending)
        if end >= 0:
            self._pending = None
            self._searched = 0
            self._take_head(bytes(pending), end)
        elif len(pending) > self._listener.limits.header_bytes:
            self._refuse_and_close(errors.head_too_large(self._listener.limits.header_bytes))
        elif _BARE_LINE_END.search(pending, start):
            self._refuse_and_close(errors.bad_request("A line of the head does not end in CR LF."))

    def _take_head(self, data: bytes, end: int) -> None:
        listener = self._listener
        limits = listener.limits
        start = end + 4
        have = len(data) - start
        try:
            if end > limits.header_bytes:
                raise errors.head_too_large(limits.header_bytes)
            head = read_request_head(data, end, limits.header_count)
        except Refusal as refusal:
            self._refuse_and_close(refusal)
            return
        self._head = head
        self._keep_alive = head.keep_alive
        length = head.length
        try:
            self.tenant = listener.handler.admit(head)
            if length > limits.body_bytes:
                raise errors.body_too_large(limits.body_bytes)
            if length >= 0:
                self._hold(min(length, have))
        except Refusal as refusal:
            if 0 <= length <= have:
                self._take_ahead(data, start + length)
                self._phase = BUSY
                self.refuse(refusal)
            else:
                self._refuse_and_close(refusal, head.request_id)
            return
        if 0 <= length <= have:
            if length < have:
                self._take_ahead(data, start + length)
            self._serve(data[start : start + length])
            return
        if length >= 0:
            self._phase = SIZED_BODY
            self._body += data[start:]
            self._missing = length - have
        else:
            self._phase = CHUNKED_BODY
            self._frames = ChunkFrames()
            self._missing = limits.body_bytes
        deadlines = listener.deadlines
        deadlines.arm(self, deadlines.now() + limits.body_timeout_s)
        if head.expects_continue and not have:
            self.write(_CONTINUE)
        if length < 0 and have:
            self._take_chunks(data[start:])

    def _take_ahead(self, data: bytes, start: int) -> None:
        """Keeps what was sent ahead of its turn."""
        if start < len(data):
            self._keep_for_later(data[start:])

    def _take_sized(self, data: bytes) -> None:
        try:
            self._hold(min(len(data), self._missing))
        except Refusal as refusal:
            self._refuse_and_close(refusal)
            return
        if len(data) > self._missing:
            self._take_ahead(data, self._missing)
            data = data[: self._missing]
        self._body += data
        self._missing -= len(data)
        if not self._missing:
            self._serve_body()

    def _take_chunks(self, data: bytes) -> None:
        frames = self._frames
        assert frames is not None
        pieces: list[bytes] = []
        try:
            end = frames.feed(data, pieces)
            more = b"".join(pieces)
            self._missing -= len(more)
            if self._missing < 0:
                raise errors.body_too_large(self._listener.limits.body_bytes)
            self._hold(len(more))
            self._body += more
        except BadChunk as bad:
            self._refuse_and_close(errors.bad_request(f"The chunked body is malformed: {bad}."))
            return
        except Refusal as refusal:
            self._refuse_and_close(refusal)
            return
        if end >= 0:
            self._take_ahead(data, end)
            self._frames = None
            self._serve_body()

    def _serve_body(self) -> None:
        body, self._body = bytes(self._body), bytearray()
        self._serve(body)

    def _hold(self, size: int) -> None:
        """Counts bytes of a body against what may be held in all."""
        listener = self._listener
        if listener.buffered_bytes + size > listener.limits.buffered_bytes:
            raise errors.memory_full()
        listener.buffered_bytes += size
        self._held_bytes += size

    def release_body(self) -> None:
        """The exchange no longer needs the body."""
        self._listener.buffered_bytes -= self._held_bytes
        self._held_bytes = 0
        if self._body:
            self._body = bytearray()

    def _serve(self, body: bytes) -> None:
        self._phase = BUSY
        self.deadline_s = NEVER
        try:
            self._exchange = self._listener.handler.serve(self, self._head, body)
        except Refusal as refusal:
            self.refuse(refusal)

    # From an answer to bytes.

    @property
    def keeps_alive(self) -> bool:
        """Whether the connection may serve another request after this one."""
        return self._keep_alive and not self._listener.closing

    @property
    def speaks_chunked(self) -> bool:
        return self._head.minor == 1

    def connection_line(self, keep_alive: bool) -> bytes:
        """What an answer's head says of the connection; nothing where HTTP's default says it."""
        if not keep_alive:
            return CLOSE_LINE
        return b"" if self._head.minor else _KEEP_ALIVE_LINE

    def answered(self, keep_alive: bool, now_s: float | None = None) -> None:
        """The exchange has written the whole answer, just `now_s`."""
        self._exchange = None
        if self._held_bytes:
            self.release_body()
        if self._phase != BUSY:
            return
        listener = self._listener
        if self._overran:
            self._linger()
        elif not keep_alive or not self._keep_alive or listener.closing:
            self._close()
        elif self._paused:
            self._phase = BEHIND
            self._arm_stall()
        else:
            self._wait_for_request(now_s)

    def _wait_for_request(self, now_s: float | None = None) -> None:
        listener = self._listener
        if listener.closing or not self._keep_alive:
            self._close()
            return
        self._phase = HEAD
        deadlines = listener.deadlines
        deadlines.arm(self, (deadlines.now() if now_s is None else now_s) + listener.limits.idle_timeout_s)
        if self._pending:
            asyncio.get_running_loop().call_soon(self._next_request)

    def _next_request(self) -> None:
        """Takes what was sent ahead."""
        if self._phase != HEAD or not self._pending:
            return
        deadlines = self._listener.deadlines
        deadlines.arm(self, deadlines.now() + self._listener.limits.header_timeout_s)
        self._listener.buffered_bytes -= self._ahead_bytes  # no longer ahead
        self._ahead_bytes = 0
        self._seek_head()

    def break_off(self, reset: bool = False) -> None:
        """Ends the connection after what was written, so that the answer is seen to be unfinished.

        `reset`: by a reset, where a plain end would look like the answer's own.
        """
        self._exchange = None
        if reset:
            ending = self.transport.get_extra_info("socket")
            if ending is not None:
                ending.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self._close()

    def reply(
        self,
        status: int,
        body: bytes,
        headers: tuple[tuple[str, str], ...] = (),
        content_type: str = "application/json",
    ) -> None:
        """Writes a whole answer of the router's own."""
        keep_alive = self.keeps_alive
        line = self.connection_line(keep_alive)
        self.write(render_reply(status, body, headers, content_type, line, self._head.method == b"HEAD"))
        self.answered(keep_alive)

    def refuse(self, refusal: Refusal, request_id: bytes = b"") -> None:
        """Answers with an error a request that has been read whole."""
        if refusal.close:
            self._refuse_and_close(refusal, request_id or self._head.request_id)
            return
        handler = self._listener.handler
        request_id = request_id or self._head.request_id or handler.new_request_id()
        handler.refused(refusal, request_id)
        self.reply(refusal.status, refusal.body(), with_id(refusal, request_id))

    def _refuse_and_close(self, refusal: Refusal, request_id: bytes = b"") -> None:
        """Answers with an error where what follows on the connection can't be read as a request."""
        handler = self._listener.handler
        request_id = request_id or handler.new_request_id()
        handler.refused(refusal, request_id)
        self.write(render_refusal(refusal, request_id))
        self._exchange = None
        self._linger()

    def _linger(self) -> None:
        """Says no more, but reads on for a moment: closing on unread data would destroy the answer on its way."""
        self._phase = LINGER
        self._unread_bytes = 0
        self._let_go_ahead()
        self.release_body()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._listener.deadlines.arm(self, self._listener.deadlines.now() + _LINGER_S)

    def _close(self) -> None:
        """Ends the connection once what was written is gone, or a client that does not read has had its time."""
        self._phase = CLOSED
        self.transport.close()
        if self.transport.get_write_buffer_size():
            deadlines = self._listener.deadlines
            deadlines.arm(self, deadlines.now() + self._listener.limits.stall_timeout_s)
