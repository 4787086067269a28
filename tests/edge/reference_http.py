"""The reference for the HTTP parsers of `_kernel/http_head.c`, in Python. Property tests compare the two.

A head is accepted only if the grammar of RFC 9112, without its obsolete parts, covers every byte. The reason of a
rejection is the first error from left to right.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Final

from warmroute._kernel import (
    AMBIGUOUS_FIELD_NAME,
    BAD_CONTENT_LENGTH,
    BAD_HOST,
    BAD_TARGET,
    CHUNKED,
    FIELD_NAMED_IN_CONNECTION,
    LENGTH_AND_TRANSFER_ENCODING,
    MALFORMED_FIELD,
    MALFORMED_START_LINE,
    REPEATED_FIELD,
    REPEATED_TRANSFER_ENCODING,
    TOO_MANY_CONNECTION_OPTIONS,
    TOO_MANY_FIELDS,
    TRANSFER_ENCODING_IN_HTTP_1_0,
    UNSUPPORTED_CONTENT_ENCODING,
    UNSUPPORTED_EXPECTATION,
    UNSUPPORTED_TRANSFER_ENCODING,
    UNSUPPORTED_VERSION,
    UNTIL_CLOSE,
)

MAX_DROPPED: Final = 16
MAX_LINE_BYTES: Final = 4096
MAX_TRAILERS: Final = 64
MAX_FILLED_BYTES: Final = 65_536

TOKEN: Final = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]"
TEXT: Final = rb"[\t\x20-\x7e\x80-\xff]"
_REQUEST_LINE: Final = re.compile(rb"(" + TOKEN + rb"+) ([!-~]+) HTTP/([0-9]\.[0-9])\r\n")
_STATUS_LINE: Final = re.compile(rb"HTTP/1\.([01]) ([1-5][0-9][0-9])(?: " + TEXT + rb"*)?\r\n")
_FIELD: Final = re.compile(rb"(" + TOKEN + rb"+):[ \t]*(" + TEXT + rb"*)\r\n")
_LENGTH: Final = re.compile(rb"[0-9]{1,18}")
_REQUEST_ID: Final = re.compile(rb"[!-~]{1,200}")

# Hop-by-hop headers (RFC 9110, 7.6.1), and headers that the router sets itself.
_DROPPED_FROM_REQUESTS: Final = {
    b"keep-alive", b"proxy-connection", b"proxy-authorization", b"te", b"trailer", b"upgrade", b"x-data-parallel-rank",
}  # fmt: skip
_ONCE: Final = {b"content-type", b"authorization", b"x-api-key", b"x-vllm-priority"}
_ROUTING_HEADERS: Final = {b"x-priority", b"x-queue", b"x-deadline-ttft-ms", b"x-deadline-ms", b"x-vllm-priority"}
_READ_IN_REQUESTS: Final = _ONCE | _ROUTING_HEADERS | {
    b"host", b"content-length", b"transfer-encoding", b"connection", b"expect", b"x-request-id", b"x-forwarded-for",
    b"content-encoding",
}  # fmt: skip
"""A request must not name one of these in Connection."""
_DROPPED_FROM_RESPONSES: Final = {
    b"x-request-id", b"keep-alive", b"proxy-connection", b"proxy-authenticate", b"te", b"trailer", b"upgrade",
}  # fmt: skip


class Rejected(Exception):
    """The head is rejected. `reason` is one of the kernel's constants."""

    def __init__(self, reason: int) -> None:
        self.reason = reason


@dataclass
class RequestHead:
    method: bytes
    target: bytes
    minor_version: int
    length: int = 0
    chunked: bool = False
    keep_alive: bool = True
    expects_continue: bool = False
    authorization: bytes = b""
    api_key: bytes = b""
    request_id: bytes = b""
    forwarded_for: bytes = b""
    content_type: bytes = b""
    has_routing_headers: bool = False
    forwarded_fields: bytes = b""
    fields: list[tuple[bytes, bytes]] = field(default_factory=list)

    def get(self, name: bytes) -> bytes:
        return next((value for key, value in self.fields if key.lower() == name.lower()), b"")


@dataclass
class ResponseHead:
    status: int
    status_line: bytes
    length: int = UNTIL_CLOSE
    keep_alive: bool = True
    content_type: bytes = b""
    retry_after: bytes = b""
    encoded: bool = False
    forwarded_fields: bytes = b""


@dataclass
class _Connection:
    """The options in the Connection headers of a head."""

    close: bool = False
    keep: bool = False
    names: list[bytes] = field(default_factory=list)

    def read(self, value: bytes) -> None:
        for option in value.lower().split(b","):
            option = option.strip(b" \t")
            if option == b"close":
                self.close = True
            elif option == b"keep-alive":
                self.keep = True
            elif option:
                if len(self.names) == MAX_DROPPED:
                    raise Rejected(TOO_MANY_CONNECTION_OPTIONS)
                self.names.append(option)

    def left_of(self, lines: list[tuple[bytes, bytes]]) -> bytes:
        return b"".join(line for name, line in lines if name not in self.names)


def _fields(data: bytes, at: int, end: int) -> list[tuple[bytes, bytes, bytes] | None]:
    """Return (line, lower-case name, value) of each header. The last one is None if it is malformed."""
    found: list[tuple[bytes, bytes, bytes] | None] = []
    while at < end:
        match = _FIELD.match(data, at, end)
        if match is None:
            found.append(None)
            break
        found.append((match[0], match[1].lower(), match[2].rstrip(b" \t")))
        at = match.end()
    return found


def _length(value: bytes) -> int:
    if _LENGTH.fullmatch(value) is None:
        raise Rejected(BAD_CONTENT_LENGTH)
    return int(value)


def read_request_head(data: bytes, end: int, max_fields: int) -> RequestHead | int:
    try:
        return _read_request_head(data, end, max_fields)
    except Rejected as rejected:
        return rejected.reason


def _read_request_head(data: bytes, end: int, max_fields: int) -> RequestHead:
    line = _REQUEST_LINE.match(data, 0, end + 2)
    if line is None:
        raise Rejected(MALFORMED_START_LINE)
    if line[3] not in (b"1.0", b"1.1"):
        raise Rejected(UNSUPPORTED_VERSION)
    if b"#" in line[2] or (not line[2].startswith(b"/") and line[2] != b"*"):
        raise Rejected(BAD_TARGET)
    head = RequestHead(line[1], line[2], int(line[3][2:]))
    length: int | None = None
    hosts = 0
    connection = _Connection()
    forwarded_fields: list[tuple[bytes, bytes]] = []
    for number, each in enumerate(_fields(data, line.end(), end + 2), 1):
        if each is None:
            raise Rejected(MALFORMED_FIELD)
        if number > max_fields:
            raise Rejected(TOO_MANY_FIELDS)
        text, name, value = each
        if name in _ONCE and any(name == before for before, _ in head.fields):
            raise Rejected(REPEATED_FIELD)
        head.fields.append((name, value))
        if name == b"host":
            hosts += 1
        elif name == b"content-length":
            if length is not None:
                raise Rejected(BAD_CONTENT_LENGTH)
            length = _length(value)
        elif name == b"transfer-encoding":
            if head.chunked:
                raise Rejected(REPEATED_TRANSFER_ENCODING)
            if value.lower() != b"chunked":
                raise Rejected(UNSUPPORTED_TRANSFER_ENCODING)
            head.chunked = True
        elif name == b"connection":
            connection.read(value)
        elif name == b"expect":
            if value.lower() != b"100-continue":
                raise Rejected(UNSUPPORTED_EXPECTATION)
            head.expects_continue = head.minor_version == 1
        elif name == b"authorization":
            head.authorization = value
        elif name == b"x-api-key":
            head.api_key = value
        elif name == b"x-request-id":
            if _REQUEST_ID.fullmatch(value):
                head.request_id = value
        elif name == b"x-forwarded-for":
            head.forwarded_for = head.forwarded_for + b", " + value if head.forwarded_for else value
        elif name == b"content-encoding":
            if value.lower() != b"identity":
                raise Rejected(UNSUPPORTED_CONTENT_ENCODING)
        elif name not in _DROPPED_FROM_REQUESTS:
            if name == b"content-type":
                head.content_type = value
            if name in _ROUTING_HEADERS:
                head.has_routing_headers = True
            if b"_" in name and name.replace(b"_", b"-") in _READ_IN_REQUESTS | _DROPPED_FROM_REQUESTS:
                raise Rejected(AMBIGUOUS_FIELD_NAME)
            forwarded_fields.append((name, text))
    if hosts != 1 and (hosts or head.minor_version):
        raise Rejected(BAD_HOST)
    if head.chunked and length is not None:
        raise Rejected(LENGTH_AND_TRANSFER_ENCODING)
    if head.chunked and not head.minor_version:
        raise Rejected(TRANSFER_ENCODING_IN_HTTP_1_0)
    if any(name in _READ_IN_REQUESTS for name in connection.names):
        raise Rejected(FIELD_NAMED_IN_CONNECTION)
    head.length = CHUNKED if head.chunked else length or 0
    head.keep_alive = not connection.close and (head.minor_version == 1 or connection.keep)
    head.forwarded_fields = connection.left_of(forwarded_fields)
    return head


def read_response_head(data: bytes, end: int) -> ResponseHead | int:
    try:
        return _read_response_head(data, end)
    except Rejected as rejected:
        return rejected.reason


def _read_response_head(data: bytes, end: int) -> ResponseHead:
    line = _STATUS_LINE.match(data, 0, end + 2)
    if line is None:
        raise Rejected(MALFORMED_START_LINE)
    head = ResponseHead(int(line[2]), b"HTTP/1.1" + line[0][8:])
    connection = _Connection()
    forwarded_fields: list[tuple[bytes, bytes]] = []
    for each in _fields(data, line.end(), end + 2):
        if each is None:
            raise Rejected(MALFORMED_FIELD)
        text, name, value = each
        if name == b"content-length":
            if head.length != UNTIL_CLOSE:
                raise Rejected(BAD_CONTENT_LENGTH)
            head.length = _length(value)
        elif name == b"transfer-encoding":
            if head.length != UNTIL_CLOSE:
                raise Rejected(REPEATED_TRANSFER_ENCODING)
            if value.lower() != b"chunked":
                raise Rejected(UNSUPPORTED_TRANSFER_ENCODING)
            head.length = CHUNKED
        elif name == b"connection":
            connection.read(value)
        elif name not in _DROPPED_FROM_RESPONSES:
            if name == b"content-type":
                head.content_type = value
            elif name == b"retry-after":
                head.retry_after = value
            elif name == b"content-encoding":
                head.encoded |= value.lower() != b"identity"
            forwarded_fields.append((name, text))
    if head.status in (204, 304) or head.status < 200:
        head.length = 0
    # HTTP/1.0 needs keep-alive to keep a connection open; close overrides keep-alive (RFC 9112, 9.3).
    head.keep_alive = not connection.close and (line[1] == b"1" or connection.keep) and head.length != UNTIL_CLOSE
    head.forwarded_fields = connection.left_of(forwarded_fields)
    return head


# Chunked bodies.

MAX_SIZE_DIGITS: Final = 15
_HEX: Final = rb"[0-9A-Fa-f]"
_EXTENSION: Final = rb"[ \t]*;" + TEXT + rb"*"
_SIZE_LINE: Final = re.compile(rb"(" + _HEX + rb"{1,15})(" + _EXTENSION + rb")?\r\n")
_SIZE_SO_FAR: Final = re.compile(
    _HEX + rb"{0,15}|" + _HEX + rb"{1,15}[ \t]+|" + _HEX + rb"{1,15}(?:" + _EXTENSION + rb")?\r?"
)
_TRAILER: Final = re.compile(rb"\r\n|" + TOKEN + rb"+:" + TEXT + rb"*\r\n")
_TRAILER_SO_FAR: Final = re.compile(rb"\r?|" + TOKEN + rb"+|" + TOKEN + rb"+:" + TEXT + rb"*\r?")


class BadChunk(Exception):
    """The chunked encoding is malformed."""


class ChunkReader:
    """Follows the chunks in a stream of bytes. Raises BadChunk at the first wrong byte."""

    def __init__(self) -> None:
        self.left = 0
        self._line = b""
        self._state = "size"
        self._trailers = 0

    def feed(self, data: bytes, pieces: list[bytes] | None = None) -> int:
        """Read all of the data or none of it: BadChunk leaves the state unchanged."""
        before = dict(self.__dict__)
        try:
            return self._feed(data, pieces)
        except BadChunk:
            self.__dict__.update(before)
            raise

    def _feed(self, data: bytes, pieces: list[bytes] | None) -> int:
        at = 0
        while at < len(data):
            if self._state == "data":
                piece = data[at : at + self.left]
                if pieces is not None:
                    pieces.append(piece)
                at += len(piece)
                self.left -= len(piece)
                if not self.left:
                    self._state = "after data"
            elif self._state == "ended":
                raise BadChunk
            else:
                newline = data.find(b"\n", at)
                stop = newline + 1 if newline >= 0 else len(data)
                begins = not self._line
                self._line += data[at:stop]
                at = stop
                if self._take_line(begins):
                    return at
        return -1

    def _take_line(self, begins: bool) -> bool:
        line, whole = self._line, self._line.endswith(b"\n")
        if self._state == "after data":
            if not b"\r\n".startswith(line):
                raise BadChunk
            if whole:
                self._state, self._line = "size", b""
            return False
        length = len(line.rstrip(b"\r\n"))
        if self._state == "size":
            if (_SIZE_LINE if whole else _SIZE_SO_FAR).fullmatch(line) is None or length - 1 > MAX_LINE_BYTES:
                raise BadChunk
            if whole:
                match = _SIZE_LINE.fullmatch(line)
                assert match is not None
                self.left = int(match[1], 16)
                self._state, self._line = "data" if self.left else "trailer", b""
            return False
        if begins and not line.startswith(b"\r"):
            self._trailers += 1
        if (
            (_TRAILER if whole else _TRAILER_SO_FAR).fullmatch(line) is None
            or length > MAX_LINE_BYTES
            or self._trailers > MAX_TRAILERS
        ):
            raise BadChunk
        if whole:
            self._line = b""
            if line == b"\r\n":
                self._state = "ended"
                return True
        return False

    def padding_to_chunk_end(self) -> bytes | None:
        """Return blank text that completes the current chunk, so that another may follow; None if impossible."""
        if self._state == "after data":
            return b"\r\n"[len(self._line) :]
        if self._state == "data":
            return self._filled(b"", self.left)
        if self._state != "size":
            return None
        if not self._line:
            return b""
        digits = re.match(_HEX + rb"+", self._line)
        assert digits is not None
        size = int(digits[0], 16)
        if digits[0] == self._line:
            # only zeros so far would end the body: one more digit makes it a chunk of one byte
            if not size and len(digits[0]) == MAX_SIZE_DIGITS:
                return None
            return self._filled(b"\r\n", size) if size else self._filled(b"1\r\n", 1)
        if not size:
            return None
        if len(self._line) > MAX_LINE_BYTES and self._line[-1:] in b" \t" and b";" not in self._line:
            return None  # no `;` may follow
        if self._line.endswith(b"\r"):
            return self._filled(b"\n", size)
        return self._filled(b"\r\n" if b";" in self._line else b";\r\n", size)

    @staticmethod
    def _filled(line_end: bytes, size: int) -> bytes | None:
        return None if size > MAX_FILLED_BYTES else line_end + b"\n" * size + b"\r\n"
