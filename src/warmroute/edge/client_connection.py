"""A client's connection: requests in, responses out, and what it needs of its listener."""

from __future__ import annotations

import asyncio
import re
import socket
import struct
from collections.abc import Callable
from functools import partial
from typing import Any, Final, Protocol

from warmroute._kernel import (
    BadChunk,
    BodyBuffer,
    ChunkReader,
    RequestHead,
    SocketTransport,
    UnreadBytes,
    read_request_head,
)
from warmroute.config import Limits
from warmroute.edge import errors
from warmroute.edge.arrival import Rights, is_anthropic
from warmroute.edge.errors import CLOSE_LINE, Headers, HttpError, render_final_error, render_reply, with_request_id
from warmroute.edge.http1 import MAX_HEADER_FIELDS, head_rejection
from warmroute.edge.timer_wheel import NEVER, TICK_S, TimerWheel
from warmroute.event_log import EventLog

# Collects a request body from the pieces in which it arrives, within the limits on size and memory.
#
# All bodies share `limits.buffered_bytes`. Each tenant may take at most half of what the others leave, so a tenant that
# fills its share leaves room for the next one. A tenant that needs more than is left ends incomplete bodies of tenants
# that have more than itself. In the end, n tenants that want all they can get have 1 / (n + 1) of the memory each.

_BURST_BYTES: Final = 1 << 20


class BodyMemory:
    """The memory of request bodies, by tenant."""

    def __init__(self) -> None:
        self.total_bytes = 0
        self.by_tenant: dict[str, int] = {}
        """Of tenants that share the memory: `Rights.body_tenant`."""
        self._incomplete: dict[str, dict[Any, int]] = {}
        """Connections or streams whose body is arriving, by tenant, and how much of it has arrived. They have a method
        `give_way`."""

    def reserve(self, tenant: str | None, size: int, limit: int) -> None:
        """Count bytes of a body. Raises HttpError if the limit on all bodies, or on this tenant's, is reached."""
        if tenant is None:
            if self.total_bytes + size > limit:
                raise errors.request_buffer_full()
        else:
            own = self.by_tenant.get(tenant, 0)
            if own + size > (limit - self.total_bytes + own) // 2:
                self._make_room(tenant, size, limit)
            self.by_tenant[tenant] = own + size
        self.total_bytes += size

    def has_room(self, tenant: str | None, size: int, limit: int) -> bool:
        """Return whether `reserve` would succeed without ending other bodies."""
        if tenant is None:
            return self.total_bytes + size <= limit
        own = self.by_tenant.get(tenant, 0)
        return own + size <= (limit - self.total_bytes + own) // 2

    def release(self, tenant: str | None, size: int) -> None:
        self.total_bytes -= size
        if tenant is not None and size:
            left = self.by_tenant[tenant] - size
            if left:
                self.by_tenant[tenant] = left
            else:
                del self.by_tenant[tenant]

    def arrives(self, tenant: str | None, receiver: Any, size: int) -> None:
        """So much of this body has arrived, and it is not complete."""
        if tenant is not None:
            self._incomplete.setdefault(tenant, {})[receiver] = size

    def arrived(self, tenant: str | None, receiver: Any) -> None:
        """The body is complete, or given up."""
        if tenant is not None and (incomplete := self._incomplete.get(tenant)) is not None:
            incomplete.pop(receiver, None)
            if not incomplete:
                del self._incomplete[tenant]

    def _make_room(self, tenant: str, size: int, limit: int) -> None:
        """Raises HttpError."""
        while not self.has_room(tenant, size, limit):
            wanted = self.by_tenant.get(tenant, 0) + size
            held = {name: held for name, held in self.by_tenant.items() if held > wanted}
            from_whom = max(held.keys() & self._incomplete.keys(), key=held.__getitem__, default=None)
            if from_whom is None:
                raise errors.request_buffer_full() if held else errors.tenant_buffer_full()
            incomplete = self._incomplete[from_whom]
            receiver = max(incomplete, key=incomplete.__getitem__)
            self.arrived(from_whom, receiver)
            receiver.give_way()


class BodyReader:
    __slots__ = ("_burst_bytes", "_data", "_frames", "_listener", "_missing_bytes", "held_bytes", "tenant")

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._data = BodyBuffer()
        self._burst_bytes = 0
        self._frames: ChunkReader | None = None
        self._missing_bytes = 0
        """Of a chunked body: how many more bytes the limit allows."""
        self.tenant: str | None = ""
        """Whose share of the memory this body takes from."""
        self.held_bytes = 0
        """This body's part of `listener.bodies`."""

    def start(self, length: int) -> None:
        """Expect a body of this length; a negative length: a chunked body."""
        if length >= 0:
            self._frames = None
            self._missing_bytes = length
        else:
            self._frames = ChunkReader()
            self._missing_bytes = self._listener.limits.body_bytes

    def feed(self, data: bytes) -> int:
        """Add bytes. Return how many of them belong to the body if it ends in them, else -1. Raises HttpError."""
        frames = self._frames
        if frames is None:
            end = min(len(data), self._missing_bytes)
            payload = data if end == len(data) else data[:end]
            self.reserve(end)
            self._missing_bytes -= end
            if self._missing_bytes:
                end = -1
        else:
            pieces: list[bytes] = []
            try:
                end = frames.feed(data, pieces)
            except BadChunk as bad:
                raise errors.bad_request(f"The chunked body is malformed: {bad}.") from None
            payload = b"".join(pieces)
            self._missing_bytes -= len(payload)
            if self._missing_bytes < 0:
                raise errors.body_too_large(self._listener.limits.body_bytes)
            self.reserve(len(payload))
        self._data.append(payload, 0 if frames is not None else self._missing_bytes)
        self._burst_bytes += len(data)
        return end

    def ends_burst(self) -> bool:
        """Return whether so much has arrived that other connections should have their turn: the event loop would read
        8 MB of one connection at once, which takes up to 20 ms."""
        if self._burst_bytes < _BURST_BYTES:
            return False
        self._burst_bytes = 0
        return True

    def take(self) -> bytes:
        """Return the complete body. Its memory stays counted until `release`."""
        return self._data.take()

    def reserve(self, size: int) -> None:
        """Count bytes against the memory limit of all bodies. Raises HttpError if it is reached."""
        listener = self._listener
        listener.bodies.reserve(self.tenant, size, listener.limits.buffered_bytes)
        self.held_bytes += size

    def release(self) -> None:
        """The body is no longer needed."""
        if self.held_bytes:
            bodies = self._listener.bodies
            if self.tenant is None:
                bodies.total_bytes -= self.held_bytes
            else:
                bodies.release(self.tenant, self.held_bytes)
            self.held_bytes = 0
        if self._data:
            self._data.take()


# One connection from a client: parses its bytes into requests and writes the responses.
#
# The connection reads one request at a time (the head, then the whole body), passes it to its handler, and takes the
# next one after the response. During a response it keeps reading, so that it notices when the client disconnects.

AWAITING_HEAD: Final = 0
AWAITING_BODY: Final = 1
RESPONDING: Final = 2
FLUSHING: Final = 3
LINGERING: Final = 4
CLOSED: Final = 5
HELD: Final = 6
"""FLUSHING: the response is written, but the client has not read most of it. LINGERING: see `_linger`. HELD: the client
has sent a wrong key and waits for its 401."""
MAX_HELD: Final = 256
"""Clients of a listener that wait for their 401. Beyond that a 401 is sent at once: waiting must not become an attack
on memory and connections."""
_BARE_LINE_END: Final = re.compile(rb"(?<!\r)\n|\r(?!\n)(?!\Z)")
_KEEP_ALIVE_LINE: Final = b"Connection: keep-alive\r\n"
_CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
_MAX_PIPELINED_BYTES: Final = 524_288
"""How much of the next requests a connection buffers during a response."""
_HIGH_WATER_BYTES: Final = 65_536
"""With TLS, a response is paused when OpenSSL holds this much for the client. The connection below it holds as much
again, and OpenSSL's buffer is up to twice as large as what is in it."""
_TLS_PIECE_BYTES: Final = 32_768
_RESET: Final = struct.pack("ii", 1, 0)
_CR: Final = 13
_LINGER_S: Final = 2.0
LAST_REQUEST_S: Final = 1.0
"""When the router stops: how long a connection that has not sent anything has for its first request."""
_TLS_HANDSHAKE: Final = 22
"""The first byte of a TLS connection. No HTTP method begins with it."""


def _write_in_pieces(write: Callable[[Any], object], data: bytes) -> None:
    """Write to a TLS connection. OpenSSL's buffer stays as large as the largest write while a connection lives."""
    if len(data) <= _TLS_PIECE_BYTES:
        write(data)
        return
    rest = memoryview(data)
    while rest:
        write(rest[:_TLS_PIECE_BYTES])
        rest = rest[_TLS_PIECE_BYTES:]


class ClientConnection:
    __slots__ = (
        "_body", "_head", "_held", "_pipelined_bytes", "_pipelined_too_much", "_searched_bytes", "_state", "_unparsed",
        "_unread_bytes", "_without_request", "body_started_s", "bucket", "deadline_s", "exchange", "keep_alive",
        "listener", "paused", "peer", "release_body", "rights", "transport", "write",
    )  # fmt: skip

    def __init__(self, listener: Listener) -> None:
        # per connection
        self.listener = listener
        self.transport: Any  # an asyncio.Transport, or uvloop's, which does not inherit from it
        self.peer = b""
        self.deadline_s = NEVER
        self.bucket = -1
        self._state = AWAITING_HEAD
        self._without_request = True
        """It has not sent the head of a request yet."""
        self._unparsed: bytearray | None = None
        """An incomplete head, or pipelined requests."""
        self._searched_bytes = 0
        """How much of an incomplete head was searched for its end."""
        self._pipelined_bytes = 0
        """The part of `listener.bodies` that pipelined requests take."""
        self._pipelined_too_much = False
        self.paused = False
        """The client reads more slowly than the router writes."""
        self._unread_bytes = 0
        """What the client had not read yet when its stall timeout started."""
        # per request
        self._head: RequestHead
        self.rights: Rights
        """What the current request may do, as its head was checked."""
        self._body = BodyReader(listener)
        self.release_body = self._body.release
        self.exchange: Exchange | None = None
        """Answers the current request; None: it is answered, or has no answer yet."""
        self._held: HttpError | None = None
        """The 401 that the client waits for."""
        self.keep_alive = True
        self.body_started_s = 0.0
        """When the router began to wait for the body; 0 if it came with the head."""

    # The connection.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.write = self.transport.write
        listener = self.listener
        if isinstance(transport, SocketTransport):
            transport.count_unread(listener.unread)
        else:
            self.transport.set_write_buffer_limits(_HIGH_WATER_BYTES)
            self.write = partial(_write_in_pieces, self.transport.write)
        peer = transport.get_extra_info("peername")
        self.peer = peer[0].encode() if isinstance(peer, tuple) else b""
        if not listener.connection_made(self):
            self._send_error_and_close(errors.too_many_connections())
            return
        timers, limits = listener.timers, listener.limits
        timeout_s = min(limits.first_request_timeout_s, limits.idle_timeout_s)
        timers.arm(self, timers.now() + (min(timeout_s, LAST_REQUEST_S) if listener.closing else timeout_s))

    def connection_lost(self, exc: Exception | None) -> None:
        if self._held is not None:  # the client did not wait, but counts
            error, head = self._take_held(), self._head
            self.listener.handler.error_sent(error, head.request_id, self.peer, head.forwarded_for)
        self._state = CLOSED
        self.listener.connection_closed(self)
        self.listener.timers.disarm(self)
        self._give_up_body()
        self._leave()

    def eof_received(self) -> None:
        # A half-closed connection counts as closed: such a client may wait for its response, or may be gone.
        self._leave()
        self._close()

    def _leave(self) -> None:
        exchange, self.exchange = self.exchange, None
        if exchange is not None:
            try:
                exchange.client_left()
            except Exception as error:
                exchange.internal_error(error)

    def pause_writing(self) -> None:
        self.paused = True
        self._arm_stall_timeout()
        if not isinstance(self.transport, SocketTransport):
            asyncio.get_running_loop().call_soon(self._count_unread)  # with the rest of what is being written
        if self._state == AWAITING_HEAD:  # the last response was written in this iteration of the event loop
            self._state = FLUSHING
        elif self.exchange is not None:
            self._safely(self.exchange.pause_response)

    def resume_writing(self) -> None:
        self.paused = False
        if not isinstance(self.transport, SocketTransport):
            self.listener.read_again(self)
        if self._state == FLUSHING:
            self._safely(self._all_is_read)
        elif self.exchange is not None:
            self.deadline_s = NEVER
            self._safely(self.exchange.resume_response)

    def _count_unread(self) -> None:
        if self.paused and self in self.listener.connections:
            self.listener.stall(self, 2 * self.transport.get_write_buffer_size() + _HIGH_WATER_BYTES)

    def _arm_stall_timeout(self) -> None:
        self._unread_bytes = self.transport.get_write_buffer_size()
        timers = self.listener.timers
        timers.arm(self, timers.now() + self.listener.limits.stall_timeout_s)

    def timed_out(self) -> None:
        self._safely(self._time_out)

    def _time_out(self) -> None:
        limits = self.listener.limits
        if self._state == HELD:
            self._answer_held()
        elif self._state == AWAITING_HEAD and self._unparsed:
            self._send_error_and_close(errors.header_timeout(limits.header_timeout_s))
        elif self._state == AWAITING_BODY:
            self._send_error_and_close(errors.body_timeout(limits.body_timeout_s), self._head)
        elif self._state == AWAITING_HEAD and not self.transport.get_write_buffer_size():
            self._close()  # idle
        elif self.transport.get_write_buffer_size() < self._unread_bytes:
            self._arm_stall_timeout()  # the client reads, but slowly
        else:
            self.abort()  # the client has stopped reading, or does not close

    def abort(self) -> None:
        self.transport.abort()

    def too_slow(self) -> None:
        """Disconnect at once: what this client has not read takes the memory of others. A reset also frees what the
        system holds for it, and no client takes it for the end of a response."""
        self._reset_on_close()
        self.abort()

    def cut_off(self) -> None:
        """End the current request: the router stops."""
        if self.exchange is not None:
            self.exchange.cut_off()
        else:
            self.abort()

    @property
    def busy(self) -> bool:
        return self._state in (RESPONDING, HELD)

    @property
    def has_node(self) -> bool:
        return self.exchange is not None and self.exchange.has_node

    def make_place(self) -> None:
        """Close: this connection has sent no request, and another one needs its place."""
        if self._unparsed:
            handler = self.listener.handler
            error, request_id = errors.too_many_connections(), handler.new_request_id()
            handler.error_sent(error, request_id, self.peer, b"")
            self.write(render_final_error(error, request_id, False))
        self._close()

    def close_if_idle(self) -> None:
        if self._state == HELD:
            self._safely(self._answer_held)
        if self._state != AWAITING_HEAD or self._unparsed:
            return
        if self._without_request:
            timers = self.listener.timers
            timers.arm(self, min(self.deadline_s, timers.now() + LAST_REQUEST_S))
        else:
            self._close()

    # From bytes to a request.

    def data_received(self, data: bytes) -> None:
        state = self._state
        try:
            if state == AWAITING_HEAD:
                if self._unparsed is None:
                    end = data.find(b"\r\n\r\n")
                    if end > 0 and data[0] != _CR:
                        self._read_head(data, end)
                        return
                    if data[0] == _TLS_HANDSHAKE:
                        self._send_error_and_close(errors.tls_on_plain_port())
                        return
                    self._unparsed = bytearray()
                    timers = self.listener.timers
                    timers.arm(self, timers.now() + self.listener.limits.header_timeout_s)
                elif self._pipelined_bytes:
                    self._release_pipelined()  # more of it came before `_read_pipelined`
                self._unparsed += data
                self._find_head()
            elif state == AWAITING_BODY:
                self._read_body(data)
            elif state in (RESPONDING, FLUSHING, HELD):
                self._buffer_pipelined(data)
        except Exception as error:
            self._fail_internally(error)

    def _safely(self, act: Callable[[], object]) -> None:
        try:
            act()
        except Exception as error:
            self._fail_internally(error)

    def _fail_internally(self, error: Exception) -> None:
        """The router itself failed at this connection: end the current request with an error."""
        exchange = self.exchange
        if exchange is not None:
            exchange.internal_error(error)
            return
        http_error = self.listener.handler.internal_error(error)
        if self._held is not None:
            self._take_held()
        if self._state in (AWAITING_HEAD, AWAITING_BODY, RESPONDING):
            self._send_error_and_close(http_error, self._head if self._state != AWAITING_HEAD else None)
        else:
            self.abort()

    def _buffer_pipelined(self, data: bytes) -> None:
        """Keep the next requests until the current one is answered.

        Beyond the limit the connection goes on reading, to notice when the client disconnects, but drops the bytes and
        closes after the current response. The client has to repeat the other requests.
        """
        if not self.keep_alive:
            return
        listener = self.listener
        if self._unparsed is None:
            self._unparsed = bytearray()
        self._unparsed += data
        size, tenant, limit = len(data), self._body.tenant, listener.limits.buffered_bytes
        if len(self._unparsed) > _MAX_PIPELINED_BYTES or not listener.bodies.has_room(tenant, size, limit):
            self.keep_alive = False
            self._pipelined_too_much = True
            self._drop_pipelined()
            return
        listener.bodies.reserve(tenant, size, limit)
        self._pipelined_bytes += size

    def _give_up_body(self) -> None:
        self.listener.bodies.arrived(self._body.tenant, self)
        self.release_body()
        self._drop_pipelined()

    def _drop_pipelined(self) -> None:
        self._unparsed = None
        self._release_pipelined()

    def _release_pipelined(self) -> None:
        self.listener.bodies.release(self._body.tenant, self._pipelined_bytes)
        self._pipelined_bytes = 0

    def _find_head(self) -> None:
        unparsed = self._unparsed
        assert unparsed is not None
        if unparsed[:2] == b"\r\n":  # a server ignores an empty line before a request (RFC 9112, 2.2)
            del unparsed[:2]
        start = max(0, self._searched_bytes - 3)
        end = unparsed.find(b"\r\n\r\n", start)
        self._searched_bytes = len(unparsed)
        if end >= 0:
            self._unparsed = None
            self._searched_bytes = 0
            self._read_head(bytes(unparsed), end)
        elif len(unparsed) > self.listener.limits.header_bytes:
            self._send_error_and_close(errors.headers_too_large(self.listener.limits.header_bytes))
        elif _BARE_LINE_END.search(unparsed, start):
            self._send_error_and_close(errors.bad_request("A header line does not end with CR LF."))

    def _read_head(self, data: bytes, end: int) -> None:
        listener = self.listener
        limits = listener.limits
        if self._without_request:
            self._without_request = False
            listener.without_request.pop(self, None)
        start = end + 4
        have = len(data) - start
        if end > limits.header_bytes:
            self._send_error_and_close(errors.headers_too_large(limits.header_bytes))
            return
        head = read_request_head(data, end, MAX_HEADER_FIELDS)
        if isinstance(head, int):
            is_tls = data[0] == _TLS_HANDSHAKE
            self._send_error_and_close(errors.tls_on_plain_port() if is_tls else head_rejection(head))
            return
        self._head = head
        self.keep_alive = head.keep_alive
        length = head.length
        complete = 0 <= length <= have
        try:
            self.rights = rights = listener.handler.check_head(head)
            self._body.tenant = rights.body_tenant
            if length > limits.body_bytes:
                raise errors.body_too_large(limits.body_bytes)
            if complete:
                bodies = listener.bodies
                if rights.body_tenant is None and bodies.total_bytes + length <= limits.buffered_bytes:
                    bodies.total_bytes += length  # as `reserve`, without a call: most routers have one tenant
                    self._body.held_bytes += length
                else:
                    self._body.reserve(length)
        except HttpError as error:
            if error.status == 401 and self._may_wait():
                self._hold(error, data[start + length :] if complete else None)
            elif complete:
                if length < have:
                    self._buffer_pipelined(data[start + length :])
                self._state = RESPONDING
                self.send_error(error)
            else:
                self._send_error_and_close(error, head)
            return
        if complete:
            if length < have:
                self._buffer_pipelined(data[start + length :])
            self._state = RESPONDING
            self.deadline_s = NEVER
            try:
                listener.handler.serve(self, head, data[start : start + length])
            except HttpError as error:
                self.send_error(error)
            return
        self._state = AWAITING_BODY
        self._body.start(length)
        listener.bodies.arrives(rights.body_tenant, self, 0)
        timers = listener.timers
        self.body_started_s = timers.now()
        timers.arm(self, self.body_started_s + limits.body_timeout_s)
        if have:
            self._read_body(data[start:])
        elif head.expects_continue:
            self.write(_CONTINUE)

    # A wrong key.

    def _may_wait(self) -> bool:
        listener = self.listener
        return listener.wrong_key_delay_s > 0.0 and listener.held < MAX_HELD and not listener.closes_after_response

    def _hold(self, error: HttpError, more: bytes | None) -> None:
        """Send a 401 later. Meanwhile the router reads nothing of the client and keeps nothing but its head and `more`,
        what came behind the request; None: the request is incomplete, and the connection closes after the response."""
        if more is None:
            error.close = True
            self.keep_alive = False
        elif more:
            self._buffer_pipelined(more)
        listener = self.listener
        listener.held += 1
        self._held = error
        self._state = HELD
        self.transport.pause_reading()
        listener.timers.arm(self, listener.timers.now() + listener.wrong_key_delay_s)

    def _take_held(self) -> HttpError:
        error, self._held = self._held, None
        assert error is not None
        self.listener.held -= 1
        self._state = RESPONDING
        return error

    def _answer_held(self) -> None:
        self.deadline_s = NEVER
        self.send_error(self._take_held())
        self._continue_reading()

    def _read_body(self, data: bytes) -> None:
        try:
            end = self._body.feed(data)
        except HttpError as error:
            self._send_error_and_close(error, self._head)
            return
        bodies, tenant = self.listener.bodies, self._body.tenant
        if end >= 0:
            bodies.arrived(tenant, self)
            if end < len(data):
                self._buffer_pipelined(data[end:])
            self._state = RESPONDING
            self.deadline_s = NEVER
            try:
                self.listener.handler.serve(self, self._head, self._body.take())
            except HttpError as error:
                self.send_error(error)
            return
        bodies.arrives(tenant, self, self._body.held_bytes)
        if self._body.ends_burst():
            self.transport.pause_reading()
            asyncio.get_running_loop().call_soon(self._continue_reading)

    def _continue_reading(self) -> None:
        if not self.transport.is_closing():
            self.transport.resume_reading()

    def give_way(self) -> None:
        """The body has not arrived completely, and another tenant needs the memory."""
        self._send_error_and_close(errors.body_gave_way(), self._head)

    def is_serving(self, exchange: Exchange) -> bool:
        """Return whether this exchange answers the current request, and the client is there."""
        return self.exchange is exchange and self._state == RESPONDING

    # From a response to bytes.

    @property
    def keeps_alive(self) -> bool:
        """Whether the connection can serve another request after this one."""
        return self.keep_alive and not self.listener.closes_after_response

    @property
    def accepts_chunked(self) -> bool:
        return self._head.minor_version == 1

    def connection_line(self, keep_alive: bool) -> bytes:
        """Return the response's `Connection` line; empty if it would only repeat HTTP's default."""
        if not keep_alive:
            return CLOSE_LINE
        return b"" if self._head.minor_version else _KEEP_ALIVE_LINE

    def response_sent(self, keep_alive: bool, now_s: float | None = None) -> None:
        """The exchange has written the whole response. `now_s` is the current time, if the caller has it."""
        listener, self.exchange = self.listener, None
        if self._body.held_bytes:
            self.release_body()
        if self._state != RESPONDING:
            return
        if self._pipelined_too_much:
            self._linger()
        elif not keep_alive or not self.keep_alive or listener.closing:
            self._close()
        elif self.paused:
            self._state = FLUSHING
            self._arm_stall_timeout()
        else:  # the next request may come
            self._state = AWAITING_HEAD
            self.body_started_s = 0.0
            timers = listener.timers
            deadline_s = (timers.now() if now_s is None else now_s) + listener.limits.idle_timeout_s
            if 0.0 <= self.bucket * TICK_S <= deadline_s:  # as in `arm`, without a call
                self.deadline_s = deadline_s
            else:
                timers.arm(self, deadline_s)
            if self._unparsed:
                asyncio.get_running_loop().call_soon(self._read_pipelined)

    def _all_is_read(self) -> None:
        """The client has read a response that it had not read when the router had written it."""
        self._state = RESPONDING
        self.response_sent(True)

    def _read_pipelined(self) -> None:
        if self._state != AWAITING_HEAD or not self._unparsed:
            return
        timers = self.listener.timers
        timers.arm(self, timers.now() + self.listener.limits.header_timeout_s)
        self._release_pipelined()  # its turn has come
        self._safely(self._find_head)

    def close_unfinished(self, reset: bool = False) -> None:
        """Close the connection after what was written, so that the client sees an incomplete response.

        `reset`: close with a TCP reset, where a normal close would look like the end of the response.
        """
        self.exchange = None
        if reset:
            self._reset_on_close()
        self._close()

    def _reset_on_close(self) -> None:
        transport = self.transport
        if isinstance(transport, SocketTransport):
            transport.reset_on_close()
            return
        ending = transport.get_extra_info("socket")
        if ending is not None:
            ending.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)

    def reply(self, status: int, body: bytes, headers: Headers = (), content_type: str = "application/json") -> None:
        """Write a whole response of the router itself."""
        keep_alive = self.keeps_alive
        line = self.connection_line(keep_alive)
        self.write(render_reply(status, body, headers, content_type, line, self._head.method == b"HEAD"))
        self.response_sent(keep_alive)

    def send_error(self, error: HttpError, request_id: bytes = b"") -> None:
        """Answer a request that was read completely with an error."""
        if error.close:
            self._send_error_and_close(error, self._head, request_id)
            return
        handler = self.listener.handler
        request_id = request_id or self._head.request_id or handler.new_request_id()
        handler.error_sent(error, request_id, self.peer, self._head.forwarded_for)
        self.reply(error.status, error.body(is_anthropic(self._head.target)), with_request_id(error, request_id))

    def _send_error_and_close(self, error: HttpError, head: RequestHead | None = None, request_id: bytes = b"") -> None:
        """Answer with an error where the rest of the connection's bytes cannot be read as a request.

        `head`: that of the request, if it could be read.
        """
        handler = self.listener.handler
        if head is not None:
            request_id = request_id or head.request_id
        request_id = request_id or handler.new_request_id()
        handler.error_sent(error, request_id, self.peer, head.forwarded_for if head is not None else b"")
        self.write(render_final_error(error, request_id, head is not None and is_anthropic(head.target)))
        self.exchange = None
        self._linger()

    def _linger(self) -> None:
        """Send no more, but read and drop bytes for a moment.

        If the router closed with unread data, the client's kernel would discard the response before the client read it.
        """
        self._state = LINGERING
        self._unread_bytes = 0
        self._give_up_body()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.listener.timers.arm(self, self.listener.timers.now() + _LINGER_S)

    def _close(self) -> None:
        """Close the connection once the client has read what was written, or has stopped reading for too long."""
        self._state = CLOSED
        self.transport.close()
        if self.transport.get_write_buffer_size():
            timers = self.listener.timers
            timers.arm(self, timers.now() + self.listener.limits.stall_timeout_s)


# The handler behind a listening socket, and the client connections that are open on it.

log = EventLog("warmroute.edge")

LOG_PAUSE_S: Final = 10.0
"""Shortest time between two log records of clients that were too slow."""


class Exchange(Protocol):
    """Answers the current request. The connection tells it what its client does."""

    @property
    def has_node(self) -> bool:
        """Whether a node has the request."""

    def client_left(self) -> None:
        """The client disconnected."""

    def pause_response(self) -> None:
        """The client reads more slowly than the router writes: write no more until `resume_response`."""

    def resume_response(self) -> None: ...

    def internal_error(self, error: Exception) -> None:
        """The router itself failed while this request was served: answer with an error, or break off the response."""

    def cut_off(self) -> None:
        """The router stops: answer with an error, or break off the response."""


class Handler(Protocol):
    def check_head(self, head: RequestHead) -> Rights:
        """Check a request's head before its body is read. Return what the request may do. Raises HttpError."""

    def serve(self, client: ClientConnection, head: RequestHead, body: bytes) -> None:
        """Answer a request, or set `client.exchange` to what answers it later. Raises HttpError."""

    def new_request_id(self) -> bytes:
        """Return an id for a request that has none; empty if this listener gives no ids."""

    def error_sent(self, error: HttpError, request_id: bytes, peer: bytes, forwarded_for: bytes) -> None:
        """The router answered a request with this error. `peer`: the address of the connection. `forwarded_for`: the
        request's X-Forwarded-For."""

    def internal_error(self, error: Exception, request_id: bytes = b"") -> HttpError:
        """The router itself failed at a request: log that, and return the client's error."""


class Listener:
    """State that the connections of one listening socket share."""

    def __init__(
        self, handler: Handler, limits: Limits, timers: TimerWheel, wrong_key_delay_s: float = 0.0
    ) -> None:  # fmt: skip
        """`wrong_key_delay_s`: how long clients with a wrong key wait for their 401, at most MAX_HELD at a time."""
        self.handler = handler
        self.wrong_key_delay_s = wrong_key_delay_s
        self.held = 0
        """Connections whose client waits for its 401."""
        self.limits = limits
        self.timers = timers
        self.unread = UnreadBytes(limits.unread_bytes, self.unread_limit_reached)
        """What clients have not read of their responses."""
        self.stalled: dict[ClientConnection, int] = {}
        """Clients that do not read and whose bytes the event loop holds, not the kernel: those with TLS. The one that
        stopped reading first is the first; how much it has not read."""
        self.too_slow = 0
        """Clients that were disconnected because of `Limits.unread_bytes`."""
        self._too_slow_logged = 0
        self._log_again_s = -NEVER
        self.connections: set[ClientConnection] = set()
        self.without_request: dict[ClientConnection, None] = {}
        """Connections that have not sent the head of a request yet, the oldest first."""
        self.accepted = 0
        self.handshakes = 0
        """Accepted connections whose TLS handshake has not ended."""
        self.bodies = BodyMemory()
        self.closing = False
        """The router stops: idle connections are closed."""
        self.closes_after_response = False
        """Responses carry `Connection: close`: the router stops, or `limits.connections` is reached."""
        self.on_closed: Callable[[], object] | None = None
        """Is called after a connection was closed."""
        self._empty: asyncio.Event | None = None

    def protocol(self) -> Any:
        """Return the protocol of a new connection. It has asyncio.Protocol's methods and does not inherit from it."""
        return ClientConnection(self)

    def close_idle(self) -> None:
        """Close the connections that wait for a request now, and the others after their response. Those that have not
        sent any request yet have a moment for it."""
        self.closing = self.closes_after_response = True
        for client in list(self.connections):
            client.close_if_idle()

    async def until_empty(self) -> None:
        self._empty = asyncio.Event()
        handshakes_end_s = self.timers.now() + LAST_REQUEST_S
        while self.connections or (self.handshakes and self.timers.now() < handshakes_end_s):
            if self.connections:
                await self._empty.wait()
                self._empty.clear()
            else:
                await asyncio.sleep(0.01)

    def connection_made(self, client: ClientConnection) -> bool:
        """Count a new connection. Return False if there are too many."""
        self.accepted += 1
        connections = self.connections
        connections.add(client)
        if len(connections) > self.limits.connections:
            oldest = next(iter(self.without_request), None)
            if oldest is None:
                return False
            del self.without_request[oldest]
            connections.discard(oldest)
            oldest.make_place()
        self.without_request[client] = None
        self._count_changed()
        return True

    def _count_changed(self) -> None:
        self.closes_after_response = self.closing or len(self.connections) >= self.limits.connections

    def connection_closed(self, client: ClientConnection) -> None:
        self.connections.discard(client)
        self.without_request.pop(client, None)
        if self.stalled:
            self.read_again(client)
        self._count_changed()
        if self._empty is not None and not self.connections:
            self._empty.set()
        if self.on_closed is not None:
            self.on_closed()

    @property
    def buffered_bytes(self) -> int:
        """Bytes of requests in memory, of all connections."""
        return self.bodies.total_bytes

    # Clients that do not read.

    def stall(self, client: ClientConnection, unread_bytes: int) -> None:
        """Count what a client has not read, where the kernel does not."""
        self.read_again(client)
        self.stalled[client] = unread_bytes
        self.unread.add(unread_bytes)
        if self.unread.bytes > self.unread.limit:
            self.unread_limit_reached()

    def read_again(self, client: ClientConnection) -> None:
        """A client has read what `stall` counted, or has left."""
        self.unread.add(-self.stalled.pop(client, 0))

    def unread_limit_reached(self) -> None:
        """Disconnect the slowest clients until the others have left no more than `Limits.unread_bytes` unread."""
        unread = self.unread
        while unread.bytes > unread.limit:
            client: ClientConnection | None = unread.slowest() or next(iter(self.stalled), None)
            if client is None:
                break
            self.too_slow += 1
            client.too_slow()
            self.read_again(client)
        now_s = self.timers.now()
        if self.too_slow > self._too_slow_logged and now_s >= self._log_again_s:
            log.warning(
                "slow_clients_disconnected",
                "Clients have left more of their responses unread than the router keeps. The slowest ones go first.",
                clients=self.too_slow - self._too_slow_logged,
                limit_bytes=unread.limit,
            )
            self._too_slow_logged, self._log_again_s = self.too_slow, now_s + LOG_PAUSE_S

    def cut_off_all(self) -> None:
        """End all requests with an error: the router stops. Those that wait for a node go first: none may get the place
        of one that ends now."""
        for client in sorted(self.connections, key=lambda client: client.has_node):
            client._safely(client.cut_off)  # an error ends this client's request, and no other

    def abort_all(self) -> None:
        for client in list(self.connections):
            client.abort()

    @property
    def busy(self) -> int:
        return sum(1 for client in self.connections if client.busy)
