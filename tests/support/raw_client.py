"""A raw HTTP client: tests write bytes and see the response's bytes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast

from support.polling import PATIENCE_S

CHAT = b'{"model":"m","messages":[{"role":"user","content":"hi"}]}'


def post(
    body: bytes = CHAT,
    path: str = "/v1/chat/completions",
    headers: Iterable[str] = (),
    content_type: str = "application/json",
) -> bytes:
    """Return the bytes of a POST request."""
    lines = [
        f"POST {path} HTTP/1.1",
        "Host: router",
        f"Content-Length: {len(body)}",
        f"Content-Type: {content_type}",
        *headers,
    ]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


def get(path: str, *headers: str, method: str = "GET") -> bytes:
    """Return the bytes of a GET request."""
    return "\r\n".join([f"{method} {path} HTTP/1.1", "Host: router", *headers]).encode("latin-1") + b"\r\n\r\n"


def chat(content: str = "hi", model: str = "m", **more: Any) -> bytes:
    """Return the body of a chat completion with one message."""
    return json.dumps({"model": model, "messages": [{"role": "user", "content": content}], **more}).encode()


@dataclass
class Response:
    status: int
    fields: list[tuple[str, str]]
    body: bytes
    complete: bool
    """Whether the response ended as its framing says."""
    chunks: list[bytes]
    head: bytes

    def get(self, name: str) -> str | None:
        return next((value for key, value in self.fields if key == name.lower()), None)

    def all(self, name: str) -> list[str]:
        return [value for key, value in self.fields if key == name.lower()]

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The OpenAI-style error. Fails if the response is not one."""
        assert self.get("content-type") == "application/json"
        error: dict[str, Any] = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert isinstance(error["message"], str) and error["message"]
        assert isinstance(error["type"], str) and isinstance(error["code"], str)
        return error


class ConnectionClosed(Exception):
    """The other side closed the connection instead of a response."""


class RawConnection:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def write(self, data: bytes) -> None:
        self.writer.write(data)

    def pause_reading(self) -> None:
        cast(asyncio.Transport, self.writer.transport).pause_reading()

    def resume_reading(self) -> None:
        cast(asyncio.Transport, self.writer.transport).resume_reading()

    async def send(self, data: bytes) -> None:
        """Write, and wait until the kernel has taken most of it."""
        self.writer.write(data)
        await self.writer.drain()

    async def response(self, without_body: bool = False, patience_s: float = PATIENCE_S * 2) -> Response:
        """Read the next response. 1xx responses are skipped."""
        async with asyncio.timeout(patience_s):
            while True:
                response = await self._response(without_body, patience_s)
                if response.status >= 200:
                    return response

    async def head(self, patience_s: float = PATIENCE_S * 2) -> Response:
        async with asyncio.timeout(patience_s):
            try:
                head = await self.reader.readuntil(b"\r\n\r\n")
            except (asyncio.IncompleteReadError, ConnectionError) as error:
                raise ConnectionClosed(getattr(error, "partial", b"")) from None
            lines = head.decode("latin-1").split("\r\n")
            assert lines[0].startswith("HTTP/1.1 "), head
            fields = [(name.lower(), value.strip()) for name, _, value in (line.partition(":") for line in lines[1:-2])]
            return Response(int(lines[0].split(" ")[1]), fields, b"", False, [], head)

    async def _response(self, without_body: bool, patience_s: float) -> Response:
        response = await self.head(patience_s)
        if without_body or response.status in (100, 204, 304):
            response.complete = True
            return response
        try:
            length = response.get("content-length")
            if length is not None:
                assert response.get("transfer-encoding") is None
                response.body = await self.reader.readexactly(int(length))
                response.complete = True
            elif response.get("transfer-encoding") == "chunked":
                await self._read_chunks(response)
            else:
                response.body = await self.reader.read()
                response.complete = True
        except asyncio.IncompleteReadError as short:
            response.body = short.partial if response.get("content-length") is not None else b""
        except ConnectionError:
            pass
        if response.chunks:
            response.body = b"".join(response.chunks)
        return response

    async def _read_chunks(self, response: Response) -> None:
        while True:
            line = await self.reader.readuntil(b"\r\n")
            size = int(line[:-2].partition(b";")[0], 16)
            if size == 0:
                while await self.reader.readuntil(b"\r\n") != b"\r\n":
                    pass
                response.complete = True
                return
            data = await self.reader.readexactly(size)
            assert await self.reader.readexactly(2) == b"\r\n"
            response.chunks.append(data)

    async def rest(self, patience_s: float = PATIENCE_S) -> bytes:
        """Read until the other side closes."""
        async with asyncio.timeout(patience_s):
            try:
                return await self.reader.read()
            except ConnectionError:
                return b""

    async def is_closed(self, patience_s: float = PATIENCE_S) -> bool:
        """Wait for the other side to close. Return whether it closed without sending more."""
        try:
            return await self.rest(patience_s) == b""
        except TimeoutError:
            return False

    def disconnect(self) -> None:
        """Close at once, with unsent and unread data dropped."""
        self.writer.transport.abort()

    def close(self) -> None:
        self.writer.close()
