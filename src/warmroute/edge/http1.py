"""HTTP/1.1 parsing: request heads, response heads and chunked bodies, read strictly by `_kernel/_kernel.c`."""

from __future__ import annotations

from typing import Final

from warmroute import _kernel
from warmroute._kernel import BadChunk, ChunkReader, RequestHead, ResponseHead
from warmroute.edge import errors
from warmroute.edge.errors import HttpError

__all__ = ["CHUNKED", "UNTIL_CLOSE", "BadChunk", "BrokenResponse", "ChunkReader", "RequestHead", "ResponseHead"]

CHUNKED: Final = -1
UNTIL_CLOSE: Final = -2
"""Values of a head's `length` where the head gives no number of bytes."""

_REJECTION_MESSAGES: Final = {
    1: "The request line is malformed. It must be `METHOD /path HTTP/1.1`.",
    2: "The request target must be a path that begins with `/`.",
    4: "A header line is malformed. Each one must be `Name: value` and end with CR LF.",
    6: "The `Content-Length` header must be given once and be a decimal number.",
    7: "The `Transfer-Encoding` header is given twice. Send it once.",
    10: "A request must have exactly one `Host` header.",
    11: "`Content-Length` and `Transfer-Encoding` must not be used together. Send only one of them.",
    12: "HTTP/1.0 does not allow `Transfer-Encoding`. Send `Content-Length` or use HTTP/1.1.",
    13: "The `Connection` header lists too many header names.",
}
"""By the reason that `_kernel/_kernel.c` returns."""

MAX_HEADER_FIELDS: Final = 100
"""Maximum number of header fields in a request."""


class BrokenResponse(Exception):
    """A node's response is not valid HTTP."""


def read_request_head(data: bytes, end: int) -> RequestHead:
    """Parse data[:end + 4], where data[end:end + 4] is the blank line. Raises HttpError."""
    head = _kernel.read_request_head(data, end, MAX_HEADER_FIELDS)
    if isinstance(head, int):
        raise _to_error(head)
    return head


def read_response_head(data: bytes, end: int) -> ResponseHead:
    """Parse data[:end + 4], where data[end:end + 4] is the blank line. Raises BrokenResponse."""
    head = _kernel.read_response_head(data, end)
    if isinstance(head, int):
        raise BrokenResponse("malformed head")
    return head


def _to_error(reason: int) -> HttpError:
    """Return the error for a head that the kernel rejected."""
    match reason:
        case 3:
            return errors.unsupported_http_version()
        case 5:
            return errors.too_many_headers(MAX_HEADER_FIELDS)
        case 8:
            return errors.unsupported_transfer_encoding()
        case 9:
            return errors.expectation_failed()
    return errors.bad_request(_REJECTION_MESSAGES[reason])
