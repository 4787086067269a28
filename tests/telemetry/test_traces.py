"""A collector receives complete traces: each stage of a request, whatever happens to it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
from gated_engine import ONE_BY_ONE, PRICE, busy_engine, long_prompt, send_long_prompt, until_queued
from support.engine_scripts import HANG, RESET, SSE_HEAD, chunk, failing, hanging, normal, script, sse_event, stream
from support.otlp_collector import Collector, ReceivedSpan, otlp_collector
from support.polling import until
from support.raw_client import chat, post
from support.running_router import router
from support.scripted_engine import engines

from warmroute.app import tracing as trace_exporter

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED = f"traceparent: 00-{TRACE_ID}-{PARENT_ID}-01"
USAGE = b'{"usage":{"prompt_tokens":70,"completion_tokens":5,"prompt_tokens_details":{"cached_tokens":48}}}'


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    monkeypatch.setattr(trace_exporter, "EXPORT_INTERVAL_S", 0.02)
    with otlp_collector() as started:
        yield started


def tracing(collector: Collector, **more: Any) -> dict[str, Any]:
    return {"enabled": True, "endpoint": collector.url, "sample_ratio": 1.0, **more}


async def requests_of(collector: Collector, count: int = 1) -> list[ReceivedSpan]:
    await until(lambda: len(collector.requests_spans()) >= count, f"{count} traces arrive")
    spans = collector.requests_spans()
    assert len(spans) == count
    for span in spans:
        check_tree(span)
    return spans


def check_tree(span: ReceivedSpan) -> None:
    """Every child belongs to its parent's trace, and lies within its parent's time."""
    for child in span.children:
        assert child.trace_id == span.trace_id
        assert span.start_s - 1e-5 <= child.start_s <= child.end_s <= span.end_s + 1e-5, (span.name, child.name)
        check_tree(child)


async def test_a_stream_has_a_span_for_each_stage(collector: Collector) -> None:
    before_s = time.time()
    async with engines() as [engine], router(engine, routing=PRICE, tracing=tracing(collector)) as r:
        engine.behave = script(
            SSE_HEAD, chunk(b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n'), 0.05,
            chunk(b'data: {"choices":[{"delta":{"content":"Hello"}}]}\n\n'), 0.05,
            chunk(b"data: %b\n\n" % USAGE), chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n",
        )  # fmt: skip
        response = await r.request(post(chat("word " * 1000, stream=True, max_tokens=9), headers=["X-Request-Id: r-1"]))
        assert response.status == 200
        [request] = await requests_of(collector)
    assert (request.name, request.kind, request.parent_id) == ("POST /v1/chat/completions", "server", "")
    assert request.names == ["read", "prompt", "decide", "attempt"] and not request.failed
    assert before_s - 1 < request.start_s < request.end_s < time.time() + 1
    expected = {
        "http.request.method": "POST", "http.route": "/v1/chat/completions", "http.response.status_code": 200,
        "gen_ai.operation.name": "chat", "gen_ai.request.model": "m", "gen_ai.request.stream": True,
        "gen_ai.request.max_tokens": 9, "gen_ai.usage.input_tokens": 70, "gen_ai.usage.output_tokens": 5,
        "gen_ai.usage.cache_read.input_tokens": 48, "warmroute.request_id": "r-1", "warmroute.priority": "normal",
        "warmroute.attempts": 1, "warmroute.node": "node0", "warmroute.island": "local",
    }  # fmt: skip
    ttft_s = request.attributes.pop("gen_ai.response.time_to_first_chunk")
    assert request.attributes == expected and 0.04 < ttft_s < request.end_s - request.start_s
    decide = request.only("decide")
    terms = {name.removeprefix("warmroute.price.") for name in decide.attributes if ".price." in name}
    assert terms >= {"total_ms", "prefill_ms"}
    assert sum(cost for name, cost in decide.attributes.items() if ".price." in name) == pytest.approx(
        2 * decide.attributes["warmroute.price.total_ms"], abs=0.01
    )
    assert decide.attributes["warmroute.policy"] == "price" and decide.attributes["warmroute.candidates"] == 1
    assert decide.attributes["warmroute.prompt_tokens"] > 100 and decide.attributes["warmroute.cached_tokens"] == 0
    attempt = request.only("attempt")
    assert attempt.kind == "client" and attempt.names == ["first_token", "response"]
    assert attempt.attributes["server.port"] == engine.port
    assert attempt.attributes["warmroute.outcome"] == "ok" and attempt.attributes["http.response.status_code"] == 200
    assert all(stage.end_s - stage.start_s > 0.03 for stage in attempt.children)
    assert request.resource["service.name"] == "warmroute"
    assert engine.seen[0].get(b"traceparent") == [f"00-{request.trace_id}-{attempt.span_id}-01".encode()]


async def test_a_whole_response_has_no_span_after_its_first_token(collector: Collector) -> None:
    async with engines() as [engine], router(engine, tracing=tracing(collector)) as r:
        engine.behave = normal(USAGE)
        assert (await r.request()).status == 200
        [request] = await requests_of(collector)
    assert request.attributes["gen_ai.usage.output_tokens"] == 5
    assert "first_token" in request.only("attempt").names


async def test_a_queued_request_has_its_wait(collector: Collector) -> None:
    async with busy_engine(admission=ONE_BY_ONE, tracing=tracing(collector)) as (r, gate):
        waiting = await send_long_prompt(r, 1)
        await until_queued(r, 1)
        await asyncio.sleep(0.1)
        gate.release(2)
        assert (await waiting.response()).status == 200
        _, second = await requests_of(collector, 2)
    assert second.names == ["read", "prompt", "queue", "decide", "attempt"]
    queue = second.only("queue")
    assert queue.end_s - queue.start_s > 0.09 and queue.attributes == {"warmroute.queue.waiting": 0}


async def test_a_failover_has_an_attempt_for_each_node(collector: Collector) -> None:
    async with engines(3) as [broken, busy, good], router(broken, busy, good, tracing=tracing(collector)) as r:
        broken.behave, busy.behave = script(RESET), failing(503)
        assert (await r.request()).status == 200
        [request] = await requests_of(collector)
    assert not request.failed and request.attributes["warmroute.attempts"] == 3
    attempts = request.named("attempt")
    assert {one.attributes["warmroute.node"]: one.attributes["warmroute.outcome"] for one in attempts} == {
        "node0": "failed", "node1": "busy", "node2": "ok",
    }  # fmt: skip
    by_node = {one.attributes["warmroute.node"]: one for one in attempts}
    assert by_node["node0"].failed and by_node["node0"].message
    assert by_node["node1"].failed and by_node["node1"].attributes["error.type"] == "503"
    assert not by_node["node2"].failed and not any("warmroute.hedge" in one.attributes for one in attempts)
    told = {engine.seen[0].get(b"traceparent")[0].split(b"-")[2].decode() for engine in (broken, busy, good)}
    assert told == {one.span_id for one in attempts}


async def test_a_request_that_no_node_serves_fails(collector: Collector) -> None:
    async with engines(2) as both, router(*both, tracing=tracing(collector)) as r:
        for engine in both:
            engine.behave = failing(500)
        assert (await r.request()).status == 502
        [request] = await requests_of(collector)
    assert request.failed and request.attributes["http.response.status_code"] == 502
    assert request.attributes["error.type"] == "upstream_failed" and len(request.named("attempt")) == 2


async def test_a_hedge_is_marked(collector: Collector) -> None:
    hedging, health = {"min_delay_s": 0.2, "max_ratio": 1.0}, {"timeout_s": 0.2, "consecutive_timeouts": 1000}
    async with (
        engines(2) as [slow, quick],
        router(slow, quick, hedging=hedging, health=health, tracing=tracing(collector), health_checks_hang=True) as r,
    ):
        slow.behave = slow.health = hanging
        while not slow.seen:
            assert (await r.request(post(chat(stream=True)))).status == 200
        await until(lambda: len(collector.requests_spans()) == len(quick.seen))
        request = next(one for one in collector.requests_spans() if len(one.named("attempt")) == 2)
        check_tree(request)
    first, hedge = request.named("attempt")
    assert hedge.attributes["warmroute.hedge"] is True and "warmroute.hedge" not in first.attributes
    assert first.attributes["warmroute.node"] == "node0" and hedge.attributes["warmroute.outcome"] == "ok"


@pytest.mark.parametrize("begun", [False, True])
async def test_a_client_that_leaves_ends_its_trace(collector: Collector, begun: bool) -> None:
    async with engines() as [engine], router(engine, tracing=tracing(collector)) as r:
        engine.behave = script(SSE_HEAD, chunk(sse_event(1)), HANG) if begun else hanging
        client = await r.connect()
        client.write(post(chat(stream=True)))
        await until(lambda: engine.seen)
        if begun:
            await client.reader.readuntil(b"data:")
        client.disconnect()
        [request] = await requests_of(collector)
    assert request.attributes["warmroute.client_left"] is True and not request.failed
    attempt = request.only("attempt")
    assert attempt.attributes["warmroute.outcome"] == "cancelled" and not attempt.failed
    assert attempt.names == (["first_token", "response"] if begun else [])


async def test_a_client_that_leaves_the_queue_ends_its_trace(collector: Collector) -> None:
    async with busy_engine(admission=ONE_BY_ONE, tracing=tracing(collector)) as (r, _gate):
        waiting = await send_long_prompt(r, 1)
        await until_queued(r, 1)
        waiting.disconnect()
        [request] = await requests_of(collector)
    assert request.names == ["read", "prompt", "queue"] and request.attributes["warmroute.client_left"] is True


async def test_a_response_that_breaks_off_is_an_error(collector: Collector) -> None:
    async with engines() as [engine], router(engine, tracing=tracing(collector)) as r:
        engine.behave = script(SSE_HEAD, chunk(sse_event(1)), RESET)
        client = await r.connect()
        client.write(post(chat(stream=True)))
        await client.reader.read()
        [request] = await requests_of(collector)
    assert request.failed and request.attributes["error.type"] == "upstream_broken"
    assert request.attributes["http.response.status_code"] == 200, "the client has it"
    assert request.only("attempt").failed and request.only("attempt").attributes["warmroute.outcome"] == "broken"


async def test_shed_requests_end_their_traces(collector: Collector) -> None:
    admission = {**ONE_BY_ONE, "max_waiting": 1, "max_wait_s": 0.3}
    async with busy_engine(admission=admission, tracing=tracing(collector)) as (r, _gate):
        waiting = await send_long_prompt(r, 1)
        await until_queued(r, 1)
        assert (await r.request(long_prompt(2))).status == 429
        assert (await waiting.response()).status == 503
        timed_out, shed = await requests_of(collector, 2)
    assert shed.attributes["http.response.status_code"] == 429 and shed.attributes["error.type"] == "overloaded"
    assert shed.names == ["read", "prompt", "decide"] and not shed.failed, "429 is no error of the server's span"
    assert timed_out.attributes["error.type"] == "queue_timeout" and timed_out.failed
    assert timed_out.names == ["read", "prompt", "queue"]


async def test_rejected_requests_carry_nothing_that_the_client_typed(collector: Collector) -> None:
    async with engines() as [engine], router(engine, tracing=tracing(collector)) as r:
        secret = "my-secret-text"
        assert (await r.request(post(b'{"model":"%b"' % secret.encode()))).status == 400
        assert (await r.request(post(json.dumps({"model": secret, "messages": [{}]}).encode()))).status == 404
        body = json.dumps({"model": "m", "messages": [{"role": "user", "content": secret}], "user": secret}).encode()
        headers = [f"X-Other: {secret}", f"traceparent: {secret}", f"tracestate: {secret}"]
        assert (await r.request(post(body, path=f"/v1/{secret}?q={secret}", headers=headers))).status == 200
        malformed, unknown, served = await requests_of(collector, 3)
    assert malformed.names == ["read"] and malformed.attributes["http.response.status_code"] == 400
    assert unknown.attributes["error.type"] == "model_not_found"
    assert served.attributes["http.route"] == "/v1/*"
    assert secret not in repr(collector.spans)


async def test_a_request_cut_off_by_the_shutdown_ends_its_trace(collector: Collector) -> None:
    async with engines() as [engine], router(
        engine, tracing=tracing(collector), shutdown={"deadline_s": 0.1}
    ) as r:  # fmt: skip
        engine.behave = hanging
        client = await r.connect()
        client.write(post())
        await until(lambda: engine.seen)
        await r.service.stop()
        assert (await client.response()).status == 503
        [request] = await requests_of(collector)
    assert request.failed and request.attributes["error.type"] == "router_stopping"


async def test_a_large_body_has_the_time_of_its_arrival(collector: Collector) -> None:
    async with engines() as [engine], router(engine, tracing=tracing(collector)) as r:
        data = post(chat("x" * 400_000))
        client = await r.connect()
        client.write(data[:300_000])
        await asyncio.sleep(0.1)
        client.write(data[300_000:])
        assert (await client.response()).status == 200
        client.write(post())
        assert (await client.response()).status == 200
        large, small = await requests_of(collector, 2)
    read = large.only("read")
    assert read.end_s - read.start_s > 0.09
    assert small.start_s > large.end_s, "the next request on the connection begins when it comes"


async def test_the_clients_trace_continues_in_the_engine(collector: Collector) -> None:
    async with engines() as [engine], router(engine, tracing=tracing(collector, sample_ratio=0.0)) as r:
        engine.behave = stream(2)
        headers = [SAMPLED, "tracestate: vendor=value,other=1", "baggage: a=b"]
        assert (await r.request(post(headers=headers))).status == 200
        [request] = await requests_of(collector)
    assert (request.trace_id, request.parent_id) == (TRACE_ID, PARENT_ID)
    assert request.trace_state == "vendor=value,other=1"
    [seen] = engine.seen
    assert seen.get(b"traceparent") == [f"00-{TRACE_ID}-{request.only('attempt').span_id}-01".encode()]
    assert seen.get(b"tracestate") == [b"vendor=value,other=1"] and seen.get(b"baggage") == [b"a=b"]
