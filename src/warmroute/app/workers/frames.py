"""Frames between the parent and a worker, over a pair of connected Unix sockets: length, kind, payload.

parent ← worker    READY       it serves; the payload is its id in the cluster
parent ← worker    OPEN        how many connections it has received, and how many are open (two unsigned 64-bit)
parent ↔ worker    STATE       an update of the cluster; the parent passes it to all other workers
parent ← worker    DIRECT      a message for one process: the length of its id (two bytes), its id, the message
parent ← worker    STORE       a change of a node, to be kept: length of the name (two bytes), name, value
parent → worker    STORED      the changes of nodes that the parent or Redis has, as a MessagePack list
parent ← worker    APPLIED     the worker has applied the changes of nodes that the parent sent when it started
parent → worker    KEPT        of one STORE: 1 if the change survives a restart of the parent, else 0
parent → worker    LINK        the state of the link to Redis (core/cluster/transport.py LinkStatus) as MessagePack
parent → worker    GONE        a worker has ended; the payload is its id in the cluster
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from typing import Final, cast

from warmroute.core.cluster.messages import MAX_MESSAGE_BYTES

READY: Final = b"R"
OPEN: Final = b"O"
STATE: Final = b"S"
GONE: Final = b"G"
DIRECT: Final = b"D"
STORE: Final = b"W"
STORED: Final = b"V"
APPLIED: Final = b"A"
KEPT: Final = b"K"
LINK: Final = b"L"

MAX_UNSENT_BYTES: Final = 4 << 20
"""What may wait for a process that does not read. Updates beyond it are lost."""
COUNTS: Final = struct.Struct("<QQ")
_HEADER: Final = struct.Struct("<Ic")
_NAME: Final = struct.Struct("<H")


class FrameLink(asyncio.Protocol):
    def __init__(self, on_frame: Callable[[bytes, bytes], object], on_closed: Callable[[], object]) -> None:
        """`on_frame` gets the kind and the payload."""
        self._on_frame = on_frame
        self._on_closed = on_closed
        self._buffer = bytearray()
        self._transport: asyncio.Transport | None = None
        self.lost = 0
        """Frames that were not sent because the other side does not read."""
        self.stored = 0
        """Changes of nodes that were sent to the parent."""

    @property
    def is_open(self) -> bool:
        return self._transport is not None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._on_closed()

    def send_frame(self, kind: bytes, payload: bytes = b"") -> bool:
        """Return False if the frame was lost: the other side does not read, or has ended."""
        transport = self._transport
        if transport is None or transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            self.lost += 1
            return False
        transport.write(_HEADER.pack(len(payload), kind) + payload)
        return True

    # The transport of a worker (core/cluster/transport.py).

    def publish(self, message: bytes) -> None:
        """Send an update of the cluster."""
        self.send_frame(STATE, message)

    def send(self, to: str, message: bytes) -> None:
        """Send a message to one process of the cluster."""
        self.send_frame(DIRECT, pack_named(to, message))

    def store(self, name: str, value: bytes) -> None:
        """Let the parent store a change of a node."""
        self.stored += 1
        self.send_frame(STORE, pack_named(name, value))

    def data_received(self, data: bytes) -> None:
        buffer = self._buffer
        buffer += data
        at = 0
        while len(buffer) - at >= _HEADER.size:
            length, kind = _HEADER.unpack_from(buffer, at)
            if length > MAX_MESSAGE_BYTES:
                self.close()
                return
            end = at + _HEADER.size + length
            if len(buffer) < end:
                break
            self._on_frame(kind, bytes(buffer[at + _HEADER.size : end]))
            at = end
        del buffer[:at]

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()


def pack_named(name: str, value: bytes) -> bytes:
    encoded = name.encode()
    return _NAME.pack(len(encoded)) + encoded + value


def unpack_named(payload: bytes) -> tuple[str, bytes]:
    """Raises ValueError or struct.error."""
    (length,) = _NAME.unpack_from(payload)
    end = _NAME.size + length
    return payload[_NAME.size : end].decode(), payload[end:]
