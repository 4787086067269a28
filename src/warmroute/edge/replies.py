"""Answers of the router's own, in bytes."""

from __future__ import annotations

from typing import Final

from warmroute.edge.errors import REASONS, Refusal

CLOSE_LINE: Final = b"Connection: close\r\n"


def render_refusal(refusal: Refusal, request_id: bytes) -> bytes:
    """The last answer on its connection."""
    return render_reply(refusal.status, refusal.body(), with_id(refusal, request_id), "application/json", CLOSE_LINE)


def with_id(refusal: Refusal, request_id: bytes) -> tuple[tuple[str, str], ...]:
    return (*refusal.headers, ("X-Request-Id", request_id.decode("ascii"))) if request_id else refusal.headers


def render_reply(
    status: int,
    body: bytes,
    headers: tuple[tuple[str, str], ...],
    content_type: str,
    connection_line: bytes,
    without_body: bool = False,
) -> bytes:
    lines = [
        b"HTTP/1.1 %d %b\r\nContent-Type: %b\r\nContent-Length: %d\r\n"
        % (status, REASONS.get(status, b"Status"), content_type.encode(), len(body))
    ]
    lines += [f"{name}: {value}\r\n".encode() for name, value in headers]
    lines += (connection_line, b"\r\n")
    if not without_body:
        lines.append(body)
    return b"".join(lines)
