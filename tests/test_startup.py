"""The start of the router: it is ready, and serves requests, once it knows its nodes and what they have cached."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from support.engine_processes import FakeEngine
from support.engine_scripts import hanging, http_response, script
from support.polling import until
from support.raw_client import get, post
from support.running_router import router
from support.scripted_engine import engines
from support.serve_process import serve

from warmroute import is_compiled
from warmroute.engines.kv_subscription import KvEventClient
from warmroute.lab.demo.processes import Children

SMALL_MODEL = Path(__file__).parent / "prompt" / "small-model"


async def test_requests_at_the_start_wait_until_nodes_are_checked() -> None:
    async with engines() as [engine]:
        gate = asyncio.Event()
        engine.health = script(gate, http_response(b""))
        async with router(engine, wait=0) as r:
            asking = asyncio.ensure_future(r.request())
            found = await r.request(get("/ready"))
            assert found.status == 503 and b"starting" in found.body
            assert (await r.admin("GET", "/ready")).status == 503
            assert (await r.request(get("/health"))).status == 200
            await asyncio.sleep(0.1)
            assert not asking.done()
            gate.set()
            assert (await asking).status == 200
            await until(lambda: not r.service.proxy.own_endpoints.starting)
            assert (await r.request(get("/ready"))).status == 200


@pytest.mark.parametrize(
    ("header", "status"), [("X-Queue: no", 503), ("X-Deadline-Ttft-Ms: 500", 429), ("X-Deadline-Ms: 500", 429)]
)
async def test_requests_that_must_not_wait_are_not_held_back(header: str, status: int) -> None:
    async with engines() as [engine]:
        engine.health = hanging
        async with router(engine, wait=0, health={"timeout_s": 20.0}, health_checks_hang=True) as r:
            assert (await r.request(post(headers=[header]))).status == status


async def test_the_wait_is_bounded(caplog: pytest.LogCaptureFixture) -> None:
    async with engines() as [engine]:
        engine.health = hanging
        health = {"timeout_s": 20.0}
        async with router(engine, wait=0, health=health, startup={"max_wait_s": 0.3}, health_checks_hang=True) as r:
            assert (await r.request()).status == 503
            assert b"starting" not in (await r.request(get("/ready"))).body
            assert "startup_timed_out" in caplog.text


async def test_a_node_that_is_down_or_slow_does_not_delay_the_start() -> None:
    async with engines(3) as [good, dead, slow]:
        await dead.refuse()
        slow.health = hanging
        async with router(good, dead, slow, wait=0, health={"timeout_s": 0.2}, health_checks_hang=True) as r:
            assert (await r.request()).status == 200
            assert (await r.request(get("/ready"))).status == 200


async def test_a_client_that_leaves_at_the_start_leaves_nothing_behind() -> None:
    async with engines() as [engine]:
        gate = asyncio.Event()
        engine.health = script(gate, http_response(b""))
        async with router(engine, wait=0) as r:
            peer = await r.connect()
            peer.write(post())
            await asyncio.sleep(0.1)
            peer.disconnect()
            await until(lambda: r.service.counters.disconnects == 1)
            gate.set()
            await until(lambda: not r.service.proxy.own_endpoints.starting)
            await asyncio.sleep(0.1)
            assert engine.seen == []


async def test_the_first_request_after_a_restart_goes_where_its_prompt_is_cached(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    discover = KvEventClient._discover

    async def slowly(client: KvEventClient) -> bool:
        await asyncio.sleep(0.5)
        return await discover(client)

    monkeypatch.setattr(KvEventClient, "_discover", slowly)
    with Children() as children:
        made = [FakeEngine(children, "--tokenizer", str(SMALL_MODEL)) for _ in range(3)]
        prompts = [f"Question {number}. " + f"Text number {number} of a long prompt. " * 40 for number in range(3)]
        for engine, prompt in zip(made, prompts, strict=True):
            engine.complete(prompt, model="sim")
        async with router(
            *({"url": engine.url} for engine in made),
            wait=0,
            routing={"policy": "price"},
            index={"min_prompt_tokens": 32},
            journal={"response_headers": "always"},
            models=[{"name": "sim", "tokenizer": str(SMALL_MODEL)}],
        ) as r:
            for number in (2, 1, 0):
                body = {"model": "sim", "prompt": prompts[number], "max_tokens": 1}
                response = await r.request(post(json.dumps(body).encode(), "/v1/completions"))
                assert response.status == 200
                assert response.get("x-warmroute-node") == f"node{number}", response.head


async def test_the_log_of_the_start_names_the_build_and_how_to_get_the_compiled_one(tmp_path: Path) -> None:
    (tmp_path / "w.toml").write_text("[listen]\nport = 0\n[admin]\nport = 0\n")
    for flags in ((), ("--edges", "2"), ("--workers", "2")):
        async with serve("--config", tmp_path / "w.toml", *flags) as process:
            [line] = [line for line in process.lines if "service_started" in line]
            build, advice = ("compiled", False) if is_compiled() else ("interpreted", True)
            assert f" build={build}" in line and ("WARMROUTE_COMPILE=1 pip install ." in line) is advice
