"""What the picker learns of a response: who served it, the first token, the usage, its end. Tickets always close."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import grpc
import pytest
from gated_engine import LONG, ONE_BY_ONE, PRICE
from support.picker import FakeEnvoy, RunningPicker, chat_body, headers_message, picker
from support.polling import until
from support.scripted_engine import engines

from warmroute.app.journal import describe
from warmroute.core.health import HealthState, counts_of
from warmroute.core.messages import Outcome
from warmroute.core.node import Node
from warmroute.core.tickets import PromptTicket
from warmroute.edge.envoy import ext_proc

ROLE = b'data: {"choices":[{"delta":{"role":"assistant"}}]}\n\n'
TOKEN = b'data: {"choices":[{"delta":{"content":"hi"}}]}\n\n'
TEXT = "some words of a prompt " * 200


def usage(cached: int, prompt: int = 1150) -> bytes:
    details = {"cached_tokens": cached}
    counts = {"prompt_tokens": prompt, "completion_tokens": 3, "prompt_tokens_details": details}
    return b"data: %b\n\ndata: [DONE]\n\n" % json.dumps({"choices": [], "usage": counts}).encode()


async def _sent(p: RunningPicker, mode: str = "buffered", responses: str = "streamed") -> tuple[FakeEnvoy, list[str]]:
    envoy = p.stream(mode, responses)
    await envoy.send_request(chat_body(TEXT, stream=True))
    answer = await envoy.decision()
    if mode == "duplex":
        await envoy.body_back()
    return envoy, answer.endpoints


def _node_at(p: RunningPicker, endpoint: str) -> Node:
    row = p.server.endpoints.node_at(endpoint)
    node = p.service.fleet.numbered(row.number) if row is not None else None
    assert node is not None
    return node


def _outcomes(p: RunningPicker) -> dict[str, dict[Outcome, int]]:
    return {
        node.name: {outcome: node.outcomes[outcome] for outcome in Outcome if node.outcomes[outcome]}
        for node in p.service.fleet
    }


@pytest.mark.parametrize("responses", ["streamed", "duplex"])
async def test_the_first_token_is_found_by_content_and_the_usage_is_read(responses: str) -> None:
    async with engines(1) as nodes, picker(*nodes, routing=PRICE) as p:
        envoy, _endpoints = await _sent(p, responses=responses)
        [call] = p.service.brain.open.values()
        assert call.main is not None
        ticket = call.main.ticket
        assert isinstance(ticket, PromptTicket)
        await envoy.respond(ROLE, end=False)
        assert not ticket.first_token_s
        await envoy.show(TOKEN, TOKEN, usage(1024))
        assert ticket.first_token_s
        await envoy.finish()
        assert _outcomes(p) == {"node0": {Outcome.OK: 1}}
        [call] = p.service.last_decisions.latest(1)
        assert call.usage == (1150, 1024, 3)


async def test_the_journal_and_explain_work_as_with_the_proxy() -> None:
    async with engines(2) as nodes, picker(*nodes, routing=PRICE) as p:
        envoy, endpoints = await _sent(p)
        await envoy.respond(TOKEN, usage(0))
        await envoy.finish()
        reader, writer = await asyncio.open_connection("127.0.0.1", p.service.admin_port)
        writer.write(b"GET /admin/decisions HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
        answer = await reader.read()
        writer.close()
        [call] = p.service.last_decisions.latest(1)
        decision = describe(call, 0.0)
        assert f"127.0.0.1:{p.service.fleet.node(decision['node']).port}" == endpoints[0]
        assert decision["outcome"] == "ok" and decision["request_id"].encode() in answer


async def test_the_ticket_moves_to_the_fallback_that_served() -> None:
    async with engines(3) as nodes, picker(*nodes, routing=PRICE) as p:
        envoy, endpoints = await _sent(p)
        first, second = (_node_at(p, one) for one in endpoints[:2])
        assert first.inflight == 1
        await envoy.respond(TOKEN, served=endpoints[1], end=False)
        assert (first.inflight, second.inflight) == (0, 1)
        assert first.outcomes[Outcome.FAILED] == 1 and p.service.counters.retries == 1
        await envoy.show(usage(0))
        await envoy.finish()
        assert second.outcomes[Outcome.OK] == 1


async def test_upstream_address_names_the_node_where_the_policy_does_not() -> None:
    async with engines(2) as nodes, picker(*nodes) as p:
        envoy, endpoints = await _sent(p)
        second = _node_at(p, endpoints[1])
        head = headers_message("response_headers", {":status": "200", "x-envoy-upstream-service-time": "1"}, end=True)
        head.attributes["envoy.filters.http.ext_proc"]["upstream.address"] = endpoints[1]
        await envoy.call.write(head)
        await envoy.read()
        assert second.outcomes[Outcome.OK] == 1
        await envoy.finish()


@pytest.mark.parametrize(
    ("status", "from_node", "outcome"),
    [
        (500, True, Outcome.FAILED), (503, True, Outcome.BUSY), (429, True, Outcome.BUSY),
        (400, True, Outcome.REJECTED), (503, False, Outcome.FAILED),
        (504, False, Outcome.FAILED), (429, False, Outcome.CANCELLED),
    ],
)  # fmt: skip
async def test_an_error_counts_for_the_node_that_sent_it(status: int, from_node: bool, outcome: Outcome) -> None:
    async with engines(1) as nodes, picker(*nodes, health={"consecutive_failures": 100}) as p:
        envoy, _endpoints = await _sent(p)
        await envoy.respond(b"{}", status=status, from_node=from_node, content_type="application/json")
        await envoy.finish()
        assert _outcomes(p) == {"node0": {outcome: 1}}
        counters = p.service.counters
        if outcome is Outcome.REJECTED:
            assert counters.responses == {status: 1} and not counters.errors
        else:  # as if the proxy had answered
            assert not counters.responses and [code for code, _ in counters.errors] == [status]


async def test_an_unknown_served_endpoint_changes_nothing() -> None:
    async with engines(1) as nodes, picker(*nodes) as p:
        envoy, _endpoints = await _sent(p)
        await envoy.respond(TOKEN, served="10.1.1.1:9")
        await envoy.finish()
        assert _outcomes(p) == {"node0": {Outcome.OK: 1}}


# Responses that Envoy does not show.


async def test_a_response_that_is_not_shown_counts_until_the_stream_ends() -> None:
    async with engines(1) as nodes, picker(*nodes, routing=PRICE) as p:
        envoy, _endpoints = await _sent(p, responses="none")
        assert p.inflight() == [1]
        await envoy.finish()
        assert p.inflight() == [0] and _outcomes(p) == {"node0": {Outcome.OK: 1}}
        assert p.service.counters.responses == {0: 1}


async def test_with_the_head_alone_status_and_node_are_known() -> None:
    async with engines(1) as nodes, picker(*nodes, routing=PRICE) as p:
        for _ in range(2):
            envoy, _endpoints = await _sent(p, responses="none")
            await envoy.respond()
            assert p.inflight() == [1]
            await envoy.finish()
        assert p.service.counters.responses == {200: 2}
        envoy, _endpoints = await _sent(p, responses="none")
        await envoy.finish()  # this Envoy shows heads: the client left before there was one
        assert _outcomes(p) == {"node0": {Outcome.OK: 2, Outcome.CANCELLED: 1}}


# Ends at every point.


@pytest.mark.parametrize("how", ["cancel", "finish"])
@pytest.mark.parametrize("mode", ["buffered", "duplex"])
async def test_a_client_that_leaves_frees_the_node_at_every_point(mode: str, how: str) -> None:
    async with engines(1) as nodes, picker(*nodes, routing=PRICE) as p:

        async def leave(envoy: FakeEnvoy) -> None:
            if how == "cancel":
                envoy.call.cancel()
            else:
                await envoy.call.done_writing()
            await p.until_idle()

        for fields in ({}, {":method": "POST", ":path": "/v1/completions", "content-length": "999"}):
            early = p.stream(mode)
            if fields:
                await early.call.write(headers_message("request_headers", fields, end=False))
                await until(lambda: p.server.connections)
            await leave(early)
        decided, _endpoints = await _sent(p, mode)
        assert p.inflight() == [1]
        await leave(decided)
        answering, _endpoints = await _sent(p, mode)
        await answering.respond(TOKEN, end=False)
        await leave(answering)
        assert p.service.counters.disconnects >= 2


async def test_a_client_that_leaves_after_the_last_event_has_its_response() -> None:
    async with engines(1) as nodes, picker(*nodes, routing=PRICE) as p:
        for number, ends in enumerate((usage(1024), usage(1024)[:-20]), 1):
            envoy, _endpoints = await _sent(p)
            await envoy.respond(TOKEN, ends, end=False)
            assert sum(p.inflight()) == number - 1  # the node is free before Envoy shows the end
            envoy.call.cancel()
            await p.until_idle()
            assert (p.service.counters.responses[200], p.service.counters.disconnects) == (1, number - 1)
        assert _outcomes(p) == {"node0": {Outcome.OK: 1, Outcome.CANCELLED: 1}}
        assert [call.usage and call.usage[1] for call in p.service.last_decisions.latest(2)] == [None, 1024]


async def test_a_queued_request_leaves_the_queue_with_its_client() -> None:
    tables: dict[str, Any] = {"routing": PRICE, "admission": ONE_BY_ONE}
    async with engines(1) as nodes, picker(*nodes, **tables) as p:
        first = p.stream()
        await first.send_request(chat_body(f"first {LONG}", stream=True))
        await first.decision()
        for how in ("cancel", "done_writing"):
            for mode in ("buffered", "duplex"):
                waiting = p.stream(mode)
                await waiting.send_request(chat_body(LONG, stream=True))
                await until(lambda: p.service.admission.queue.waiting == 1)
                if how == "cancel":
                    waiting.call.cancel()
                else:
                    await waiting.call.done_writing()
                await until(lambda: not p.service.admission.queue.waiting)
        first.call.cancel()


async def test_a_queued_request_is_sent_when_the_node_has_room() -> None:
    tables: dict[str, Any] = {"routing": PRICE, "admission": ONE_BY_ONE}
    async with engines(1) as nodes, picker(*nodes, **tables) as p:
        first = p.stream()
        await first.send_request(chat_body(f"first {LONG}", stream=True))
        await first.decision()
        waiting = p.stream()
        await waiting.send_request(chat_body(LONG, stream=True))
        await until(lambda: p.service.admission.queue.waiting == 1)
        await first.respond(TOKEN)
        assert (await waiting.decision()).endpoints
        assert waiting.more_time_s == []
        await first.finish()
        waiting.call.cancel()


async def _flood(envoy: FakeEnvoy, message: Any) -> None:
    for _ in range(1000):
        await envoy.call.write(message)


async def test_a_message_that_comes_before_the_decision_is_answered_after_it() -> None:
    tables: dict[str, Any] = {"routing": PRICE, "admission": ONE_BY_ONE}
    trailers = ext_proc.ProcessingRequest(request_trailers=ext_proc.MESSAGES["HttpTrailers"]())
    async with engines(1) as nodes, picker(*nodes, **tables) as p:
        first = p.stream()
        await first.send_request(chat_body(f"first {LONG}", stream=True))
        await first.decision()
        waiting, flooding = p.stream("duplex"), p.stream("duplex")
        for one in (waiting, flooding):
            await one.send_request(chat_body(LONG, stream=True))
        await until(lambda: p.service.admission.queue.waiting == 2)
        await waiting.call.write(trailers)
        with pytest.raises((grpc.aio.AioRpcError, asyncio.InvalidStateError)):  # grpcio knows of the end, or not yet
            await _flood(flooding, trailers)
        await until(lambda: p.service.admission.queue.waiting == 1)
        await first.respond(TOKEN)
        assert (await waiting.decision()).endpoints
        assert await waiting.body_back() == chat_body(LONG, stream=True)
        assert (await waiting.read()).HasField("request_trailers")
        await first.finish()
        waiting.call.cancel()


async def test_the_picker_asks_envoy_for_more_time_where_the_filter_allows_it() -> None:
    limits = {"port": 0, "message_timeout_s": 0.2, "max_message_timeout_s": 20.0}
    tables: dict[str, Any] = {"routing": PRICE, "admission": ONE_BY_ONE, "picker": limits}
    async with engines(1) as nodes, picker(*nodes, **tables) as p:
        first = p.stream()
        await first.send_request(chat_body(f"first {LONG}", stream=True))
        await first.decision()
        waiting = p.stream()
        await waiting.send_request(chat_body(LONG, stream=True))
        asking = asyncio.ensure_future(waiting.decision())
        await until(lambda: waiting.more_time_s == [20.0])
        await asyncio.sleep(0.3)
        assert not asking.done()
        await first.respond(TOKEN)
        assert (await asking).endpoints
        await first.finish()
        waiting.call.cancel()


# Errors.


async def test_the_body_of_an_error_is_read_where_envoy_shows_it() -> None:
    body = b'{"error":{"message":"CUDA out of memory: some words","type":"InternalServerError","code":500}}'
    async with engines(1) as nodes, picker(*nodes, health={"consecutive_failures": 100}) as p:
        for status, responses, kind in ((500, "streamed", "out_of_memory"), (400, "streamed", "out_of_memory")):
            envoy, _endpoints = await _sent(p, responses=responses)
            await envoy.respond(body[:20], body[20:], status=status, content_type="application/json")
            await envoy.finish()
            [call] = p.service.last_decisions.latest(1)
            [failed] = describe(call, 0.0)["failed_tries"]
            assert failed["status"] == status
            assert failed["error"] == {
                "class": kind, "type": "InternalServerError", "code": "500", "length": len(body)
            }  # fmt: skip


async def test_poison_requests_open_no_breaker() -> None:
    """Envoy used a fallback, which answers 500 as well: both nodes serve other requests."""
    async with engines(3) as nodes, picker(*nodes) as p:
        for one in range(3):
            envoy, endpoints = await _sent(p)
            await envoy.respond(TOKEN, usage(0), served=endpoints[one])
            await envoy.finish()
        for node in p.service.fleet:
            node.last_served_s = p.service.proxy.now()
        failed_before = {node.name: counts_of(node).failed for node in p.service.fleet}
        for _ in range(30):
            envoy, endpoints = await _sent(p)
            await envoy.respond(b"{}", status=500, served=endpoints[1], content_type="application/json")
            await envoy.finish()
            [call] = p.service.last_decisions.latest(1)
            assert describe(call, 0.0)["poison"] is True
        assert {node.name: counts_of(node).failed for node in p.service.fleet} == failed_before
        assert all(node.health.state is HealthState.UP for node in p.service.fleet)


async def test_a_node_whose_fallbacks_serve_goes_down() -> None:
    async with engines(2) as nodes, picker(*nodes, health={"breaker_open_s": 30}) as p:
        for node in p.service.fleet:
            node.last_served_s = p.service.proxy.now()
        bad = next(iter(p.service.fleet))
        threshold = bad.health.config.consecutive_failures
        while bad.outcomes[Outcome.FAILED] < threshold:
            envoy, endpoints = await _sent(p)
            if _node_at(p, endpoints[0]) is bad:
                await envoy.respond(TOKEN, usage(0), served=endpoints[1])
            else:
                await envoy.respond(TOKEN, usage(0))
            await envoy.finish()
        assert bad.health.state is HealthState.DOWN
