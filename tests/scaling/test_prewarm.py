"""Prewarming with simulated engines: a new node has hot prefixes cached before it serves."""

from __future__ import annotations

import asyncio
import json
import time
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.engine_processes import FakeEngine as SimulatedEngine
from support.raw_client import post
from support.running_router import RunningRouter, router

from warmroute.config import NodeConfig
from warmroute.core.hot_prefixes import HotPrefix
from warmroute.core.messages import Lookup
from warmroute.core.node import Node
from warmroute.edge.connection_pool import NodeClient
from warmroute.lab.demo.processes import Children
from warmroute.scaling.control_loop import PrefixPrefiller, completion_body

SMALL_MODEL = Path(__file__).parents[1] / "prompt" / "small-model"
SHARED = list(range(100, 356))
"""The prefix of all prompts."""
SCALED: dict[str, Any] = {"scaling": {"enabled": True, "dry_run": True}, "routing": {"policy": "price"}}


@pytest.fixture(scope="module")
def engines() -> Iterator[list[SimulatedEngine]]:
    with Children() as children:
        known = ("--tokenizer", str(SMALL_MODEL))
        yield [SimulatedEngine(children, *flags) for flags in (known, known, ())]


async def send(router_: RunningRouter, prompt: object) -> None:
    body = {"model": "sim", "prompt": prompt, "max_tokens": 1}
    answer = await router_.request(post(json.dumps(body).encode(), "/v1/completions"))
    assert answer.status == 200, answer.body


async def prewarm(running: RunningRouter, engine: SimulatedEngine) -> PrefixPrefiller:
    """Prefill the hot prefixes on a new node."""
    service = running.service
    assert service.scaling is not None
    prefixes = service.scaling.autoscaler.prefixes_to_prewarm(time.monotonic())
    assert prefixes
    node = service.add_node(NodeConfig(url=engine.url, name="new"))
    service.fleet.drain("new")
    prefiller = PrefixPrefiller(NodeClient(service.pools).post)
    for prefix in prefixes:
        assert await prefiller.prefill(node, prefix) == (completion_body(prefix) is not None)
    service.remove_node("new")
    return prefiller


async def test_a_new_node_has_hot_prefixes_cached_before_its_first_request(engines: list[SimulatedEngine]) -> None:
    old, new, _ = engines
    models = [{"name": "sim", "tokenizer": str(SMALL_MODEL)}]
    async with router({"url": old.url}, models=models, **SCALED) as running:
        for number in range(6):
            await send(running, SHARED + [50 + number] * 40)
        prefiller = await prewarm(running, new)
    assert prefiller.prefilled == 1
    assert await asyncio.to_thread(new.cached, [*SHARED, *[9] * 40]) == len(SHARED)
    assert await asyncio.to_thread(old.cached, [8] * 100) == 0


async def test_prompts_without_exact_tokens_are_not_prefilled(engines: list[SimulatedEngine]) -> None:
    *_, plain = engines
    async with router({"url": plain.url}, **SCALED) as running:  # without a tokenizer the router matches text
        for number in range(6):
            await send(running, SHARED + [50 + number] * 40)
        before = await asyncio.to_thread(plain.metric, "vllm:request_success_total")
        prefiller = await prewarm(running, plain)
    assert prefiller.prefilled == 0
    assert await asyncio.to_thread(plain.metric, "vllm:request_success_total") == before == 6


def example(exact_tokens: int, **more: object) -> HotPrefix:
    tokens = array("I", SHARED).tobytes()
    lookup = Lookup(tokens, len(SHARED), exact_tokens, **more)  # type: ignore[arg-type]
    return HotPrefix(lookup.blocks("m", "", 16), 9.0, lookup, len(SHARED))


def test_only_prefixes_of_exact_tokens_have_a_completion_body() -> None:
    whole = completion_body(example(len(SHARED)))
    assert whole is not None
    assert json.loads(whole) == {"model": "m", "prompt": SHARED, "max_tokens": 1, "temperature": 0}
    assert completion_body(example(len(SHARED) - 1)) is None
    assert completion_body(example(0)) is None
    assert completion_body(example(len(SHARED), text=True)) is None
    assert completion_body(example(len(SHARED), media=((32, b"a picture"),))) is None
    salted = completion_body(example(len(SHARED), salt="tenant"))
    assert salted is not None and json.loads(salted)["cache_salt"] == "tenant"
    other = array("I", [7] * 256).tobytes()
    stranger = HotPrefix(Lookup(other, 256, 256).blocks("m", "", 16), 9.0, example(256).example, 256)
    assert completion_body(stranger) is None


@pytest.mark.parametrize(
    "trouble", [ConnectionRefusedError("connection refused"), TimeoutError(), OSError("no sockets")]
)
async def test_a_failed_prefill_is_not_an_error(trouble: Exception) -> None:
    async def failing(_node: Node, _path: str, _body: bytes, _timeout_s: float) -> tuple[int, bytes]:
        raise trouble

    async def refusing(_node: Node, _path: str, _body: bytes, _timeout_s: float) -> tuple[int, bytes]:
        return 503, b""

    node = Node.__new__(Node)
    node.name = "n"
    for post_somehow in (failing, refusing):
        prefiller = PrefixPrefiller(post_somehow)
        assert await prefiller.prefill(node, example(len(SHARED))) is False and prefiller.prefilled == 0
