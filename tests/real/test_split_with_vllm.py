"""Two real vLLM engines with NIXL: one prefills, the other one decodes. A third one without it serves alone."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest
from real_asking import run
from real_engine import RealEngine, free_port, make_tiny_model, running
from support.polling import until
from support.raw_client import Response, post
from support.running_router import RunningRouter, router

from warmroute.engines.vllm_kv_transfer import VllmKvTransfer

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]
AUTO_TOOLS = ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
PATIENCE_S = 120.0
"""vLLM on a busy CPU takes its time."""
PATIENT = {"first_byte_timeout_s": PATIENCE_S, "between_chunks_timeout_s": PATIENCE_S}
CONNECTOR = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
WORDS = ["alpha", "beta", "gamma", "delta", "import", "class", "return", "self", "value", "index"]
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}]


class SplittingEngine(RealEngine):
    """A vLLM engine that transfers KV cache over loopback."""

    def start(self) -> None:
        environment = {
            "UCX_TLS": "tcp,self,sm", "UCX_NET_DEVICES": "lo", "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
        }  # fmt: skip
        os.environ.update(environment)
        try:
            super().start()
        finally:
            for name in environment:
                del os.environ[name]


@pytest.fixture(scope="module")
def split_engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[RealEngine]]:
    """The prefill engine, the decode engine, and a mixed one without a KV connector."""
    folder = tmp_path_factory.mktemp("nixl")
    model = make_tiny_model(folder)
    flags = [*AUTO_TOOLS, "--kv-transfer-config", json.dumps(CONNECTOR)]
    found: list[RealEngine] = [SplittingEngine(name, model, folder, flags=flags) for name in ("prefill", "decode")]
    found.append(RealEngine("mixed", model, folder, flags=AUTO_TOOLS))
    with running(found):
        yield found


@asynccontextmanager
async def split_router(prefill: RealEngine, *decode: RealEngine, split: str = "always") -> AsyncIterator[RunningRouter]:
    nodes: list[dict[str, Any]] = [{"url": prefill.url, "role": "prefill"}]
    nodes += [{"url": engine.url, "role": "decode"} for engine in decode]
    tables: dict[str, Any] = {
        "routing": {"policy": "price", "seed": 7}, "index": {"min_prompt_tokens": 16}, "price": {"split": split},
        "journal": {"response_headers": "always"}, "models": [{"name": "tiny", "tokenizer": str(prefill.model)}],
        "health": {"interval_s": 0.2, "timeout_s": 5.0}, "hedging": {"min_delay_s": 2.0}, "upstream": PATIENT,
    }  # fmt: skip
    async with router(*nodes, check_leaks=False, **tables) as r:
        yield r


def alone_router(mixed: RealEngine) -> AbstractAsyncContextManager[RunningRouter]:
    return router({"url": mixed.url}, check_leaks=False, upstream=PATIENT)


async def ask(r: RunningRouter, request: bytes) -> Response:
    peer = await r.connect()
    peer.write(request)
    response = await peer.response(patience_s=PATIENCE_S)
    peer.close()
    return response


def text_of(seed: int, words: int) -> str:
    chosen = random.Random(seed)
    return " ".join(f"{chosen.choice(WORDS)}{chosen.randint(0, 99)}" for _ in range(words))


def chat(number: int, words: int = 150, **fields: Any) -> bytes:
    message = {"role": "user", "content": text_of(number, words)}
    return json.dumps({"model": "tiny", "messages": [message], "temperature": 0, "max_tokens": 12, **fields}).encode()


def text(response: Response) -> str:
    assert response.status == 200 and response.complete, response.body
    if b"data:" not in response.body:
        choice = response.json["choices"][0]
        return str(choice.get("text") or choice["message"]["content"])
    events = [json.loads(line[6:]) for line in response.body.splitlines() if line.startswith(b"data: {")]
    assert events and not any("error" in event for event in events), response.body
    return "".join(choice["delta"].get("content") or "" for event in events for choice in event["choices"])


def test_answers_are_those_of_one_engine(split_engines: list[RealEngine]) -> None:
    prefill, decode, mixed = split_engines
    requests = [
        chat(1), chat(1), chat(2, stream=True), chat(3, 250, stream=True, stream_options={"include_usage": True}),
        chat(4, tools=TOOLS), chat(5, tools=TOOLS, tool_choice="auto", stream=True), chat(6, 3), chat(7, 40),
        chat(8, max_completion_tokens=3), chat(9, logprobs=True, top_logprobs=2), chat(10, n=1, seed=5, stop=["zzz"]),
    ]  # fmt: skip

    async def work() -> None:
        async with (
            split_router(prefill, decode) as r,
            alone_router(mixed) as alone,
        ):
            for request in requests:
                expected, found = await ask(alone, post(request)), await ask(r, post(request))
                assert text(found) == text(expected)
            completion = json.dumps({"model": "tiny", "prompt": text_of(11, 100), "max_tokens": 9, "temperature": 0})
            raw = post(completion.encode(), "/v1/completions")
            assert text(await ask(r, raw)) == text(await ask(alone, raw))
            splits = r.service.counters.split_requests
            assert splits["transferred"] >= 0.7 * len(requests), "all but the short one, unless vLLM paused for seconds"
            assert r.inflight() == 0

    run(work)


def answer_of(response: Response) -> str:
    """Return the text of an answer to /v1/messages or /v1/responses, streamed or not."""
    assert response.status == 200 and response.complete, response.body
    if b"data:" not in response.body:
        parts = response.json.get("content") or response.json["output"][0]["content"]
        return "".join(part["text"] for part in parts)
    events = [json.loads(line[6:]) for line in response.body.splitlines() if line.startswith(b"data: {")]
    deltas = [event.get("delta") for event in events if str(event.get("type", "")).endswith("delta")]
    return "".join(delta if isinstance(delta, str) else (delta or {}).get("text") or "" for delta in deltas)


@pytest.mark.parametrize("stream", [False, True])
def test_messages_and_responses_are_those_of_one_engine(split_engines: list[RealEngine], stream: bool) -> None:
    prefill, decode, mixed = split_engines
    common = {"model": "tiny", "temperature": 0, "stream": stream}
    message = {"role": "user", "content": text_of(80 + stream, 150)}
    requests = [
        post(json.dumps({**common, "messages": [message], "max_tokens": 12}).encode(), "/v1/messages"),
        post(
            json.dumps({**common, "input": text_of(90 + stream, 150), "max_output_tokens": 12}).encode(),
            "/v1/responses",
        ),
    ]

    async def work() -> None:
        async with (
            split_router(prefill, decode) as r,
            alone_router(mixed) as alone,
        ):
            await until(lambda: all(node.engine == "vllm" for node in r.service.fleet))
            for request in requests:
                expected, found = await ask(alone, request), await ask(r, request)
                assert answer_of(found) == answer_of(expected) != ""
                assert found.get("x-warmroute-prefill-node") == "node0"
            assert r.service.counters.split_requests == {"transferred": 2}
            assert r.inflight() == 0

    run(work)


def test_the_second_turn_finds_its_first(split_engines: list[RealEngine]) -> None:
    prefill, decode, _mixed = split_engines

    async def work() -> None:
        async with split_router(prefill, decode) as r:
            first = {"role": "user", "content": text_of(20, 150)}
            body = {"model": "tiny", "temperature": 0, "max_tokens": 8, "messages": [first]}
            answer = text(await ask(r, post(json.dumps(body).encode())))
            body["messages"] = [
                first,
                {"role": "assistant", "content": answer},
                {"role": "user", "content": "go on " * 40},
            ]
            await asyncio.sleep(0.5)  # the KV events of both engines
            await ask(r, post(json.dumps(body).encode()))
            entry = (await r.admin("GET", "/admin/decisions?limit=1")).json["decisions"][0]
            assert entry["prefill_node"] == "node0" and entry["reported"]["cached_tokens"] >= 400
            assert entry["cached_tokens"] >= 400, "the router knew it"
            assert entry["transfer_tokens"] < 0.6 * entry["prompt_tokens"], "the decode node has the first turn"

    run(work)


@pytest.mark.parametrize("stream", [False, True])
def test_kill_9_of_the_prefill_engine(split_engines: list[RealEngine], stream: bool) -> None:
    prefill, decode, mixed = split_engines

    async def work() -> None:
        async with (
            split_router(prefill, decode) as r,
            alone_router(mixed) as alone,
        ):
            assert text(await ask(r, post(chat(30 + stream))))
            requests = [post(chat(40 + 10 * stream + number, 200, stream=stream)) for number in range(6)]
            asking = [asyncio.ensure_future(ask(r, request)) for request in requests]
            await until(lambda: r.node(0).inflight > 0)
            prefill.kill()
            for request, response in zip(requests, await asyncio.gather(*asking), strict=True):
                assert text(response) == text(await ask(alone, request))
            await until(lambda: r.node(0).health.state.value == "down")
            assert text(await ask(r, post(chat(60))))
            assert r.inflight() == 0

    try:
        run(work)
    finally:
        prefill.start()
        prefill.wait_until_ready()


@pytest.mark.parametrize("stream", [False, True])
def test_a_prefill_engine_that_died_after_the_prefill(split_engines: list[RealEngine], stream: bool) -> None:
    prefill, decode, mixed = split_engines

    class KillingTransfer(VllmKvTransfer):
        def read_transfer(self, response: bytes) -> bytes | None:
            prefill.kill()
            return super().read_transfer(response)

    async def work() -> None:
        async with (
            split_router(prefill, decode) as r,
            alone_router(mixed) as alone,
        ):
            assert text(await ask(r, post(chat(80 + stream))))
            r.service.proxy.kv_transfer = lambda prefill_node: KillingTransfer()  # type: ignore[method-assign]
            request = post(chat(70 + stream, 200, stream=stream))
            assert text(await ask(r, request)) == text(await ask(alone, request))
            assert r.service.counters.split_requests == {"transferred": 1, "transfer_failed": 1}

    try:
        run(work)
    finally:
        prefill.start()
        prefill.wait_until_ready()


def test_kill_9_of_the_decode_engine(split_engines: list[RealEngine]) -> None:
    prefill, decode, mixed = split_engines

    async def work() -> None:
        async with split_router(prefill, decode, mixed) as r:
            expected = [text(await ask(r, post(chat(90 + number, 200)))) for number in range(4)]
            asking = [asyncio.ensure_future(ask(r, post(chat(90 + number, 200)))) for number in range(4)]
            await until(lambda: r.node(1).inflight > 0 or r.node(2).inflight > 0)
            decode.kill()
            assert [text(response) for response in await asyncio.gather(*asking)] == expected
            assert r.inflight() == 0

    try:
        run(work)
    finally:
        decode.start()
        decode.wait_until_ready()


def test_a_frozen_prefill_engine_is_left(split_engines: list[RealEngine]) -> None:
    prefill, decode, _mixed = split_engines
    assert prefill.process is not None
    group = prefill.process.pid

    async def work() -> None:
        async with split_router(prefill, decode) as r:
            assert text(await ask(r, post(chat(100))))
            os.killpg(group, signal.SIGSTOP)
            assert text(await ask(r, post(chat(101, 200, stream=True))))
            assert r.inflight() == 0

    try:
        run(work)
    finally:
        os.killpg(group, signal.SIGCONT)
