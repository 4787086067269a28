"""Request and response heads, read strictly (`_kernel/_http.c` has the rules), with the refusals put in words."""

from __future__ import annotations

from typing import Final

from warmroute._kernel import _http
from warmroute._kernel._http import RequestHead, ResponseHead
from warmroute.edge import errors
from warmroute.edge.errors import Refusal

__all__ = ["CHUNKED", "UNTIL_CLOSE", "BrokenResponse", "RequestHead", "ResponseHead"]

CHUNKED: Final = -1
UNTIL_CLOSE: Final = -2

_REASONS: Final = {
    1: "The request line is malformed.",
    2: "The request's target must be a path that begins with /.",
    4: "A header field is malformed.",
    6: "Content-Length is given twice or is not a number.",
    7: "Transfer-Encoding is given twice.",
    10: "A request must have exactly one Host field.",
    11: "Content-Length and Transfer-Encoding exclude each other.",
    12: "HTTP/1.0 has no Transfer-Encoding.",
    13: "Connection names too many fields.",
}


class BrokenResponse(Exception):
    """A node's answer is not HTTP."""


def read_request_head(data: bytes, end: int, max_fields: int) -> RequestHead:
    """Reads data[:end + 4], where data[end:end + 4] is the blank line. Raises Refusal."""
    head = _http.read_request_head(data, end, max_fields)
    if isinstance(head, int):
        raise _refusal(head, max_fields)
    return head


def read_response_head(data: bytes, end: int) -> ResponseHead:
    """Reads data[:end + 4], where data[end:end + 4] is the blank line. Raises BrokenResponse."""
    head = _http.read_response_head(data, end)
    if isinstance(head, int):
        raise BrokenResponse("malformed head")
    return head


def _refusal(reason: int, max_fields: int) -> Refusal:
    """Why the kernel does not take a request's head, in words."""
    match reason:
        case 3:
            return errors.unsupported_version()
        case 5:
            return errors.too_many_headers(max_fields)
        case 8:
            return errors.unsupported_coding()
        case 9:
            return errors.expectation_failed()
    return errors.bad_request(_REASONS[reason])
