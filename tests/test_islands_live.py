"""Islands and adapters in the running router, in front of `warmroute engine` processes."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.polling import until
from support.raw_client import post
from support.running_router import RunningRouter, count_up, router

from warmroute.lab.demo.processes import Children

HERE = Path(__file__).parent
sys.path.append(str(HERE / "fake_engine"))

from support.engine_processes import FakeEngine  # noqa: E402

SMALL_MODEL = HERE / "prompt" / "small-model"
PRICED: dict[str, Any] = {"routing": {"policy": "price", "seed": 7}}
SYSTEM = "You answer questions about the routing of requests to engines, whose caches hold what they have seen before. "


@pytest.fixture
def children() -> Iterator[Children]:
    with Children() as started:
        yield started


async def turn(
    r: RunningRouter, messages: list[dict[str, str]], question: str, model: str = "sim", **headers: str
) -> str:
    """Adds a question and its answer; the name of the node that answered."""
    messages.append({"role": "user", "content": question})
    before = {node.name: node.outcomes[0] for node in r.service.fleet}
    body = json.dumps({"model": model, "messages": messages, "max_tokens": 20}).encode()
    found = await r.request(
        post(body, headers=[f"{name.replace('_', '-')}: {value}" for name, value in headers.items()])
    )
    assert found.status == 200, found.body
    messages.append({"role": "assistant", "content": found.json["choices"][0]["message"]["content"]})
    await until(lambda: any(node.outcomes[0] > before[node.name] for node in r.service.fleet), "the books are settled")
    [name] = [node.name for node in r.service.fleet if node.outcomes[0] > before[node.name]]
    return name


async def island(r: RunningRouter, name: str) -> dict[str, Any]:
    told = (await r.admin("GET", "/admin/islands")).json["islands"]
    return next(one for one in told if one["name"] == name)


async def test_a_conversation_leaves_an_island_that_is_gone_and_comes_home(children: Children) -> None:
    flags = ("--tokenizer", str(SMALL_MODEL))
    near, far = FakeEngine(children, *flags), FakeEngine(children, *flags)
    nodes = [{"url": near.url, "name": "near-0", "island": "near"}, {"url": far.url, "name": "far-0", "island": "far"}]
    tables: dict[str, Any] = {
        **PRICED,
        "models": [{"name": "sim", "tokenizer": str(SMALL_MODEL)}],
        "index": {"min_prompt_tokens": 32},
        "islands": [{"name": "far", "round_trip_ms": 5000.0, "egress_usd_per_gb": 0.09}],
        "health": {"interval_s": 0.1, "slow_start_s": 0.0},
    }
    async with router(*nodes, **tables) as r:
        messages = [{"role": "system", "content": f"Conversation number 1. {SYSTEM * 3}"}]
        assert await turn(r, messages, "What is a block?") == "near-0"
        assert await turn(r, messages, "And what is a chain of them?") == "near-0"
        assert (await r.admin("POST", "/admin/nodes/near-0/drain")).status == 200
        assert await turn(r, messages, "Are you still there?") == "far-0"
        assert await turn(r, messages, "And now?") == "far-0"
        assert (await r.admin("POST", "/admin/nodes/near-0/undrain")).status == 200
        assert await turn(r, messages, "Who is this?") == "near-0"

        told = await island(r, "near")
        assert told["conversations_moved"] == [{"to": "far", "reason": "down", "count": 1}]
        assert (
            told["conversations_started"],
            told["turns_at_home"],
            told["turns_away"],
            told["conversations_returned"],
        ) == (1, 2, 2, 1)
        assert told["measured_round_trip_ms"] == pytest.approx(told["round_trip_ms"])
        assert 0.0 < told["round_trip_ms"] < 5000.0
        told = await island(r, "far")
        assert told["round_trip_ms"] == 5000.0 and told["distance_ms"] > 5000.0 and told["egress_ms"] > 0.0
        page = (await r.admin("GET", "/metrics")).body.decode()
        assert 'warmroute_conversations_moved_total{island="near",reason="down",to="far"} 1' in page
        assert 'warmroute_conversations_returned_total{island="near"} 1' in page


async def test_a_named_conversation_stays_though_its_prompts_are_too_short_to_be_read(children: Children) -> None:
    near, far = FakeEngine(children), FakeEngine(children)
    nodes = [{"url": near.url, "name": "near-0", "island": "near"}, {"url": far.url, "name": "far-0", "island": "far"}]
    islands = [{"name": "near", "round_trip_ms": 1.0}, {"name": "far", "round_trip_ms": 50.0}]
    async with router(*nodes, islands=islands, health={"slow_start_s": 0.0, "interval_s": 0.1}, **PRICED) as r:
        await r.admin("POST", "/admin/nodes/near-0/drain")
        assert await turn(r, [], "Hello", x_session_id="one") == "far-0"
        await r.admin("POST", "/admin/nodes/near-0/undrain")
        assert await turn(r, [], "Hello", x_session_id="one") == "far-0"
        assert await turn(r, [], "Hello", x_session_id="two") == "near-0"


async def test_a_named_conversation_stays_on_an_island_that_came_at_run_time(children: Children) -> None:
    near, far = FakeEngine(children), FakeEngine(children)
    here, there = {"url": near.url, "name": "near-0"}, {"url": far.url, "name": "far-0", "island": "far"}
    async with router(here, health={"slow_start_s": 0.0, "interval_s": 0.1}, **PRICED) as r:
        assert (await r.admin("POST", "/admin/nodes", json.dumps(there).encode())).status in (200, 201)
        await until(lambda: count_up(r.service) == 2, "both are up")
        await r.admin("POST", "/admin/nodes/near-0/drain")
        assert await turn(r, [], "Hello", x_session_id="one") == "far-0"
        await r.admin("POST", "/admin/nodes/near-0/undrain")
        for _ in range(6):
            assert await turn(r, [], "Hello", x_session_id="one") == "far-0"
        assert r.service.fleet.islands.conversations.served_at_home == {"far": 6}


async def test_requests_for_an_adapter_go_where_it_is_loaded(children: Children) -> None:
    flags = ("--lora", "first", "--lora", "second", "--max-loras", "1")
    nodes = [FakeEngine(children, *flags) for _ in range(2)]
    async with router(*({"url": engine.url} for engine in nodes), health={"slow_start_s": 0.0}, **PRICED) as r:
        fleet = r.service.fleet
        await until(
            lambda: all(node.loaded_adapters.slots == 1 for node in fleet), "metrics tell how many adapters fit"
        )
        homes = {name: await turn(r, [], f"A question for {name}?", name) for name in ("first", "second")}
        assert len(set(homes.values())) == 2, "each of them fits one"
        for number in range(6):
            for name, home in homes.items():
                assert await turn(r, [], f"Question number {number} for {name}?", name) == home
        for node in fleet:
            assert node.loaded_adapters.load_count == 1
            told = (await r.admin("GET", f"/admin/nodes/{node.name}")).json
            assert [homes[name] for name in told["lora_adapters"]] == [node.name]
