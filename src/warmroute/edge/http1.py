"""HTTP/1.1: heads, chunks and content types, read strictly."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final

from warmroute import _kernel
from warmroute._kernel import CHUNKED, UNTIL_CLOSE, BadChunk, ChunkReader, RequestHead, ResponseHead
from warmroute.edge import errors
from warmroute.edge.errors import HttpError

# HTTP/1.1 heads and chunked bodies, parsed strictly by `_kernel/http_head.c` and `_kernel/http_chunks.c`.

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


# What a request's Content-Type says about its body: JSON, or a form with a boundary.
#
# The router accepts a type only if every server reads it in the same way, since a body that the engine reads as
# something else names another model there. Servers differ in the charset of JSON, in parameters given twice, and in the
# extended parameters of RFC 2231 (`boundary*`).

_TOKEN: Final = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+"
_TYPE: Final = re.compile(_TOKEN + rb"/" + _TOKEN)
_PARAMETER: Final = re.compile(rb"[ \t]*;[ \t]*(?:(" + _TOKEN + rb")=(?:(" + _TOKEN + rb')|"([\t\x20-!#-\[\]-~]*)"))?')
"""One parameter, or an empty one. Parameters are matched one by one: a pattern of all of them would try every way to
share out the blanks between two empty ones."""
_MAX_BYTES: Final = 256
"""A media type with a boundary of 70 bytes is far shorter."""
_BOUNDARY: Final = re.compile(rb"[0-9A-Za-z'()+_,\-./:=? ]{0,69}[0-9A-Za-z'()+_,\-./:=?]")
_CHARSETS: Final = (b"utf-8", b"utf8", b"us-ascii")
_FORM: Final = b"multipart/form-data"


@lru_cache(maxsize=128)
def form_boundary(content_type: bytes) -> bytes | None:
    """Return the boundary of a form, None for JSON. Raises HttpError for anything else.

    A body without a type, or of a type that is no form, is JSON: the engine refuses it if it disagrees.
    """
    if not content_type:
        return None
    found = _TYPE.match(content_type)
    if found is None or len(content_type) > _MAX_BYTES:
        raise _malformed()
    media_type = found[0].lower()
    if media_type == b"application/x-www-form-urlencoded" or (
        media_type.startswith(b"multipart/") and media_type != _FORM
    ):
        raise errors.unsupported_media_type("The body must be JSON, or a form of type `multipart/form-data`.")
    parameters = _read_parameters(content_type, found.end())
    if parameters.get(b"charset", b"utf-8").lower() not in _CHARSETS:
        raise errors.unsupported_media_type("The body must be UTF-8.")
    if media_type != _FORM:
        return None
    boundary = parameters.get(b"boundary", b"")
    if _BOUNDARY.fullmatch(boundary) is None:
        raise errors.unsupported_media_type("The `Content-Type` header has no valid `boundary`.")
    return boundary


def _read_parameters(content_type: bytes, at: int) -> dict[bytes, bytes]:
    parameters: dict[bytes, bytes] = {}
    while (found := _PARAMETER.match(content_type, at)) is not None:
        at = found.end()
        name, plain, quoted = found.groups()
        if name is None:
            continue
        name = name.lower()
        if name in parameters or b"*" in name:
            raise errors.unsupported_media_type("A parameter of the `Content-Type` header is given twice or extended.")
        parameters[name] = plain or quoted
    if content_type[at:].strip(b" \t"):
        raise _malformed()
    return parameters


def _malformed() -> errors.HttpError:
    return errors.unsupported_media_type("The `Content-Type` header is malformed.")
