"""One client's requests that every engine answers with 500, beside other clients' requests."""

from __future__ import annotations

import asyncio
import json

import pytest
from support.engine_scripts import DONE, SSE_HEAD, Behaviour, chunk, failing, http_response, normal, script, sse_event
from support.polling import until
from support.raw_client import Response, chat, post
from support.running_router import RunningRouter, router
from support.scripted_engine import ReceivedRequest, ScriptedEngine, engines

from warmroute.core.health import HealthState
from warmroute.core.node import Node

POISON = "poison"


def serving(serves: Behaviour, delay_s: float = 0.0) -> Behaviour:
    """Serves every request but poison."""
    fails = script(delay_s, http_response(b'{"error":"no"}', 500))

    async def answer(engine: ScriptedEngine, received: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
        await (fails if POISON.encode() in received.body else serves)(engine, received, writer)

    return answer


def is_poison(received: ReceivedRequest) -> bool:
    return POISON.encode() in received.body


async def send(r: RunningRouter, content: str, request_id: str = "") -> Response:
    return await r.request(post(chat(content), headers=[f"X-Request-Id: {request_id}"] if request_id else []))


def watch(r: RunningRouter) -> list[str]:
    """Return the list to which every change of a node's health is added."""
    changes: list[str] = []

    def changed(node: Node, before: HealthState) -> None:
        changes.append(f"{node.name}: {before.value} -> {node.health.state.value}")

    r.service.fleet.observe_health(changed)
    return changes


@pytest.mark.parametrize("delay_s", [0.0, 0.3])
async def test_thirty_poison_requests_open_no_breaker_and_run_nobody_elses_prefill_again(delay_s: float) -> None:
    """Whether they fail at once or after a while, and with others' requests waiting for their first token meanwhile."""
    slow = script(0.5, SSE_HEAD, chunk(sse_event(0)), DONE)
    async with engines(4) as nodes, router(*nodes) as r:
        for engine in nodes:
            engine.behave = serving(normal(), delay_s)
        for number in range(8):
            assert (await send(r, f"warm {number}")).status == 200
        changes = watch(r)
        for engine in nodes:
            engine.seen.clear()
            engine.behave = serving(slow, delay_s)
        others = [asyncio.ensure_future(send(r, f"other {number}")) for number in range(12)]
        await until(lambda: sum(len(engine.seen) for engine in nodes) == 12, "others' prefills run")
        answers = await asyncio.gather(*(send(r, f"{POISON} {number}") for number in range(30)))
        for answer in answers:
            assert answer.status == 502 and answer.json["error"]["code"] == "failed_on_every_node"
            assert answer.get("x-should-retry") == "false" and answer.get("retry-after") is None
        assert [one.status for one in await asyncio.gather(*others)] == [200] * 12
        seen = [received for engine in nodes for received in engine.seen]
        assert sum(map(is_poison, seen)) == 60, "two nodes each"
        assert len(seen) - 60 == 12, "no prefill of another client ran again"
        assert not changes
        page = (await r.admin("GET", "/metrics")).body
        assert b'warmroute_errors_total{code="failed_on_every_node",status="502"} 30' in page.replace(
            b'status="502",code="failed_on_every_node"', b'code="failed_on_every_node",status="502"'
        )


async def test_the_decision_says_that_the_request_itself_fails() -> None:
    async with engines(3) as nodes, router(*nodes) as r:
        for engine in nodes:
            engine.behave = serving(normal())
        for number in range(3):
            assert (await send(r, f"warm {number}")).status == 200
        assert (await send(r, POISON, "one")).status == 502
        found = (await r.admin("GET", "/admin/decisions/one")).json
        assert found["poison"] is True and found["attempts"] == 2 and len(found["failed_tries"]) == 2
        assert found["explanation"].startswith(
            "probably the request itself is at fault: 2 nodes that serve other requests"
        )
        assert (await r.admin("GET", "/admin/decisions?failed=1")).json["decisions"][0]["poison"] is True


async def test_with_one_node_the_breaker_opens(caplog: pytest.LogCaptureFixture) -> None:
    async with engines() as [engine], router(engine, health={"breaker_open_s": 30}) as r:
        engine.behave = serving(normal())
        assert (await send(r, "warm")).status == 200
        for _ in range(r.node(0).health.config.consecutive_failures):
            answer = await send(r, POISON)
            assert answer.status == 502 and answer.json["error"]["code"] == "upstream_failed"
        assert r.node(0).health.state is HealthState.DOWN
        assert (
            f'reason="HTTP status 500": {r.node(0).health.config.consecutive_failures} requests in a row failed. The '
            "router sends it no requests until its breaker is over and a health check passes; then one trial request."
        ) in caplog.text


async def test_a_node_that_begins_to_fail_every_request_goes_down() -> None:
    """Requests are served by the others, and the first of them to be served shows whose fault it was."""
    async with engines(3) as nodes, router(*nodes, health={"breaker_open_s": 30}) as r:
        for number in range(6):
            assert (await send(r, f"warm {number}")).status == 200
        nodes[0].behave = failing(500)
        for number in range(60):
            assert (await send(r, f"later {number}")).status == 200
            if r.node(0).health.state is HealthState.DOWN:
                break
        assert r.node(0).health.state is HealthState.DOWN
        assert len(nodes[0].seen) <= 2 + r.node(0).health.config.consecutive_failures


async def test_poison_among_many_requests_ejects_no_node() -> None:
    """Outlier detection looks at each health check, every 50 ms here."""
    detection = {"min_requests": 5, "interval_s": 1.0, "failure_ratio": 0.3, "ejection_s": 30.0}
    async with engines(4) as nodes, router(*nodes, outlier_detection=detection) as r:
        for engine in nodes:
            engine.behave = serving(normal(), 0.1)
        changes = watch(r)
        for number in range(4):
            assert (await send(r, f"warm {number}")).status == 200
        for turn in range(12):
            bad = [asyncio.ensure_future(send(r, f"{POISON} {turn} {number}")) for number in range(12)]
            assert [(await send(r, f"{turn} {number}")).status for number in range(8)] == [200] * 8
            assert [one.json["error"]["code"] for one in await asyncio.gather(*bad)] == ["failed_on_every_node"] * 12
        assert not changes
        for node in json.loads((await r.admin("GET", "/admin/nodes")).body)["nodes"]:
            assert node["state"] == "up" and node["outcomes"]["failed"] > 10
