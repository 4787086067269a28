"""One gRPC call, and the service grpc.health.v1."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Protocol
from urllib.parse import quote

from warmroute.edge.envoy.ext_proc import SERVICE

if TYPE_CHECKING:
    from warmroute.edge.envoy.http2 import Http2Connection


# One gRPC call on an HTTP/2 connection: the messages in its data, and its answer's messages, status and end.

OK, INVALID_ARGUMENT, NOT_FOUND, RESOURCE_EXHAUSTED, UNIMPLEMENTED, INTERNAL = 0, 3, 5, 8, 12, 13
"""Status codes of gRPC."""
_PREFIX: Final = struct.Struct(">BI")
"""Before each message: whether it is compressed, and its length."""
_PREFIX_BYTES: Final = 5


class CallHandler(Protocol):
    """Serves one call."""

    def received(self, message: bytes) -> None: ...

    def too_large(self) -> None:
        """The next message is larger than the limit, or too many bytes are buffered: end the call."""

    def client_finished(self) -> None:
        """The client sends no more messages."""

    def cancelled(self) -> None:
        """The client has reset the call, or the connection is lost."""


class UnknownMethod:
    """Serves a call of a method that the picker does not have."""

    def __init__(self, call: Call) -> None:
        self._call = call

    def client_finished(self) -> None:
        self._call.end(UNIMPLEMENTED, "unknown method")

    def received(self, _message: bytes) -> None:
        self.client_finished()

    def too_large(self) -> None:
        self.client_finished()

    def cancelled(self) -> None:
        """Nothing is left to do."""


class Call:
    __slots__ = (
        "_connection", "_ended", "_partial", "_status", "client_done", "handler", "headers_sent", "id", "pending",
        "received", "send_window",
    )  # fmt: skip

    def __init__(self, connection: Http2Connection, number: int, send_window: int) -> None:
        self._connection = connection
        self.id = number
        self.handler: CallHandler
        self.client_done = False
        self.headers_sent = False
        self.received = 0
        """Bytes since the client was last allowed to send more."""
        self.send_window = send_window
        self.pending = bytearray()
        """What the client's flow control does not allow yet."""
        self._partial: bytearray | None = None
        """The beginning of a message."""
        self._ended = False
        self._status: bytes | None = None
        """Trailers that wait until `pending` is sent."""

    @property
    def peer_host(self) -> str:
        return self._connection.peer_host

    # From the client.

    def data_received(self, data: bytes) -> None:
        if self._partial is not None:
            self._continue(data)
            return
        at, end = 0, len(data)
        while end - at >= _PREFIX_BYTES and not self._ended:
            compressed, size = _PREFIX.unpack_from(data, at)
            stop = at + _PREFIX_BYTES + size
            if stop > end or compressed:
                break
            self.handler.received(data[at + _PREFIX_BYTES : stop])
            at = stop
        if at < end and not self._ended:
            self._partial = bytearray()
            self._continue(data[at:])

    def _continue(self, data: bytes) -> None:
        """Add to a message that has come in part."""
        partial, connection = self._partial, self._connection
        assert partial is not None
        partial += data
        connection.server.partial_bytes += len(data)
        while len(partial) >= _PREFIX_BYTES and not self._ended:
            compressed, size = _PREFIX.unpack_from(partial)
            if compressed:
                handler = self.handler
                self.end(UNIMPLEMENTED, "messages must not be compressed")
                handler.cancelled()
                return
            stop = _PREFIX_BYTES + size
            if not connection.server.may_buffer(size):
                self.handler.too_large()
                return
            if len(partial) < stop:
                return
            message = bytes(memoryview(partial)[_PREFIX_BYTES:stop])
            del partial[:stop]
            connection.server.partial_bytes -= stop
            self.handler.received(message)
        if not partial:
            self._partial = None

    def _drop_partial(self) -> None:
        if self._partial is not None:
            self._connection.server.partial_bytes -= len(self._partial)
            self._partial = None

    def client_finished(self) -> None:
        self.client_done = True
        if not self._ended:
            self.handler.client_finished()

    def cancelled(self) -> None:
        self.pending.clear()
        if not self._ended:
            handler = self.handler
            self._end()
            handler.cancelled()

    # To the client.

    def write(self, message: bytes) -> None:
        if not self._ended:
            self._connection.send_message(self, _PREFIX.pack(0, len(message)) + message)

    def end(self, status: int = OK, message: str = "") -> None:
        """End the call. Messages that were written before arrive first."""
        if self._ended:
            return
        self._end()
        trailers = b"\x00\x0bgrpc-status" + _text(str(status))
        if message:
            trailers += b"\x00\x0cgrpc-message" + _text(quote(message, safe=" "))
        self._status = trailers
        if not self.pending:
            self.send_status()

    def send_status(self) -> None:
        """Send the trailers, if the call has ended."""
        if self._status is not None:
            self._connection.send_trailers(self, self._status)

    def reset(self) -> None:
        """End the call without a status."""
        if not self._ended:
            self._end()
            self._connection.reset(self.id)

    def _end(self) -> None:
        """The handler hears no more of the call. They must not hold each other in memory."""
        self._ended = True
        self._drop_partial()
        del self.handler


def _text(value: str) -> bytes:
    """Return a string as HPACK writes it, without Huffman's code."""
    data = value.encode()[:100]
    return bytes((len(data),)) + data


# grpc.health.v1: whether the picker is alive, and whether Envoy should ask it.
#
#     "liveness"                                          the process answers
#     "", "readiness", "envoy.service.ext_proc.v3…"       it has read its nodes once, and it does not stop
#
# A picker without a node that could serve is ready all the same: it answers 503 itself, with the reason.

CHECK: Final = "/grpc.health.v1.Health/Check"
WATCH: Final = "/grpc.health.v1.Health/Watch"
WATCH_S: Final = 0.5
_SERVING: Final = b"\x08\x01"
_NOT_SERVING: Final = b"\x08\x02"
_SERVICE_UNKNOWN: Final = b"\x08\x03"
_READINESS: Final = ("", "readiness", SERVICE)


def _service_of(request: bytes) -> str:
    """Return the field `service` (1) of a HealthCheckRequest."""
    if len(request) < 2 or request[0] != 0x0A or request[1] > 127:
        return ""
    return request[2 : 2 + request[1]].decode("utf-8", "replace")


class HealthCall:
    """One Check, or one Watch, which sends the status at once and at each change."""

    def __init__(self, call: Call, is_ready: Callable[[], bool], watches: bool) -> None:
        self._call = call
        self._is_ready = is_ready
        self._watches = watches
        self._service = ""
        self._sent = b""
        self._timer: asyncio.TimerHandle | None = None

    def _status(self) -> bytes:
        if self._service == "liveness":
            return _SERVING
        if self._service in _READINESS:
            return _SERVING if self._is_ready() else _NOT_SERVING
        return _SERVICE_UNKNOWN

    def received(self, message: bytes) -> None:
        self._service = _service_of(message)
        if self._watches:
            self.cancelled()
            self._tell()
            return
        status = self._status()
        if status is _SERVICE_UNKNOWN:
            self._call.end(NOT_FOUND, "unknown service")
        else:
            self._call.write(status)
            self._call.end()

    def _tell(self) -> None:
        status = self._status()
        if status != self._sent:
            self._sent = status
            self._call.write(status)
        self._timer = asyncio.get_running_loop().call_later(WATCH_S, self._tell)

    def too_large(self) -> None:
        self._call.reset()

    def client_finished(self) -> None:
        if self._timer is None:  # it asked nothing
            self._call.end()

    def cancelled(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
