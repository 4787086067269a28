"""What tests need to ask real vLLM engines through a router in this process: prompts are token ids, so that blocks are
where a test has put them.
"""

from __future__ import annotations

import asyncio
import json
import random
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import uvloop
from real_engine import RealEngine
from support import running_router
from support.polling import until

MODEL = "tiny"
BLOCK = 32
VOCABULARY = range(100, 4000)
POLL_S = 0.2
LIMIT_S = 540.0
STREAM: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}


def run(work: Callable[[], Awaitable[None]]) -> None:
    """A coroutine with more time than tests usually have."""

    async def within_limit() -> None:
        async with asyncio.timeout(LIMIT_S):
            await work()

    uvloop.run(within_limit())


def settings(policy: str) -> dict[str, Any]:
    return {"routing": {"policy": policy, "seed": 7}, "index": {"min_prompt_tokens": 16}}


@asynccontextmanager
async def routed(policy: str, *urls: str) -> AsyncIterator[running_router.RunningRouter]:
    """A router that knows its nodes, and their caches where the policy asks for them."""
    quick = {"interval_s": POLL_S, "timeout_s": 5.0}
    tables = {
        **settings(policy),
        "health": quick,
        "polling": {"interval_s": quick["interval_s"]},
        "upstream": {"first_byte_timeout_s": 60.0, "between_chunks_timeout_s": 60.0},
    }
    async with running_router.router(*({"url": url} for url in urls), wait=0, check_leaks=False, **tables) as router:
        service = router.service
        await until(lambda: running_router.count_up(service) == len(urls), "all nodes up", 60)
        if service.config.routing.uses_kv_events:
            await until(
                lambda: service.tokenizer_registry.prompt_tokenizer(MODEL).tokenizer is not None,
                "the tokenizer is discovered",
                60,
            )
            await until(lambda: all(cache.complete for cache in service.cache_view), "all events are followed", 60)
            await until(lambda: all(cache.capacity_blocks for cache in service.cache_view), "metrics are read", 60)
        yield router
        await running_router.check_nothing_in_flight(service)
        assert not router.loop_errors, router.loop_errors


async def post(engine: RealEngine, path: str, body: bytes = b"") -> bytes:
    def ask() -> bytes:
        request = urllib.request.Request(engine.url + path, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            found: bytes = answer.read()
            return found

    return await asyncio.to_thread(ask)


async def emptied(engines: list[RealEngine]) -> None:
    """Empty the engines' caches. vLLM publishes the event only with its next request, so send one to each."""
    for engine in engines:
        await post(engine, "/reset_prefix_cache")
        await post(engine, "/v1/completions", body_of([7] * BLOCK, 1))


def body_of(tokens: list[int], answer_tokens: int, model: str = MODEL, **more: Any) -> bytes:
    fields = {"model": model, "prompt": tokens, "max_tokens": answer_tokens, "temperature": 0, "ignore_eos": True}
    return json.dumps({**fields, "return_token_ids": True, **more}).encode()


@dataclass(frozen=True)
class Told:
    """What the engine said of an answer."""

    tokens: list[int]
    prompt_tokens: int
    cached_tokens: int


def told(answer: bytes) -> Told:
    """Of a stream with usage, or of a whole answer."""
    lines = answer.decode().splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")] or [json.loads(answer)]
    usage = events[-1]["usage"]
    tokens = [token for event in events for choice in event["choices"] for token in choice["token_ids"] or ()]
    return Told(tokens, usage["prompt_tokens"], (usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0)


def made_up(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(VOCABULARY, k=count)
