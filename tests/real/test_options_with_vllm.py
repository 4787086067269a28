"""Real vLLM engines with different context windows, and requests for which they do not use their cache as usual."""

from __future__ import annotations

import asyncio
import http.client
import json
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import pytest
from real_engine import RealEngine, make_tiny_model, running
from support import running_router
from support.polling import until

from warmroute.core.node import Node

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]
SMALL, LONG = 256, 1024
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(scope="module")
def two_windows(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[RealEngine]]:
    folder = tmp_path_factory.mktemp("windows")
    model = make_tiny_model(folder)
    engines = [
        RealEngine(f"w{window}", model, folder, flags=["--max-model-len", str(window)]) for window in (SMALL, LONG)
    ]
    with running(engines):
        yield engines


@asynccontextmanager
async def router(*engines: RealEngine) -> AsyncIterator[running_router.RunningRouter]:
    tables: dict[str, Any] = {
        "routing": {"policy": "price", "seed": 7},
        "index": {"min_prompt_tokens": 16},
        "health": {"interval_s": 0.2, "timeout_s": 5.0},
        "polling": {"interval_s": 0.2},
        "journal": {"response_headers": "always"},
        "upstream": {"first_byte_timeout_s": 60.0, "between_chunks_timeout_s": 60.0},
    }
    nodes = [{"url": engine.url} for engine in engines]
    async with running_router.router(*nodes, wait=0, check_leaks=False, **tables) as running:
        service = running.service
        await until(lambda: running_router.count_up(service) == len(nodes), "all nodes up", 60)
        has_tokenizer = lambda: service.tokenizer_registry.prompt_tokenizer("tiny").tokenizer is not None  # noqa: E731
        await until(has_tokenizer, "the tokenizer is discovered", 60)
        await until(lambda: all(cache.complete for cache in service.cache_view), "events are followed", 60)
        yield running


class Answer(NamedTuple):
    status: int
    body: bytes
    hit: str

    @property
    def json(self) -> Any:
        return json.loads(self.body)


async def ask(r: running_router.RunningRouter, path: str, **fields: Any) -> Answer:
    """The first request of an engine on a busy CPU takes long."""
    body = json.dumps({"model": "tiny", "max_tokens": 4, **fields}).encode()

    def send() -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", r.port, timeout=120.0)
        connection.request("POST", path, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        answer = Answer(response.status, response.read(), response.headers.get("x-warmroute-hit", "0/"))
        connection.close()
        return answer

    return await asyncio.to_thread(send)


def words(count: int, start: int = 0) -> str:
    return " ".join(f"w{number}" for number in range(start, start + count))


def node_of(r: running_router.RunningRouter, window: int) -> Node:
    return next(node for node in r.service.fleet if node.context_window("tiny") == window)


async def test_prompts_go_to_windows_that_hold_them(two_windows: list[RealEngine]) -> None:
    async with router(*two_windows) as r:
        group = r.service.fleet.group("tiny")
        assert group is not None
        await until(lambda: group.windows is not None, "both windows are known", 60)
        for number in range(12):
            long = await ask(r, CHAT, messages=[{"role": "user", "content": words(120, number)}])
            assert long.status == 200, long.body
            assert long.json["usage"]["prompt_tokens"] > SMALL
            short = await ask(r, CHAT, messages=[{"role": "user", "content": "hello"}])
            assert short.status == 200, short.body
        assert node_of(r, SMALL).outcomes[1] == 0, "the small window rejected nothing"
        too_long = await ask(r, CHAT, messages=[{"role": "user", "content": words(700)}])
        assert (too_long.status, too_long.json["error"]["code"]) == (400, "context_length_exceeded")
        assert f"{LONG:,} tokens" in too_long.json["error"]["message"]


async def test_requests_that_skip_the_cache_cost_no_confidence(two_windows: list[RealEngine]) -> None:
    async with router(two_windows[1]) as r:
        node = node_of(r, LONG)
        cache = r.service.cache_view.cache(node.name)
        assert cache is not None
        messages = [{"role": "user", "content": words(40)}]
        several = [words(30, 100), words(30, 200), words(30, 100)]
        kinds: list[tuple[str, dict[str, Any]]] = [
            (CHAT, {"messages": messages}),
            (CHAT, {"messages": messages, "prompt_logprobs": 1}),
            (CHAT, {"messages": messages, "echo": True}),
            (CHAT, {"messages": messages, "truncate_prompt_tokens": 40}),
            (COMPLETIONS, {"prompt": several}),
            (COMPLETIONS, {"prompt": words(40), "echo": True, "logprobs": 1}),
        ]
        for _ in range(4):
            for path, fields in kinds:
                response = await ask(r, path, **fields)
                assert response.status == 200, response.body
                reported = (response.json["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0)
                predicted = int(response.hit.partition("/")[0])
                if fields.keys() & {"prompt_logprobs", "echo"}:
                    assert predicted == reported == 0
                elif fields == {"messages": messages}:
                    assert predicted == reported
                await asyncio.sleep(0.3)
        assert cache.accuracy.trust(time.monotonic()) == 1.0 and not cache.token_mismatches
        assert cache.accuracy.compared == 4, "only the plain requests"
        await until(lambda: node.rates.hit_share is not None, "the engine's counters are read", 10)
        assert node.rates.queue_time_ms is not None
