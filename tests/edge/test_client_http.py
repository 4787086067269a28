"""HTTP between clients and the router: versions, keep-alive, pipelining, Expect."""

from __future__ import annotations

import asyncio
import contextlib

from support.engine_scripts import (
    DONE,
    SSE_HEAD,
    chunk,
    failing,
    http_response,
    normal,
    script,
    sse_event,
    stream,
)
from support.raw_client import chat, get, post
from support.running_router import router
from support.scripted_engine import engines


async def test_expect_100_continue_is_answered_before_the_body_arrives() -> None:
    async with engines() as [engine], router(engine) as r:
        peer = await r.connect()
        head, _, body = post(headers=["Expect: 100-Continue"]).partition(b"\r\n\r\n")
        await peer.send(head + b"\r\n\r\n")
        assert (await peer.head()).head == b"HTTP/1.1 100 Continue\r\n\r\n"
        peer.write(body)
        assert (await peer.response()).status == 200
        assert engine.seen[0].get(b"expect") == []


async def test_a_request_that_will_be_rejected_gets_no_100_continue() -> None:
    async with engines() as [engine], router(engine, limits={"body_bytes": 10}) as r:
        peer = await r.connect()
        peer.write(post(headers=["Expect: 100-continue"]).partition(b"\r\n\r\n")[0] + b"\r\n\r\n")
        assert (await peer.head()).status == 413


async def test_an_http_1_0_client_is_answered_and_the_connection_closed() -> None:
    async with engines() as [engine], router(engine) as r:
        for request in (post(), get("/health"), b"GET /health HTTP/1.0\r\n\r\n"):
            peer = await r.connect()
            peer.write(request.replace(b"HTTP/1.1", b"HTTP/1.0"))
            response = await peer.response()
            assert response.status == 200 and response.get("connection") == "close"
            assert await peer.is_closed()


async def test_an_http_1_0_client_can_keep_its_connection_alive() -> None:
    async with engines() as [engine], router(engine) as r:
        peer = await r.connect()
        for request in (post(headers=["Connection: Keep-Alive"]), get("/health", "Connection: keep-alive")) * 2:
            peer.write(request.replace(b"HTTP/1.1", b"HTTP/1.0"))
            response = await peer.response()
            assert response.status == 200 and (response.get("connection") or "").lower() == "keep-alive"


async def test_an_http_1_0_client_gets_a_stream_without_chunks() -> None:
    async with engines() as [engine], router(engine) as r:
        engine.behave = stream(5, 0.01)
        peer = await r.connect()
        peer.write(post(headers=["Connection: keep-alive"]).replace(b"HTTP/1.1", b"HTTP/1.0"))
        response = await peer.response()
        assert response.get("transfer-encoding") is None and response.get("connection") == "close"
        assert response.body == b"".join(sse_event(n) for n in range(5)) + b"data: [DONE]\n\n"


async def test_a_connection_serves_many_requests_of_every_kind() -> None:
    async with engines() as [engine], router(engine) as r:
        peer = await r.connect()
        for number in range(30):
            engine.behave = (normal(), stream(3), failing(400))[number % 3]
            peer.write(post())
            response = await peer.response()
            assert response.complete and response.status == (200, 200, 400)[number % 3]
        assert r.service.listener.accepted == 1


async def test_connection_close_closes_the_connection() -> None:
    async with engines() as [engine], router(engine) as r:
        for request in (
            post(headers=["Connection: x, Close"]),
            get("/health", "Connection: close"),
            post(b"{", headers=["Connection: close"]),
        ):
            peer = await r.connect()
            peer.write(request)
            assert (await peer.response()).get("connection") == "close"
            assert await peer.is_closed()


async def test_pipelined_requests_are_answered_in_their_order() -> None:
    async with engines(3) as three, router(*three) as r:
        for number, engine in enumerate(three):
            engine.behave = script((2 - number) * 0.1, http_response(b"%d" % number))
        peer = await r.connect()
        peer.write(post() + post() + get("/health") + post())
        bodies = [(await peer.response()).body for _ in range(4)]
        assert bodies == [b"0", b"1", b'{"status":"alive"}', b"2"]


async def test_pipelined_requests_with_bodies_are_all_answered() -> None:
    async with engines() as [engine], router(engine) as r:
        bodies = [chat(f"{number} " + "x" * 1500) for number in range(30)]
        peer = await r.connect()
        peer.write(b"".join(map(post, bodies)))
        for _ in bodies:
            assert (await peer.response()).status == 200
        assert [seen.body for seen in engine.seen] == bodies


async def test_a_client_that_pipelines_too_much_still_gets_the_current_response() -> None:
    """The client has to repeat the other requests: the router started none of them."""
    async with engines() as [engine], router(engine) as r:
        gate = asyncio.Event()
        engine.behave = script(SSE_HEAD, chunk(sse_event(0)), gate, chunk(b"x" * 200_000), DONE)
        peer = await r.connect()
        peer.write(post())
        await peer.head()
        sending = asyncio.ensure_future(peer.send(post(chat("x" * 50_000)) * 100))
        await asyncio.sleep(0.2)
        gate.set()
        got = b""
        with contextlib.suppress(ConnectionError):
            while data := await asyncio.wait_for(peer.reader.read(65_536), 10):
                got += data
        with contextlib.suppress(ConnectionError):
            await sending
        assert got.endswith(DONE)
        assert len(engine.seen) == 1
