"""Requests that wait in the router's queue until a node has room. The engine does not see them before."""

from __future__ import annotations

import asyncio
import json
import re
import time
from typing import Any

import openai
import pytest
from gated_engine import LONG, ONE_BY_ONE, PRICE, ResponseGate, busy_engine, long_prompt, send_long_prompt, until_queued
from support.polling import until
from support.raw_client import Response, chat, get, post
from support.running_router import RunningRouter, quick_table, router
from support.scripted_engine import engines

from warmroute.app.service import Service
from warmroute.config import Config, from_table
from warmroute.core.router import Router
from warmroute.edge.arrival import hash_key


async def test_requests_wait_in_the_router_while_the_engine_has_no_room() -> None:
    async with busy_engine(admission=ONE_BY_ONE) as (r, gate):
        peers = [await send_long_prompt(r, number) for number in range(1, 4)]
        await until_queued(r, 3)
        await asyncio.sleep(0.15)  # several runs of the admission loop
        assert len(gate.engine.seen) == 1 and r.inflight() == 1
        for seen in range(2, 5):
            gate.release()
            await until(lambda seen=seen: len(gate.engine.seen) == seen)
        gate.release()
        assert [(await peer.response()).status for peer in peers] == [200] * 3
        assert r.service.admission.queue.queued_total == 3 and r.service.admission.queue.waiting == 0


async def test_a_long_prompt_exceeds_the_node_backlog_and_a_response_corrects_the_estimate() -> None:
    async with busy_engine() as (r, gate):
        assert r.service.config.admission.max_node_backlog_ms == 250.0
        assert 400 < r.node(0).pending_work * r.node(0).speed.ms_per_token < 600
        peer = await send_long_prompt(r, 1)
        await until_queued(r, 1)
        assert len(gate.engine.seen) == 1
        gate.release(2)
        assert (await peer.response()).status == 200
        assert r.node(0).speed.answers == 2 and abs(r.node(0).pending_work) < 1e-3


async def test_a_queued_request_reaches_the_engine_byte_for_byte() -> None:
    async with busy_engine() as (r, gate):
        peer = await send_long_prompt(r, 1)
        await until_queued(r, 1)
        gate.release(2)
        assert (await peer.response()).status == 200
        assert gate.engine.seen[1].body == chat(f"{1:08d}{LONG}", stream=True)


async def test_pipelined_requests_wait_one_after_the_other() -> None:
    async with busy_engine() as (r, gate):
        peer = await r.connect()
        peer.write(long_prompt(1) + long_prompt(2))
        await until_queued(r, 1)
        gate.release(3)
        assert [(await peer.response()).status for _ in range(2)] == [200, 200]
        assert [seen.body[:80] for seen in gate.engine.seen[1:]] == [
            chat(f"{number:08d}{LONG}", stream=True)[:80] for number in (1, 2)
        ]


async def test_a_queued_request_of_a_client_that_left_never_reaches_an_engine() -> None:
    async with busy_engine() as (r, gate):
        leaving, staying = await send_long_prompt(r, 1), await send_long_prompt(r, 2)
        await until_queued(r, 2)
        left_s = time.monotonic()
        leaving.disconnect()
        await until_queued(r, 1)
        assert time.monotonic() - left_s < 0.5
        assert r.service.counters.disconnects == 1
        gate.release(2)
        assert (await staying.response()).status == 200
        assert len(gate.engine.seen) == 2


async def test_a_queued_request_goes_to_the_node_that_is_free_first() -> None:
    async with engines(2) as [first, second], router(first, second, routing=PRICE) as r:
        gates = [ResponseGate(first), ResponseGate(second)]
        await send_long_prompt(r, 0)
        await send_long_prompt(r, 1)
        await until(lambda: first.seen and second.seen)
        peer = await send_long_prompt(r, 2)
        await until_queued(r, 1)
        gates[1].release(2)
        assert (await peer.response()).status == 200
        assert len(first.seen) == 1 and len(second.seen) == 2
        gates[0].release()
        await until(lambda: r.inflight() == 0)


async def test_a_full_queue_rejects_with_429_and_retry_after() -> None:
    async with busy_engine(admission={"max_waiting": 2}) as (r, gate):
        for number in range(1, 3):
            await send_long_prompt(r, number)
        await until_queued(r, 2)
        rejected = await r.request(long_prompt(3))
        assert rejected.status == 429 and rejected.error["code"] == "overloaded"
        assert rejected.error["type"] == "rate_limit_error"
        assert 1 <= int(rejected.get("retry-after") or 0) <= 60
        assert len(gate.engine.seen) == 1 and r.service.counters.errors[429, "overloaded"] == 1


async def test_rejected_requests_are_in_the_log_while_the_router_runs_and_when_it_stops(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def logged() -> int:
        return sum(
            [int(count) for count in re.findall(r"requests_rejected reason=queue_full count=(\d+)", caplog.text)]
        )

    async with busy_engine(admission={"max_waiting": 1}) as (r, _gate):
        await send_long_prompt(r, 1)
        await until_queued(r, 1)
        for number in range(2, 5):
            assert (await r.request(long_prompt(number))).status == 429
        r.service.alerts.update(time.monotonic())
        assert logged() >= 1 and "The router's queue is at its limit admission.max_waiting" in caplog.text
        for number in range(5, 7):
            assert (await r.request(long_prompt(number))).status == 429
    assert logged() == 5


async def test_the_openai_client_comes_back_when_the_queue_has_drained() -> None:
    """The engine ends ten requests per second, so forty that wait are gone after 4 s."""
    async with busy_engine(admission={**ONE_BY_ONE, "max_waiting": 40}) as (r, gate):
        told: list[tuple[float, str | None]] = []

        async def note(response: Any) -> None:
            told.append((time.monotonic(), response.headers.get("retry-after")))

        for number in range(1, 41):
            await send_long_prompt(r, number)
        await until_queued(r, 40)
        for number in range(41, 61):
            await asyncio.sleep(0.1)
            gate.release()
            await until_queued(r, 39)
            await send_long_prompt(r, number)
            await until_queued(r, 40)
        http = openai.DefaultAsyncHttpxClient(event_hooks={"response": [note]})
        url = f"http://127.0.0.1:{r.port}/v1"
        client = openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=5, http_client=http)
        messages: Any = [{"role": "user", "content": LONG}]
        answer = asyncio.create_task(client.chat.completions.create(model="m", messages=messages, stream=True))
        await until(lambda: told)
        while r.service.admission.queue.waiting:
            await asyncio.sleep(0.1)
            gate.release()
        drained_s = time.monotonic() - told[0][0]
        gate.release(2)
        await answer
        (rejected_s, after), (returned_s, _) = told  # one 429, then the response
        assert after is not None and 1 / 3 < float(after) / drained_s < 3, (after, drained_s)
        assert returned_s - rejected_s >= float(after)
        await client.close()


async def test_a_request_that_waits_too_long_gets_503() -> None:
    async with busy_engine(admission={"max_wait_s": 0.2}) as (r, gate):
        began_s = time.monotonic()
        rejected = await r.request(long_prompt(1))
        assert rejected.status == 503 and rejected.error["code"] == "queue_timeout"
        assert rejected.get("retry-after") and time.monotonic() - began_s >= 0.2
        assert len(gate.engine.seen) == 1


async def test_the_connection_of_a_rejected_request_serves_the_next_one() -> None:
    async with busy_engine(admission={"max_wait_s": 0.1}) as (r, _gate):
        peer = await r.connect()
        peer.write(long_prompt(1) + get("/v1/models"))
        assert (await peer.response()).status == 503
        assert (await peer.response()).status == 200


async def test_queued_requests_get_an_error_when_the_node_dies() -> None:
    async with busy_engine() as (r, gate):
        peers = [await send_long_prompt(r, number) for number in range(1, 4)]
        await until_queued(r, 3)
        await gate.engine.refuse()
        answers: list[Response] = [await peer.response() for peer in peers]
        assert {response.status for response in answers} <= {502, 503} and all(
            response.error["code"] for response in answers
        )
        await gate.engine.listen()
        await until(lambda: r.service.fleet.can_serve)


async def test_without_a_router_queue_the_engine_gets_every_request_at_once() -> None:
    async with busy_engine(admission={"queue_at_router": False}) as (r, gate):
        for number in range(1, 4):
            await send_long_prompt(r, number)
        await until(lambda: len(gate.engine.seen) == 4)
        assert r.service.admission.queue.queued_total == 0


async def test_metrics_count_queued_requests() -> None:
    async with busy_engine() as (r, gate):
        peer = await send_long_prompt(r, 1)
        await until_queued(r, 1)
        page = (await r.admin("GET", "/metrics")).body.decode()
        assert "\nwarmroute_requests_waiting 1\n" in page and "\nwarmroute_requests_queued_total 1\n" in page
        assert '\nwarmroute_node_prefill_seconds_per_token{node="node0"} 5e-05\n' in page
        assert '\nwarmroute_node_decode_seconds_per_token{node="node0"} ' in page
        gate.release(2)
        await peer.response()
        page = (await r.admin("GET", "/metrics")).body.decode()
        assert "\nwarmroute_requests_waiting 0\n" in page and "\nwarmroute_requests_queued_total 1\n" in page
        assert '\nwarmroute_queue_admissions_total{order="work"} 1\n' in page
        assert '\nwarmroute_queue_admissions_total{order="guarantee"} 0\n' in page
        assert "\nwarmroute_queue_guarantee_exceeded_total 0\n" in page


@pytest.mark.interpreted
async def test_an_internal_error_fails_one_request_and_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: object) -> None:
        raise OverflowError("what the user typed")

    async with busy_engine() as (r, gate):
        queued = await send_long_prompt(r, 1)
        await until_queued(r, 1)
        with monkeypatch.context() as broken:
            broken.setattr(Router, "open_ticket", fails)
            gate.release(1)  # ends the first request: admission lets the queued one through, and it fails
            failed = await queued.response()
            assert failed.status == 500 and failed.error["code"] == "internal_error"
            assert (await r.request(post(chat(LONG)))).status == 500, "also without waiting in the queue"
        assert r.service.admission.queue.waiting == 0 and r.node(0).inflight == 0
        gate.release(1)
        peer = await send_long_prompt(r, 2)
        assert (await peer.response()).status == 200
    assert "OverflowError at" in caplog.text and "typed" not in caplog.text


# Reload and shutdown.


async def test_a_reload_of_admission_applies_to_queued_requests() -> None:
    async with engines() as [engine]:
        tables: dict[str, Any] = {}

        def config() -> Config:
            return from_table(quick_table([engine], routing=PRICE, **tables), experiment=True)

        service = Service(config)
        await service.start()
        r = RunningRouter(service)
        try:
            await until(lambda: service.fleet.can_serve)
            gate = ResponseGate(engine)
            peers = [await send_long_prompt(r, 0)]
            await until(lambda: engine.seen)
            peers += [await send_long_prompt(r, 1), await send_long_prompt(r, 2)]
            await until_queued(r, 2)
            tables["admission"] = {"max_waiting": 2}
            assert service.reload() is None
            assert (await r.request(long_prompt(3))).status == 429
            tables["admission"] = {"max_node_backlog_ms": 60_000.0}
            assert service.reload() is None
            await until(lambda: len(engine.seen) == 3)
            gate.release(3)
            assert [(await peer.response()).status for peer in peers] == [200] * 3
        finally:
            for peer in r.peers:
                peer.disconnect()
            await service.stop()


async def test_queued_requests_are_served_during_shutdown() -> None:
    async with busy_engine() as (r, gate):
        peers = [await send_long_prompt(r, number) for number in range(1, 3)]
        await until_queued(r, 2)
        stopping = asyncio.ensure_future(r.service.stop())
        await asyncio.sleep(0.05)
        gate.release(3)
        assert [(await peer.response()).status for peer in peers] == [200, 200]
        await asyncio.wait_for(stopping, 10)


async def test_queued_requests_get_an_error_when_the_shutdown_deadline_passes() -> None:
    async with busy_engine(shutdown={"deadline_s": 0.2}) as (r, gate):
        peer = await send_long_prompt(r, 1)
        await until_queued(r, 1)
        await asyncio.wait_for(r.service.stop(), 10)
        response = await peer.response()
        assert response.status == 503 and response.error["code"] == "router_stopping"
        assert await peer.is_closed()
        assert r.service.admission.queue.waiting == 0 and len(gate.engine.seen) == 1


async def test_priority_from_header_or_body_decides_the_order() -> None:
    async with busy_engine(admission=ONE_BY_ONE) as (r, gate):
        requests = [
            post(chat("1" * 8 + LONG, stream=True), headers=["X-Priority: low"]),
            post(chat("2" * 8 + LONG, stream=True)),
            post(chat("3" * 8 + LONG, stream=True, priority=5)),
            post(chat("4" * 8 + LONG, stream=True, priority=-1)),
            post(chat("5" * 8 + LONG, stream=True), headers=["X-Priority: HIGH"]),
            post(chat("6" * 8 + LONG, stream=True), headers=["X-Priority: normal"]),
        ]
        for request in requests:
            (await r.connect()).write(request)
        await until_queued(r, len(requests))
        for seen in range(len(requests)):
            gate.release()
            await until(lambda seen=seen: len(gate.engine.seen) == seen + 2)
        order = [
            next(number for number in "123456" if number * 8 in seen.body.decode()) for seen in gate.engine.seen[1:]
        ]
        assert [{"1": 2, "2": 1, "3": 2, "4": 0, "5": 0, "6": 1}[number] for number in order] == [0, 0, 1, 1, 2, 2]


async def test_a_key_caps_the_priority_of_its_requests() -> None:
    keys = [
        {"sha256": hash_key("big"), "tenant": "a", "max_priority": "high"},
        {"sha256": hash_key("small"), "tenant": "b"},  # normal, by default
    ]
    async with engines() as [engine], router(engine, routing=PRICE, admission=ONE_BY_ONE, keys=keys) as r:
        gate = ResponseGate(engine)
        for number, key in enumerate(["big", "small", "small", "big"]):
            headers = [f"Authorization: Bearer {key}", "X-Priority: high"]
            (await r.connect()).write(post(chat(f"{number:08d}{LONG}", stream=True), headers=headers))
            await until(lambda number=number: r.service.admission.queue.waiting + len(engine.seen) == number + 1)
        queued = sorted(key for key, tenant in r.service.admission.queue.tenants.items() if tenant.waiting)
        assert queued == [(0, "a"), (1, "b")]
        gate.release(4)
        await until(lambda: len(engine.seen) == 4)
        await until(lambda: r.inflight() == 0)


async def test_requests_without_streaming_do_not_wait_for_each_other_to_end() -> None:
    async with engines() as [engine], router(engine, routing=PRICE) as r:
        gate = ResponseGate(engine)
        peers = []
        for number in range(4):  # 460 ms of estimated prefill each, and none has ended
            peers.append(await r.connect())
            peers[-1].write(post(chat(f"{number:08d}{LONG}")))
        await until(lambda: len(engine.seen) == 4, "the engine has all requests")
        gate.release(4)
        for peer in peers:
            assert (await peer.response()).status == 200


async def test_an_engine_gets_no_more_than_max_inflight_requests_at_a_time() -> None:
    """Also without streaming, where the router does not see when a prefill ends."""
    async with engines() as [engine], router({"url": engine.url, "max_inflight": 2}, routing=PRICE) as r:
        gate = ResponseGate(engine)
        peers = []
        for number in range(6):
            peers.append(await r.connect())
            peers[-1].write(post(chat(f"{number} short")))
        await until_queued(r, 4)
        await asyncio.sleep(0.2)  # several runs of the admission loop
        assert len(engine.seen) == 2 and r.node(0).inflight == 2
        [node] = json.loads((await r.admin("GET", "/admin/nodes")).body)["nodes"]
        assert node["max_inflight"] == node["requests_in_flight"] == 2
        explained = json.loads((await r.admin("POST", "/admin/explain", b'{"body": %b}' % chat("7 short"))).body)
        assert explained["would_queue"] and "every node is at max_inflight" in explained["explanation"]
        assert (
            '\nwarmroute_node_max_requests_in_flight{node="node0"} 2\n'
            in (await r.admin("GET", "/metrics")).body.decode()
        )
        for served in range(3, 7):
            gate.release()
            await until(lambda served=served: len(engine.seen) == served)
            assert r.node(0).inflight == 2
        gate.release(2)
        assert [(await peer.response()).status for peer in peers] == [200] * 6


async def test_a_policy_that_does_not_queue_answers_429_at_max_inflight() -> None:
    table: dict[str, Any] = {"routing": {"policy": "round_robin"}}
    async with engines() as [engine], router({"url": engine.url, "max_inflight": 1}, **table) as r:
        gate = ResponseGate(engine)
        first = await r.connect()
        first.write(post(chat("first")))
        await until(lambda: engine.seen)
        rejected = await r.request(post(chat("second")))
        assert rejected.status == 429 and rejected.error["code"] == "overloaded" and rejected.get("retry-after")
        page = (await r.admin("GET", "/metrics")).body.decode()
        assert '\nwarmroute_requests_rejected_total{priority="normal",reason="max_inflight"} 1\n' in page
        gate.release(2)
        assert (await first.response()).status == 200
        assert (await r.request(post(chat("third")))).status == 200
