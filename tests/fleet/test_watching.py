"""Nodes that fall ill and come back, with real sockets: nobody has to restart anything."""

from __future__ import annotations

import asyncio

import pytest
from harness import (
    CLOSE,
    HANG,
    SSE_HEAD,
    answer,
    chat,
    chunk,
    engines,
    event,
    failing,
    get,
    hanging,
    normal,
    post,
    router,
    script,
    until,
    vllm_metrics,
)


async def test_all_dead_is_503_and_recovery_needs_no_restart() -> None:
    async with engines(2) as two, router(*two) as r:
        for _ in range(2):
            for engine in two:
                await engine.refuse()
            await until(lambda: not r.service.fleet.can_serve)
            found = await r.ask()
            assert found.status == 503 and found.get("retry-after")
            assert (await r.ask(get("/ready"))).status == 503
            for engine in two:
                await engine.listen()
            await until(lambda: r.service.fleet.can_serve)
            assert (await r.ask()).status == 200
            assert (await r.ask(get("/ready"))).status == 200


async def test_a_node_that_says_it_is_ill_gets_no_request_until_it_is_well() -> None:
    async with engines(2) as [ill, well], router(ill, well) as r:
        ill.health = failing(503)
        await until(lambda: r.node(0).health.certain_open)
        for _ in range(6):
            assert (await r.ask()).status == 200
        assert ill.seen == []
        ill.health = script(answer(b""))
        await until(lambda: r.node(0).health.standing.value == "up")
        for _ in range(6):
            assert (await r.ask()).status == 200
        assert len(ill.seen) >= 2


async def test_busy_is_not_dead_a_last_node_with_a_slow_health_still_serves() -> None:
    health = {"timeout_s": 0.1, "slow_checks": 2}
    async with engines() as [engine], router(engine, health=health, checks_hang=True) as r:
        engine.health = hanging
        await until(lambda: r.node(0).health.standing.value == "open")
        for _ in range(5):
            assert (await r.ask()).status == 200
        assert (await r.ask(get("/ready"))).status == 200


async def test_busy_is_not_dead_a_node_with_a_running_stream_stays_up() -> None:
    health = {"timeout_s": 0.2, "slow_checks": 2}
    async with engines(2) as [busy, other], router(busy, other, health=health, checks_hang=True) as r:
        busy.behave = script(SSE_HEAD, *[chunk(event(0)), 0.05] * 60, b"0\r\n\r\n")
        peer = await r.connect()
        peer.write(post())
        await until(lambda: busy.seen)
        busy.health = hanging
        told: list[str] = []
        r.service.fleet._on_change = lambda node, _before: told.append(node.health.standing.value)
        found = await peer.answer()
        assert found.complete
        assert r.node(0).outcomes[0] == 1
        assert "open" not in told


async def test_a_slow_node_is_avoided_where_there_is_a_better_one() -> None:
    health = {"timeout_s": 0.1, "slow_checks": 2}
    async with engines(2) as [slow, well], router(slow, well, health=health, checks_hang=True) as r:
        slow.health = hanging
        await until(lambda: r.node(0).health.standing.value == "open")
        for _ in range(4):
            assert (await r.ask()).status == 200
        assert slow.seen == []


async def test_requests_that_fail_open_the_breaker_and_one_at_a_time_tries_again() -> None:
    health = {"failures": 3, "open_s": 0.1}
    async with engines(2) as [bad, good], router(bad, good, health=health) as r:
        bad.behave = failing(500)
        for _ in range(8):
            assert (await r.ask()).status == 200
        await until(lambda: r.node(0).health.standing.value in ("open", "half_open"))
        failed = len(bad.seen)
        assert failed <= 4
        await until(lambda: r.node(0).health.standing.value == "half_open")
        bad.behave = hanging
        asking = [asyncio.ensure_future(r.ask()) for _ in range(6)]
        await until(lambda: len(bad.seen) == failed + 1)
        await until(lambda: sum(task.done() for task in asking) == 5)
        assert len(bad.seen) == failed + 1, "one request at a time is the trial"
        bad.behave = normal()
        bad.drop_connections()
        assert [found.status for found in await asyncio.gather(*asking)] == [200] * 6


async def test_a_trial_that_succeeds_brings_the_node_back() -> None:
    async with engines(2) as [bad, good], router(bad, good, health={"failures": 2, "open_s": 0.1}) as r:
        bad.behave = script(CLOSE)
        for _ in range(6):
            assert (await r.ask()).status == 200
        bad.behave = normal()
        await until(lambda: r.node(0).health.standing.value == "half_open")
        before = len(bad.seen)
        for _ in range(10):
            assert (await r.ask()).status == 200
        assert r.node(0).health.standing.value == "up" and len(bad.seen) - before >= 4


async def test_a_node_that_comes_back_starts_slowly() -> None:
    async with engines(2) as [back, steady], router(back, steady, health={"slow_start_s": 1000.0}) as r:
        await back.refuse()
        await until(lambda: r.node(0).health.certain_open)
        await back.listen()
        await until(lambda: r.node(0).health.standing.value == "up")
        for _ in range(100):
            assert (await r.ask()).status == 200
        assert 0 <= len(back.seen) <= 35, "a tenth of the turns where it is in"


# Models.


async def test_several_models_on_several_nodes_go_by_name() -> None:
    async with (
        engines(1, "a") as [one],
        engines(1, "a", "b") as [two],
        engines(1, "c") as [three],
        router(one, two, three) as r,
    ):
        for model in ("a", "a", "b", "c", "c"):
            assert (await r.ask(post(chat(model=model)))).status == 200
        assert (len(one.seen), len(two.seen), len(three.seen)) == (1, 2, 2)


async def test_a_model_that_a_node_begins_to_serve_is_found() -> None:
    async with engines(1, "old") as [engine], router(engine, metrics={"models_interval_s": 0.1}) as r:
        assert (await r.ask(post(chat(model="new")))).status == 404
        engine.models = ("old", "new")
        await until(lambda: r.service.fleet.group("new"))
        assert (await r.ask(post(chat(model="new")))).status == 200


@pytest.mark.parametrize("listed", [b"", b"[]", b"{", b'{"data":7}', b'{"data":[7,{"id":7}]}', b"\xff"])
async def test_a_model_list_that_makes_no_sense_does_no_harm(listed: bytes) -> None:
    async with engines(2) as [odd, good]:
        odd.list_models = script(answer(listed))
        async with router(odd, good, wait=1) as r:
            await until(lambda: r.node(0).health.standing.value == "up")
            assert (await r.ask()).status == 200
            assert odd.seen == []


async def test_configured_models_need_no_list() -> None:
    async with engines() as [engine]:
        engine.list_models = failing(404)
        async with router({"url": engine.url, "models": ["x"]}) as r:
            assert (await r.ask(post(chat(model="x")))).status == 200
            assert [card["id"] for card in (await r.ask(get("/v1/models"))).json["data"]] == ["x"]


# Load.


async def test_the_nodes_metrics_are_read_and_merged_with_what_is_in_flight() -> None:
    async with engines(2) as two, router(*two, routing={"policy": "least_loaded"}) as r:
        two[0].metrics = script(answer(vllm_metrics(running=3, waiting=2, kv_usage=0.25), content_type=b"text/plain"))
        await until(lambda: r.node(0).other_load == 5)
        assert (r.node(0).running, r.node(0).waiting, r.node(0).kv_usage) == (3, 2, 0.25)
        assert r.node(0).engine == "vllm" and r.node(0).incarnation == 1.7e9
        for _ in range(5):
            assert (await r.ask()).status == 200
        assert len(two[1].seen) == 5, "the node that others use is left alone"


@pytest.mark.parametrize(
    "metrics", [failing(404), script(answer(b"\xff\xfe nonsense")), script(CLOSE), script(answer(b""))]
)
async def test_a_node_without_metrics_is_served_by_what_is_in_flight(metrics: object) -> None:
    async with engines() as [engine]:
        engine.metrics = metrics  # type: ignore[assignment]
        async with router(engine) as r:
            assert (await r.ask()).status == 200


async def test_metrics_that_stop_coming_no_longer_count() -> None:
    async with engines() as [engine]:
        engine.metrics = script(answer(vllm_metrics(running=9)))
        async with router(engine, metrics={"stale_s": 0.3, "timeout_s": 0.1}, checks_hang=True) as r:
            await until(lambda: r.node(0).other_load == 9)
            engine.metrics = script(HANG)
            await until(lambda: r.node(0).other_load == 0)
