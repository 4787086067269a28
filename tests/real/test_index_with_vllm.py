"""What is believed of real vLLM engines' caches, against what the engines themselves say of each answer.

The whole router runs in this process, in front of two engines with 63 blocks of 32 tokens each: far too few for the
conversations, so blocks come and go all the time. The tokenizer is the one that the engines name in /v1/models.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import uvloop
from overheard import Overheard, Relay
from real_engine import RealEngine
from support import raw_client, running_router
from support.polling import until

from warmroute.core.cache_view import CacheView
from warmroute.core.messages import Lookup
from warmroute.core.node_cache import NodeCache
from warmroute.core.prediction import Prediction
from warmroute.prompt.tokenizer import pack_token_ids

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]
MODEL = "tiny"
BLOCK = 32
REQUESTS = 300
CONVERSATIONS = 20
TEXT = (
    "import return value class object module path string number list method raise error file read write call test "
    "self name type key item index size time thread lock queue socket server client request answer header body"
)
WORDS = TEXT.split()
LIMIT_S = 540.0
SETTLED_S = 0.2


def run(work: Callable[[], Awaitable[None]]) -> None:
    """A coroutine with more time than tests usually have."""

    async def within_limit() -> None:
        async with asyncio.timeout(LIMIT_S):
            await work()

    uvloop.run(within_limit())


# ---- The router ----


class Sent(NamedTuple):
    prediction: Prediction
    at_s: float
    """By the wall clock."""
    next_number: int
    """Of the node's events, the first that the router did not have yet."""


class Watched:
    """The router in front of the engines, and every prediction that it makes."""

    def __init__(self, router: running_router.RunningRouter) -> None:
        self.router = router
        self.cache_view: CacheView = router.service.cache_view
        self.sent: list[Sent] = []
        sent = self.cache_view.record_routed

        def noted(*given: Any, **named: Any) -> Prediction | None:
            prediction = sent(*given, **named)
            assert prediction is not None
            self.sent.append(Sent(prediction, time.time(), self._next_number(prediction.cache.name)))
            return prediction

        self.cache_view.record_routed = noted  # type: ignore[method-assign]

    def _next_number(self, name: str) -> int:
        service = self.router.service
        return service.watcher._kv_clients[service.fleet.node(name)]._events.ranks[0].sequence.next_number

    async def is_told(self, prediction: Prediction) -> None:
        """Until the node's events have told of the prompt, or a second is over: as long as a client thinks."""
        place, last = prediction.cache.ranks[0], prediction.chain[-8:]
        for _ in range(100):
            await asyncio.sleep(0.01)
            if any(row == place for row, *_ in self.cache_view.index.match(last)):
                break
        await asyncio.sleep(0.01)

    def cache(self, number: int = 0) -> NodeCache:
        found = self.cache_view.cache(f"node{number}")
        assert found is not None
        return found

    def told_blocks(self, number: int = 0) -> int:
        return self.cache_view.index.pair_count(self.cache(number).ranks[0])

    def told(self, tokens: list[int], number: int = 0) -> int:
        """Leading tokens that a node told it holds; nothing that is merely expected. As a prompt of one token more."""
        chain = Lookup(pack_token_ids(tokens), len(tokens), len(tokens)).blocks(MODEL, "", BLOCK)
        place = self.cache(number).ranks[0]
        return next((gpu * BLOCK for row, gpu, *_ in self.cache_view.index.match(chain) if row == place), 0)

    async def metric(self, name: str) -> float:
        """Summed over the nodes."""
        page = (await self.router.admin("GET", "/metrics")).body.decode()
        lines = [line for line in page.splitlines() if line.startswith(f"warmroute_node_cache_{name}{{")]
        assert lines, name
        return sum(float(line.rpartition(" ")[2]) for line in lines)


@asynccontextmanager
async def watched(*nodes: dict[str, Any], complete: bool = True) -> AsyncIterator[Watched]:
    quick = {"interval_s": 0.2, "timeout_s": 5.0}
    tables: dict[str, Any] = {
        "routing": {"policy": "overlap", "seed": 7},
        "index": {"min_prompt_tokens": 16},
        "health": {**quick, "breaker_open_s": 0.2},
        "polling": {"interval_s": quick["interval_s"]},
        "upstream": {"first_byte_timeout_s": 60.0, "between_chunks_timeout_s": 60.0},
    }
    async with running_router.router(*nodes, wait=0, check_leaks=False, **tables) as router:
        service = router.service
        await until(lambda: running_router.count_up(service) == len(nodes), "all nodes up", 60)
        await until(
            lambda: service.tokenizer_registry.prompt_tokenizer(MODEL).tokenizer is not None,
            "the tokenizer is discovered",
            60,
        )
        await until(lambda: all(cache.has_events for cache in service.cache_view), "all events are followed", 60)
        if complete:
            await until(lambda: all(cache.complete for cache in service.cache_view), "the past is known", 60)
        await until(lambda: all(cache.capacity_blocks for cache in service.cache_view), "metrics are read", 60)
        yield Watched(router)
        await running_router.check_nothing_in_flight(service)
        assert not router.loop_errors, router.loop_errors


# ---- The engines ----


async def fetch(engine: RealEngine, path: str, body: dict[str, Any] | None = None) -> bytes:
    def ask() -> bytes:
        data = json.dumps(body).encode() if body is not None else b""
        request = urllib.request.Request(engine.url + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            found: bytes = answer.read()
            return found

    return await asyncio.to_thread(ask)


def prompt(seed: int, blocks: int = 4) -> list[int]:
    """Token ids of `blocks` blocks."""
    return [10 + (seed * 911 + at * 7) % 1500 for at in range(blocks * BLOCK)]


async def prefill(engine: RealEngine, tokens: list[int]) -> int:
    """Straight to the engine, as somebody else's request would be: the cached tokens that it reports."""
    body = {"model": MODEL, "prompt": [*tokens, 7], "max_tokens": 1}
    return cached_of(json.loads(await fetch(engine, "/v1/completions", body))["usage"])


def cached_of(usage: dict[str, Any]) -> int:
    return int((usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0)


async def agrees(w: Watched, engine: RealEngine, overheard: Overheard, seeds: range, number: int = 0) -> None:
    """What the node is believed to hold of each prompt is what it then reports."""
    for seed in seeds:
        await until(lambda: time.monotonic() - overheard.last_event_s > SETTLED_S, "the engine is silent")
        believed = w.told(prompt(seed), number)
        assert believed == await prefill(engine, prompt(seed)), f"prompt {seed}"


# ---- Predictions ----


@dataclass
class Conversation:
    """Grows by a question and its answer each turn; begins anew where it gets too long for the engine."""

    number: int
    random: random.Random
    messages: list[dict[str, str]] = field(default_factory=list)

    def ask(self) -> None:
        if sum(len(message["content"]) for message in self.messages) > 1300:
            self.messages = []
        if not self.messages:
            about = " ".join(self.random.choices(WORDS, k=30))
            self.messages = [{"role": "system", "content": f"Conversation {self.number}, about {about}."}]
        question = " ".join(self.random.choices(WORDS, k=self.random.randrange(8, 30)))
        self.messages.append({"role": "user", "content": question})

    def body(self, stream: bool) -> bytes:
        more: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        tokens = self.random.randrange(1, 48)
        return json.dumps({"model": MODEL, "messages": self.messages, "max_tokens": tokens, **more}).encode()

    async def turn(self, w: Watched, stream: bool) -> int:
        """The cached tokens that the answer reports."""
        self.ask()
        answer = await w.router.request(raw_client.post(self.body(stream)))
        assert answer.status == 200 and answer.complete, answer.body
        if stream:
            events = [json.loads(line[6:]) for line in answer.body.decode().splitlines() if line.startswith("data: {")]
            text = "".join(choice["delta"].get("content") or "" for event in events for choice in event["choices"])
            usage = events[-1]["usage"]
        else:
            text, usage = answer.json["choices"][0]["message"]["content"] or "", answer.json["usage"]
        self.messages.append({"role": "assistant", "content": text})
        return cached_of(usage)


def test_what_is_predicted_is_what_the_engines_report(real_engines: list[RealEngine]) -> None:
    async def work() -> None:
        chance = random.Random(11)
        conversations = [Conversation(number, random.Random(number)) for number in range(CONVERSATIONS)]
        with ExitStack() as stack:
            overheard = [stack.enter_context(Overheard(engine.events_port)) for engine in real_engines]
            async with watched(*({"url": engine.url} for engine in real_engines)) as w:
                reported: list[int] = []
                for number in range(REQUESTS):
                    reported.append(await chance.choice(conversations).turn(w, stream=number % 2 == 0))
                    assert len(w.sent) == number + 1
                    await w.is_told(w.sent[-1].prediction)
                late: list[tuple[int, int, Sent]] = []
                wrong: list[tuple[int, int, Sent]] = []
                for sent, cached in zip(w.sent, reported, strict=True):
                    predicted, node = sent.prediction.tokens, int(sent.prediction.cache.name.removeprefix("node"))
                    if predicted != cached:
                        # What a busy machine has not brought in time, the router can't know.
                        is_late = overheard[node].said_by(sent.at_s, sent.next_number)
                        (late if is_late else wrong).append((predicted, cached, sent))
                compared, exact, tokens = [
                    await w.metric(f"{name}_total") for name in ("predictions", "exact_predictions", "reported_tokens")
                ]
                print(f"{int(exact)} of {int(compared)} exact, {len(late)} with events still under way; "
                      f"{sum(reported)} cached tokens; evicted {[each.evicted for each in overheard]}")  # fmt: skip
                assert compared == REQUESTS and exact == REQUESTS - len(wrong) - len(late) and tokens == sum(reported)
                assert len(wrong) <= REQUESTS // 100, wrong
                assert len(late) <= REQUESTS // 20, late
                assert sum(cached > 0 for cached in reported) > REQUESTS // 3
                for number, each in enumerate(overheard):
                    assert each.evicted > 100, "nothing was evicted"
                    assert w.cache(number).complete and w.cache(number).gaps == 0
                    assert w.told_blocks(number) <= 63

    run(work)


def test_many_at_once_are_predicted_well(real_engines: list[RealEngine]) -> None:
    """Not all exactly: what one request evicts while another waits to be scheduled is not known beforehand."""

    async def work() -> None:
        conversations = [Conversation(number, random.Random(100 + number)) for number in range(CONVERSATIONS)]
        async with watched(*({"url": engine.url} for engine in real_engines)) as w:

            async def hold(some: list[Conversation]) -> None:
                for number in range(36):
                    await some[number % len(some)].turn(w, stream=number % 2 == 0)

            await asyncio.gather(*(hold(conversations[first::5]) for first in range(5)))
            compared, exact = [await w.metric(f"{name}_total") for name in ("predictions", "exact_predictions")]
            predicted, reported = [await w.metric(f"{name}_tokens_total") for name in ("predicted", "reported")]
            print(f"{int(exact)} of {int(compared)} exact; {int(predicted)} tokens predicted, {int(reported)} reported")
            assert compared == 180
            assert exact >= 0.85 * compared
            assert abs(predicted - reported) <= 0.2 * max(predicted, reported)

    run(work)


# ---- When things happen to an engine ----


def test_an_emptied_cache_is_believed_empty(real_engines: list[RealEngine]) -> None:
    engine = real_engines[0]

    async def work() -> None:
        with Overheard(engine.events_port) as overheard:
            async with watched({"url": engine.url}) as w:
                for seed in range(3):
                    await prefill(engine, prompt(seed))
                await until(lambda: w.told(prompt(2)) == 4 * BLOCK)
                await fetch(engine, "/reset_prefix_cache")
                await prefill(engine, prompt(9))
                began_s = time.monotonic()
                await until(lambda: w.told(prompt(9)) == 4 * BLOCK and w.told_blocks() == 4)
                print(f"right {time.monotonic() - began_s:.3f} s after the next answer")
                assert w.cache().complete and w.cache().gaps == 0
                await agrees(w, engine, overheard, range(4))

    run(work)


def test_an_engine_killed_and_restarted_in_place_is_believed_empty(real_engines: list[RealEngine]) -> None:
    engine = real_engines[0]

    async def work() -> None:
        with Overheard(engine.events_port) as overheard:
            async with watched({"url": engine.url}) as w:
                for seed in range(3):
                    await prefill(engine, prompt(seed))
                await until(lambda: w.told(prompt(2)) == 4 * BLOCK)
                engine.kill()
                engine.start()
                await asyncio.to_thread(engine.wait_until_ready)
                await prefill(engine, prompt(9))
                began_s = time.monotonic()
                await until(lambda: w.told(prompt(9)) == 4 * BLOCK and w.told_blocks() == 4, patience_s=30)
                print(f"right {time.monotonic() - began_s:.3f} s after the first answer")
                await until(lambda: w.cache().complete, patience_s=30)
                await until(lambda: running_router.count_up(w.router.service) == 1, patience_s=30)
                await agrees(w, engine, overheard, range(4))
                assert w.told_blocks() <= 63
                conversation = Conversation(1, random.Random(5))
                for stream in (False, True, False):
                    await until(lambda: time.monotonic() - overheard.last_event_s > SETTLED_S, "the engine is silent")
                    cached = await conversation.turn(w, stream)
                    assert w.sent[-1].prediction.tokens == cached

    run(work)


@pytest.mark.parametrize("replays", [True, False])
def test_a_lost_event_is_made_up_for(real_engines: list[RealEngine], replays: bool) -> None:
    """By replay; without one, by forgetting everything that the node told."""
    engine = real_engines[0]

    async def work() -> None:
        await fetch(engine, "/reset_prefix_cache")
        with Overheard(engine.events_port) as overheard, Relay(engine.events_port) as relay:
            node = {"url": engine.url, "kv_events": f"tcp://127.0.0.1:{relay.port}"}
            if replays:
                node["kv_replay"] = f"tcp://127.0.0.1:{engine.replay_port}"
            async with watched(node, complete=replays) as w:
                seeds = iter(range(1000, 2000))
                while not w.told_blocks():  # the subscription takes a moment, and what is said before it is lost
                    await prefill(engine, prompt(next(seeds)))
                    await asyncio.sleep(0.1)
                await prefill(engine, prompt(0))
                await until(lambda: w.told(prompt(0)) == 4 * BLOCK)
                relay.lose_next()
                await prefill(engine, prompt(1))
                await until(lambda: relay.lost == 1)
                await prefill(engine, prompt(2))
                began_s = time.monotonic()
                await until(lambda: w.told(prompt(2)) == 4 * BLOCK)
                print(f"right {time.monotonic() - began_s:.3f} s after the next answer")
                if replays:
                    assert w.told(prompt(1)) == 4 * BLOCK and w.told(prompt(0)) == 4 * BLOCK
                    assert w.cache().complete and w.cache().gaps == 0
                    await agrees(w, engine, overheard, range(4))
                    return
                assert w.told(prompt(0)) == w.told(prompt(1)) == 0 and w.told_blocks() == 4
                assert w.cache().gaps >= 1 and not w.cache().complete
                await fetch(engine, "/reset_prefix_cache")
                await prefill(engine, prompt(3))
                await until(lambda: w.cache().complete and w.told_blocks() == 4, "emptied, it is known in whole")
                await agrees(w, engine, overheard, range(5))

    run(work)


def test_nothing_is_believed_of_a_node_that_was_removed(real_engines: list[RealEngine]) -> None:
    async def work() -> None:
        async with watched(*({"url": engine.url} for engine in real_engines)) as w:
            for engine in real_engines:
                await prefill(engine, prompt(3))
            await until(lambda: w.told(prompt(3), 0) == w.told(prompt(3), 1) == 4 * BLOCK)
            conversation = Conversation(3, random.Random(3))
            await conversation.turn(w, stream=True)
            gone, stays = w.cache(0), w.cache(1)
            index = w.cache_view.index
            assert (await w.router.admin("DELETE", "/admin/nodes/node0")).status == 200
            assert w.cache_view.cache("node0") is None and not gone.ranks
            await prefill(real_engines[0], prompt(4))  # what it says from now on reaches nobody
            await prefill(real_engines[1], prompt(5))
            await until(lambda: w.told(prompt(5), 1) == 4 * BLOCK)
            await until(lambda: index.stats()["unswept_pairs"] == 0)
            owners = w.cache_view._owners
            assert {cache for cache, _rank in owners.values()} == {stays}
            assert index.stats()["pairs"] == sum(index.pair_count(place) for place in owners)
            lookup = Lookup(pack_token_ids([*prompt(3), 7]), 4 * BLOCK + 1, 4 * BLOCK + 1)
            assert set(w.cache_view.hits(MODEL, lookup, time.monotonic())) == {"node1"}
            await conversation.turn(w, stream=False)
            assert w.sent[-1].prediction.cache is stays

    run(work)
