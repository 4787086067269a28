"""The router in front of two real engines that are not vLLM: `transformers serve`, on this CPU.

This engine sends a chunk with only a role at once. It has no metrics, no KV events and no `cached_tokens`, its
/v1/models fails offline, and it rejects fields that it does not know.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import pytest
from real_asking import run
from support import raw_client
from support.polling import until
from support.running_router import RunningRouter, count_up, router
from transformers_engine import BLOCK, BLOCKS, TransformersEngine, make_model

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]
WORDS = ("alpha", "beta", "gamma", "delta", "river", "stone", "cloud", "field", "light", "north", "paper", "table")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[TransformersEngine]]:
    folder = tmp_path_factory.mktemp("transformers")
    model = make_model(folder)
    found = [TransformersEngine(name, model, folder) for name in ("a", "b")]
    try:
        for engine in found:
            engine.start()
        for engine in found:
            engine.wait_until_ready()
            for number in range(2):  # the first requests take longer
                ask(engine, messages(f"warm {number}", 50))
        yield found
    finally:
        for engine in found:
            engine.kill()


@dataclass(frozen=True)
class Times:
    role_s: float
    content_s: float
    """0.0 if the response had none: tokens without text."""


def messages(salt: str, words: int) -> list[dict[str, str]]:
    text = " ".join(random.Random(salt).choices(WORDS, k=words))
    return [{"role": "user", "content": f"{salt}: {text}"}]


def body_of(engine: TransformersEngine, said: list[dict[str, str]], **more: Any) -> bytes:
    fields = {"model": str(engine.model), "messages": said, "max_tokens": 4, "stream": True}
    return json.dumps({**fields, **more}).encode()


def ask(engine: TransformersEngine, said: list[dict[str, str]]) -> Times:
    """Ask the engine itself, and return when the role and the first content came."""
    request = urllib.request.Request(
        f"{engine.url}/v1/chat/completions", body_of(engine, said), {"Content-Type": "application/json"}
    )
    started_s, role_s, content_s = time.monotonic(), 0.0, 0.0
    with urllib.request.urlopen(request, timeout=60) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                role_s = role_s or time.monotonic() - started_s
                choices = json.loads(line[6:])["choices"]
                if any(choice["delta"].get("content") for choice in choices):
                    content_s = content_s or time.monotonic() - started_s
    return Times(role_s, content_s)


@asynccontextmanager
async def routed(engines: list[TransformersEngine]) -> AsyncIterator[RunningRouter]:
    model = str(engines[0].model)
    tables: dict[str, Any] = {
        "routing": {"policy": "price", "seed": 7},
        "index": {"min_prompt_tokens": 16, "assumed_cache_tokens": BLOCK * BLOCKS},
        "models": [{"name": model, "tokenizer": model}],
        "journal": {"response_headers": "always"},
        "health": {"interval_s": 0.5, "timeout_s": 10.0},
        "upstream": {"first_byte_timeout_s": 60.0, "between_chunks_timeout_s": 60.0},
    }
    nodes = [{"url": engine.url, "models": [model]} for engine in engines]
    async with router(*nodes, wait=0, check_leaks=False, **tables) as running:
        service = running.service
        await until(lambda: count_up(service) == len(engines), "all nodes up", 60)
        tokenizers = service.tokenizer_registry
        await until(lambda: tokenizers.prompt_tokenizer(model).tokenizer is not None, "the tokenizer is loaded", 60)
        yield running


async def asked(r: RunningRouter, engine: TransformersEngine, said: list[dict[str, str]]) -> raw_client.Response:
    response = await r.request(raw_client.post(body_of(engine, said)))
    assert response.status == 200 and response.complete, response.body
    return response


def test_the_learned_speed_is_that_of_the_prefill(served: list[TransformersEngine]) -> None:
    """The engine is also asked directly, in turns: a busy machine slows down both alike."""
    engine = served[0]

    async def work() -> None:
        async with routed([engine]) as r:
            node = r.node(0)
            tokens = 0
            own: list[Times] = []
            for number in range(12):
                times = await asyncio.to_thread(ask, engine, messages(f"own {number}", 400))
                if times.content_s:
                    own.append(times)
                response = await asked(r, engine, messages(f"learn {number}", 400))
                predicted = response.get("x-warmroute-hit")
                assert predicted is not None
                tokens = int(predicted.partition("/")[2])
            assert len(own) >= 6, "most responses have no content"
            role_s, content_s = median(times.role_s for times in own), median(times.content_s for times in own)
            assert content_s > 3 * role_s, "the engine does not send its role early"
            learned_ms = node.speed.ms_per_token
            assert learned_ms > 3 * 1000 * role_s / tokens, "learned from the role"
            assert 0.3 < learned_ms / (1000 * content_s / tokens) < 3, (learned_ms, content_s, tokens)
            assert not node.speed.implausible and node.speed.source == "learned"

    run(work)


def test_conversations_stay_on_their_node(served: list[TransformersEngine]) -> None:
    async def work() -> None:
        async with routed(served) as r:
            for number in range(6):  # both nodes show their speed
                await asked(r, served[0], messages(f"first {number}", 200))
            homes: list[set[str | None]] = []
            for number in range(4):
                said = messages(f"conversation {number}", 300)
                homes.append(set())
                for turn in range(4):
                    response = await asked(r, served[0], said)
                    homes[-1].add(response.get("x-warmroute-node"))
                    said += [{"role": "assistant", "content": f"noted {turn}"}, {"role": "user", "content": "more"}]
            assert all(len(nodes) == 1 for nodes in homes), homes
            assert len(set.union(*homes)) == 2, "one node got everything"

    run(work)


def test_bodies_arrive_unchanged(served: list[TransformersEngine]) -> None:
    """The engine rejects any field that it does not know: the router adds none, and passes on its answer."""

    async def work() -> None:
        async with routed(served) as r:
            await asked(r, served[0], messages("plain", 30))
            body = body_of(served[0], messages("unknown", 30), ignore_eos=True)
            response = await r.request(raw_client.post(body))
            assert response.status == 422 and b"ignore_eos" in response.body

    run(work)


def test_a_node_whose_model_list_fails_stays_up(served: list[TransformersEngine]) -> None:
    with pytest.raises(urllib.error.HTTPError) as failed:
        urllib.request.urlopen(f"{served[0].url}/v1/models", timeout=10)
    assert failed.value.code == 500

    async def work() -> None:
        async with routed(served) as r:
            await asyncio.sleep(1.5)
            assert count_up(r.service) == 2
            await asked(r, served[0], messages("still there", 30))

    run(work)
