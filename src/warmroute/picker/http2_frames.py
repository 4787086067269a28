"""The frames of HTTP/2 (RFC 9113): their types, flags and settings, and the bytes of one."""

from __future__ import annotations

import struct
from typing import Final

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
