"""What a client sees of a route with `on_deadline = "end"`: errors at once and at the deadline, and cut streams."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from gated_engine import LONG, PRICE
from support.engine_scripts import CLOSE, DONE, HANG, SSE_HEAD, Step, chunk, hanging, http_response, script, sse_event
from support.polling import until
from support.raw_client import chat, post
from support.running_router import RunningRouter, router
from support.scripted_engine import ScriptedEngine, engines

END: list[dict[str, Any]] = [{"name": "all", "on_deadline": "end"}]
SLOW_S = 0.95


def prompt(number: int, *headers: str, stream: bool = True) -> bytes:
    return post(chat(f"{number:08d}{LONG}", stream=stream), headers=headers)


@asynccontextmanager
async def measured(*made: ScriptedEngine, **tables: Any) -> AsyncIterator[RunningRouter]:
    """A router that knows that its engines take SLOW_S for a long prompt."""
    async with router(*made, routing=PRICE, **tables) as r:
        for engine in made:
            engine.behave = script(SLOW_S, http_response())
        for number in range(3):
            for node in r.service.fleet:
                for other in r.service.fleet:
                    r.service.fleet.drain(other.name, other is not node)
                assert (await r.request(prompt(number))).status == 200
        for node in r.service.fleet:
            r.service.fleet.drain(node.name, False)
        assert not any(node.load for node in r.service.fleet)
        yield r


@pytest.mark.parametrize("header", ["X-Deadline-Ttft-Ms: 5", "X-Deadline-Ms: 5"])
async def test_a_hopeless_deadline_is_rejected_at_once_by_an_idle_node(header: str) -> None:
    async with engines() as [engine], measured(engine, routes=END) as r:
        seen, began_s = len(engine.seen), time.monotonic()
        rejected = await r.request(prompt(9, header))
        assert rejected.status == 429 and rejected.error["code"] == "deadline_unreachable"
        assert time.monotonic() - began_s < SLOW_S / 2 and len(engine.seen) == seen


async def test_without_end_a_hopeless_deadline_is_tried_on_an_idle_node() -> None:
    async with engines() as [engine], measured(engine) as r:
        assert (await r.request(prompt(9, "X-Deadline-Ttft-Ms: 5"))).status == 200


@pytest.mark.parametrize("stream", [True, False])
async def test_a_request_without_a_response_ends_at_its_deadline(stream: bool) -> None:
    async with engines() as [engine], router(engine, routing=PRICE, routes=END) as r:
        engine.behave = hanging
        began_s = time.monotonic()
        peer = await r.connect()
        peer.write(prompt(0, "X-Deadline-Ttft-Ms: 300", stream=stream))
        late = await peer.response()
        assert late.status == 504 and late.error["code"] == "deadline_exceeded"
        assert "first token was due 300 ms after" in late.error["message"] and late.get("retry-after") is None
        assert time.monotonic() - began_s >= 0.3
        await until(lambda: engine.seen[0].left.is_set() and r.inflight() == 0)
        assert r.service.counters.errors[504, "deadline_exceeded"] == 1
        assert not r.service.brain.deadlines.watched
        engine.behave = script(http_response())
        peer.write(prompt(1))
        assert (await peer.response()).status == 200, "the client's connection goes on"


async def test_an_overdue_request_moves_to_another_node() -> None:
    async with engines(2) as two, measured(*two, routes=END) as r:
        for engine in two:
            engine.behave = hanging
        peer = await r.connect()
        seen = [len(engine.seen) for engine in two]
        peer.write(prompt(9, "X-Deadline-Ttft-Ms: 20000"))
        await until(lambda: any(len(engine.seen) > before for engine, before in zip(two, seen, strict=True)))
        first = next(n for n, engine in enumerate(two) if len(engine.seen) > seen[n])
        two[1 - first].behave = script(http_response())
        assert (await peer.response()).status == 200
        assert r.service.counters.retries == 1 and r.service.counters.hedges == 0
        assert r.node(first).inflight == 0


@pytest.mark.parametrize("framing", ["chunked", "until close"])
async def test_a_stream_ends_with_an_error_event_at_the_deadline_of_the_whole_response(framing: str) -> None:
    head = SSE_HEAD if framing == "chunked" else SSE_HEAD.replace(b"Transfer-Encoding: chunked\r\n", b"")
    pieces = [chunk(sse_event(n)) if framing == "chunked" else sse_event(n) for n in range(100)]
    steps: list[Step] = [head]
    for piece in pieces:
        steps += [piece, 0.05]
    async with engines() as [engine], router(engine, routes=END) as r:
        engine.behave = script(*steps, DONE if framing == "chunked" else CLOSE)
        response = await r.request(prompt(0, "X-Deadline-Ms: 500"))
        assert response.status == 200 and response.body.startswith(sse_event(0))
        event = response.body.rpartition(b"event: error\ndata: ")[2]
        assert json.loads(event)["error"]["code"] == "deadline_exceeded"
        assert response.body.count(b"event: error") == 1 and sse_event(50) not in response.body
        assert r.service.counters.interrupted == 1 and r.inflight() == 0
        assert not r.service.brain.deadlines.watched


async def test_a_response_that_is_not_streamed_breaks_off_at_the_deadline() -> None:
    async with engines() as [engine], router(engine, routes=END) as r:
        engine.behave = script(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nabc", HANG)
        response = await r.request(prompt(0, "X-Deadline-Ms: 300", stream=False))
        assert response.status == 200 and not response.complete and response.body == b"abc"


async def test_a_client_that_reads_slowly_does_not_hold_up_the_end() -> None:
    async with engines() as [engine], router(engine, routes=END) as r:
        engine.behave = script(SSE_HEAD, *[chunk(b"data: " + b"x" * 65_536 + b"\n\n")] * 400, HANG)
        peer = await r.connect()
        peer.pause_reading()
        peer.write(prompt(0, "X-Deadline-Ms: 500"))
        await until(lambda: r.inflight() == 1)
        await until(lambda: r.inflight() == 0)
        assert r.service.counters.interrupted == 1
        peer.disconnect()


async def test_a_whole_stream_whose_connection_stays_open_is_not_cut() -> None:
    end = asyncio.Event()
    async with engines() as [engine], router(engine, routes=END, routing=PRICE) as r:
        engine.behave = script(SSE_HEAD, chunk(sse_event(0)), chunk(b"data: [DONE]\n\n"), end, b"0\r\n\r\n")
        peer = await r.connect()
        peer.write(prompt(0, "X-Deadline-Ms: 300"))
        await until(lambda: r.inflight() == 1)
        await asyncio.sleep(0.5)
        end.set()
        response = await peer.response()
        assert response.complete and b"error" not in response.body
        await until(lambda: not r.service.brain.deadlines.watched)


async def test_the_routes_own_deadline_ends_requests_too() -> None:
    routes = [{"name": "chat", "on_deadline": "end", "ttft_deadline_ms": 200}]
    async with engines() as [engine], router(engine, routes=routes) as r:
        engine.behave = hanging
        assert (await r.request()).error["code"] == "deadline_exceeded"
        anthropic = await r.request(post(path="/v1/messages"))
        assert anthropic.status == 504 and anthropic.json["error"]["type"] == "api_error"


async def test_a_404_that_is_being_read_at_the_deadline_gets_an_answer() -> None:
    async with engines() as [engine], router(engine, routes=END) as r:
        head = http_response(b'{"detail":"Not Found"}', 404)
        engine.behave = script(head[:-5], HANG)
        response = await asyncio.wait_for(r.request(post(headers=["X-Deadline-Ms: 300"])), 5)
        assert response.status == 504 and response.get("x-should-retry") == "false"


async def test_what_a_deadline_ended_is_seen_with_its_reason() -> None:
    async with engines() as [engine], router(engine, routes=END) as r:
        event = chunk(b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n')
        for behave, header, request_id in (
            (script(SSE_HEAD + event, HANG), "X-Deadline-Ms: 300", "cut"),
            (hanging, "X-Deadline-Ttft-Ms: 300", "late"),
        ):
            engine.behave = behave
            peer = await r.connect()
            peer.write(post(chat(stream=True), headers=[header, f"X-Request-Id: {request_id}"]))
            await asyncio.wait_for(peer.reader.read(100), 5)
            await until(lambda: not r.inflight())
            peer.disconnect()
            [failed] = json.loads((await r.admin("GET", f"/admin/decisions/{request_id}")).body)["failed_tries"]
            assert failed["reason"] == "the deadline has passed"
        listed = json.loads((await r.admin("GET", "/admin/decisions?failed=1")).body)["decisions"]
        assert {one["request_id"] for one in listed} == {"cut", "late"}
