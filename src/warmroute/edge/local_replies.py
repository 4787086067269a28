"""Renders the responses that the router sends itself, without a node."""

from __future__ import annotations

from typing import Final

from warmroute.edge.errors import REASON_PHRASES, HttpError

CLOSE_LINE: Final = b"Connection: close\r\n"
Headers = tuple[tuple[str, str], ...]


def render_final_error(error: HttpError, request_id: bytes, anthropic: bool) -> bytes:
    """Return the last response on its connection."""
    headers = with_request_id(error, request_id)
    return render_reply(error.status, error.body(anthropic), headers, "application/json", CLOSE_LINE)


def with_request_id(error: HttpError, request_id: bytes) -> Headers:
    return (*error.headers, ("X-Request-Id", request_id.decode("ascii"))) if request_id else error.headers


def render_reply(
    status: int,
    body: bytes,
    headers: Headers,
    content_type: str,
    connection_line: bytes,
    head_only: bool = False,
) -> bytes:
    """Return the response. `head_only`: the request's method is HEAD."""
    lines = [render_start(status, content_type), b"Content-Length: %d\r\n" % len(body)]
    lines += [f"{name}: {value}\r\n".encode() for name, value in headers]
    lines += (connection_line, b"\r\n")
    if not head_only:
        lines.append(body)
    return b"".join(lines)


def render_start(status: int, content_type: str) -> bytes:
    """Return the status line and the content type."""
    phrase = REASON_PHRASES.get(status, b"Status")
    return b"HTTP/1.1 %d %b\r\nContent-Type: %b\r\n" % (status, phrase, content_type.encode())
