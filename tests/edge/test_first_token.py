"""The router counts a response's first token, not its first byte: engines send roles, comments and events before it."""

from __future__ import annotations

import asyncio
import gzip
import json
from typing import Any

import pytest
from small_model_router import LONG
from support.engine_scripts import CLOSE, DONE, SSE_HEAD, Behaviour, chunk, http_response, normal, script
from support.polling import until
from support.raw_client import chat, post
from support.running_router import RunningRouter, router
from support.scripted_engine import ReceivedRequest, ScriptedEngine, engines
from test_first_token_search import CREATED, MESSAGE_START, ROLE, completion, named, sse
from test_first_token_search import chat as chat_event

from warmroute.edge.exchange import Exchange

STREAMED = chat(LONG, stream=True)
EARLY: dict[str, tuple[str, bytes, bytes]] = {
    # name: path, what comes at once, the event with the first token
    "role": ("/v1/chat/completions", sse(ROLE), sse(chat_event({"content": "Hi"}))),
    "comment": ("/v1/chat/completions", b": ping\n\n", sse(chat_event({"role": "assistant", "content": "Hi"}))),
    "tool call": ("/v1/chat/completions", sse(ROLE), sse(chat_event({"tool_calls": [{"index": 0, "id": "c"}]}))),
    "completion": ("/v1/completions", b": ping\n\n", sse(completion("Hi"))),
    "responses": ("/v1/responses", CREATED, named({"type": "response.output_text.delta", "delta": "Hi"})),
    "messages": (
        "/v1/messages",
        MESSAGE_START,
        named({"type": "content_block_delta", "delta": {"type": "text_delta", "text": "Hi"}}),
    ),
}
PRICE: dict[str, Any] = {"routing": {"policy": "price", "seed": 7}, "index": {"min_prompt_tokens": 16}}


async def started(r: RunningRouter, path: str, body: bytes, early: bytes) -> asyncio.StreamReader:
    """Send a request, and return once the client has the bytes that come before the first token."""
    peer = await r.connect()
    peer.write(post(body, path))
    assert (await peer.head()).status == 200
    assert await peer.reader.readuntil(early[-20:])
    return peer.reader


def request_body(path: str) -> bytes:
    body = json.loads(STREAMED)
    if path == "/v1/responses":
        body["input"] = LONG
    elif path == "/v1/completions":
        body["prompt"] = LONG
    return json.dumps(body).encode()


@pytest.mark.parametrize("name", list(EARLY))
async def test_the_prefill_lasts_until_the_first_content(name: str) -> None:
    path, early, token = EARLY[name]
    prefilled, finish = asyncio.Event(), asyncio.Event()
    async with engines() as [engine], router(engine, **PRICE) as r:
        engine.behave = script(SSE_HEAD, chunk(early), prefilled, chunk(token), finish, DONE)
        node = r.node(0)
        reader = await started(r, path, request_body(path), early)
        await asyncio.sleep(0.02)
        assert node.pending_work > 0 and node.speed.answers == 0 and sum(node.ttft_counts) == 0
        prefilled.set()
        await reader.readuntil(token[-20:])
        await until(lambda: sum(node.ttft_counts) == 1)
        assert node.pending_work == 0 and node.speed.answers == 1
        finish.set()
        await reader.readuntil(b"0\r\n\r\n")
    assert sum(node.ttft_counts) == 1, "the end is no second first token"


def searches(r: RunningRouter) -> bool:
    """Return whether the router looks for the first token of the only request."""
    [exchange] = r.service.proxy.exchanges.values()
    assert isinstance(exchange, Exchange)
    return exchange._detector is not None


@pytest.mark.interpreted
async def test_the_search_ends_with_the_first_token() -> None:
    """From then on a piece goes straight to the client."""
    prefilled, finish = asyncio.Event(), asyncio.Event()
    async with engines() as [engine], router(engine) as r:
        path, early, token = EARLY["role"]
        engine.behave = script(SSE_HEAD, chunk(early), prefilled, chunk(token), finish, DONE)
        reader = await started(r, path, STREAMED, early)
        assert searches(r)
        prefilled.set()
        await reader.readuntil(token[-20:])
        await until(lambda: not searches(r))
        finish.set()
        await reader.readuntil(b"0\r\n\r\n")


async def test_a_prefill_that_fails_after_the_role_was_sent_is_not_learned() -> None:
    async with engines(2) as nodes, router(*nodes, **PRICE) as r:
        for engine in nodes:
            engine.behave = script(SSE_HEAD, chunk(sse(ROLE)), 0.02, CLOSE)
        response = await r.request(post(STREAMED))
        assert response.status == 200 and b"upstream_broken" in response.body
        assert sum(len(engine.seen) for engine in nodes) == 1, "no retry: the client has the role"
        assert all(node.speed.answers == 0 and not node.pending_work for node in r.service.fleet)


async def test_a_client_that_leaves_before_the_first_token_leaves_nothing_behind() -> None:
    async with engines() as [engine], router(engine, **PRICE) as r:
        engine.behave = script(SSE_HEAD, chunk(sse(ROLE)), asyncio.Event())
        peer = await r.connect()
        peer.write(post(STREAMED))
        await peer.head()
        await peer.reader.readuntil(b"\n\n")
        peer.disconnect()
        node = r.node(0)
        await until(lambda: node.inflight == 0)
        assert node.pending_work == 0 and node.unstarted == 0 and node.speed.answers == 0


@pytest.mark.parametrize(
    "events", [sse(ROLE), sse(ROLE, chat_event({}, "stop")), sse({"error": {"message": "no"}}), b"", b": ping\n\n"]
)
async def test_a_stream_without_tokens_counts_once(events: bytes) -> None:
    async with engines() as [engine], router(engine, **PRICE) as r:
        engine.behave = script(SSE_HEAD, *([chunk(events)] if events else []), b"0\r\n\r\n")
        assert (await r.request(post(STREAMED))).body == events
        node = r.node(0)
        await until(lambda: node.inflight == 0)
        assert sum(node.ttft_counts) == 1 and node.speed.answers == 1


async def test_a_compressed_stream_counts_from_its_first_byte() -> None:
    head = SSE_HEAD.replace(b"\r\n\r\n", b"\r\nContent-Encoding: gzip\r\n\r\n")
    finish = asyncio.Event()
    async with engines() as [engine], router(engine, **PRICE) as r:
        engine.behave = script(head, chunk(gzip.compress(sse(ROLE))), finish, b"0\r\n\r\n")
        peer = await r.connect()
        peer.write(post(STREAMED))
        assert (await peer.head()).get("content-encoding") == "gzip"
        await until(lambda: sum(r.node(0).ttft_counts) == 1)
        finish.set()
        await peer.reader.readuntil(b"0\r\n\r\n")


async def test_a_client_of_http_1_0_gets_the_events_at_once_too() -> None:
    prefilled = asyncio.Event()
    async with engines() as [engine], router(engine, **PRICE) as r:
        path, early, token = EARLY["role"]
        engine.behave = script(SSE_HEAD, chunk(early), prefilled, chunk(token), DONE)
        peer = await r.connect()
        peer.write(post(STREAMED, path).replace(b"HTTP/1.1", b"HTTP/1.0"))
        await peer.reader.readuntil(early[-20:])
        assert r.node(0).speed.answers == 0
        prefilled.set()
        assert (await peer.rest()).startswith(token)
        assert r.node(0).speed.answers == 1


async def test_error_responses_and_whole_responses_need_no_search() -> None:
    async with engines() as [engine], router(engine, **PRICE) as r:
        node = r.node(0)
        for number, behave in enumerate(
            (normal(), script(http_response(b"{}", 400)), script(http_response(sse(ROLE), 200, b"text/event-stream")))
        ):
            engine.behave = behave
            await r.request(post(STREAMED))
            await until(lambda number=number: sum(node.ttft_counts) == number + 1)


MS_PER_TOKEN = 0.02
"""A prompt of 2,000 tokens takes 40 ms."""


def early_engine() -> Behaviour:
    """Sends a role at once, prefills at a fixed speed, one prompt after the other, and reports no usage."""
    prefill = asyncio.Lock()

    async def play(_engine: ScriptedEngine, received: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(SSE_HEAD + chunk(sse(ROLE)))
        async with prefill:
            await asyncio.sleep(len(received.body) / 4 * MS_PER_TOKEN / 1000.0)
        writer.write(chunk(sse(chat_event({"content": "Hi"}))) + DONE)

    return play


async def test_nodes_that_send_a_role_at_once_share_the_load() -> None:
    """The first node to serve a request must not seem so fast, compared with unused ones, that it gets every other."""
    async with engines(4) as nodes, router(*nodes, **PRICE) as r:
        for engine in nodes:
            engine.behave = early_engine()
        numbers = iter(range(144))

        async def client() -> None:
            for number in numbers:
                words = " ".join(f"{number}-{at}" for at in range(1200 + 10 * number))
                assert (await r.request(post(chat(words, stream=True)))).complete

        await asyncio.gather(*(client() for _ in range(12)))
        assert sum(len(engine.seen) for engine in nodes) == 144
        assert min(len(engine.seen) for engine in nodes) >= 15, [len(engine.seen) for engine in nodes]
        for node in r.service.fleet:
            assert MS_PER_TOKEN / 3 < node.speed.ms_per_token < MS_PER_TOKEN * 8, node.speed.ms_per_token
