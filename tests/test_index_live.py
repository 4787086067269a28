"""The CacheView of a running router, with `warmroute engine` processes that publish KV events."""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from support.engine_processes import FakeEngine
from support.polling import until
from support.raw_client import Response, post
from support.running_router import RunningRouter, router

from warmroute.config import Index
from warmroute.core.cache_view import PENDING_TIMEOUT_S, CacheView
from warmroute.core.messages import Lookup
from warmroute.core.node_cache import NodeCache
from warmroute.core.prediction import Prediction
from warmroute.edge.arrival import hash_key
from warmroute.lab.demo.processes import Children
from warmroute.prompt.tokenizer import pack_token_ids

HERE = Path(__file__).parent

SMALL_MODEL = HERE / "prompt" / "small-model"
SYSTEM = "You answer questions about the routing of requests to engines, whose caches hold what they have seen before. "


@pytest.fixture
def children() -> Iterator[Children]:
    with Children() as started:
        yield started


class LiveRouter:
    """A router in front of engine processes, and every prediction that it makes."""

    def __init__(self, running: RunningRouter) -> None:
        self.router = running
        self.cache_view = running.service.cache_view
        self.predictions: list[Prediction] = []
        record_routed = self.cache_view.record_routed

        def recorded(*given: Any, **named: Any) -> Prediction | None:
            prediction = record_routed(*given, **named)
            if prediction is not None:
                self.predictions.append(prediction)
            return prediction

        self.cache_view.record_routed = recorded  # type: ignore[method-assign]

    def cache(self, number: int) -> NodeCache:
        found = self.cache_view.cache(f"node{number}")
        assert found is not None
        return found

    async def request(self, messages: list[dict[str, str]], key: str = "", **more: Any) -> Response:
        body = {"model": "sim", "messages": messages, "max_tokens": 40, **more}
        headers = [f"Authorization: Bearer {key}"] if key else []
        found = await self.router.request(post(json.dumps(body).encode(), headers=headers))
        assert found.status == 200, found.body
        return found

    async def turn(self, messages: list[dict[str, str]], question: str, key: str = "") -> tuple[Prediction, int]:
        """Add a question and its response. Return the prediction, and the cached tokens that the engine reported."""
        messages.append({"role": "user", "content": question})
        before = len(self.predictions)
        found = (await self.request(messages, key)).json
        messages.append({"role": "assistant", "content": found["choices"][0]["message"]["content"]})
        assert len(self.predictions) == before + 1
        await self.until_reported(self.predictions[-1])
        return self.predictions[-1], found["usage"]["prompt_tokens_details"]["cached_tokens"]

    async def until_reported(self, prediction: Prediction) -> None:
        """Wait until events report the prompt's blocks and they are no longer pending."""
        places = prediction.cache.ranks.values()
        last = prediction.chain[-8:]
        await until(
            lambda: any(place in places for place, *_ in self.cache_view.index.match(last)), "events of the prompt"
        )
        await until(lambda: not prediction.pending, "no longer pending")


@asynccontextmanager
async def live(*engines: FakeEngine, with_events: bool = True, **tables: Any) -> AsyncIterator[LiveRouter]:
    models = [{"name": "sim", "tokenizer": str(SMALL_MODEL)}]
    tables = {
        "routing": {"policy": "overlap", "seed": 7},
        "index": {"min_prompt_tokens": 32},
        "models": models,
        **tables,
    }
    async with router(*({"url": engine.url} for engine in engines), **tables) as running:
        live_router = LiveRouter(running)
        if with_events:
            await until(lambda: all(cache.complete for cache in live_router.cache_view), "all events subscribed")
            await until(lambda: all(cache.capacity_blocks for cache in live_router.cache_view), "all metrics read")
        yield live_router


def conversation(number: int) -> list[dict[str, str]]:
    """Return the first message of a conversation that shares no block with others."""
    return [{"role": "system", "content": f"Conversation number {number}. {SYSTEM * 3}"}]


def start(children: Children, *flags: str, blocks: int = 2000) -> FakeEngine:
    return FakeEngine(children, "--tokenizer", str(SMALL_MODEL), *flags, blocks=blocks)


async def test_a_turn_goes_to_the_node_of_the_turns_before_it(children: Children) -> None:
    nodes = [start(children) for _ in range(3)]
    async with live(*nodes) as r:
        conversations = [conversation(number) for number in range(9)]
        homes: list[NodeCache] = []
        for messages in conversations:
            first, cached = await r.turn(messages, "What is a block?")
            assert first.tokens == cached == 0
            homes.append(first.cache)
        assert len(set(homes)) > 1, "conversations spread over a cold fleet"
        for turn in range(3):
            for messages, home in zip(conversations, homes, strict=True):
                before = len(r.predictions)
                prediction, cached = await r.turn(messages, f"And why is that so, for the {turn}th time?")
                assert len(r.predictions) == before + 1 and prediction.cache is home
                assert prediction.tokens == cached > 0
        for cache in r.cache_view:
            assert cache.accuracy.exact == cache.accuracy.compared == 4 * homes.count(cache)
            assert cache.token_mismatches == 0 and not cache.token_mismatch


async def test_responses_count_as_cached_in_the_next_turn(children: Children) -> None:
    """The engine caches the blocks of its responses and reports them."""
    async with live(start(children)) as r:
        messages = conversation(1)
        first, _ = await r.turn(messages, "Say something long.")
        second, cached = await r.turn(messages, "Go on.")
        assert second.tokens == cached > first.prompt_tokens


async def test_prompts_sent_directly_to_an_engine_are_hits(children: Children) -> None:
    nodes = [start(children) for _ in range(2)]
    async with live(*nodes) as r:
        for number, engine in enumerate(nodes):
            messages = [*conversation(number), {"role": "user", "content": "Hello?"}]
            body = {"messages": messages, "max_tokens": 1}
            before = r.cache_view.index.pair_count(r.cache(number).ranks[0])
            status, _ = await asyncio.to_thread(engine.request, "/v1/chat/completions", body)
            assert status == 200
            place = r.cache(number).ranks[0]
            await until(lambda place=place, before=before: r.cache_view.index.pair_count(place) > before)
            found = (await r.request(messages)).json
            assert r.predictions[-1].cache is r.cache(number)
            assert r.predictions[-1].tokens == found["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


async def test_two_block_sizes_in_one_fleet(children: Children) -> None:
    nodes = [start(children, "--block-size", str(size)) for size in (16, 64)]
    async with live(*nodes) as r:
        await until(lambda: [cache.block_size for cache in r.cache_view] == [16, 64])
        for number, (engine, size) in enumerate(zip(nodes, (16, 64), strict=True)):
            messages = conversation(number)
            body = {"messages": [*messages, {"role": "user", "content": "Hello?"}], "max_tokens": 1}
            assert (await asyncio.to_thread(engine.request, "/v1/chat/completions", body))[0] == 200
            place = r.cache(number).ranks[0]
            await until(lambda place=place: r.cache_view.index.pair_count(place))
            for question in ("Hello?", "Is it so?", "And what else?"):
                prediction, cached = await r.turn(messages, question)
                assert prediction.cache is r.cache(number)
                assert prediction.tokens == cached > 0
                assert cached % size == 0
        assert all(cache.accuracy.exact == cache.accuracy.compared == 3 for cache in r.cache_view)


async def test_a_node_tokenizes_if_the_router_has_no_tokenizer(children: Children) -> None:
    nodes = [start(children) for _ in range(2)]
    async with live(*nodes, models=[], prompts={"remote_tokenize": True, "discover_tokenizers": False}) as r:
        await until(lambda: all(node.engine == "vllm" for node in r.router.service.fleet))
        for number in range(2):
            messages = conversation(number)
            await r.turn(messages, "What is a block?")
            prediction, cached = await r.turn(messages, "And what is a chain of them?")
            assert prediction.exact and prediction.tokens == cached > 0


def test_a_block_reported_and_then_evicted_is_no_longer_pending() -> None:
    """A small cache may evict a block long before PENDING_TIMEOUT_S is over."""
    cache_view = CacheView(Index())
    cache = cache_view.add_node("n", ["m"])
    cache.add_rank(0)
    cache.set_complete(0, True)
    tokens = list(range(65))
    lookup = Lookup(pack_token_ids(tokens), 65, 65)

    def hit_tokens(now_s: float) -> int:
        hit = cache_view.hits("m", lookup, now_s).get("n")
        return hit.tokens if hit is not None else 0

    prediction = cache_view.record_routed("m", lookup, "n", None, 0.0)
    assert prediction is not None and hit_tokens(0.0) == 64, "pending"
    cache.blocks_stored(0, None, [1, 2, 3, 4], tokens[:64], 16)
    cache_view.first_token(prediction, 0.1)
    assert hit_tokens(0.2) == 64
    cache.blocks_removed(0, [4, 3])
    assert hit_tokens(0.3) == 32
    late = cache_view.record_routed("m", lookup, "n", None, 1.0)
    assert late is not None
    cache_view.first_token(late, 1.1)
    assert hit_tokens(1.1 + 0.9 * PENDING_TIMEOUT_S) == 64, "no event has reported it yet"
    assert hit_tokens(1.1 + 1.1 * PENDING_TIMEOUT_S) == 32


# Tenants.


def keys(**groups: str) -> list[dict[str, str]]:
    """Return keys of tenants with their cache groups."""
    return [{"sha256": hash_key(name), "tenant": name, "cache_group": group} for name, group in groups.items()]


async def test_tenants_get_no_hits_from_each_other(children: Children) -> None:
    async with live(start(children), keys=keys(ann="", bob="")) as r:
        messages = conversation(1)
        first, cached = await r.turn(messages, "What is in the contract?", "ann")
        assert first.tokens == cached == 0
        again, cached = await r.turn(messages, "And what else?", "ann")
        assert again.tokens == cached > 0, "including the response, which only ann received"
        guess = conversation(1)
        prediction, cached = await r.turn(guess, "What is in the contract?", "bob")
        assert prediction.tokens == 0 < cached, "the engine has it cached, and bob must not learn that"
        secret = [*messages, {"role": "user", "content": "Tell me."}]
        await r.request(secret, "bob")
        blocks_of_bob = len(prediction.chain) // 8
        assert 0 < r.predictions[-1].tokens <= blocks_of_bob * 16, "only blocks that bob has sent"


async def test_tenants_of_one_group_share_hits(children: Children) -> None:
    async with live(start(children), keys=keys(ann="team", bob="team", eve="")) as r:
        messages = conversation(1)
        await r.turn(messages, "What is in the contract?", "ann")
        question = {"role": "user", "content": "And what else?"}
        await r.request([*messages, question], "eve")
        assert r.predictions[-1].tokens == 0
        await r.request([*messages, question], "bob")
        assert r.predictions[-1].tokens > 0


async def test_hits_are_unlimited_if_all_keys_share(children: Children) -> None:
    """All keys share, so prompts that other clients sent to the engine count."""
    engine = start(children)
    async with live(engine, keys=keys(ann="all", bob="all")) as r:
        messages = [*conversation(1), {"role": "user", "content": "Hello?"}]
        body = {"messages": messages, "max_tokens": 1}
        assert (await asyncio.to_thread(engine.request, "/v1/chat/completions", body))[0] == 200
        await until(lambda: r.cache_view.index.pair_count(r.cache(0).ranks[0]))
        await r.request(messages, "bob")
        assert r.predictions[-1].tokens > 0


# Another tokenizer.


async def test_a_node_with_another_tokenizer_is_detected(children: Children, caplog: pytest.LogCaptureFixture) -> None:
    nodes = [start(children), FakeEngine(children)]  # the second has the simulator's own tokenizer
    caplog.set_level(logging.WARNING)
    async with live(*nodes) as r:

        async def mismatches() -> list[bytes]:
            page = (await r.router.admin("GET", "/metrics")).body
            return [line for line in page.splitlines() if line.startswith(b"warmroute_node_cache_token_mismatch{")]

        assert await mismatches() == [b'warmroute_node_cache_token_mismatch{node="node%d"} 0' % n for n in (0, 1)]
        for number in range(200):
            if r.cache(1).token_mismatch:
                break
            await r.request([*conversation(number), {"role": "user", "content": "Hello?"}])
        assert r.cache(1).token_mismatch and not r.cache(0).token_mismatch
        await until(lambda: "token_mismatch node=node1 model=sim" in caplog.text)
        assert "node0" not in caplog.text
        assert await mismatches() == [b'warmroute_node_cache_token_mismatch{node="node%d"} %d' % (n, n) for n in (0, 1)]
        assert not r.cache(1).complete
        # Routed prompts still count: conversations stay on the node.
        messages = [*conversation(1000), {"role": "user", "content": "Hello?"}]
        await r.request(messages)
        home = r.predictions[-1].cache
        await r.request(messages)
        assert r.predictions[-1].cache is home and r.predictions[-1].tokens > 0


# Memory.

DAY_SCRIPT = """
import sys
from array import array
from random import Random

from warmroute.config import Index
from warmroute.core.cache_view import CacheView
from warmroute.core.messages import Lookup

PROMPTS, BLOCKS, STEP_S = 20_000, 64, 86_400 / 20_000
tenants = int(sys.argv[1])
cache_view = CacheView(Index(memory_bytes=4 << 20))
caches = [cache_view.add_node(f"n{number}", ["m"]) for number in range(4)]
caches[0].add_rank(0)
caches[0].set_complete(0, True)
held = []


def rss_kb():
    return int(open("/proc/self/statm").read().split()[1]) * 4


random, now_s, figures = Random(1), 0.0, []
for number in range(PROMPTS):
    now_s += STEP_S
    tokens = array("I", random.randbytes(4 * (BLOCKS * 16 + 1)))
    group = f"tenant {number % tenants}" if tenants else ""
    lookup = Lookup(tokens.tobytes(), len(tokens), len(tokens), cache_group=group)
    hits = cache_view.hits("m", lookup, now_s)
    assert not hits
    cache = caches[number % 4]
    prediction = cache_view.record_routed("m", lookup, cache.name, None, now_s)
    if number % 10 == 9:
        prediction.withdraw()
    else:
        cache_view.first_token(prediction, now_s + 0.5)
        prediction.check_prompt_tokens(len(tokens))
        prediction.check_cached_tokens(0, now_s + 0.5)
        if cache is caches[0]:
            hashes = [number * BLOCKS + block for block in range(BLOCKS)]
            assert cache.blocks_stored(0, None, hashes, tokens[: BLOCKS * 16].tolist(), 16)
            held.append(hashes)
            if len(held) > 16:
                cache.blocks_removed(0, held.pop(0))
    cache_view.tidy(now_s + 1.0)
    stats = cache_view.index.stats()
    assert stats["bytes"] <= 4 << 20
    if number + 1 in (5_000, 10_000, 15_000, 20_000):
        figures.append(rss_kb())
assert not cache_view._prefilled
assert cache_view.index.pair_count(caches[0].ranks[0]) <= 17 * BLOCKS
print(*figures, stats["pairs"], stats["bytes"])
"""


@pytest.mark.parametrize("tenants", [0, 50])
def test_memory_stays_flat_over_a_day_of_unique_prompts(tenants: int) -> None:
    ran = subprocess.run([sys.executable, "-c", DAY_SCRIPT, str(tenants)], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    *rss_kb, pairs, used_bytes = map(int, ran.stdout.split())
    print(f"RSS {rss_kb} KB, {pairs} pairs, {used_bytes} bytes")
    assert pairs > 0
    assert max(rss_kb) - rss_kb[0] < 4096, "it grows"
