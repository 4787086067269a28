"""What clients see of admission: limits, deadlines, thresholds, the wish not to wait, and routes. Real sockets."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import openai
import pytest
from harness import Router, answer, chat, engines, hanging, post, quick_table, router, script, until, vllm_metrics
from test_waiting import LONG, ONE_BY_ONE, PRICE, Gate, one_busy, waiting

from warmroute.config import Config, from_table
from warmroute.edge.keys import hash_key
from warmroute.service import Service


def keys(**limits: int) -> list[dict[str, Any]]:
    return [
        {"sha256": hash_key("one"), "tenant": "a", **limits},
        {"sha256": hash_key("two"), "tenant": "a"},
        {"sha256": hash_key("other"), "tenant": "b"},
    ]


def by(key: str, body: bytes = chat(), path: str = "/v1/chat/completions", *headers: str) -> bytes:
    return post(body, path, headers=[f"Authorization: Bearer {key}", *headers])


def usage(prompt: int, output: int) -> bytes:
    return json.dumps({"ok": True, "usage": {"prompt_tokens": prompt, "completion_tokens": output}}).encode()


async def metric(r: Router, line: str) -> bool:
    return f"\n{line}\n" in (await r.admin("GET", "/metrics")).body.decode()


# Rate limits.


async def test_requests_a_minute_are_counted_for_all_keys_of_a_tenant() -> None:
    async with engines() as [engine], router(engine, keys=keys(requests_per_min=3)) as r:
        assert [(await r.ask(by(key))).status for key in ("one", "two", "one")] == [200] * 3
        refused = await r.ask(by("two"))
        assert refused.status == 429 and refused.error["code"] == "rate_limit_exceeded"
        assert refused.error["type"] == "rate_limit_error" and "3 requests a minute" in refused.error["message"]
        assert 15 <= int(refused.get("retry-after") or 0) <= 20
        assert refused.get("x-ratelimit-limit-requests") == "3"
        assert refused.get("x-ratelimit-remaining-requests") == "0"
        assert (refused.get("x-ratelimit-reset-requests") or "").endswith("s")
        assert (await r.ask(by("other"))).status == 200, "another tenant's affair"
        assert len(engine.seen) == 4
        assert await metric(r, 'warmroute_shed_total{priority="normal",reason="requests_per_min"} 1')


@pytest.mark.parametrize("most", [0, -1_000_000, -(10**400), 10**400], ids=["none", "less", "far less", "far more"])
async def test_an_impossible_limit_of_an_answer_gives_no_tokens_back(most: int) -> None:
    async with engines() as [engine], router(engine, keys=keys(tokens_per_min=1000), routing=PRICE) as r:
        assert (await r.ask(by("one", chat(LONG[:400], max_tokens=10)))).status == 200
        bucket = r.service.proxy.rate_limits.of("a").tokens
        before = bucket.level(r.service.proxy.now())
        engine.behave = hanging
        peer = await r.connect()
        peer.write(by("one", chat(LONG[:400], max_tokens=most)))
        await until(lambda: len(engine.seen) == 2)
        assert bucket.level(r.service.proxy.now()) < before
        peer.leave()
        await until(lambda: r.node(0).inflight == 0)
        assert bucket.level(r.service.proxy.now()) < before


async def test_tokens_are_charged_as_expected_and_settled_by_the_answer() -> None:
    async with engines() as [engine], router(engine, keys=keys(tokens_per_min=1000)) as r:
        engine.behave = script(answer(usage(20, 10)))
        bucket = r.service.proxy.rate_limits.of("a")
        assert bucket is not None and bucket.tokens is not None

        def left() -> float:
            assert bucket is not None and bucket.tokens is not None
            return bucket.tokens.level(r.service.proxy.now())

        for _ in range(3):
            assert (await r.ask(by("one"))).status == 200
        assert 910 <= left() < 930, "30 tokens each, and a little has come back"
        engine.behave = script(answer(usage(20, 5000)))
        assert (await r.ask(by("one"))).status == 200
        refused = await r.ask(by("one"))
        assert refused.status == 429 and "1,000 tokens a minute" in refused.error["message"]
        assert 240 <= int(refused.get("retry-after") or 0) <= 260, "4,100 in debt, and 16 come each second"
        assert refused.get("x-ratelimit-remaining-tokens") == "0"


async def test_what_came_to_nothing_is_given_back() -> None:
    async with engines() as [engine], router(engine, keys=keys(requests_per_min=100, tokens_per_min=10_000)) as r:
        bucket = r.service.proxy.rate_limits.of("a")
        assert bucket is not None and bucket.tokens is not None and bucket.requests is not None

        def left() -> tuple[int, int]:
            assert bucket is not None and bucket.tokens is not None and bucket.requests is not None
            now_s = r.service.proxy.now()
            return round(bucket.requests.level(now_s)), round(bucket.tokens.level(now_s))

        engine.behave = script(answer(b"{}", status=503))
        assert (await r.ask(by("one"))).status == 502
        assert left() == (100, 10_000)
        assert (await r.ask(by("one", chat(model="none")))).status == 404
        assert left() == (100, 10_000)
        engine.behave = script(answer(b'{"error":{}}', status=400))
        assert (await r.ask(by("one"))).status == 400
        assert left() == (99, 10_000), "a request, but no tokens"
        engine.behave = script(answer(json.dumps({"usage": {"prompt_tokens": 7}}).encode()))
        assert (await r.ask(by("one", b'{"model":"m","input":"x"}', "/v1/embeddings"))).status == 200
        await until(lambda: r.inflight() == 0)
        assert left()[1] > 9_985


async def test_a_client_that_leaves_the_queue_leaves_its_tokens() -> None:
    tables = {"keys": keys(tokens_per_min=100_000), "admission": ONE_BY_ONE}
    async with engines() as [engine], router(engine, routing=PRICE, **tables) as r:
        gate = Gate(engine)
        first = await r.connect()
        first.write(by("one", chat("0" * 8 + LONG, stream=True)))
        await until(lambda: engine.seen)
        bucket = r.service.proxy.rate_limits.of("a")
        assert bucket is not None and bucket.tokens is not None
        before = bucket.tokens.level(r.service.proxy.now())
        assert before < 95_000
        second = await r.connect()
        second.write(by("one", chat("1" * 8 + LONG, stream=True)))
        await waiting(r, 1)
        assert bucket.tokens.level(r.service.proxy.now()) < before - 5000
        second.leave()
        await waiting(r, 0)
        assert bucket.tokens.level(r.service.proxy.now()) >= before
        gate.let()
        assert (await first.answer()).status == 200


async def test_openais_client_sees_a_rate_limit_error() -> None:
    async with engines() as [engine], router(engine, keys=keys(requests_per_min=1)) as r:
        client = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{r.port}/v1", api_key="one", max_retries=0)
        engine.behave = script(answer(b'{"id":"x","object":"chat.completion","created":1,"model":"m","choices":[]}'))
        messages: Any = [{"role": "user", "content": "hi"}]
        await client.chat.completions.create(model="m", messages=messages)
        with pytest.raises(openai.RateLimitError) as refused:
            await client.chat.completions.create(model="m", messages=messages)
        assert refused.value.code == "rate_limit_exceeded" and refused.value.type == "rate_limit_error"
        assert int(refused.value.response.headers["retry-after"]) > 30
        await client.close()


async def test_limits_are_reloaded_and_what_was_used_counts() -> None:
    async with engines() as [engine]:
        limit = 2

        def config() -> Config:
            return from_table(quick_table([engine], keys=keys(requests_per_min=limit)))

        service = Service(config)
        await service.start()
        r = Router(service)
        try:
            await until(lambda: service.fleet.can_serve)
            assert [(await r.ask(by("one"))).status for _ in range(3)] == [200, 200, 429]
            limit = 600
            assert service.reload() is None
            await asyncio.sleep(0.25)  # ten come each second
            assert (await r.ask(by("one"))).status == 200
            limit = 0
            assert service.reload() is None
            assert {(await r.ask(by("one"))).status for _ in range(5)} == {200}
        finally:
            for peer in r.peers:
                peer.leave()
            await service.stop()


# The wish not to wait.


async def test_who_asks_not_to_wait_is_told_at_once() -> None:
    async with one_busy(admission=ONE_BY_ONE) as (r, gate):
        refused = await r.ask(post(chat("1" * 8 + LONG, stream=True), headers=["x-queue: NO"]))
        assert refused.status == 429 and refused.error["code"] == "would_wait" and refused.get("retry-after")
        assert r.service.admission.held == 0 and len(gate.engine.seen) == 1
        (await r.connect()).write(post(chat("2" * 8 + LONG, stream=True), headers=["X-Queue: yes"]))
        await waiting(r, 1)
        assert await metric(r, 'warmroute_shed_total{priority="normal",reason="would_wait"} 1')


# Deadlines.


async def test_a_deadline_that_cannot_be_met_is_refused_with_what_was_expected() -> None:
    async with one_busy(admission=ONE_BY_ONE) as (r, _gate):
        node = r.node(0)
        node.speed.answers = 5  # it is known to take 460 ms for each of them
        refused = await r.ask(post(chat("1" * 8 + LONG, stream=True), headers=["X-Deadline-Ttft-Ms: 500"]))
        assert refused.status == 429 and refused.error["code"] == "deadline_unreachable"
        assert re.search(r"first token is due in \d+ ms and expected after \d+ ms", refused.error["message"])
        assert refused.get("retry-after") == "1"
        peer = await r.connect()
        peer.write(post(chat("2" * 8 + LONG, stream=True), headers=["X-Deadline-Ttft-Ms: 2500"]))
        await waiting(r, 1)
        late = await peer.answer()
        assert late.status == 429 and late.error["code"] == "deadline_unreachable"
        assert r.service.admission.waiting == 0
        assert await metric(r, 'warmroute_shed_total{priority="normal",reason="deadline_ttft"} 2')


@pytest.mark.parametrize("header", ["X-Deadline-Ms: soon", "X-Deadline-Ttft-Ms: -5", "x-deadline-ms: nan"])
async def test_a_deadline_that_is_none_is_said(header: str) -> None:
    async with engines() as [engine], router(engine) as r:
        refused = await r.ask(post(headers=[header]))
        assert refused.status == 400 and refused.error["code"] == "bad_deadline"
        assert refused.error["param"] == header.partition(":")[0].lower() and not engine.seen


@pytest.mark.parametrize(
    ("header", "values"), [("X-Priority: urgent", "high, normal or low"), ("X-Queue: maybe", "yes or no")]
)
async def test_a_wish_that_is_none_is_said(header: str, values: str) -> None:
    async with engines() as [engine], router(engine) as r:
        refused = await r.ask(post(headers=[header]))
        name = header.partition(":")[0].lower()
        assert refused.status == 400 and refused.error["code"] == "bad_header" and refused.error["param"] == name
        assert refused.error["message"] == f"`{name}` must be {values}." and not engine.seen


async def test_a_deadline_with_time_to_spare_changes_nothing() -> None:
    async with engines() as [engine], router(engine, routing=PRICE) as r:
        headers = ["X-Deadline-Ttft-Ms: 5000", "X-Deadline-Ms: 60000.5", "X-Queue: no"]
        assert (await r.ask(post(headers=headers))).status == 200
        assert engine.seen[0].get(b"x-deadline-ms") == [b"60000.5"], "bytes pass as they are"


# Thresholds.


async def test_over_the_threshold_everywhere_is_refused_but_the_high() -> None:
    async with engines(2) as made, router(*made, admission={"queue_threshold": 4}) as r:
        for engine in made:
            engine.metrics = script(answer(vllm_metrics(running=8, waiting=5), content_type=b"text/plain"))
        await until(lambda: all(node.waiting == 5 for node in r.service.fleet))
        refused = await r.ask()
        assert refused.status == 429 and refused.error["code"] == "overloaded" and refused.get("retry-after") == "1"
        assert (await r.ask(post(headers=["X-Priority: high"]))).status == 200
        made[1].metrics = script(answer(vllm_metrics(running=8, waiting=3), content_type=b"text/plain"))
        await until(lambda: r.node(1).waiting == 3)
        seen = len(made[0].seen)
        assert {(await r.ask()).status for _ in range(4)} == {200} and len(made[0].seen) == seen
        assert (await r.ask(post(headers=["X-Priority: low"]))).status == 429
        assert await metric(r, 'warmroute_shed_total{priority="low",reason="queue_threshold"} 1')


async def test_a_low_one_that_waits_is_told_when_it_makes_room() -> None:
    async with one_busy(admission={**ONE_BY_ONE, "max_waiting": 2}) as (r, _gate):
        low = await r.connect()
        low.write(post(chat("1" * 8 + LONG, stream=True), headers=["X-Priority: low"]))
        await waiting(r, 1)
        for number in "23":
            (await r.connect()).write(post(chat(number * 8 + LONG, stream=True)))
        refused = await low.answer()
        assert refused.status == 429 and refused.error["code"] == "overloaded"
        assert "higher priority" in refused.error["message"] and refused.get("retry-after")
        await waiting(r, 2)
        assert await metric(r, 'warmroute_shed_total{priority="low",reason="displaced"} 1')


# Routes.

ROUTES: list[dict[str, Any]] = [
    {"name": "agents", "header": "x-class=agent*", "policy": "session"},
    {"name": "batch", "tenant": "b", "priority": "low", "hold": False},
    {"name": "embed", "path": "/v1/embeddings", "policy": "least_loaded"},
]


async def test_routes_choose_the_policy() -> None:
    async with engines(3) as made, router(*made, routes=ROUTES) as r:
        for _ in range(6):
            headers = ["X-Class: agent-7", "X-Session-Id: s"]
            assert (await r.ask(post(headers=headers))).status == 200
        assert sorted(len(engine.seen) for engine in made) == [0, 0, 6], "a session stays on its node"
        for _ in range(6):
            assert (await r.ask(post(headers=["X-Session-Id: s"]))).status == 200
        assert sorted(len(engine.seen) for engine in made) == [2, 2, 8], "others go round in turn"
        await r.ask(post(b'{"model":"m","input":"x"}', "/v1/embeddings?x=1"))
        assert await metric(r, 'warmroute_route_requests_total{route="agents"} 6')
        assert await metric(r, 'warmroute_route_requests_total{route="embed"} 1')


async def test_a_route_reads_prompts_only_where_its_policy_wants_them() -> None:
    routes = [{"name": "warm", "header": "x-warm", "policy": "price"}]
    async with engines() as [engine], router(engine, routes=routes) as r:
        node = r.node(0)
        gate = Gate(engine)
        (await r.connect()).write(post(chat(LONG, stream=True)))
        await until(lambda: node.inflight == 1)
        assert node.pending_work == 0, "it was not read"
        (await r.connect()).write(post(chat(LONG, stream=True), headers=["X-Warm: 1"]))
        await until(lambda: node.inflight == 2)
        assert node.pending_work > 5000
        gate.let(2)
        await until(lambda: r.inflight() == 0)


async def test_a_routes_priority_is_a_default_that_headers_and_bodies_overrule_as_far_as_the_key_may() -> None:
    made_keys = [
        {"sha256": hash_key("one"), "tenant": "b", "priority": "high"},
        {"sha256": hash_key("two"), "tenant": "b", "priority": "normal"},
    ]
    routes = [{**ROUTES[1], "hold": True}]
    async with (
        engines() as [engine],
        router(engine, routing=PRICE, admission=ONE_BY_ONE, keys=made_keys, routes=routes) as r,
    ):
        gate = Gate(engine)
        asked = [
            by("one", chat("0" * 8 + LONG, stream=True)),
            by("one", chat("1" * 8 + LONG, stream=True)),
            by("one", chat("2" * 8 + LONG, stream=True), "/v1/chat/completions", "X-Priority: normal"),
            by("one", chat("3" * 8 + LONG, stream=True, priority=-1)),
            by("two", chat("4" * 8 + LONG, stream=True), "/v1/chat/completions", "X-Priority: high"),
            by("two", chat("5" * 8 + LONG, stream=True, priority=-1)),
        ]
        for number, body in enumerate(asked):
            (await r.connect()).write(body)
            await until(lambda number=number: r.service.admission.waiting + len(engine.seen) == number + 1)
        found = sorted(
            (priority, len(tenant.waiting)) for (priority, _), tenant in r.service.admission.room.tenants.items()
        )
        assert found == [(0, 1), (1, 3), (2, 1)], "3 is high; 2, 4 and 5 are normal; 1 is low"
        gate.let(6)
        await until(lambda: len(engine.seen) == 6 and r.inflight() == 0)


async def test_routes_are_reloaded() -> None:
    async with engines(2) as made:
        routes: list[dict[str, Any]] = []

        def config() -> Config:
            return from_table(quick_table(made, routes=routes))

        service = Service(config)
        await service.start()
        r = Router(service)
        try:
            await until(lambda: len(service.fleet.groups) and len(next(iter(service.fleet.groups)).up) == 2)
            for _ in range(4):
                await r.ask(post(headers=["X-Session-Id: s"]))
            assert [len(engine.seen) for engine in made] == [2, 2]
            routes.append({"name": "all", "policy": "session"})
            assert service.reload() is None
            for _ in range(4):
                await r.ask(post(headers=["X-Session-Id: s"]))
            assert sorted(len(engine.seen) for engine in made) == [2, 6]
            routes[0]["policy"] = "best"
            assert "routes[0].policy" in (service.reload() or "")
        finally:
            for peer in r.peers:
                peer.leave()
            await service.stop()


async def test_a_route_gives_a_deadline_and_a_header_overrules_it() -> None:
    routes = [{"name": "all", "ttft_ms": 300.0}]
    async with one_busy(admission=ONE_BY_ONE, routes=routes) as (r, _gate):
        r.node(0).speed.answers = 5
        assert (await r.ask(post(chat("1" * 8 + LONG, stream=True)))).error["code"] == "deadline_unreachable"
        (await r.connect()).write(post(chat("2" * 8 + LONG, stream=True), headers=["X-Deadline-Ttft-Ms: 60000"]))
        await waiting(r, 1)


async def test_what_a_node_says_of_its_own_limits_passes() -> None:
    async with engines() as [engine], router(engine, keys=keys(requests_per_min=50)) as r:
        engine.behave = script(answer(b"{}", headers=b"x-ratelimit-limit-requests: 7\r\n"))
        found = await r.ask(by("one"))
        assert found.all("x-ratelimit-limit-requests") == ["7"], "an answer passes as the node gave it"
