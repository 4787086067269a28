"""A small HTTP client for simulated traffic: one connection a request, answers whole or as a chat stream."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from warmroute.edge.http1 import ChunkFrames
from warmroute.edge.http1 import CHUNKED, UNTIL_CLOSE, read_response_head


class ChatOutcome(msgspec.Struct, frozen=True):
    """What a client saw of one streamed chat. Times are real seconds."""

    text: str
    ttft_s: float
    """To the first token of the answer, not to the response's head."""
    total_s: float
    prompt_tokens: int
    cached_tokens: int
    """As the engine's usage says."""
    output_tokens: int


class Unanswered(Exception):
    """No usable answer came, in words."""


async def send_request(
    host: str, port: int, method: str, path: str, body: bytes = b"", headers: tuple[tuple[str, str], ...] = ()
) -> tuple[int, bytes]:
    """Status and body of one request. Raises OSError where nobody answers, Unanswered where the answer breaks."""
    pieces = [piece async for piece in _exchange(host, port, method, path, body, headers)]
    return pieces[0][0], b"".join(piece for _, piece in pieces)


async def chat(host: str, port: int, body: dict[str, Any]) -> ChatOutcome:
    """Streams a chat to its end. Raises OSError where nobody answers, Unanswered where the answer is not whole."""
    sent = msgspec.json.encode({**body, "stream": True, "stream_options": {"include_usage": True}})
    began_s = time.monotonic()
    first_s = 0.0
    texts: list[str] = []
    usage: dict[str, Any] = {}
    rest = b""
    done = False
    async for status, piece in _exchange(host, port, "POST", "/v1/chat/completions", sent):
        if status != 200:
            raise Unanswered(f"status {status}: {piece.decode(errors='replace')[:200]}")
        *events, rest = (rest + piece).split(b"\n\n")
        for event in events:
            data = event.removeprefix(b"data: ")
            if data == b"[DONE]":
                done = True
                continue
            chunk = msgspec.json.decode(data)
            usage = chunk.get("usage") or usage
            for choice in chunk["choices"]:
                if text := choice["delta"].get("content"):
                    first_s = first_s or time.monotonic()
                    texts.append(text)
    if not done or not usage:
        raise Unanswered("the stream broke off")
    ended_s = time.monotonic()
    return ChatOutcome(
        "".join(texts),
        (first_s or ended_s) - began_s,
        ended_s - began_s,
        usage["prompt_tokens"],
        (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
        usage["completion_tokens"],
    )


async def _exchange(
    host: str, port: int, method: str, path: str, body: bytes, headers: tuple[tuple[str, str], ...] = ()
) -> AsyncIterator[tuple[int, bytes]]:
    """The status with each piece of the body; at least once."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        lines = [f"{method} {path} HTTP/1.1", f"Host: {host}:{port}", "Connection: close"]
        lines += [f"Content-Length: {len(body)}", "Content-Type: application/json"] if body or method == "POST" else []
        lines += [f"{name}: {value}" for name, value in headers]
        writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + body)
        try:
            raw = await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:
            raise Unanswered("the connection closed without an answer") from None
        head = read_response_head(raw, len(raw) - 4)
        yield head.status, b""
        if head.length == CHUNKED:
            frames = ChunkFrames()
            pieces: list[bytes] = []
            ended = -1
            while ended < 0:
                data = await reader.read(65_536)
                if not data:
                    raise Unanswered("the answer broke off")
                ended = frames.feed(data, pieces)
                for piece in pieces:
                    yield head.status, piece
                pieces.clear()
        elif head.length == UNTIL_CLOSE:
            yield head.status, await reader.read()
        else:
            try:
                yield head.status, await reader.readexactly(head.length)
            except asyncio.IncompleteReadError:
                raise Unanswered("the answer broke off") from None
    finally:
        writer.close()
