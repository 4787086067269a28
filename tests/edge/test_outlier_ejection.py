"""A node that fails most of its requests is ejected from a running router, and returns."""

from __future__ import annotations

import asyncio
from itertools import count

import pytest
from support.engine_scripts import Behaviour, failing, normal
from support.polling import until
from support.running_router import router
from support.scripted_engine import ReceivedRequest, ScriptedEngine, engines


def three_of_four_fail() -> Behaviour:
    numbers = count()
    fails, serves = failing(500), normal()

    async def answer(engine: ScriptedEngine, received: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
        await (serves if next(numbers) % 4 == 3 else fails)(engine, received, writer)

    return answer


async def test_a_node_that_fails_three_of_four_requests_is_ejected_and_returns(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    async with engines(4) as four, router(*four, outlier_detection={"ejection_s": 0.5}) as r:
        bad = four[0]
        bad.behave = three_of_four_fail()
        node = r.node(0)
        for _ in range(100):
            assert (await r.request()).status == 200, "every request is served by another node"
            if node.health.state.value == "ejected":
                break
            await asyncio.sleep(0.01)
        assert "node_ejected duration_s=0.5 node=node0" in caplog.text and "requests failed" in caplog.text
        seen = len(bad.seen)
        found = (await r.admin("GET", "/admin/nodes/node0")).json
        assert found["state"] == "ejected" and found["ejections"] == {"failures": 1, "slow": 0}
        page = (await r.admin("GET", "/metrics")).body
        assert b'warmroute_node_ejections_total{node="node0",reason="failures"} 1' in page
        assert b'warmroute_node_state{node="node0",state="ejected"} 1' in page
        for _ in range(8):
            assert (await r.request()).status == 200
        if node.health.state.value == "ejected":
            assert len(bad.seen) == seen, "an ejected node gets no requests"
        bad.behave = normal()
        await until(lambda: node.health.state.value == "up", "the node returns")
        assert "node_returned" in caplog.text
        for _ in range(8):
            assert (await r.request()).status == 200
        assert len(bad.seen) > seen
