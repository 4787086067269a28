"""HTTP/1.1 heads and chunked bodies, parsed strictly by `_kernel/http_head.c` and `_kernel/http_chunks.c`."""

from __future__ import annotations

from typing import Final

from warmroute import _kernel
from warmroute._kernel import CHUNKED, UNTIL_CLOSE, BadChunk, ChunkReader, RequestHead, ResponseHead
from warmroute.edge.errors import HttpError

__all__ = ["CHUNKED", "UNTIL_CLOSE", "BadChunk", "BrokenResponse", "ChunkReader", "RequestHead", "ResponseHead"]

MAX_HEADER_FIELDS: Final = 100
"""Maximum number of header fields in a request."""

_REJECTIONS: Final = {
    _kernel.MALFORMED_START_LINE: (
        400,
        "bad_request",
        "The request line is malformed. It must be `METHOD /path HTTP/1.1`.",
    ),
    _kernel.BAD_TARGET: (
        400,
        "bad_request",
        "The request target must be a path that begins with `/`, without a fragment (`#`).",
    ),
    _kernel.UNSUPPORTED_VERSION: (
        505,
        "unsupported_http_version",
        "The router supports only HTTP/1.1 and HTTP/1.0. Use one of these versions.",
    ),
    _kernel.MALFORMED_FIELD: (
        400,
        "bad_request",
        "A header line is malformed. Each one must be `Name: value` and end with CR LF.",
    ),
    _kernel.TOO_MANY_FIELDS: (
        431,
        "too_many_headers",
        f"The request has more headers than the limit of {MAX_HEADER_FIELDS:,}. Send fewer headers.",
    ),
    _kernel.BAD_CONTENT_LENGTH: (
        400,
        "bad_request",
        "The `Content-Length` header must be given once and be a decimal number.",
    ),
    _kernel.REPEATED_TRANSFER_ENCODING: (
        400,
        "bad_request",
        "The `Transfer-Encoding` header is given twice. Send it once.",
    ),
    _kernel.UNSUPPORTED_TRANSFER_ENCODING: (
        501,
        "unsupported_transfer_encoding",
        "The router supports only `Transfer-Encoding: chunked`. Send that value, or a `Content-Length` instead.",
    ),
    _kernel.UNSUPPORTED_EXPECTATION: (
        417,
        "expectation_failed",
        "The router supports only `Expect: 100-continue`. Send that value, or no `Expect` header.",
    ),
    _kernel.BAD_HOST: (400, "bad_request", "A request must have exactly one `Host` header."),
    _kernel.LENGTH_AND_TRANSFER_ENCODING: (
        400,
        "bad_request",
        "`Content-Length` and `Transfer-Encoding` must not be used together. Send only one of them.",
    ),
    _kernel.TRANSFER_ENCODING_IN_HTTP_1_0: (
        400,
        "bad_request",
        "HTTP/1.0 does not allow `Transfer-Encoding`. Send `Content-Length` or use HTTP/1.1.",
    ),
    _kernel.TOO_MANY_CONNECTION_OPTIONS: (400, "bad_request", "The `Connection` header lists too many header names."),
    _kernel.REPEATED_FIELD: (
        400,
        "bad_request",
        "The `Authorization`, `Content-Type`, `X-Api-Key` or `X-Vllm-Priority` header is given twice. Send it once.",
    ),
    _kernel.FIELD_NAMED_IN_CONNECTION: (
        400,
        "bad_request",
        "The `Connection` header names a header that is not for this connection only, such as `Content-Type`.",
    ),
    _kernel.AMBIGUOUS_FIELD_NAME: (
        400,
        "bad_request",
        "A header name has `_` where a name that the router reads has `-`. Send `-`.",
    ),
    _kernel.UNSUPPORTED_CONTENT_ENCODING: (
        415,
        "unsupported_content_encoding",
        "The router does not decompress request bodies. Send the body without a `Content-Encoding`.",
    ),
}
"""Status, code and message by the reason for which the kernel rejects a head."""


class BrokenResponse(Exception):
    """A node's response is not valid HTTP."""


def read_request_head(data: bytes, end: int) -> RequestHead:
    """Parse data[:end + 4], where data[end:end + 4] is the blank line. Raises HttpError."""
    head = _kernel.read_request_head(data, end, MAX_HEADER_FIELDS)
    if isinstance(head, int):
        raise head_rejection(head)
    return head


def head_rejection(reason: int) -> HttpError:
    """Return the error for a request's head that the kernel rejects."""
    status, code, message = _REJECTIONS[reason]
    return HttpError(status, message, code=code, close=True)
