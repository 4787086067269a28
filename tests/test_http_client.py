"""The HTTP client for webhooks and other servers: every framing, every failure, and no connection left behind."""

from __future__ import annotations

import asyncio
import ssl

import pytest
import trustme
from support.engine_scripts import (
    CLOSE,
    DONE,
    HANG,
    SSE_HEAD,
    Behaviour,
    chunk,
    http_response,
    repeated,
    script,
    sse_event,
    stream,
)
from support.polling import until
from support.scripted_engine import ScriptedEngine, engines

from warmroute.http_client import BrokenResponse, open_response, request

LIMIT_BYTES = 1 << 20


async def post(engine: ScriptedEngine, behave: Behaviour, timeout_s: float = 5.0) -> tuple[int, bytes]:
    engine.behave = behave
    return await request("POST", f"{engine.url}/v1/x?a=b", b"{}", timeout_s=timeout_s, limit_bytes=LIMIT_BYTES)


RESPONSES: dict[str, tuple[Behaviour, tuple[int, bytes]]] = {
    "sized": (script(http_response(b"ab", 201)), (201, b"ab")),
    "sized, in pieces": (script(http_response(b"abcd")[:-2], 0.02, b"cd"), (200, b"abcd")),
    "empty": (script(b"HTTP/1.1 204 No Content\r\n\r\n"), (204, b"")),
    "chunked": (stream(2), (200, sse_event(0) + sse_event(1) + b"data: [DONE]\n\n")),
    "until close": (script(b"HTTP/1.0 200 OK\r\n\r\nab", 0.02, b"cd", CLOSE), (200, b"abcd")),
    "after 1xx": (script(b"HTTP/1.1 103 Early Hints\r\n\r\n", http_response(b"ab")), (200, b"ab")),
    "a redirect": (script(b"HTTP/1.1 302 X\r\nLocation: /y\r\nContent-Length: 0\r\n\r\n"), (302, b"")),
}


@pytest.mark.parametrize(("behave", "expected"), RESPONSES.values(), ids=RESPONSES)
async def test_every_framing_is_read_and_the_connection_is_closed(
    behave: Behaviour, expected: tuple[int, bytes]
) -> None:
    async with engines() as [engine]:
        assert await post(engine, behave) == expected
        await until(lambda: engine.connections == 0)
        assert len(engine.seen) == 1


BROKEN: dict[str, Behaviour] = {
    "no response": script(CLOSE),
    "not HTTP": script(b"SSH-2.0-OpenSSH_9.6\r\n\r\n"),
    "too many 1xx": script(b"HTTP/1.1 102 P\r\n\r\n" * 65, http_response(b"ab")),
    "a short body": script(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nab", CLOSE),
    "a short chunked body": script(SSE_HEAD, chunk(b"ab"), CLOSE),
    "malformed chunks": script(SSE_HEAD, b"zz\r\n", HANG),
    "an endless head": script(b"HTTP/1.1 200 OK\r\nA: " + b"x" * 200_000, HANG),
    "a body beyond the limit": script(http_response(b"x" * (LIMIT_BYTES + 1))),
}


@pytest.mark.parametrize("behave", BROKEN.values(), ids=BROKEN)
async def test_a_broken_response_is_an_error_and_the_connection_is_closed(behave: Behaviour) -> None:
    async with engines() as [engine]:
        with pytest.raises(BrokenResponse):
            await post(engine, behave)
        await until(lambda: engine.connections == 0)


@pytest.mark.parametrize("where", ["head", "body"])
async def test_the_timeout_covers_the_whole_request_however_slowly_bytes_arrive(where: str) -> None:
    start = b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\nX: " + (b"\r\n\r\n" if where == "body" else b"")
    async with engines() as [engine]:
        with pytest.raises(TimeoutError):
            await post(engine, script(start, *repeated(1000, b" ", 0.02)), timeout_s=0.2)
        await until(lambda: engine.connections == 0)


async def test_a_refused_connection_is_an_os_error() -> None:
    async with engines() as [engine]:
        await engine.refuse()
        with pytest.raises(ConnectionRefusedError):
            await post(engine, script())


async def test_the_request_has_its_target_its_headers_and_its_body() -> None:
    async with engines() as [engine]:
        headers = [("authorization", "Bearer secret"), ("content-type", "text/plain")]
        await request("POST", f"{engine.url}/a?b=c", b"body", headers, timeout_s=5.0, limit_bytes=LIMIT_BYTES)
        received = engine.seen[0]
        assert received.line == b"POST /a?b=c HTTP/1.1" and received.body == b"body"
        assert received.get(b"host") == [f"127.0.0.1:{engine.port}".encode()]
        assert received.get(b"authorization") == [b"Bearer secret"]
        assert received.get(b"content-type") == [b"text/plain"]


async def test_pieces_arrive_as_they_are_sent() -> None:
    async with engines() as [engine]:
        gate = asyncio.Event()
        engine.behave = script(SSE_HEAD, chunk(sse_event(0)), gate, chunk(sse_event(1)), DONE)
        async with open_response("POST", f"{engine.url}/x", b"{}") as response:
            pieces = response.pieces()
            assert await anext(pieces) == sse_event(0)
            gate.set()
            assert b"".join([piece async for piece in pieces]) == sse_event(1) + b"data: [DONE]\n\n"


async def test_a_certificate_is_checked() -> None:
    authority = trustme.CA()
    server_tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(server_tls)
    client_tls = ssl.create_default_context()
    authority.configure_trust(client_tls)
    engine = ScriptedEngine(tls=server_tls)
    await engine.listen()
    try:
        with pytest.raises(ssl.SSLCertVerificationError):
            await post(engine, script(http_response(b"ab")))
        status, body = await request("GET", engine.url, timeout_s=5.0, limit_bytes=LIMIT_BYTES, tls=client_tls)
        assert (status, body) == (200, b"ab") and engine.seen[0].line == b"GET / HTTP/1.1"
    finally:
        await engine.close()
