"""ZMTP, the wire protocol of ZeroMQ, and a connection that reopens."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from random import Random
from typing import Final, cast

from warmroute.engines.kv_events import ByteBudget

# ZMTP 3.0, the protocol of ZMQ sockets over TCP, as far as a subscriber and a requester of replays need it. No I/O.
#
# libzmq limits the size of a frame and the number of queued messages, but not the number of frames in a message: an
# endless message takes all memory. This decoder limits whole messages, and keeps no more than one of them and what was
# read with it.
#
#     greeting    64 bytes: signature, version, security mechanism (only NULL)
#     READY       a command with the socket's type
#     messages    frames: flags, size, body. The flag MORE marks all but the last frame of a message.

MAX_MESSAGE_BYTES: Final = 8 << 20
"""A batch of vLLM's KV events takes about 7 bytes per token: one million tokens."""
MAX_FRAMES: Final = 8
"""A KV event message has three frames, a replayed one four."""
MAX_COMMAND_BYTES: Final = 4096
"""READY has the socket's type and a few properties."""
MAX_COMMANDS: Final = 64
"""Commands that may follow each other without a message and without a pause."""
_MORE, _LONG, _COMMAND = 1, 2, 4
_GREETING_BYTES: Final = 64
_NULL: Final = b"NULL".ljust(20, b"\0")
_LONG_SIZE: Final = struct.Struct(">Q")
_PING, _PONG, _READY, _ERROR = b"\x04PING", b"\x04PONG", b"\x05READY", b"\x05ERROR"

GREETING: Final = b"\xff" + b"\0" * 8 + b"\x7f" + b"\x03\x00" + _NULL + b"\0" * 32


class ZmtpError(Exception):
    """The peer does not speak ZMTP, or exceeds a limit. The connection must be closed."""


def encode(*frames: bytes) -> bytes:
    """Return a message as it is sent."""
    last = len(frames) - 1
    return b"".join(_frame(_MORE if number < last else 0, body) for number, body in enumerate(frames))


def ready_command(socket_type: bytes) -> bytes:
    name = b"Socket-Type"
    fields = b"%c%b%b%b" % (len(name), name, struct.pack(">I", len(socket_type)), socket_type)
    return _frame(_COMMAND, _READY + fields)


def _frame(flags: int, body: bytes) -> bytes:
    if len(body) < 256:
        return bytes((flags, len(body))) + body
    return bytes((flags | _LONG,)) + _LONG_SIZE.pack(len(body)) + body


class ZmtpDecoder:
    """Decodes what a peer sends after this side's greeting. `reply` collects what this side has to send."""

    def __init__(self, socket_type: bytes) -> None:
        self._socket_type = socket_type
        self._buffer = bytearray()
        self._greeted = False
        self.ready = False
        """Whether the handshake is complete."""
        self._frames: list[bytes] = []
        """The first frames of a message that is not complete."""
        self._message_bytes = 0
        self.reply = bytearray()

    def feed(self, data: bytes) -> None:
        self._buffer += data

    def discard(self) -> None:
        """Free what was received: the connection is lost, so it will not be read."""
        self._buffer = bytearray()
        self._frames, self._message_bytes = [], 0

    @property
    def buffered_bytes(self) -> int:
        return len(self._buffer) + self._message_bytes

    def next_message(self) -> list[bytes] | None:
        """Return the next message; None until more was fed. Raises ZmtpError."""
        if not self._greeted and not self._read_greeting():
            return None
        commands = 0
        while (frame := self._next_frame()) is not None:
            flags, body = frame
            if flags & _COMMAND:
                commands += 1
                if commands > MAX_COMMANDS:
                    raise ZmtpError("a flood of commands")
                self._handle_command(body)
                continue
            if not self.ready:
                raise ZmtpError("a message before the handshake")
            self._frames.append(body)
            if not flags & _MORE:
                message, self._frames, self._message_bytes = self._frames, [], 0
                return message
            self._message_bytes += len(body)
            if len(self._frames) >= MAX_FRAMES:
                raise ZmtpError(f"a message of more than {MAX_FRAMES} frames")
        return None

    def _read_greeting(self) -> bool:
        buffer = self._buffer
        if (buffer and buffer[0] != 0xFF) or (len(buffer) >= 10 and not buffer[9] & 1):
            raise ZmtpError("not a ZMQ socket")
        if len(buffer) > 10 and buffer[10] < 3:
            raise ZmtpError("a version of ZMTP before 3")
        if len(buffer) < _GREETING_BYTES:
            return False
        if buffer[12:32] != _NULL:
            raise ZmtpError("the socket requires authentication")
        del buffer[:_GREETING_BYTES]
        self._greeted = True
        self.reply += ready_command(self._socket_type)
        return True

    def _next_frame(self) -> tuple[int, bytes] | None:
        buffer = self._buffer
        if len(buffer) < 2:
            return None
        flags = buffer[0]
        if flags & ~(_MORE | _LONG | _COMMAND):
            raise ZmtpError("an unknown kind of frame")
        if flags & _LONG:
            if len(buffer) < 9:
                return None
            start, (size,) = 9, _LONG_SIZE.unpack_from(buffer, 1)
        else:
            start, size = 2, buffer[1]
        # Checked at the header: the bytes of a frame that is too large are never collected.
        if size > (MAX_COMMAND_BYTES if flags & _COMMAND else MAX_MESSAGE_BYTES - self._message_bytes):
            raise ZmtpError(f"a message of more than {MAX_MESSAGE_BYTES:,} bytes")
        end = start + size
        if len(buffer) < end:
            return None
        body = bytes(buffer[start:end])
        del buffer[:end]
        return flags, body

    def _handle_command(self, body: bytes) -> None:
        if body.startswith(_ERROR):
            raise ZmtpError("the peer refused the connection")
        if not self.ready:
            if not body.startswith(_READY):
                raise ZmtpError("no READY command")
            self.ready = True
        elif body.startswith(_PING):
            self.reply += _frame(_COMMAND, _PONG + body[len(_PING) + 2 :])


# A TCP connection to a ZMQ socket, which is opened again when it breaks, as ZMQ's own sockets do.
#
# Reading stops while received messages wait, so that a fast publisher fills its own queue and not the router's memory.

READ_AHEAD_BYTES: Final = 1 << 18
"""Received bytes beyond which reading stops until all complete messages among them are taken."""
FIRST_RETRY_S: Final = 0.1
LAST_RETRY_S: Final = 5.0
"""Pauses before a lost connection is opened again. They double from the first to the last while that fails."""
CONNECT_TIMEOUT_S: Final = 5.0
"""A host that drops packets would hold the attempt for two minutes."""
MAX_UNSENT_BYTES: Final = 1 << 16
"""This side sends a handshake, pings' answers and requests of a few bytes. A peer that takes none of them is hung."""

SUB: Final = b"SUB"
DEALER: Final = b"DEALER"
_random: Final = Random()


class ZmtpConnection:
    """A connection to a ZMQ socket, opened again whenever it breaks. Call `receive` until it returns None each time
    `on_readable` is called."""

    def __init__(
        self,
        host: str,
        port: int,
        socket_type: bytes,
        first_message: bytes,
        budget: ByteBudget,
        on_readable: Callable[[], object],
        on_ready: Callable[[], object] = lambda: None,
        on_error: Callable[[str], object] = lambda _reason: None,
    ) -> None:
        """`first_message` is sent on each connection as soon as the handshake is complete; then `on_ready` is called.
        Received bytes count in the `budget`, and a connection that exceeds it is closed. `on_error` receives the reason
        if the peer does not follow the protocol."""
        self._address = (host, port)
        self._socket_type = socket_type
        self._first_message = first_message
        self.budget = budget
        self._on_readable = on_readable
        self._on_ready = on_ready
        self._on_error = on_error
        self._link: _Link | None = None
        self.closed = False
        self._task: asyncio.Task[None] | None = asyncio.get_running_loop().create_task(self._keep_connected())

    async def _keep_connected(self) -> None:
        loop = asyncio.get_running_loop()
        pause_s = FIRST_RETRY_S
        while True:
            try:
                async with asyncio.timeout(CONNECT_TIMEOUT_S):
                    _, link = await loop.create_connection(lambda: _Link(self), *self._address)
            except (OSError, ValueError):  # no such host, refused, timed out; a host name that cannot be encoded
                pass
            else:
                await link.lost.wait()
                # A peer that breaks the protocol would otherwise be connected to ten times a second.
                if link.decoder.ready and not link.failed:
                    pause_s = FIRST_RETRY_S
            await asyncio.sleep(pause_s * (0.8 + 0.4 * _random.random()))
            pause_s = min(2 * pause_s, LAST_RETRY_S)

    def receive(self) -> list[bytes] | None:
        """Return the next message; None if there is none yet."""
        link = self._link
        return link.receive() if link is not None else None

    def close(self) -> None:
        if self._task is not None:
            self.closed = True
            self._task.cancel()
            self._task = None  # it refers to this connection: otherwise both would wait for a garbage collection
            if self._link is not None:
                self._link.abort()

    # Called by the link.

    def attached(self, link: _Link) -> None:
        self._link = link
        if self.closed:
            link.abort()

    def detached(self, link: _Link) -> None:
        if self._link is link:
            self._link = None

    def readable(self) -> None:
        if not self.closed:
            self._on_readable()

    def ready(self, link: _Link) -> None:
        link.write(self._first_message)
        if not self.closed:
            self._on_ready()

    def failed(self, reason: str) -> None:
        if not self.closed:
            self._on_error(reason)


class _Link(asyncio.Protocol):
    """One TCP connection. ZmtpConnection makes a new one after each loss."""

    def __init__(self, connection: ZmtpConnection) -> None:
        self._connection = connection
        self._transport: asyncio.Transport | None = None
        self.decoder = ZmtpDecoder(connection._socket_type)
        self._paused = False
        self._counted_bytes = 0
        self.failed = False
        self.lost = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(GREETING)
        self._connection.attached(self)

    def data_received(self, data: bytes) -> None:
        self.decoder.feed(data)
        self._count_bytes()
        if self._connection.budget.exceeded:
            self._fail("its KV events take too much memory")
            return
        if self.decoder.buffered_bytes >= READ_AHEAD_BYTES and not self._paused and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()
        self._connection.readable()

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self.decoder.discard()
        self._count_bytes()
        self._connection.detached(self)
        self.lost.set()

    def _count_bytes(self) -> None:
        before, self._counted_bytes = self._counted_bytes, self.decoder.buffered_bytes
        self._connection.budget.used_bytes += self._counted_bytes - before

    def receive(self) -> list[bytes] | None:
        if self.failed:
            return None
        decoder = self.decoder
        was_ready = decoder.ready
        try:
            message = decoder.next_message()
        except ZmtpError as error:
            self._fail(str(error))
            return None
        self._count_bytes()
        if decoder.reply:
            self.write(bytes(decoder.reply))
            decoder.reply.clear()
        if decoder.ready and not was_ready:
            self._connection.ready(self)
        if message is None and self._paused and self._transport is not None:
            self._paused = False
            self._transport.resume_reading()
        return message

    def _fail(self, reason: str) -> None:
        self.failed = True
        self._connection.failed(reason)
        self.abort()

    def write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)
            if self._transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
                self._fail("it does not read")

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()
