"""ZMTP 3.0, the protocol of ZMQ sockets over TCP, as far as a subscriber and a requester of replays need it. No I/O.

libzmq limits the size of a frame and the number of queued messages, but not the number of frames in a message: an
endless message takes all memory. This decoder limits whole messages, and keeps no more than one of them and what was
read with it.

    greeting    64 bytes: signature, version, security mechanism (only NULL)
    READY       a command with the socket's type
    messages    frames: flags, size, body. The flag MORE marks all but the last frame of a message.
"""

from __future__ import annotations

import struct
from typing import Final

MAX_MESSAGE_BYTES: Final = 8 << 20
"""A batch of vLLM's KV events takes about 7 bytes per token: one million tokens."""
MAX_FRAMES: Final = 8
MAX_COMMAND_BYTES: Final = 4096
MAX_COMMANDS: Final = 64
"""Commands in a row, without a message and without a pause."""
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
