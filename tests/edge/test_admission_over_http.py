"""What clients see of admission: rate limits, X-Queue, deadlines, queue thresholds, priorities and routes."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import openai
import pytest
from gated_engine import LONG, ONE_BY_ONE, PRICE, ResponseGate, busy_engine, until_queued
from support.engine_scripts import hanging, http_response, script, vllm_metrics
from support.polling import until
from support.raw_client import chat, post
from support.running_router import RunningRouter, quick_table, router
from support.scripted_engine import engines

from warmroute.app.service import Service
from warmroute.config import Config, from_table
from warmroute.edge.arrival import hash_key


def keys(**limits: int) -> list[dict[str, Any]]:
    return [
        {"sha256": hash_key("one"), "tenant": "a", **limits},
        {"sha256": hash_key("two"), "tenant": "a"},
        {"sha256": hash_key("other"), "tenant": "b"},
    ]


def post_as(key: str, body: bytes = chat(), path: str = "/v1/chat/completions", *headers: str) -> bytes:
    return post(body, path, headers=[f"Authorization: Bearer {key}", *headers])


def usage(prompt: int, output: int) -> bytes:
    return json.dumps({"ok": True, "usage": {"prompt_tokens": prompt, "completion_tokens": output}}).encode()


async def has_metric(r: RunningRouter, line: str) -> bool:
    return f"\n{line}\n" in (await r.admin("GET", "/metrics")).body.decode()


# Rate limits.


async def test_the_request_limit_counts_all_keys_of_a_tenant() -> None:
    async with engines() as [engine], router(engine, keys=keys(requests_per_min=3)) as r:
        assert [(await r.request(post_as(key))).status for key in ("one", "two", "one")] == [200] * 3
        rejected = await r.request(post_as("two"))
        assert rejected.status == 429 and rejected.error["code"] == "rate_limit_exceeded"
        assert rejected.error["type"] == "rate_limit_error" and "3 requests per minute" in rejected.error["message"]
        assert 15 <= int(rejected.get("retry-after") or 0) <= 20
        assert rejected.get("x-ratelimit-limit-requests") == "3"
        assert rejected.get("x-ratelimit-remaining-requests") == "0"
        assert (rejected.get("x-ratelimit-reset-requests") or "").endswith("s")
        assert (await r.request(post_as("other"))).status == 200, "another tenant has its own limit"
        assert len(engine.seen) == 4
        assert await has_metric(r, 'warmroute_requests_rejected_total{priority="normal",reason="requests_per_min"} 1')


@pytest.mark.parametrize(
    "max_tokens", [0, -1_000_000, -(10**400), 10**400], ids=["zero", "negative", "far too small", "far too large"]
)
async def test_an_impossible_max_tokens_refunds_no_tokens(max_tokens: int) -> None:
    async with engines() as [engine], router(engine, keys=keys(tokens_per_min=1000), routing=PRICE) as r:
        assert (await r.request(post_as("one", chat(LONG[:400], max_tokens=10)))).status == 200
        limits = r.service.rate_limits.of("a")
        assert limits is not None and limits.tokens is not None
        bucket = limits.tokens
        before = bucket.level(r.service.proxy.now())
        engine.behave = hanging
        peer = await r.connect()
        peer.write(post_as("one", chat(LONG[:400], max_tokens=max_tokens)))
        await until(lambda: len(engine.seen) == 2)
        assert bucket.level(r.service.proxy.now()) < before
        peer.disconnect()
        await until(lambda: r.node(0).inflight == 0)
        assert bucket.level(r.service.proxy.now()) < before


async def test_tokens_are_charged_by_estimate_and_corrected_by_the_reported_usage() -> None:
    async with engines() as [engine], router(engine, keys=keys(tokens_per_min=1000)) as r:
        engine.behave = script(http_response(usage(20, 10)))
        bucket = r.service.rate_limits.of("a")
        assert bucket is not None and bucket.tokens is not None

        def left() -> float:
            assert bucket is not None and bucket.tokens is not None
            return bucket.tokens.level(r.service.proxy.now())

        for _ in range(3):
            assert (await r.request(post_as("one"))).status == 200
        assert 910 <= left() < 930, "30 tokens each, and the bucket has refilled a little"
        engine.behave = script(http_response(usage(20, 5000)))
        assert (await r.request(post_as("one"))).status == 200
        rejected = await r.request(post_as("one"))
        assert rejected.status == 429 and "1,000 tokens per minute" in rejected.error["message"]
        assert 240 <= int(rejected.get("retry-after") or 0) <= 260, (
            "4,100 tokens in debt, and the bucket refills 16 each second"
        )
        assert rejected.get("x-ratelimit-remaining-tokens") == "0"


async def test_a_request_that_no_node_served_is_refunded() -> None:
    async with engines() as [engine], router(engine, keys=keys(requests_per_min=100, tokens_per_min=10_000)) as r:
        bucket = r.service.rate_limits.of("a")
        assert bucket is not None and bucket.tokens is not None and bucket.requests is not None

        def left() -> tuple[int, int]:
            assert bucket is not None and bucket.tokens is not None and bucket.requests is not None
            now_s = r.service.proxy.now()
            return round(bucket.requests.level(now_s)), round(bucket.tokens.level(now_s))

        engine.behave = script(http_response(b"{}", status=503))
        assert (await r.request(post_as("one"))).status == 503
        assert left() == (100, 10_000)
        assert (await r.request(post_as("one", chat(model="none")))).status == 404
        assert left() == (100, 10_000)
        engine.behave = script(http_response(b'{"error":{}}', status=400))
        assert (await r.request(post_as("one"))).status == 400
        assert left() == (99, 10_000), "a request that the node rejects costs no tokens"
        engine.behave = script(http_response(json.dumps({"usage": {"prompt_tokens": 7}}).encode()))
        assert (await r.request(post_as("one", b'{"model":"m","input":"x"}', "/v1/embeddings"))).status == 200
        await until(lambda: r.inflight() == 0)
        assert left()[1] > 9_985


async def test_a_client_that_leaves_the_queue_gets_its_tokens_back() -> None:
    tables: dict[str, Any] = {"keys": keys(tokens_per_min=100_000), "admission": ONE_BY_ONE}
    async with engines() as [engine], router(engine, routing=PRICE, **tables) as r:
        gate = ResponseGate(engine)
        first = await r.connect()
        first.write(post_as("one", chat("0" * 8 + LONG, stream=True)))
        await until(lambda: engine.seen)
        bucket = r.service.rate_limits.of("a")
        assert bucket is not None and bucket.tokens is not None
        before = bucket.tokens.level(r.service.proxy.now())
        assert before < 95_000
        second = await r.connect()
        second.write(post_as("one", chat("1" * 8 + LONG, stream=True)))
        await until_queued(r, 1)
        assert bucket.tokens.level(r.service.proxy.now()) < before - 5000
        second.disconnect()
        await until_queued(r, 0)
        assert bucket.tokens.level(r.service.proxy.now()) >= before
        gate.release()
        assert (await first.response()).status == 200


async def test_the_openai_client_raises_a_rate_limit_error() -> None:
    async with engines() as [engine], router(engine, keys=keys(requests_per_min=1)) as r:
        client = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{r.port}/v1", api_key="one", max_retries=0)
        engine.behave = script(
            http_response(b'{"id":"x","object":"chat.completion","created":1,"model":"m","choices":[]}')
        )
        messages: Any = [{"role": "user", "content": "hi"}]
        await client.chat.completions.create(model="m", messages=messages)
        with pytest.raises(openai.RateLimitError) as rejected:
            await client.chat.completions.create(model="m", messages=messages)
        assert rejected.value.code == "rate_limit_exceeded" and rejected.value.type == "rate_limit_error"
        assert int(rejected.value.response.headers["retry-after"]) > 30
        await client.close()


async def test_a_reload_changes_the_limits_and_keeps_what_was_used() -> None:
    async with engines() as [engine]:
        limit = 2

        def config() -> Config:
            return from_table(quick_table([engine], keys=keys(requests_per_min=limit)), experiment=True)

        service = Service(config)
        await service.start()
        r = RunningRouter(service)
        try:
            await until(lambda: service.fleet.can_serve)
            assert [(await r.request(post_as("one"))).status for _ in range(3)] == [200, 200, 429]
            limit = 600
            assert service.reload() is None
            await asyncio.sleep(0.25)  # the bucket refills ten each second
            assert (await r.request(post_as("one"))).status == 200
            limit = 0
            assert service.reload() is None
            assert {(await r.request(post_as("one"))).status for _ in range(5)} == {200}
        finally:
            for peer in r.peers:
                peer.disconnect()
            await service.stop()


# X-Queue.


async def test_x_queue_no_is_rejected_at_once_when_no_node_has_room() -> None:
    async with busy_engine(admission=ONE_BY_ONE) as (r, gate):
        rejected = await r.request(post(chat("1" * 8 + LONG, stream=True), headers=["x-queue: NO"]))
        assert rejected.status == 429 and rejected.error["code"] == "would_queue" and rejected.get("retry-after")
        assert r.service.admission.queue.queued_total == 0 and len(gate.engine.seen) == 1
        (await r.connect()).write(post(chat("2" * 8 + LONG, stream=True), headers=["X-Queue: yes"]))
        await until_queued(r, 1)
        assert await has_metric(r, 'warmroute_requests_rejected_total{priority="normal",reason="would_queue"} 1')


# Deadlines.


async def test_an_unreachable_deadline_is_rejected_with_the_estimate() -> None:
    async with busy_engine(admission=ONE_BY_ONE) as (r, _gate):
        node = r.node(0)
        node.speed.answers = 5  # the router trusts its estimate of 460 ms
        rejected = await r.request(post(chat("1" * 8 + LONG, stream=True), headers=["X-Deadline-Ttft-Ms: 500"]))
        assert rejected.status == 429 and rejected.error["code"] == "deadline_unreachable"
        assert re.search(
            r"first token is due in [\d,]+ ms, but the router expects it after [\d,]+ ms", rejected.error["message"]
        )
        assert rejected.get("retry-after") == "1"
        peer = await r.connect()
        peer.write(post(chat("2" * 8 + LONG, stream=True), headers=["X-Deadline-Ttft-Ms: 2500"]))
        await until_queued(r, 1)
        late = await peer.response()
        assert late.status == 429 and late.error["code"] == "deadline_unreachable"
        assert r.service.admission.queue.waiting == 0
        assert await has_metric(r, 'warmroute_requests_rejected_total{priority="normal",reason="deadline_ttft"} 2')


@pytest.mark.parametrize("header", ["X-Deadline-Ms: soon", "X-Deadline-Ttft-Ms: -5", "x-deadline-ms: nan"])
async def test_an_invalid_deadline_header_is_400(header: str) -> None:
    async with engines() as [engine], router(engine) as r:
        rejected = await r.request(post(headers=[header]))
        assert rejected.status == 400 and rejected.error["code"] == "invalid_header"
        assert rejected.error["param"] == header.partition(":")[0].lower() and not engine.seen


@pytest.mark.parametrize(
    ("header", "values"), [("X-Priority: urgent", "high, normal or low"), ("X-Queue: maybe", "yes or no")]
)
async def test_an_invalid_priority_or_queue_header_is_400(header: str, values: str) -> None:
    async with engines() as [engine], router(engine) as r:
        rejected = await r.request(post(headers=[header]))
        name = header.partition(":")[0].lower()
        assert rejected.status == 400 and rejected.error["code"] == "invalid_header" and rejected.error["param"] == name
        assert rejected.error["message"] == f"The `{name}` header must be {values}." and not engine.seen


async def test_a_reachable_deadline_is_served_and_its_headers_are_forwarded() -> None:
    async with engines() as [engine], router(engine, routing=PRICE) as r:
        headers = ["X-Deadline-Ttft-Ms: 5000", "X-Deadline-Ms: 60000.5", "X-Queue: no"]
        assert (await r.request(post(headers=headers))).status == 200
        assert engine.seen[0].get(b"x-deadline-ms") == [b"60000.5"], "headers pass unchanged"


# Thresholds.


async def test_above_the_queue_threshold_of_all_nodes_only_high_priority_is_served() -> None:
    async with engines(2) as made, router(*made, admission={"queue_threshold": 4}) as r:
        for engine in made:
            engine.metrics = script(http_response(vllm_metrics(running=8, waiting=5), content_type=b"text/plain"))
        await until(lambda: all(node.waiting == 5 for node in r.service.fleet))
        rejected = await r.request()
        assert rejected.status == 429 and rejected.error["code"] == "overloaded" and rejected.get("retry-after") == "5"
        assert (await r.request(post(headers=["X-Priority: high"]))).status == 200
        made[1].metrics = script(http_response(vllm_metrics(running=8, waiting=3), content_type=b"text/plain"))
        await until(lambda: r.node(1).waiting == 3)
        seen = len(made[0].seen)
        assert {(await r.request()).status for _ in range(4)} == {200} and len(made[0].seen) == seen
        assert (await r.request(post(headers=["X-Priority: low"]))).status == 429
        assert await has_metric(r, 'warmroute_requests_rejected_total{priority="low",reason="queue_threshold"} 1')


async def test_a_displaced_low_priority_request_gets_429() -> None:
    async with busy_engine(admission={**ONE_BY_ONE, "max_waiting": 2}) as (r, _gate):
        low = await r.connect()
        low.write(post(chat("1" * 8 + LONG, stream=True), headers=["X-Priority: low"]))
        await until_queued(r, 1)
        for number in "23":
            (await r.connect()).write(post(chat(number * 8 + LONG, stream=True)))
        rejected = await low.response()
        assert rejected.status == 429 and rejected.error["code"] == "overloaded"
        assert "higher priority" in rejected.error["message"] and rejected.get("retry-after")
        await until_queued(r, 2)
        assert await has_metric(r, 'warmroute_requests_rejected_total{priority="low",reason="displaced"} 1')


# Routes.

ROUTES: list[dict[str, Any]] = [
    {"name": "agents", "header": "x-class=agent*", "policy": "session"},
    {"name": "batch", "tenant": "b", "priority": "low", "queue_at_router": False},
    {"name": "embed", "path": "/v1/embeddings", "policy": "least_loaded"},
]


async def test_routes_choose_the_policy() -> None:
    async with engines(3) as made, router(*made, routes=ROUTES) as r:
        for _ in range(6):
            headers = ["X-Class: agent-7", "X-Session-Id: s"]
            assert (await r.request(post(headers=headers))).status == 200
        assert sorted(len(engine.seen) for engine in made) == [0, 0, 6], "a session stays on its node"
        for _ in range(6):
            assert (await r.request(post(headers=["X-Session-Id: s"]))).status == 200
        assert sorted(len(engine.seen) for engine in made) == [2, 2, 8], "others use round robin"
        await r.request(post(b'{"model":"m","input":"x"}', "/v1/embeddings?x=1"))
        assert await has_metric(r, 'warmroute_route_requests_total{route="agents"} 6')
        assert await has_metric(r, 'warmroute_route_requests_total{route="embed"} 1')


async def test_prompts_are_read_only_for_routes_whose_policy_needs_them() -> None:
    routes = [{"name": "warm", "header": "x-warm", "policy": "price"}]
    async with engines() as [engine], router(engine, routes=routes) as r:
        node = r.node(0)
        gate = ResponseGate(engine)
        (await r.connect()).write(post(chat(LONG, stream=True)))
        await until(lambda: node.inflight == 1)
        assert node.pending_work == 0, "the prompt was not read"
        (await r.connect()).write(post(chat(LONG, stream=True), headers=["X-Warm: 1"]))
        await until(lambda: node.inflight == 2)
        assert node.pending_work > 5000
        gate.release(2)
        await until(lambda: r.inflight() == 0)


async def test_headers_and_bodies_override_a_routes_priority_up_to_the_keys_limit() -> None:
    made_keys = [
        {"sha256": hash_key("one"), "tenant": "b", "max_priority": "high"},
        {"sha256": hash_key("two"), "tenant": "b", "max_priority": "normal"},
    ]
    routes = [{**ROUTES[1], "queue_at_router": True}]
    async with (
        engines() as [engine],
        router(engine, routing=PRICE, admission=ONE_BY_ONE, keys=made_keys, routes=routes) as r,
    ):
        gate = ResponseGate(engine)
        requests = [
            post_as("one", chat("0" * 8 + LONG, stream=True)),
            post_as("one", chat("1" * 8 + LONG, stream=True)),
            post_as("one", chat("2" * 8 + LONG, stream=True), "/v1/chat/completions", "X-Priority: normal"),
            post_as("one", chat("3" * 8 + LONG, stream=True, priority=-1)),
            post_as("two", chat("4" * 8 + LONG, stream=True), "/v1/chat/completions", "X-Priority: high"),
            post_as("two", chat("5" * 8 + LONG, stream=True, priority=1), "/v1/chat/completions", "X-Priority: high"),
        ]
        for number, body in enumerate(requests):
            (await r.connect()).write(body)
            await until(lambda number=number: r.service.admission.queue.waiting + len(engine.seen) == number + 1)
        response = sorted(
            (priority, len(tenant.waiting)) for (priority, _), tenant in r.service.admission.queue.tenants.items()
        )
        assert response == [(0, 1), (1, 3), (2, 1)], "3 is high; 2, 4 and 5 are normal; 1 is low"
        gate.release(6)
        await until(lambda: len(engine.seen) == 6 and r.inflight() == 0)


async def test_a_reload_changes_the_routes() -> None:
    async with engines(2) as made:
        routes: list[dict[str, Any]] = []

        def config() -> Config:
            return from_table(quick_table(made, routes=routes), experiment=True)

        service = Service(config)
        await service.start()
        r = RunningRouter(service)
        try:
            await until(lambda: [len(group.sort_if_changed().up) for group in service.fleet.groups][:1] == [2])
            for _ in range(4):
                await r.request(post(headers=["X-Session-Id: s"]))
            assert [len(engine.seen) for engine in made] == [2, 2]
            routes.append({"name": "all", "policy": "session"})
            assert service.reload() is None
            for _ in range(4):
                await r.request(post(headers=["X-Session-Id: s"]))
            assert sorted(len(engine.seen) for engine in made) == [2, 6]
            routes[0]["policy"] = "best"
            assert "routes[0].policy" in (service.reload() or "")
        finally:
            for peer in r.peers:
                peer.disconnect()
            await service.stop()


async def test_a_header_overrides_a_routes_deadline() -> None:
    routes = [{"name": "all", "ttft_deadline_ms": 300.0}]
    async with busy_engine(admission=ONE_BY_ONE, routes=routes) as (r, _gate):
        r.node(0).speed.answers = 5
        assert (await r.request(post(chat("1" * 8 + LONG, stream=True)))).error["code"] == "deadline_unreachable"
        (await r.connect()).write(post(chat("2" * 8 + LONG, stream=True), headers=["X-Deadline-Ttft-Ms: 60000"]))
        await until_queued(r, 1)


async def test_a_response_carries_what_is_left_of_the_tenants_limits() -> None:
    async with engines() as [engine], router(engine, keys=keys(requests_per_min=50, tokens_per_min=10_000)) as r:
        engine.behave = script(http_response(b"{}", headers=b"X-RateLimit-Limit-Requests: 7\r\nX-Other: 1\r\n"))
        response = await r.request(post_as("one"))
        assert response.status == 200 and response.get("x-other") == "1"
        assert response.all("x-ratelimit-limit-requests") == ["50"], "the router's limit, not the node's"
        assert response.all("x-ratelimit-remaining-requests") == ["49"]
        assert response.all("x-ratelimit-limit-tokens") == ["10000"]
        assert 9_000 < int(response.all("x-ratelimit-remaining-tokens")[0]) < 10_000
        assert response.all("x-ratelimit-reset-requests") and response.all("x-ratelimit-reset-tokens")


async def test_rate_limit_headers_of_a_node_pass_where_the_router_has_no_limit() -> None:
    async with engines() as [engine], router(engine) as r:
        engine.behave = script(http_response(b"{}", headers=b"x-ratelimit-limit-requests: 7\r\n"))
        assert (await r.request()).all("x-ratelimit-limit-requests") == ["7"]
