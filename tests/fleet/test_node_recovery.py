"""Health checks, models and metrics of nodes, with real sockets."""

from __future__ import annotations

import asyncio

import pytest
from support.engine_scripts import (
    CLOSE,
    HANG,
    SSE_HEAD,
    chunk,
    failing,
    hanging,
    http_response,
    normal,
    repeated,
    script,
    sse_event,
    vllm_metrics,
)
from support.polling import until
from support.raw_client import chat, get, post
from support.running_router import router
from support.scripted_engine import engines

from warmroute.engines import node_watcher


async def test_with_all_nodes_down_the_router_answers_503_and_recovers_without_a_restart() -> None:
    async with engines(2) as two, router(*two) as r:
        for _ in range(2):
            for engine in two:
                await engine.refuse()
            await until(lambda: not r.service.fleet.can_serve)
            found = await r.request()
            assert found.status == 503 and found.get("retry-after")
            assert (await r.request(get("/ready"))).status == 503
            for engine in two:
                await engine.listen()
            await until(lambda: r.service.fleet.can_serve)
            assert (await r.request()).status == 200
            assert (await r.request(get("/ready"))).status == 200


async def test_a_node_with_failing_health_checks_gets_no_requests_until_they_pass() -> None:
    async with engines(2) as [sick, healthy], router(sick, healthy) as r:
        sick.health = failing(503)
        await until(lambda: r.node(0).health.confirmed_down)
        for _ in range(6):
            assert (await r.request()).status == 200
        assert sick.seen == []
        sick.health = script(http_response(b""))
        await until(lambda: r.node(0).health.state.value == "up")
        for _ in range(6):
            assert (await r.request()).status == 200
        assert len(sick.seen) >= 2


async def test_the_last_node_still_serves_while_its_health_checks_time_out() -> None:
    health = {"timeout_s": 0.1, "consecutive_timeouts": 2}
    async with engines() as [engine], router(engine, health=health, health_checks_hang=True) as r:
        engine.health = hanging
        await until(lambda: r.node(0).health.state.value == "down")
        for _ in range(5):
            assert (await r.request()).status == 200
        assert (await r.request(get("/ready"))).status == 200


async def test_a_node_with_a_running_stream_stays_up_while_its_health_checks_time_out() -> None:
    health = {"timeout_s": 0.2, "consecutive_timeouts": 2}
    async with engines(2) as [busy, other], router(busy, other, health=health, health_checks_hang=True) as r:
        busy.behave = script(SSE_HEAD, *repeated(60, chunk(sse_event(0)), 0.05), b"0\r\n\r\n")
        peer = await r.connect()
        peer.write(post())
        await until(lambda: busy.seen)
        busy.health = hanging
        states: list[str] = []
        r.service.fleet.observe_health(lambda node, _before: states.append(node.health.state.value))
        found = await peer.response()
        assert found.complete
        assert r.node(0).outcomes[0] == 1
        assert "down" not in states


async def test_a_node_with_slow_health_checks_is_avoided() -> None:
    health = {"timeout_s": 0.1, "consecutive_timeouts": 2}
    async with engines(2) as [slow, healthy], router(slow, healthy, health=health, health_checks_hang=True) as r:
        slow.health = hanging
        await until(lambda: r.node(0).health.state.value == "down")
        for _ in range(4):
            assert (await r.request()).status == 200
        assert slow.seen == []


async def test_failed_requests_open_the_breaker_and_one_trial_request_follows() -> None:
    health = {"consecutive_failures": 3, "breaker_open_s": 0.1}
    async with engines(2) as [bad, good], router(bad, good, health=health) as r:
        bad.behave = failing(500)
        for _ in range(8):
            assert (await r.request()).status == 200
        await until(lambda: r.node(0).health.state.value in ("down", "half_open"))
        failed = len(bad.seen)
        assert failed <= 4
        await until(lambda: r.node(0).health.state.value == "half_open")
        bad.behave = hanging
        asking = [asyncio.ensure_future(r.request()) for _ in range(6)]
        await until(lambda: len(bad.seen) == failed + 1)
        await until(lambda: sum(task.done() for task in asking) == 5)
        assert len(bad.seen) == failed + 1, "one trial request at a time"
        bad.behave = normal()
        bad.drop_connections()
        assert [found.status for found in await asyncio.gather(*asking)] == [200] * 6


async def test_a_successful_trial_request_closes_the_breaker() -> None:
    async with (
        engines(2) as [bad, good],
        router(bad, good, health={"consecutive_failures": 2, "breaker_open_s": 0.1}) as r,
    ):
        bad.behave = script(CLOSE)
        for _ in range(6):
            assert (await r.request()).status == 200
        bad.behave = normal()
        await until(lambda: r.node(0).health.state.value == "half_open")
        before = len(bad.seen)
        for _ in range(10):
            assert (await r.request()).status == 200
        assert r.node(0).health.state.value == "up" and len(bad.seen) - before >= 4


async def test_a_recovered_node_starts_slowly() -> None:
    async with engines(2) as [back, steady], router(back, steady, health={"slow_start_s": 1000.0}) as r:
        await back.refuse()
        await until(lambda: r.node(0).health.confirmed_down)
        await back.listen()
        await until(lambda: r.node(0).health.state.value == "up")
        for _ in range(100):
            assert (await r.request()).status == 200
        assert 0 <= len(back.seen) <= 35, "a tenth of its normal share"


# Models.


async def test_requests_go_to_the_nodes_of_their_model() -> None:
    async with (
        engines(1, "a") as [one],
        engines(1, "a", "b") as [two],
        engines(1, "c") as [three],
        router(one, two, three) as r,
    ):
        for model in ("a", "a", "b", "c", "c"):
            assert (await r.request(post(chat(model=model)))).status == 200
        assert (len(one.seen), len(two.seen), len(three.seen)) == (1, 2, 2)


async def test_a_new_model_of_a_node_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_watcher, "MODELS_INTERVAL_S", 0.1)
    async with engines(1, "old") as [engine], router(engine) as r:
        assert (await r.request(post(chat(model="new")))).status == 404
        engine.models = ("old", "new")
        await until(lambda: r.service.fleet.group("new"))
        assert (await r.request(post(chat(model="new")))).status == 200


@pytest.mark.parametrize("listed", [b"", b"[]", b"{", b'{"data":7}', b'{"data":[7,{"id":7}]}', b"\xff"])
async def test_an_invalid_model_list_does_no_harm(listed: bytes) -> None:
    async with engines(2) as [odd, good]:
        odd.list_models = script(http_response(listed))
        async with router(odd, good, wait=1) as r:
            await until(lambda: r.node(0).health.state.value == "up")
            assert (await r.request()).status == 200
            assert odd.seen == []


async def test_configured_models_need_no_model_list() -> None:
    async with engines() as [engine]:
        engine.list_models = failing(404)
        async with router({"url": engine.url, "models": ["x"]}) as r:
            assert (await r.request(post(chat(model="x")))).status == 200
            assert [card["id"] for card in (await r.request(get("/v1/models"))).json["data"]] == ["x"]


# Load.


async def test_metrics_are_added_to_the_requests_in_flight() -> None:
    async with engines(2) as two, router(*two, routing={"policy": "least_loaded"}) as r:
        two[0].metrics = script(
            http_response(vllm_metrics(running=3, waiting=2, kv_usage=0.25), content_type=b"text/plain")
        )
        await until(lambda: r.node(0).other_load == 5)
        assert (r.node(0).running, r.node(0).waiting, r.node(0).kv_usage) == (3, 2, 0.25)
        assert r.node(0).engine == "vllm" and r.node(0).incarnation == 1.7e9
        for _ in range(5):
            assert (await r.request()).status == 200
        assert len(two[1].seen) == 5, "the node with load from others is avoided"


@pytest.mark.parametrize(
    "metrics", [failing(404), script(http_response(b"\xff\xfe nonsense")), script(CLOSE), script(http_response(b""))]
)
async def test_a_node_without_metrics_is_used(metrics: object) -> None:
    async with engines() as [engine]:
        engine.metrics = metrics  # type: ignore[assignment]
        async with router(engine) as r:
            assert (await r.request()).status == 200


async def test_outdated_metrics_no_longer_count() -> None:
    async with engines() as [engine]:
        engine.metrics = script(http_response(vllm_metrics(running=9)))
        async with router(engine, polling={"stale_s": 0.3}, health_checks_hang=True) as r:
            await until(lambda: r.node(0).other_load == 9)
            engine.metrics = script(HANG)
            await until(lambda: r.node(0).other_load == 0)
