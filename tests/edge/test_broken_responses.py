"""A response that breaks off is visibly incomplete for the client, and is never retried."""

from __future__ import annotations

import asyncio

import pytest
from support.engine_scripts import (
    CLOSE,
    DONE,
    HANG,
    RESET,
    SSE_HEAD,
    chunk,
    repeated,
    script,
    sse_event,
)
from support.raw_client import ConnectionClosed, get, post
from support.running_router import router
from support.scripted_engine import engines


async def test_a_stream_that_breaks_between_chunks_ends_with_an_error_event() -> None:
    async with engines() as [engine], router(engine) as r:
        engine.behave = script(SSE_HEAD, chunk(sse_event(0)), chunk(sse_event(1)), 0.05, CLOSE)
        response = await r.request()
        assert response.status == 200 and not response.complete
        assert response.body.startswith(sse_event(0) + sse_event(1))
        assert_error_event(response.body)
        assert r.service.counters.interrupted == 1 and r.node(0).outcomes[4] == 1


@pytest.mark.parametrize("cut", [1, 5, len(sse_event(0)) - 1, len(sse_event(0)), len(sse_event(0)) + 1])
async def test_a_stream_that_breaks_inside_a_chunk_ends_with_an_error_event(cut: int) -> None:
    size_line, _, rest = chunk(sse_event(0)).partition(b"\r\n")
    async with engines() as [engine], router(engine) as r:
        engine.behave = script(SSE_HEAD, chunk(sse_event(7)), size_line + b"\r\n" + rest[:cut], 0.05, CLOSE)
        response = await r.request()
        assert not response.complete
        assert_error_event(response.body)


@pytest.mark.parametrize("how", [CLOSE, RESET, HANG])
async def test_every_kind_of_broken_stream_ends_with_an_error_event(how: str) -> None:
    async with engines() as [engine], router(engine, upstream={"between_chunks_timeout_s": 0.3}) as r:
        engine.behave = script(SSE_HEAD, chunk(sse_event(0)), 0.05, how)
        response = await r.request()
        assert not response.complete
        assert_error_event(response.body)


@pytest.mark.parametrize("cut", [b"1", b"1a\r", b"0", b"00", b"5;a", b"5 ", b"0\r", b"0\r\n"])
async def test_a_stream_that_breaks_inside_a_size_line_is_incomplete(cut: bytes) -> None:
    async with engines() as [engine], router(engine) as r:
        engine.behave = script(SSE_HEAD, chunk(sse_event(0)), cut, 0.05, CLOSE)
        response = await r.request()
        assert not response.complete
        if not cut.startswith(b"0\r"):  # the last chunk has started: no error event can follow it
            assert_error_event(response.body)


async def test_a_stream_with_malformed_chunks_ends_with_an_error_event() -> None:
    async with engines() as [engine], router(engine) as r:
        engine.behave = script(SSE_HEAD, chunk(sse_event(0)), 0.05, b"zz\r\n", HANG)
        response = await r.request()
        assert not response.complete
        assert_error_event(response.body)


async def test_a_stream_with_malformed_chunks_never_looks_complete() -> None:
    async with engines() as [engine], router(engine) as r:
        engine.behave = script(SSE_HEAD, chunk(sse_event(0)), 0.05, b"zz\r\n0\r\n\r\n", HANG)
        response = await r.request()
        assert not response.complete and response.body.startswith(sse_event(0))


async def test_a_stream_that_breaks_inside_an_enormous_chunk_ends() -> None:
    async with engines() as [engine], router(engine, check_leaks=False) as r:
        engine.behave = script(SSE_HEAD, chunk(sse_event(0)), b"7fffffffffffff\r\nabc", 0.05, CLOSE)
        peer = await r.connect()
        peer.write(post())
        assert not (await peer.response(patience_s=3)).complete


async def test_timeouts_work_after_a_node_stalled_inside_an_enormous_chunk() -> None:
    limits = {"header_timeout_s": 0.3}
    async with (
        engines() as [engine],
        router(engine, upstream={"between_chunks_timeout_s": 0.2}, limits=limits, check_leaks=False) as r,
    ):
        engine.behave = script(SSE_HEAD, chunk(sse_event(0)), b"7fffffffffffff\r\nabc", HANG)
        peer = await r.connect()
        peer.write(post())
        await asyncio.sleep(0.6)
        slow = await r.connect()
        slow.write(b"GET /health HT")
        assert (await slow.response(patience_s=3)).status == 408


@pytest.mark.parametrize("how", [CLOSE, RESET, HANG])
async def test_a_broken_sized_response_is_incomplete_and_not_retried(how: str) -> None:
    async with engines(2) as two, router(*two, upstream={"between_chunks_timeout_s": 0.3}) as r:
        for engine in two:
            engine.behave = script(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nabc", 0.05, how)
        response = await r.request()
        assert response.status == 200 and not response.complete and response.body == b"abc"
        assert sum(len(engine.seen) for engine in two) == 1, "no retry after the first byte"


async def test_a_broken_chunked_json_response_is_incomplete_and_has_no_event() -> None:
    async with engines() as [engine], router(engine) as r:
        head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
        engine.behave = script(head, chunk(b'{"a":'), 0.05, CLOSE)
        response = await r.request()
        assert not response.complete and response.body == b'{"a":'


async def test_a_response_until_close_passes_completely() -> None:
    async with engines() as [engine], router(engine) as r:
        engine.behave = script(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\nab", 0.05, b"cd", CLOSE)
        response = await r.request()
        assert response.body == b"abcd" and response.get("connection") == "close"


async def test_a_reset_stream_until_close_ends_with_an_error_event() -> None:
    async with engines() as [engine], router(engine) as r:
        engine.behave = script(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n", sse_event(0), 0.05, RESET)
        assert_error_event((await r.request()).body)


async def test_a_reset_response_until_close_is_reset_for_the_client() -> None:
    async with engines() as [engine], router(engine) as r:
        engine.behave = script(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\nab", 0.05, RESET)
        assert not (await r.request()).complete


async def test_a_broken_response_to_an_http_1_0_client_is_reset() -> None:
    async with engines() as [engine], router(engine) as r:
        head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
        engine.behave = script(head, chunk(b'{"a":'), 0.05, CLOSE)
        response = await r.request(post().replace(b"HTTP/1.1", b"HTTP/1.0"))
        assert not response.complete


async def test_a_broken_stream_to_an_http_1_0_client_ends_with_an_error_event() -> None:
    async with engines() as [engine], router(engine) as r:
        engine.behave = script(SSE_HEAD, chunk(sse_event(0)), 0.05, CLOSE)
        response = await r.request(post().replace(b"HTTP/1.1", b"HTTP/1.0"))
        assert response.body.startswith(sse_event(0)) and response.get("transfer-encoding") is None
        assert_error_event(response.body)


async def test_a_pause_shorter_than_the_timeout_is_allowed() -> None:
    async with (
        engines() as [engine],
        router(engine, upstream={"between_chunks_timeout_s": 2.0, "first_byte_timeout_s": 2.0}) as r,
    ):
        engine.behave = script(0.2, SSE_HEAD, *repeated(5, chunk(sse_event(0)), 0.2), DONE)
        assert (await r.request()).complete


async def test_nothing_follows_a_broken_response() -> None:
    async with engines() as [engine], router(engine) as r:
        peer = await r.connect()
        engine.behave = script(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nabc", 0.05, CLOSE)
        peer.write(post() + get("/health"))
        assert not (await peer.response()).complete
        with pytest.raises(ConnectionClosed):
            await peer.response()


def assert_error_event(body: bytes) -> None:
    last = body.rstrip(b"\n").rpartition(b"\n\n")[2]
    assert last.startswith(b"event: error\ndata: {"), body
    assert b"upstream_broken" in last and b"127.0.0.1" not in last
    assert b"[DONE]" not in body
