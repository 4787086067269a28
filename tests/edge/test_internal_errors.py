"""Every exception while a request is served ends in an answer: faults are injected at each stage of a request."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

import pytest
from gated_engine import LONG
from support.engine_scripts import HANG, SSE_HEAD, chunk, failing, huge, script, sse_event, stream
from support.polling import until
from support.raw_client import chat, get, post
from support.running_router import RunningRouter, router
from support.scripted_engine import engines

from warmroute.config import Limits
from warmroute.core.admission import Admitter
from warmroute.core.calls import Calls
from warmroute.core.fleet import Fleet
from warmroute.core.router import Router
from warmroute.core.traffic import Traffic
from warmroute.edge import errors, exchange, proxy
from warmroute.edge.arrival import RequestBuilder
from warmroute.edge.async_handler import AsyncHandler, Request, Responder
from warmroute.edge.client_connection import BodyReader, ClientConnection, Listener
from warmroute.edge.connection_pool import ConnectionPool
from warmroute.edge.exchange import Exchange
from warmroute.edge.node_connection import NodeConnection
from warmroute.edge.proxy import OwnEndpoints, Proxy
from warmroute.edge.timer_wheel import TimerWheel
from warmroute.edge.tries import NodeTry

pytestmark = pytest.mark.interpreted

SECRET = "what the user typed"
PRICE = {"policy": "price"}


def broken(*_arguments: Any, **_more: Any) -> Any:
    raise RuntimeError(SECRET)


BEFORE_THE_RESPONSE: dict[str, tuple[Any, str]] = {
    "read: the head": (Proxy, "check_head"),
    "read: the request": (RequestBuilder, "build"),
    "read: the rest": (Proxy, "serve"),
    "lookup: the prompt": (Proxy, "read_prompt"),
    "lookup: the prompt's tokens": (proxy, "lookup_of"),
    "decide: admission": (Admitter, "place"),
    "decide: the router": (Router, "decide"),
    "open_ticket": (Router, "open_ticket"),
    "dispatch: the pool": (ConnectionPool, "connect"),
    "dispatch: a new connection": (NodeTry, "connected"),
    "dispatch: the request's bytes": (NodeConnection, "send_request"),
    "relay: the head": (NodeConnection, "_read_head"),
    "relay: the start": (Exchange, "begin_response"),
}


@pytest.mark.parametrize("fault", BEFORE_THE_RESPONSE.values(), ids=BEFORE_THE_RESPONSE)
async def test_a_fault_before_the_response_is_a_500_that_is_logged_once(
    fault: tuple[Any, str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with engines() as [engine], router(engine, routing=PRICE, journal={"response_headers": "always"}) as r:
        quiet(r)
        with monkeypatch.context() as patch:
            patch.setattr(*fault, broken)
            response = await r.request(post(chat(f"{SECRET} {LONG}")))
            assert response.status == 500 and response.error["code"] == "internal_error"
            assert response.get("x-request-id")
        assert_logged_once(caplog)
        assert (await r.request()).status == 200, "the next request is served"


@pytest.mark.parametrize("how", ["Content-Length", "chunked"])
async def test_a_fault_in_a_body_that_arrives_in_pieces_is_a_500(
    how: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with engines() as [engine], router(engine) as r:
        peer = await r.connect()
        framing = b"Content-Length: 100" if how == "Content-Length" else b"Transfer-Encoding: chunked"
        peer.write(b"POST /v1/completions HTTP/1.1\r\nHost: r\r\n" + framing + b"\r\n\r\n")
        await asyncio.sleep(0.05)
        monkeypatch.setattr(BodyReader, "feed", broken)
        peer.write(SECRET.encode())
        response = await peer.response()
        assert response.status == 500 and response.error["code"] == "internal_error"
        assert_logged_once(caplog)


async def test_a_fault_in_an_endpoint_of_the_router_is_a_500(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with engines() as [engine], router(engine) as r:
        with monkeypatch.context() as patch:
            patch.setattr(OwnEndpoints, "model_cards", broken)
            assert (await r.request(get("/v1/models"))).error["code"] == "internal_error"
        assert_logged_once(caplog)
        assert (await r.request(get("/v1/models"))).status == 200


async def test_a_fault_in_a_pipelined_request_is_a_500(monkeypatch: pytest.MonkeyPatch) -> None:
    async with engines() as [engine], router(engine) as r:
        check_head, seen = Proxy.check_head, 0

        def second_breaks(*given: Any) -> Any:
            nonlocal seen
            seen += 1
            return check_head(*given) if seen == 1 else broken()

        monkeypatch.setattr(Proxy, "check_head", second_breaks)
        peer = await r.connect()
        peer.write(post() + post())
        assert [(await peer.response()).status for _ in range(2)] == [200, 500]


async def test_a_fault_after_the_prompt_was_read_in_a_thread_is_a_500(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with engines() as [engine], router(engine, routing=PRICE) as r:
        monkeypatch.setattr(Admitter, "place", broken)
        assert (await r.request(post(chat("word " * 300_000)))).error["code"] == "internal_error"
        assert r.service.counters.prompts_in_threads == 1
        assert_logged_once(caplog)


FAILING: dict[str, tuple[Any, str]] = {
    "the failed node": (Calls, "_give_up"),
    "the next node": (Router, "usable_nodes"),
    "the error": (errors, "rendered"),
}


@pytest.mark.parametrize("fault", FAILING.values(), ids=FAILING)
async def test_a_fault_while_a_node_fails_is_a_500(
    fault: tuple[Any, str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with engines() as [engine], router(engine) as r:
        quiet(r)
        engine.behave = failing(500)
        monkeypatch.setattr(*fault, broken)
        assert (await r.request()).error["code"] == "internal_error"
        assert_logged_once(caplog)


async def test_a_fault_while_a_ticket_closes_still_gives_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    async with engines() as [engine], router(engine, check_leaks=False) as r:
        engine.behave = failing(500)
        with monkeypatch.context() as patch:
            patch.setattr(Fleet, "close_ticket", broken)
            assert (await r.request()).error["code"] == "internal_error"
        engine.behave = stream(3)
        assert (await r.request()).complete
        assert r.loop_errors == []


async def test_a_fault_while_a_timeout_is_handled_is_a_500(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with engines() as [engine], router(engine, upstream={"first_byte_timeout_s": 0.2}) as r:
        engine.behave = script(HANG)
        monkeypatch.setattr(Exchange, "try_failed", broken)
        assert (await r.request()).error["code"] == "internal_error"
        assert_logged_once(caplog)


async def test_a_fault_when_a_queued_request_is_rejected_is_a_500(monkeypatch: pytest.MonkeyPatch) -> None:
    async with engines() as [engine], router(engine) as r:
        r.service.admission.without_node.first_node_wait_s = 0.2
        r.service.fleet.drain("node0")
        monkeypatch.setattr(errors, "rendered", broken)
        assert (await r.request()).error["code"] == "internal_error"


AFTER_THE_HEAD: dict[str, tuple[Any, str]] = {
    "the bytes": (NodeConnection, "_fail"),
    "a broken response": (Exchange, "response_broke"),
}


@pytest.mark.parametrize("fault", AFTER_THE_HEAD.values(), ids=AFTER_THE_HEAD)
async def test_a_fault_in_the_middle_of_a_stream_ends_it_with_an_error_event(
    fault: tuple[Any, str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with engines() as [engine], router(engine) as r:
        quiet(r)
        gate = asyncio.Event()
        engine.behave = script(SSE_HEAD + chunk(sse_event(0)), gate, chunk(sse_event(1)) + b"zz\r\n")
        peer = await r.connect()
        peer.write(post(chat(stream=True)))
        reading = asyncio.ensure_future(peer.response())
        await until(lambda: any(node.ttft_sum_ms for node in r.service.fleet), "the first byte")
        monkeypatch.setattr(*fault, broken)
        gate.set()
        response = await reading
        assert response.status == 200 and not response.complete
        assert b"event: error" in response.chunks[-1]
        assert_logged_once(caplog)


ENDING: dict[str, tuple[Any, str]] = {
    "the usage": (exchange, "read_usage"),
    "the accounting": (Traffic, "record"),
    "the client's connection": (ClientConnection, "response_sent"),
}


@pytest.mark.parametrize("fault", ENDING.values(), ids=ENDING)
async def test_a_fault_after_the_last_byte_leaves_the_response_complete(
    fault: tuple[Any, str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with engines() as [engine], router(engine, routing=PRICE) as r:
        quiet(r)
        engine.behave = stream(3)
        monkeypatch.setattr(*fault, broken)
        response = await r.request(post(chat(LONG, stream=True)))
        assert response.status == 200 and response.complete and b"error" not in response.body
        assert_logged_once(caplog)


@pytest.mark.parametrize("method", ["pause_response", "resume_response", "client_left"])
async def test_a_fault_about_a_client_that_reads_slowly_or_leaves_closes_its_connection(
    method: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with engines() as [engine], router(engine) as r:
        engine.behave = huge(20_000_000, sized=False)
        monkeypatch.setattr(Exchange, method, broken)
        peer = await r.connect()
        peer.write(post(chat(stream=True)))
        await peer.head()
        peer.pause_reading()
        await until(lambda: any(client.paused for client in r.service.listener.connections), "the client is slow")
        if method == "resume_response":
            peer.resume_reading()
        else:
            peer.disconnect()
        await until(lambda: not r.service.listener.connections, "the connection is closed")
        await until(lambda: r.inflight() == 0, "the ticket is closed")
        assert_logged_once(caplog)


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"m","x":"\xff"}',
        b'{"model":"m","x":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"model":"m","x":' + b"1" * 5000 + b"}",
    ],
)
async def test_a_chat_without_messages_that_is_not_json_is_a_400(body: bytes) -> None:
    async with engines() as [engine], router(engine) as r:
        response = await r.request(post(body))
        assert response.status == 400 and response.error["code"] in ("malformed_json", "missing_messages")


def quiet(r: RunningRouter) -> None:
    """Stop checking the nodes: their connections use the code that is broken, too."""
    r.service.watcher.close()
    r.service.pools.close()


def assert_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    lines = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert [getattr(record, "event", "") for record in lines] == ["request_failed_internally"], lines
    assert "RuntimeError at " in lines[0].getMessage()
    assert SECRET not in caplog.text


async def test_an_answer_of_the_admin_api_that_is_cancelled_half_way_looks_incomplete() -> None:
    async def answer(_request: Request, responder: Responder) -> None:
        responder.start(200, "text/plain")
        responder.write(b"begun")
        lost = asyncio.get_running_loop().create_future()
        lost.cancel()
        await lost

    listener = Listener(AsyncHandler(answer), Limits(), TimerWheel(time.monotonic))
    server = await asyncio.get_running_loop().create_server(listener.protocol, "127.0.0.1", 0)
    try:
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        writer.write(get("/"))
        assert (await asyncio.wait_for(reader.read(), 5.0)).endswith(b"\r\n\r\n5\r\nbegun\r\n")
        writer.close()
    finally:
        listener.abort_all()
        server.close()
