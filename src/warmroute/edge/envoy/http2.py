"""HTTP/2 as far as a gRPC server needs it."""

from __future__ import annotations

import asyncio
import struct
from typing import Any, Final, Protocol, cast

from hpack import Decoder
from hpack.exceptions import HPACKError

from warmroute.edge.envoy.grpc import Call, CallHandler

# The frames of HTTP/2 (RFC 9113): their types, flags and settings, and the bytes of one.

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
END_STREAM, ACK, END_HEADERS, PADDED, HAS_PRIORITY = 0x1, 0x1, 0x4, 0x8, 0x20
NO_ERROR, PROTOCOL_ERROR, FLOW_CONTROL_ERROR, FRAME_SIZE_ERROR, REFUSED_STREAM, CANCEL = 0, 1, 3, 6, 7, 8
COMPRESSION_ERROR, ENHANCE_YOUR_CALM = 9, 11
TABLE_SIZE, MAX_STREAMS, INITIAL_WINDOW = 1, 3, 4
"""Settings."""
MAX_ID: Final = (1 << 31) - 1
FRAME_BYTES: Final = 16_384
"""The largest frame that a client may send, and the largest that the picker sends."""
DEFAULT_WINDOW: Final = 65_535
HEAD: Final = struct.Struct(">HBBBI")
"""Of a frame: its length (16 + 8 bits), type, flags and stream."""
SETTING: Final = struct.Struct(">HI")
NUMBER: Final = struct.Struct(">I")


class Http2Error(Exception):
    """The client broke a rule that all calls of the connection depend on."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code


def frame(kind: int, flags: int, number: int, payload: bytes = b"") -> bytes:
    size = len(payload)
    return HEAD.pack(size >> 8, size & 255, kind, flags, number) + payload


def unpadded(payload: bytes) -> bytes:
    """Raises Http2Error."""
    if not payload or payload[0] >= len(payload):
        raise Http2Error(PROTOCOL_ERROR, "padding")
    return payload[1 : len(payload) - payload[0]]


# HTTP/2 (RFC 9113), as far as a gRPC server needs it: one connection of a client.
#
# The picker has its own, because the event loops and threads of grpcio took most of its time for a request. Differences
# from a general server: no priorities, no push; responses have the same headers, so they are constants.
#
# Header blocks are decoded by hpack. The connection asks its client to keep no table of headers (a table size of 0):
# from then on a block means the same each time, and Envoy's, which are always the same, are decoded once.

CALL_WINDOW: Final = 1 << 20
"""Bytes that a client may send for a call before it has to wait."""
CONNECTION_WINDOW: Final = 1 << 24
MAX_BLOCK_BYTES: Final = 65_536
"""Of the headers of a call."""
MAX_KNOWN_BLOCKS: Final = 256
PREFACE_S: Final = 10.0
"""A connection that has not begun by then is closed."""
_RESPONSE_FIELDS: Final = b"\x88\x0f\x10\x10application/grpc"
""":status 200, and the content type."""


class GrpcServer(Protocol):
    """What the connections of one server share."""

    partial_bytes: int
    """Bytes of messages that have come in part."""
    known_blocks: dict[bytes, str]
    """The path in a header block that is the same each time."""
    http2_connections: set[Any]
    max_calls: int
    """Of one connection."""

    def may_buffer(self, size: int) -> bool:
        """Return whether a message of this size may be received."""

    def handler_of(self, path: str, call: Call) -> CallHandler:
        """Return what serves a call of this method."""


class Http2Connection(asyncio.Protocol):
    __slots__ = (
        "_block", "_block_ends", "_block_id", "_calls", "_closing", "_corked", "_decoder", "_initial_window",
        "_last_id", "_out", "_paused", "_received", "_rest", "_send_window", "_started",
        "_table", "_timer", "_transport", "peer_host", "server",
    )  # fmt: skip

    def __init__(self, server: GrpcServer) -> None:
        self.server = server
        self.peer_host = ""
        self._transport: asyncio.Transport
        self._decoder = Decoder(MAX_BLOCK_BYTES)
        self._table = self._decoder.header_table
        self._timer: asyncio.TimerHandle | None = None
        self._started = self._closing = self._paused = False
        self._rest = b""
        """A frame that has come in part."""
        self._out: list[bytes] = []
        self._corked = False
        """Whether frames wait in `_out` until all that was received is handled."""
        self._calls: dict[int, Call] = {}
        self._last_id = 0
        self._block = bytearray()
        """Headers that CONTINUATION frames complete, the call they are of, and whether its data ends with them."""
        self._block_id = 0
        self._block_ends = False
        self._initial_window = self._send_window = DEFAULT_WINDOW
        self._received = 0
        """Bytes since the client was last allowed to send more."""

    # The transport.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        peer = transport.get_extra_info("peername")
        self.peer_host = str(peer[0]) if isinstance(peer, tuple) and peer else ""
        self.server.http2_connections.add(self)
        self._timer = asyncio.get_running_loop().call_later(PREFACE_S, self.abort)
        settings = (
            (TABLE_SIZE, 0),
            (MAX_STREAMS, self.server.max_calls),
            (INITIAL_WINDOW, CALL_WINDOW),
        )
        self._transport.write(
            frame(SETTINGS, 0, 0, b"".join([SETTING.pack(*one) for one in settings]))
            + frame(WINDOW_UPDATE, 0, 0, NUMBER.pack(CONNECTION_WINDOW - DEFAULT_WINDOW))
        )

    def connection_lost(self, _error: Exception | None) -> None:
        self.server.http2_connections.discard(self)
        if self._timer is not None:
            self._timer.cancel()
        self._closing = True
        calls, self._calls = self._calls, {}
        for call in calls.values():
            call.cancelled()

    def pause_writing(self) -> None:
        """The client reads too slowly: accept no more work from it."""
        self._paused = True
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        self._paused = False
        self._transport.resume_reading()
        self._pump_all()

    def data_received(self, data: bytes) -> None:
        if self._rest:
            data = self._rest + data
        self._corked = True
        try:
            at = 0 if self._started else self._read_preface(data)
            self._rest = data[self._read_frames(data, at) :]
        except Http2Error as error:
            self._fail(error.code)
        finally:
            self._corked = False
            self._flush()

    def _read_preface(self, data: bytes) -> int:
        if not PREFACE.startswith(data[: len(PREFACE)]):
            raise Http2Error(PROTOCOL_ERROR, "not HTTP/2")
        if len(data) < len(PREFACE):
            return 0
        self._started = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        return len(PREFACE)

    def _read_frames(self, data: bytes, at: int) -> int:
        """Return where a frame begins that has come in part."""
        end = len(data)
        while self._started and end - at >= HEAD.size and not self._transport.is_closing():
            high, low, kind, flags, number = HEAD.unpack_from(data, at)
            size = high << 8 | low
            if size > FRAME_BYTES:
                raise Http2Error(FRAME_SIZE_ERROR, "frame too large")
            stop = at + HEAD.size + size
            if stop > end:
                break
            self._frame(kind, flags, number & MAX_ID, data[at + HEAD.size : stop])
            at = stop
        return at

    # Frames.

    def _frame(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        if self._block_id and (kind != CONTINUATION or number != self._block_id):
            raise Http2Error(PROTOCOL_ERROR, "a header block is not complete")
        if kind == DATA:
            self._data(flags, number, payload)
        elif kind == HEADERS:
            self._headers(flags, number, payload)
        elif kind == WINDOW_UPDATE:
            self._window_update(number, payload)
        elif kind == RST_STREAM:
            call = self._calls.pop(number, None)
            if call is not None:
                call.cancelled()
        elif kind == SETTINGS:
            if not flags & ACK:
                self._settings(payload)
        elif kind == PING:
            if not flags & ACK and len(payload) == 8:
                self._send(frame(PING, ACK, 0, payload))
        elif kind == CONTINUATION:
            self._continuation(flags, payload)
        elif kind == PUSH_PROMISE:
            raise Http2Error(PROTOCOL_ERROR, "clients cannot push")

    def _data(self, flags: int, number: int, payload: bytes) -> None:
        size = len(payload)
        self._received += size
        if self._received > CONNECTION_WINDOW // 2:
            self._send(frame(WINDOW_UPDATE, 0, 0, NUMBER.pack(self._received)))
            self._received = 0
        call = self._calls.get(number)
        if call is None or call.client_done:
            if not number or (number > self._last_id and not self._closing):
                raise Http2Error(PROTOCOL_ERROR, "data of an unknown call")
            return  # of a call that has ended, or was refused
        call.received += size
        if call.received > CALL_WINDOW // 2 and not flags & END_STREAM:
            self._send(frame(WINDOW_UPDATE, 0, number, NUMBER.pack(call.received)))
            call.received = 0
        if flags & PADDED:
            payload = unpadded(payload)
        if payload:
            call.data_received(payload)
        if flags & END_STREAM:
            call.client_finished()

    def _headers(self, flags: int, number: int, payload: bytes) -> None:
        if flags & PADDED:
            payload = unpadded(payload)
        if flags & HAS_PRIORITY:
            payload = payload[5:]
        if not flags & END_HEADERS:
            self._block[:] = payload
            self._block_id, self._block_ends = number, bool(flags & END_STREAM)
            return
        self._head(number, bytes(payload), bool(flags & END_STREAM))

    def _continuation(self, flags: int, payload: bytes) -> None:
        if not self._block_id:
            raise Http2Error(PROTOCOL_ERROR, "no header block to continue")
        self._block += payload
        if len(self._block) > MAX_BLOCK_BYTES:
            raise Http2Error(ENHANCE_YOUR_CALM, "headers too large")
        if flags & END_HEADERS:
            number, self._block_id = self._block_id, 0
            self._head(number, bytes(self._block), self._block_ends)

    def _head(self, number: int, block: bytes, ends: bool) -> None:
        """A call begins, or its client sends trailers."""
        path = self._path_of(block)
        if number <= self._last_id:
            call = self._calls.get(number)
            if call is not None and not call.client_done:
                call.client_finished()
            return
        if not number & 1:
            raise Http2Error(PROTOCOL_ERROR, "an even number of a call")
        if self._closing or len(self._calls) >= self.server.max_calls:
            if not self._closing:
                self._last_id = number
            self._send(frame(RST_STREAM, 0, number, NUMBER.pack(REFUSED_STREAM)))
            return
        self._last_id = number
        call = Call(self, number, self._initial_window)
        self._calls[number] = call
        call.handler = self.server.handler_of(path, call)
        if ends:
            call.client_finished()

    def _path_of(self, block: bytes) -> str:
        table, known = self._table, self.server.known_blocks
        stateless = not table.maxsize
        if stateless and (path := known.get(block)) is not None:
            return path
        try:
            fields = self._decoder.decode(block, raw=True)
        except (HPACKError, ValueError, IndexError) as error:
            raise Http2Error(COMPRESSION_ERROR, str(error)) from None
        path = next((value for name, value in fields if name == b":path"), b"").decode("latin-1")
        if stateless and not table.maxsize and path:
            if len(known) >= MAX_KNOWN_BLOCKS:
                known.clear()
            known[block] = path
        return path

    def _settings(self, payload: bytes) -> None:
        if len(payload) % SETTING.size:
            raise Http2Error(FRAME_SIZE_ERROR, "settings")
        for name, value in SETTING.iter_unpack(payload):
            if name == INITIAL_WINDOW:
                if value > MAX_ID:
                    raise Http2Error(FLOW_CONTROL_ERROR, "window too large")
                for call in self._calls.values():
                    call.send_window += value - self._initial_window
                self._initial_window = value
        self._send(frame(SETTINGS, ACK, 0))
        self._pump_all()

    def _window_update(self, number: int, payload: bytes) -> None:
        if len(payload) != NUMBER.size:
            raise Http2Error(FRAME_SIZE_ERROR, "window update")
        more = NUMBER.unpack(payload)[0] & MAX_ID
        if not number:
            self._send_window += more
            if not more or self._send_window > MAX_ID:
                raise Http2Error(FLOW_CONTROL_ERROR, "window update")
            self._pump_all()
            return
        call = self._calls.get(number)
        if call is not None:
            call.send_window += more
            if not more or call.send_window > MAX_ID:
                self.reset(number, FLOW_CONTROL_ERROR)
                call.cancelled()
            else:
                self._pump(call)

    # From calls.

    def send_message(self, call: Call, data: bytes) -> None:
        """Send a message with its prefix, as far as the client's flow control allows."""
        if not call.headers_sent:
            call.headers_sent = True
            self._send(frame(HEADERS, END_HEADERS, call.id, _RESPONSE_FIELDS))
        size = len(data)
        if size > FRAME_BYTES or size > call.send_window or size > self._send_window or call.pending:
            call.pending += data
            self._pump(call)
            return
        call.send_window -= size
        self._send_window -= size
        self._send(HEAD.pack(size >> 8, size & 255, DATA, 0, call.id) + data)

    def send_trailers(self, call: Call, fields: bytes) -> None:
        if not call.headers_sent:
            fields = _RESPONSE_FIELDS + fields
        self._send(frame(HEADERS, END_HEADERS | END_STREAM, call.id, fields))
        if self._calls.pop(call.id, None) is not None and not call.client_done:
            self._send(frame(RST_STREAM, 0, call.id, NUMBER.pack(NO_ERROR)))
        self._close_if_idle()

    def reset(self, number: int, code: int = CANCEL) -> None:
        if self._calls.pop(number, None) is not None:
            self._send(frame(RST_STREAM, 0, number, NUMBER.pack(code)))
            self._close_if_idle()

    def _pump_all(self) -> None:
        for call in [call for call in self._calls.values() if call.pending]:
            self._pump(call)

    def _pump(self, call: Call) -> None:
        pending = call.pending
        if not pending:
            return
        at = 0
        while not self._paused:
            size = min(len(pending) - at, FRAME_BYTES, call.send_window, self._send_window)
            if size <= 0:
                break
            call.send_window -= size
            self._send_window -= size
            self._send(frame(DATA, 0, call.id, bytes(memoryview(pending)[at : at + size])))
            at += size
        del pending[:at]
        if not pending:
            call.send_status()

    def _send(self, data: bytes) -> None:
        self._out.append(data)
        if not self._corked:
            self._flush()

    def _flush(self) -> None:
        out = self._out
        if out:
            data = out[0] if len(out) == 1 else b"".join(out)
            out.clear()
            if not self._transport.is_closing():
                self._transport.write(data)

    # The end.

    def drain(self) -> None:
        """Accept no more calls, and close the connection after the last one."""
        if not self._closing:
            self._closing = True
            self._send(frame(GOAWAY, 0, 0, NUMBER.pack(self._last_id) + NUMBER.pack(NO_ERROR)))
            self._close_if_idle()

    def _close_if_idle(self) -> None:
        if self._closing and not self._calls:
            self._flush()
            self._transport.close()

    def _fail(self, code: int) -> None:
        """Close the connection with an error."""
        self._closing = True
        self._out.append(frame(GOAWAY, 0, 0, NUMBER.pack(self._last_id) + NUMBER.pack(code)))
        self._flush()
        self._transport.close()

    def close(self) -> None:
        """Send what is written, and close the connection."""
        self._transport.close()

    def abort(self) -> None:
        self._transport.abort()
