"""Requests without a response leave a node that hangs, dies or is removed, and are hedged when they are overdue."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from gated_engine import LONG
from support.engine_scripts import HANG, SSE_HEAD, chunk, hanging, script, sse_event, stream
from support.polling import until
from support.raw_client import Response, chat, post
from support.running_router import RunningRouter, router
from support.scripted_engine import engines

from warmroute.lab.demo.processes import Children

QUICK_HEDGES = {"min_delay_s": 0.3, "max_ratio": 1.0}
SLOW_BREAKER = {"timeout_s": 0.2, "consecutive_timeouts": 1000}
"""Health checks time out soon, but the breaker does not open."""
NO_HEDGES = {"max_ratio": 0.0}


async def test_requests_leave_a_node_when_its_breaker_opens() -> None:
    health = {"timeout_s": 0.2, "consecutive_timeouts": 2}
    async with (
        engines(3) as [bad, *good],
        router(bad, *good, health=health, hedging=NO_HEDGES, health_checks_hang=True) as r,
    ):
        bad.behave = hanging
        asking = [asyncio.ensure_future(r.request()) for _ in range(9)]
        await until(lambda: len(bad.seen) == 3)
        bad.health = hanging
        assert {response.status for response in await asyncio.gather(*asking)} == {200}
        assert all([await asyncio.wait_for(seen.left.wait(), 5) for seen in bad.seen]), "the node is told to stop"
        assert r.service.counters.retries == 3 and r.node(0).health.state.value == "down"


async def test_requests_leave_a_node_that_is_removed() -> None:
    async with engines(2) as [old, new], router(old, new, hedging=NO_HEDGES) as r:
        old.behave = script(SSE_HEAD, HANG)
        asking = [asyncio.ensure_future(r.request(post(chat(stream=True)))) for _ in range(4)]
        await until(lambda: len(old.seen) == 2)
        r.service.remove_node("node0")
        assert {response.status for response in await asyncio.gather(*asking)} == {200}
        assert len(new.seen) == 4


@pytest.mark.interpreted
async def test_a_request_that_was_connecting_leaves_its_node_too() -> None:
    async with engines(2) as [bad, good], router(bad, good, hedging=NO_HEDGES) as r:
        pool = r.service.pools.for_node(r.node(0))
        connect = pool.connect

        def slowly(handler: object) -> None:
            asyncio.get_running_loop().call_later(0.3, connect, handler)  # type: ignore[arg-type]

        pool.connect = slowly  # type: ignore[method-assign]
        pool.idle.clear()
        asking = [asyncio.ensure_future(r.request()) for _ in range(2)]
        await until(lambda: r.node(0).inflight == 1)
        r.service.fleet.check_failed(r.node(0), time.monotonic() + 5.0, "connection refused")
        assert {response.status for response in await asyncio.gather(*asking)} == {200}
        await asyncio.sleep(0.4)
        assert bad.seen == [] and len(good.seen) == 2


@pytest.mark.parametrize("policy", ["round_robin", "price"])
async def test_an_overdue_request_is_hedged_and_counts_once(policy: str) -> None:
    async with (
        engines(2) as both,
        router(
            *both,
            routing={"policy": policy},
            hedging=QUICK_HEDGES,
            health=SLOW_BREAKER,
            index={"min_prompt_tokens": 16},
            health_checks_hang=True,
        ) as r,
    ):
        body = chat(LONG, stream=True)
        for engine in both:
            engine.behave = stream(3)
        for _ in range(6):
            assert (await r.request(post(body))).complete
        for engine in both:
            engine.seen.clear()
        bad = both[0]
        bad.behave = bad.health = hanging
        while not bad.seen:
            response = await r.request(post(body))
            assert response.status == 200 and response.complete
        await asyncio.wait_for(bad.seen[0].left.wait(), 5)
        counters = r.service.counters
        assert counters.hedges == counters.hedges_won == 1 and counters.retries == 0
        assert counters.responses[200] == 6 + sum(len(engine.seen) for engine in both) - 1
        assert r.node(0).outcomes[3] == 1, "the node that lost has failed"
        page = (await r.admin("GET", "/metrics")).body
        assert b"warmroute_hedges_total 1" in page and b"warmroute_hedges_won_total 1" in page


async def test_a_hedge_that_loses_is_cancelled() -> None:
    async with (
        engines(2) as both,
        router(*both, hedging=QUICK_HEDGES, health=SLOW_BREAKER, health_checks_hang=True) as r,
    ):
        for engine in both:
            engine.health = hanging
        gate = asyncio.Event()
        both[0].behave = script(gate, SSE_HEAD, chunk(sse_event(0)), b"0\r\n\r\n")
        both[1].behave = hanging
        asking = asyncio.ensure_future(r.request(post(chat(stream=True))))
        await until(lambda: both[0].seen and both[1].seen, "both nodes have the request")
        gate.set()
        assert (await asking).complete
        await asyncio.wait_for(both[1].seen[0].left.wait(), 5)
        assert r.service.counters.hedges == 1


async def test_a_path_that_the_router_does_not_know_is_not_hedged() -> None:
    async with (
        engines(2) as both,
        router(*both, hedging=QUICK_HEDGES, health=SLOW_BREAKER, health_checks_hang=True) as r,
    ):
        body = chat(stream=True)
        both[0].health = hanging
        both[0].behave = script(0.8, SSE_HEAD, chunk(sse_event(0)), b"0\r\n\r\n")
        for _ in range(2):
            assert (await r.request(post(body, "/v1/other"))).status == 200
        assert r.service.counters.hedges == 0


async def test_a_client_that_leaves_a_hedged_request_leaves_nothing_behind() -> None:
    async with (
        engines(2) as both,
        router(*both, hedging=QUICK_HEDGES, health=SLOW_BREAKER, health_checks_hang=True) as r,
    ):
        for engine in both:
            engine.behave = engine.health = hanging
        peer = await r.connect()
        peer.write(post(chat(stream=True)))
        await until(lambda: all(engine.seen for engine in both), "both nodes have the request")
        peer.disconnect()
        for engine in both:
            await asyncio.wait_for(engine.seen[0].left.wait(), 5)


# Real processes.


@asynccontextmanager
async def three_engines(**tables: Any) -> AsyncIterator[tuple[RunningRouter, list[int]]]:
    with Children() as children:
        flags = ("engine", "--port", "0", "--profile", "h100-8b", "--speed", "5", "--model", "m")
        made = [children.start(*flags) for _ in range(3)]
        nodes = [{"url": json.loads(child.first_line())["url"]} for child in made]
        upstream = {"between_chunks_timeout_s": 2.0}
        async with router(*nodes, routing={"policy": "price"}, upstream=upstream, **tables) as r:
            yield r, [child.process.pid for child in made]


async def ask(r: RunningRouter, number: int) -> Response:
    return await r.request(post(chat(f"{number} {LONG}", stream=True, max_tokens=20)))


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
async def test_no_request_waits_for_an_engine_that_was_stopped_or_killed(number: signal.Signals) -> None:
    health = {"timeout_s": 0.3, "interval_s": 0.1, "consecutive_timeouts": 2}
    async with three_engines(health=health, hedging={"min_delay_s": 0.5}, check_leaks=False) as (r, pids):
        for at in range(12):
            assert (await ask(r, at)).complete
        asking = [asyncio.ensure_future(ask(r, at)) for at in range(24)]
        await until(lambda: r.node(0).inflight > 0)
        os.kill(pids[0], number)
        try:
            more = [asyncio.ensure_future(ask(r, at)) for at in range(24)]
            responses = await asyncio.wait_for(asyncio.gather(*asking, *more), 20)
        finally:
            os.kill(pids[0], signal.SIGCONT)
        assert all(response.status == 200 for response in responses)
        broken = [response for response in responses if not response.complete]
        assert all(b"upstream_broken" in response.body for response in broken), "only streams that had begun"
        await until(lambda: r.inflight() == 0, "every ticket is closed")
