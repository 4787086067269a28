"""Request and response heads, read strictly: bytes in, values out, no I/O.

The rule: a head is taken only if every byte of it is covered by the grammar of RFC 9112, without its obsolete parts.
Whatever two parsers might read in two ways (bare CR or LF, folded lines, a space before a colon, two lengths, a length
beside a coding) is refused, since that is what request smuggling is made of.
"""

from __future__ import annotations

import re
from typing import Final

from warmroute.edge import errors
from warmroute.edge.errors import Refusal

_TOKEN: Final = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]++"
_REQUEST_LINE: Final = re.compile(rb"(" + _TOKEN + rb") (/[!-~]*+|\*) HTTP/1\.([01])\r\n")
_OTHER_VERSION: Final = re.compile(_TOKEN + rb" \S++ HTTP/[0-9.]++\r\n")
_STATUS_LINE: Final = re.compile(rb"HTTP/1\.([01]) ([1-5][0-9][0-9])(?: [\t\x20-\x7e\x80-\xff]*+)?\r\n")
_FIELD: Final = re.compile(rb"^((" + _TOKEN + rb"):[ \t]*+([\t\x20-\x7e\x80-\xff]*+)\r\n)", re.MULTILINE)
_LENGTH: Final = re.compile(rb"[0-9]{1,18}")
_REQUEST_ID: Final = re.compile(rb"[!-~]{1,200}")

# What the router reads itself. Names that are dropped belong to one connection (RFC 9110, 7.6.1) or are set anew.
_HOST, _LENGTH_FIELD, _CODING, _CONNECTION, _EXPECT, _AUTH, _ID, _FORWARDED, _TYPE, _DROP, _RETRY = range(1, 12)
_REQUEST_FIELDS: Final = {
    b"host": _HOST,
    b"content-length": _LENGTH_FIELD,
    b"transfer-encoding": _CODING,
    b"connection": _CONNECTION,
    b"expect": _EXPECT,
    b"authorization": _AUTH,
    b"x-request-id": _ID,
    b"x-forwarded-for": _FORWARDED,
    b"content-type": _TYPE,
    b"keep-alive": _DROP,
    b"proxy-connection": _DROP,
    b"proxy-authorization": _DROP,
    b"te": _DROP,
    b"trailer": _DROP,
    b"upgrade": _DROP,
}
_RESPONSE_FIELDS: Final = {
    b"content-length": _LENGTH_FIELD,
    b"transfer-encoding": _CODING,
    b"connection": _CONNECTION,
    b"content-type": _TYPE,
    b"retry-after": _RETRY,
    b"x-request-id": _DROP,
    b"keep-alive": _DROP,
    b"proxy-connection": _DROP,
    b"proxy-authenticate": _DROP,
    b"te": _DROP,
    b"trailer": _DROP,
    b"upgrade": _DROP,
}


class RequestHead:
    """A client's request head: what the router reads of it, and the lines that pass on as they are."""

    __slots__ = (
        "authorization",
        "chunked",
        "content_type",
        "expects_continue",
        "fields",
        "forwarded_for",
        "keep_alive",
        "length",
        "method",
        "minor",
        "passing",
        "request_id",
        "target",
    )

    method: bytes
    target: bytes
    minor: int
    length: int
    """Bytes of the body; 0 without one, -1 where it is chunked."""
    chunked: bool
    keep_alive: bool
    expects_continue: bool
    authorization: bytes
    request_id: bytes
    forwarded_for: bytes
    content_type: bytes
    passing: list[bytes]
    """Whole header lines that go to the node untouched."""
    fields: list[tuple[bytes, bytes, bytes]]
    """Every header field: line, name, value."""

    def get(self, name: bytes) -> bytes:
        """The first value of a field (name in lower case), or nothing."""
        for _line, key, value in self.fields:
            if key.lower() == name:
                return value.rstrip()
        return b""


def read_request_head(data: bytes, end: int, max_fields: int) -> RequestHead:
    """Reads data[:end + 4], where data[end:end + 4] is the blank line. Raises Refusal."""
    line = _REQUEST_LINE.match(data, 0, end + 2)
    if line is None:
        raise _why_no_request_line(data, end)
    start = line.end()
    fields = _FIELD.findall(data, start, end + 2)
    if len(fields) != data.count(b"\n", start, end + 2):
        raise errors.bad_request("A header field is malformed.")
    if len(fields) > max_fields:
        raise errors.too_many_headers(max_fields)
    head = RequestHead()
    head.method, head.target, minor = line.groups()
    head.minor = 1 if minor == b"1" else 0
    head.fields = fields
    head.passing = passing = []
    head.chunked = head.expects_continue = False
    head.keep_alive = head.minor == 1
    head.authorization = head.request_id = head.forwarded_for = head.content_type = b""
    length = -1
    hosts = 0
    dropped: list[bytes] | None = None
    for field in fields:
        kind = _REQUEST_FIELDS.get(field[1].lower())
        if kind is None:
            passing.append(field[0])
        elif kind == _LENGTH_FIELD:
            value = field[2].rstrip()
            if length >= 0 or _LENGTH.fullmatch(value) is None:
                raise errors.bad_request("Content-Length is given twice or is not a number.")
            length = int(value)
        elif kind == _HOST:
            hosts += 1
        elif kind == _TYPE:
            head.content_type = field[2]
            passing.append(field[0])
        elif kind == _AUTH:
            head.authorization = field[2].rstrip()
        elif kind == _CONNECTION:
            dropped = _read_connection(head, field[2], dropped)
        elif kind == _ID:
            value = field[2].rstrip()
            if _REQUEST_ID.fullmatch(value):
                head.request_id = value
        elif kind == _FORWARDED:
            value = field[2].rstrip()
            head.forwarded_for = head.forwarded_for + b", " + value if head.forwarded_for else value
        elif kind == _CODING:
            if head.chunked:
                raise errors.bad_request("Transfer-Encoding is given twice.")
            if field[2].rstrip().lower() != b"chunked":
                raise errors.unsupported_coding()
            head.chunked = True
        elif kind == _EXPECT:
            if field[2].rstrip().lower() != b"100-continue":
                raise Refusal(417, "The only expectation met here is 100-continue.", code="expectation_failed")
            head.expects_continue = head.minor == 1
    if hosts != 1 and (hosts or head.minor):
        raise errors.bad_request("A request must have exactly one Host field.")
    if head.chunked:
        if length >= 0:
            raise errors.bad_request("Content-Length and Transfer-Encoding exclude each other.")
        if not head.minor:
            raise errors.bad_request("HTTP/1.0 has no Transfer-Encoding.")
        head.length = -1
    else:
        head.length = length if length >= 0 else 0
    if dropped:
        head.passing = [line for line in passing if line.partition(b":")[0].lower() not in dropped]
    return head


def _read_connection(head: RequestHead, value: bytes, dropped: list[bytes] | None) -> list[bytes] | None:
    for option in value.lower().split(b","):
        option = option.strip(b" \t")
        if option == b"close":
            head.keep_alive = False
        elif option == b"keep-alive":
            if not head.minor:
                head.keep_alive = True
        elif option:
            dropped = [*(dropped or ()), option]
    return dropped


def _why_no_request_line(data: bytes, end: int) -> Refusal:
    if _OTHER_VERSION.match(data, 0, end + 2):
        if data.partition(b"\r\n")[0].rpartition(b" ")[2] in (b"HTTP/1.1", b"HTTP/1.0"):
            return errors.bad_request("The request's target must be a path that begins with /.")
        return errors.unsupported_version()
    return errors.bad_request("The request line is malformed.")


class ResponseHead:
    """A node's response head."""

    __slots__ = ("content_type", "keep_alive", "length", "passing", "retry_after", "status", "status_line")

    status: int
    status_line: bytes
    length: int
    """Bytes of the body; CHUNKED or UNTIL_CLOSE where it does not say."""
    keep_alive: bool
    content_type: bytes
    retry_after: bytes
    passing: list[bytes]


CHUNKED: Final = -1
UNTIL_CLOSE: Final = -2


class BrokenResponse(Exception):
    """A node's answer is not HTTP."""


def read_response_head(data: bytes, end: int) -> ResponseHead:
    """Reads data[:end + 4], where data[end:end + 4] is the blank line. Raises BrokenResponse."""
    line = _STATUS_LINE.match(data, 0, end + 2)
    if line is None:
        raise BrokenResponse("malformed status line")
    start = line.end()
    fields = _FIELD.findall(data, start, end + 2)
    if len(fields) != data.count(b"\n", start, end + 2):
        raise BrokenResponse("malformed header field")
    head = ResponseHead()
    minor, status = line.groups()
    head.status = int(status)
    head.status_line = b"HTTP/1.1" + data[8:start]
    head.keep_alive = minor == b"1"
    head.content_type = head.retry_after = b""
    head.passing = passing = []
    length = UNTIL_CLOSE
    dropped: list[bytes] = []
    for field in fields:
        kind = _RESPONSE_FIELDS.get(field[1].lower())
        if kind is None:
            passing.append(field[0])
        elif kind == _TYPE:
            head.content_type = field[2]
            passing.append(field[0])
        elif kind == _LENGTH_FIELD:
            value = field[2].rstrip()
            if length != UNTIL_CLOSE or _LENGTH.fullmatch(value) is None:
                raise BrokenResponse("malformed or repeated length")
            length = int(value)
        elif kind == _CODING:
            if length != UNTIL_CLOSE or field[2].rstrip().lower() != b"chunked":
                raise BrokenResponse("unknown or repeated transfer coding")
            length = CHUNKED
        elif kind == _CONNECTION:
            for option in field[2].lower().split(b","):
                option = option.strip(b" \t")
                if option == b"close":
                    head.keep_alive = False
                elif option == b"keep-alive":
                    head.keep_alive = True
                else:
                    dropped.append(option)
        elif kind == _RETRY:
            head.retry_after = field[2].rstrip()
            passing.append(field[0])
    head.length = 0 if head.status in (204, 304) or head.status < 200 else length
    if head.length == UNTIL_CLOSE:
        head.keep_alive = False
    if dropped:
        head.passing = [line for line in passing if line.partition(b":")[0].lower() not in dropped]
    return head
