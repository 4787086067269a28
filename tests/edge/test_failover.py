"""Failover: a node that fails before the first byte of its response leads to a retry on the next node."""

from __future__ import annotations

import asyncio

import pytest
from support.engine_scripts import (
    CLOSE,
    HANG,
    RESET,
    SSE_HEAD,
    Behaviour,
    chunk,
    failing,
    hanging,
    http_response,
    repeated,
    script,
)
from support.polling import until
from support.raw_client import chat, post
from support.running_router import router
from support.scripted_engine import BlackHole, ScriptedEngine, engines

from warmroute.config import NodeConfig
from warmroute.http_client import MAX_INFORMATIONAL

FAILURES: dict[str, Behaviour] = {
    "500": failing(500),
    "502": failing(502),
    "599": failing(599),
    "429": failing(429),
    "503 with Retry-After": failing(503, b"Retry-After: 3\r\n"),
    "500 without an end": script(b"HTTP/1.1 500 X\r\nContent-Length: 100\r\n\r\nabc", HANG),
    "500 in chunks": script(b"HTTP/1.1 500 X\r\nTransfer-Encoding: chunked\r\n\r\n", chunk(b"no"), b"0\r\n\r\n"),
    "500 until close": script(b"HTTP/1.1 500 X\r\n\r\nabc", CLOSE),
    "closes": script(CLOSE),
    "resets": script(RESET),
    "closes inside the head": script(b"HTTP/1.1 200 OK\r\nContent-", CLOSE),
    "garbage": script(b"\x16\x03\x01 what is this\r\n\r\n"),
    "not HTTP": script(b"SSH-2.0-OpenSSH_9.6\r\n\r\n"),
    "HTTP/2": script(b"HTTP/2 200 OK\r\n\r\n"),
    "a status of four digits": script(b"HTTP/1.1 2000 OK\r\nContent-Length: 0\r\n\r\n"),
    "a status of 600": script(b"HTTP/1.1 600 OK\r\nContent-Length: 0\r\n\r\n"),
    "two lengths": script(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}}"),
    "length and coding": script(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"),
    "an unknown coding": script(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\n"),
    "a bare LF": script(b"HTTP/1.1 200 OK\r\nA: b\nContent-Length: 2\r\n\r\n{}"),
    "a malformed first chunk": script(SSE_HEAD + b"zz\r\nhello\r\n"),
    "an upgrade": script(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n"),
    "an endless head": script(b"HTTP/1.1 200 OK\r\n", *[b"A: " + b"x" * 1000 + b"\r\n"] * 200, HANG),
    "an endless line": script(b"HTTP/1.1 200 OK\r\nA: ", *[b"x" * 10_000] * 20, HANG),
}


@pytest.mark.parametrize("failure", FAILURES.values(), ids=FAILURES)
async def test_a_node_that_fails_before_its_response_leads_to_a_retry(failure: Behaviour) -> None:
    async with engines(2) as [bad, good], router(bad, good, health={"consecutive_failures": 100}) as r:
        bad.behave = failure
        for _ in range(4):
            response = await r.request()
            assert response.status == 200 and response.body == b'{"ok":true}'
        assert len(good.seen) == 4 and len(bad.seen) >= 2
        assert [seen.body for seen in good.seen] == [chat()] * 4 or len({seen.body for seen in good.seen}) == 1


async def test_a_refused_connection_leads_to_a_retry_and_marks_the_node_down() -> None:
    async with engines(2) as [bad, good], router(bad, good, health={"interval_s": 30}) as r:
        await bad.refuse()
        for _ in range(4):
            assert (await r.request()).status == 200
        assert r.node(0).health.confirmed_down
        assert r.service.counters.retries == 1, "the second request no longer went to that node"


async def test_a_connect_timeout_leads_to_a_retry() -> None:
    async with engines() as [good]:
        hole = BlackHole()
        try:
            async with router(
                hole,
                good,
                wait=1,
                upstream={"connect_timeout_s": 0.2},
                health={"interval_s": 0.1, "consecutive_timeouts": 1},
            ) as r:
                await until(lambda: r.node(0).health.state.value == "down")
                r.node(0).health.state = type(r.node(0).health.state).UP
                r.node(0).groups[0].health_changed(0.0)
                for _ in range(2):
                    assert (await r.request()).status == 200
                assert len(good.seen) == 2
        finally:
            hole.close()


async def test_a_first_byte_timeout_leads_to_a_retry() -> None:
    async with engines(2) as [bad, good], router(bad, good, upstream={"first_byte_timeout_s": 0.3}) as r:
        bad.behave = hanging
        for _ in range(2):
            assert (await r.request()).status == 200
        assert bad.seen[0].left.is_set() or await asyncio.wait_for(bad.seen[0].left.wait(), 5)


@pytest.mark.parametrize("status", [400, 401, 403, 404, 408, 409, 413, 422])
async def test_other_4xx_pass_to_the_client_without_a_retry(status: int) -> None:
    async with engines(2) as two, router(*two) as r:
        for engine in two:
            engine.behave = failing(status)
        response = await r.request()
        assert response.status == status and response.body == b'{"error":"no"}'
        assert sum(len(engine.seen) for engine in two) == 1
        assert r.service.counters.retries == 0


@pytest.mark.parametrize("status", [200, 201, 202, 206, 301, 304])
async def test_other_statuses_pass_unchanged(status: int) -> None:
    async with engines() as [engine], router(engine) as r:
        engine.behave = script(http_response(b"" if status == 304 else b"x", status))
        assert (await r.request()).status == status


async def test_a_204_has_no_content_length() -> None:
    async with engines() as [engine], router(engine) as r:
        engine.behave = script(b"HTTP/1.1 204 No Content\r\n\r\n")
        response = await r.request()
        assert response.status == 204 and response.get("content-length") is None


async def test_retries_follow_the_order_of_the_fallbacks() -> None:
    async with (
        engines(4) as four,
        router(*four, health={"consecutive_failures": 100}) as r,
    ):
        for engine in four:
            engine.behave = failing(500)

        async def order() -> list[int]:
            for engine in four:
                engine.seen.clear()
            assert (await r.request()).status == 502
            return sorted(range(4), key=lambda number: four[number].seen[0].at_s)

        assert [await order(), await order()] == [[0, 1, 2, 3], [1, 2, 3, 0]]


async def test_every_node_is_tried_before_a_request_fails() -> None:
    async with engines(5) as five, router(*five, health={"consecutive_failures": 100}) as r:
        *bad, good = five
        for engine in bad:
            engine.behave = failing(500)
        for _ in range(12):
            assert (await r.request()).status == 200
        assert len(good.seen) == 12


async def test_a_node_that_came_up_meanwhile_is_tried() -> None:
    async with engines(2) as [bad, late], router(bad, health={"interval_s": 0.05}) as r:
        gate = asyncio.Event()
        bad.behave = script(gate, http_response(b"no", 500))
        asking = asyncio.ensure_future(r.request())
        await until(lambda: bool(bad.seen))
        r.service.add_node(NodeConfig(url=late.url, name="late"))
        await until(lambda: r.service.fleet.node("late").health.state.value == "up")
        gate.set()
        assert (await asking).status == 200
        assert len(late.seen) == 1


async def test_1xx_responses_are_ignored() -> None:
    async with engines() as [engine], router(engine) as r:
        early = b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n"
        engine.behave = script(b"HTTP/1.1 100 Continue\r\n\r\n", 0.05, early + early + http_response())
        response = await r.request()
        assert response.status == 200 and response.get("link") is None


async def test_too_many_1xx_responses_fail_the_request_at_this_node() -> None:
    informational = b"HTTP/1.1 102 P\r\n\r\n"
    async with engines(2) as [bad, good], router(bad, good) as r:
        bad.behave = script(informational * MAX_INFORMATIONAL, http_response(b"allowed"))
        assert [(await r.request()).body for _ in range(2)] == [b"allowed", b'{"ok":true}']
        for too_many in (
            script(informational * (MAX_INFORMATIONAL + 1), http_response(b"no")),
            script(informational * 20_000, http_response(b"no")),
            script(*[informational] * (MAX_INFORMATIONAL + 1), HANG),
        ):
            bad.behave = too_many
            assert [(await r.request()).body for _ in range(2)] == [b'{"ok":true}'] * 2


async def test_endless_1xx_responses_time_out() -> None:
    async with engines(2) as [bad, good], router(bad, good, upstream={"first_byte_timeout_s": 0.5}) as r:
        bad.behave = script(*repeated(200, b"HTTP/1.1 102 Processing\r\n\r\n", 0.05), HANG)
        for _ in range(2):
            assert (await r.request()).status == 200


async def test_a_response_sent_before_the_request_was_read_is_passed_on() -> None:
    """A node may respond with 413 and close without reading a large body."""
    async with engines() as [engine], router(engine) as r:

        async def too_large(engine: ScriptedEngine, seen: object, writer: asyncio.StreamWriter) -> None:
            writer.write(http_response(b"too large", 413))
            await writer.drain()

        engine.behave = too_large
        response = await r.request(post(chat("x" * 5_000_000)))
        assert response.status == 413 and response.body == b"too large"


@pytest.mark.parametrize("how", [CLOSE, RESET, HANG])
async def test_a_node_that_fails_between_its_head_and_its_body_leads_to_a_retry(how: str) -> None:
    """Engines send a stream's head when they accept a request, long before its first token."""
    async with engines(2) as [bad, good], router(bad, good, upstream={"first_byte_timeout_s": 0.5}) as r:
        bad.behave = script(SSE_HEAD, 0.05, how)
        for _ in range(2):
            response = await r.request()
            assert response.status == 200 and response.body == b'{"ok":true}'
        assert len(bad.seen) == 1 and r.service.counters.interrupted == 0
