"""A small async HTTP/1.1 client with one connection for each request. It follows no redirects and uses no threads.

    status, body = await request("POST", url, body, headers, timeout_s=10.0, limit_bytes=1 << 20)

    async with open_response("POST", url, body) as response:
        async for piece in response.pieces():
            ...

Requests to nodes use the edge's connection pools instead (edge/connection_pool.py).
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Final
from urllib.parse import urlsplit

from warmroute._kernel import BadChunk, ChunkReader, ResponseHead, read_response_head

_CHUNKED: Final = -1
_READ_BYTES: Final = 65_536
_JSON: Final = "application/json"
MAX_INFORMATIONAL: Final = 64
"""Maximum number of 1xx responses before a response."""
Headers = Iterable[tuple[str, str]]


class BrokenResponse(ConnectionError):
    """The response is not valid HTTP, ended too early, or is too large."""


class Response:
    """A response whose head has arrived."""

    def __init__(self, head: ResponseHead, reader: asyncio.StreamReader) -> None:
        self.head = head
        self.status = head.status
        self._reader = reader

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield the body as it arrives. Raises BrokenResponse."""
        if self.head.length == _CHUNKED:
            frames, payload, end = ChunkReader(), list[bytes](), -1
            while end < 0:
                data = await self._reader.read(_READ_BYTES)
                if not data:
                    raise BrokenResponse("the connection closed in the middle of the response")
                try:
                    end = frames.feed(data, payload)
                except BadChunk as bad:
                    raise BrokenResponse(f"the response's chunked encoding is malformed: {bad}") from None
                for piece in payload:
                    yield piece
                payload.clear()
            return
        missing_bytes = self.head.length  # negative, and only falling, where the end of the connection ends the body
        while missing_bytes:
            data = await self._reader.read(min(missing_bytes, _READ_BYTES) if missing_bytes > 0 else _READ_BYTES)
            if not data and missing_bytes > 0:
                raise BrokenResponse("the connection closed in the middle of the response")
            if not data:
                return
            missing_bytes -= len(data)
            yield data

    async def read(self, limit_bytes: int) -> bytes:
        """Return the whole body. Raises BrokenResponse, also for a body beyond the limit."""
        body = bytearray()
        async for piece in self.pieces():
            body += piece
            if len(body) > limit_bytes:
                raise BrokenResponse(f"the response is larger than {limit_bytes:,} bytes")
        return bytes(body)


@asynccontextmanager
async def open_response(
    method: str,
    url: str,
    body: bytes = b"",
    headers: Headers = (),
    tls: ssl.SSLContext | None = None,
    unix_socket: str = "",
) -> AsyncIterator[Response]:
    """Send a request and wait for the response's head. A body is sent as JSON, unless `headers` has a Content-Type.

    Raises OSError if the server cannot be reached, BrokenResponse if it does not speak HTTP. The end of the block
    closes the connection, so that a timeout or a cancellation leaves nothing behind.
    """
    parts = urlsplit(url)
    secure = parts.scheme == "https"
    if secure and tls is None:
        tls = ssl.create_default_context()
    host, port = parts.hostname or "", parts.port or (443 if secure else 80)
    if unix_socket:
        reader, writer = await asyncio.open_unix_connection(unix_socket)
    else:
        reader, writer = await asyncio.open_connection(host, port, ssl=tls if secure else None)
    try:
        fields = {"Host": parts.netloc.rpartition("@")[2], "Connection": "close", "Accept": "*/*"}
        if body or method == "POST":
            fields |= {"Content-Length": str(len(body)), "Content-Type": _JSON}
        fields |= {name.title(): value for name, value in headers}
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        lines = [f"{method} {target} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items())]
        writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + body)
        yield Response(await _read_head(reader), reader)
    finally:
        writer.transport.abort()


async def _read_head(reader: asyncio.StreamReader) -> ResponseHead:
    for _head in range(MAX_INFORMATIONAL + 1):
        try:
            data = await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:
            raise BrokenResponse("the connection closed before the response") from None
        except asyncio.LimitOverrunError:
            raise BrokenResponse("the response's head is too large") from None
        head = read_response_head(data, len(data) - 4)
        if isinstance(head, int) or head.status == 101:
            raise BrokenResponse("the response is not valid HTTP")
        if head.status >= 200:
            return head
    raise BrokenResponse(f"more than {MAX_INFORMATIONAL} 1xx responses")


async def request(
    method: str,
    url: str,
    body: bytes = b"",
    headers: Headers = (),
    *,
    timeout_s: float,
    limit_bytes: int,
    tls: ssl.SSLContext | None = None,
    unix_socket: str = "",
) -> tuple[int, bytes]:
    """Return the status and the whole body. Raises TimeoutError if it takes longer than `timeout_s` in all."""
    async with asyncio.timeout(timeout_s), open_response(method, url, body, headers, tls, unix_socket) as response:
        return response.status, await response.read(limit_bytes)
