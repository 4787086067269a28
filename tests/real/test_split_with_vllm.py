"""Two real vLLM engines with NIXL: one prefills, the other one decodes. A third one without it serves alone."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from real_asking import run
from real_engine import RealEngine, free_port, make_tiny_model, running
from support.polling import until
from support.raw_client import Response, post
from support.running_router import RunningRouter, router

from warmroute.engines.vllm import VllmKvTransfer

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]
AUTO_TOOLS = ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
PATIENCE_S = 120.0
"""vLLM on a busy CPU takes its time."""
PATIENT = {"first_byte_timeout_s": PATIENCE_S, "between_chunks_timeout_s": PATIENCE_S}
CONNECTOR = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
WORDS = ["alpha", "beta", "gamma", "delta", "import", "class", "return", "self", "value", "index"]
CITY = {"city": {"type": "string", "enum": ["Rome"]}}
PARAMETERS = {"type": "object", "properties": CITY, "required": ["city"], "additionalProperties": False}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS, "strict": True}}]


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
async def split_router(
    prefill: RealEngine, *decode: RealEngine, split: str = "always", hang_s: float = PATIENCE_S
) -> AsyncIterator[RunningRouter]:
    """`hang_s`: when the router leaves a silent prefill node. Three engines on a busy CPU pause for seconds."""
    nodes: list[dict[str, Any]] = [{"url": prefill.url, "role": "prefill"}]
    nodes += [{"url": engine.url, "role": "decode"} for engine in decode]
    tables: dict[str, Any] = {
        "routing": {"policy": "price", "seed": 7}, "index": {"min_prompt_tokens": 16}, "price": {"split": split},
        "journal": {"response_headers": "always"}, "models": [{"name": "tiny", "tokenizer": str(prefill.model)}],
        "health": {"interval_s": 0.2, "timeout_s": 5.0}, "hedging": {"min_delay_s": hang_s}, "upstream": PATIENT,
    }  # fmt: skip
    async with router(*nodes, check_leaks=False, **tables) as r:
        await until(lambda: all(node.engine == "vllm" for node in r.service.fleet), patience_s=PATIENCE_S)
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


def logprobs(response: Response) -> list[float]:
    """Return the log probabilities of a chat's tokens. Unlike its tokens, they differ if the KV cache differs."""
    events = [json.loads(line[6:]) for line in response.body.splitlines() if line.startswith(b"data: {")]
    choices = [choice for event in events or [response.json] for choice in event["choices"]]
    return [token["logprob"] for choice in choices for token in (choice.get("logprobs") or {}).get("content") or ()]


def calls(response: Response) -> list[tuple[str, str]]:
    """Return the tool calls of a chat: names and arguments."""
    if b"data:" not in response.body:
        found = response.json["choices"][0]["message"].get("tool_calls") or []
        return [(call["function"]["name"], call["function"]["arguments"]) for call in found]
    events = [json.loads(line[6:]) for line in response.body.splitlines() if line.startswith(b"data: {")]
    pieces: dict[int, tuple[str, str]] = {}
    for event in events:
        for choice in event["choices"]:
            for call in choice["delta"].get("tool_calls") or ():
                name, arguments = pieces.get(call["index"], ("", ""))
                more = {key: value or "" for key, value in call["function"].items()}
                pieces[call["index"]] = (name + more.get("name", ""), arguments + more.get("arguments", ""))
    return list(pieces.values())


def without_spaces(model: Path) -> dict[str, int]:
    """Return the bias that keeps a model with random weights from filling JSON with spaces and newlines."""
    vocabulary = json.loads((model / "tokenizer.json").read_text())["model"]["vocab"]
    return {str(token): -100 for piece, token in vocabulary.items() if set(piece) <= set("ĠĊčĉ")}


def test_answers_are_those_of_one_engine(split_engines: list[RealEngine]) -> None:
    prefill, decode, mixed = split_engines
    choice = {"type": "function", "function": {"name": "weather"}}
    forced: dict[str, Any] = {
        "tools": TOOLS,
        "tool_choice": choice,
        "max_tokens": 100,
        "logit_bias": without_spaces(mixed.model),
    }
    whole = [chat(6, 1), chat(13, **forced), chat(14, stream=True, **forced)]
    """These go to one node: a short prompt, and calls that the request forces."""
    requests = [
        chat(1), chat(1), chat(2, stream=True), chat(3, 250, stream=True, stream_options={"include_usage": True}),
        chat(4, tools=TOOLS), chat(5, tools=TOOLS, tool_choice="auto", stream=True), chat(7, 40), chat(12, 250),
        chat(8, max_completion_tokens=3), chat(9, logprobs=True, top_logprobs=2), chat(10, n=1, seed=5, stop=["zzz"]),
    ]  # fmt: skip

    async def work() -> None:
        async with (
            split_router(prefill, decode) as r,
            alone_router(mixed) as alone,
        ):
            for request in (*requests, *whole):
                expected, found = await ask(alone, post(request)), await ask(r, post(request))
                assert text(found) == text(expected) and calls(found) == calls(expected)
                assert [name for name, _ in calls(found)] == ["weather"] * (b'"tool_choice": {' in request), found.body
                assert (found.get("x-warmroute-prefill-node") == "node0") == (request in requests)
            completion = json.dumps({"model": "tiny", "prompt": text_of(11, 100), "max_tokens": 9, "temperature": 0})
            raw = post(completion.encode(), "/v1/completions")
            assert text(await ask(r, raw)) == text(await ask(alone, raw))
            assert r.service.counters.split_requests == {"transferred": len(requests) + 1}
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
            for request in requests:
                expected, found = await ask(alone, request), await ask(r, request)
                assert answer_of(found) == answer_of(expected) != ""
                assert found.get("x-warmroute-prefill-node") == "node0"
            assert r.service.counters.split_requests == {"transferred": 2}
            assert r.inflight() == 0

    run(work)


@pytest.mark.parametrize("stream", [False, True])
def test_the_transferred_kv_cache_is_that_of_the_prompt(split_engines: list[RealEngine], stream: bool) -> None:
    prefill, decode, mixed = split_engines
    bodies = [chat(140 + number, words, logprobs=True, stream=stream) for number, words in enumerate((60, 150, 250))]

    async def work() -> None:
        async with split_router(prefill, decode) as r, alone_router(mixed) as alone:
            expected = [logprobs(await ask(alone, post(body))) for body in bodies]
            found = [logprobs(await ask(r, post(body))) for body in bodies]
            assert r.service.counters.split_requests == {"transferred": len(bodies)}
            for ours, theirs in zip(found, expected, strict=True):
                assert len(ours) == 12 and ours == pytest.approx(theirs, abs=0.02)
            assert expected[0] != pytest.approx(expected[1], abs=0.02), "another prompt has other probabilities"

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
            r.service.proxy.kv_transfer = lambda engine: KillingTransfer()  # type: ignore[method-assign]
            request = post(chat(70 + stream, 200, stream=stream))
            assert text(await ask(r, request)) == text(await ask(alone, request))
            assert r.service.counters.split_requests == {"transferred": 1, "transfer_failed": 1}

    try:
        run(work)
    finally:
        prefill.start()
        prefill.wait_until_ready()


@pytest.mark.parametrize("stream", [False, True])
def test_kill_9_of_the_decode_engine(split_engines: list[RealEngine], stream: bool) -> None:
    """It has the decode request and has sent no byte of its answer: another decode node serves the request."""
    prefill, decode, mixed = split_engines
    assert decode.process is not None
    group = decode.process.pid

    class FreezingTransfer(VllmKvTransfer):
        def read_transfer(self, response: bytes) -> bytes | None:
            os.killpg(group, signal.SIGSTOP)
            return super().read_transfer(response)

    async def work() -> None:
        async with split_router(prefill, decode, mixed) as r, alone_router(mixed) as alone:
            await r.admin("POST", "/admin/nodes/node2/drain")
            assert text(await ask(r, post(chat(90 + stream)))), "the engines know each other"
            r.service.proxy.kv_transfer = lambda engine: FreezingTransfer()  # type: ignore[method-assign]
            request = post(chat(92 + stream, 200, stream=stream))
            asking = asyncio.ensure_future(ask(r, request))
            checked = r.service.brain.calls.checked
            await until(lambda: any(a.split and a.split.decode_sent for a in checked), patience_s=PATIENCE_S)
            await r.admin("POST", "/admin/nodes/node2/undrain")
            assert not asking.done() and r.node(1).inflight == 1
            decode.kill()
            response = await asking
            assert text(response) == text(await ask(alone, request))
            assert response.get("x-warmroute-node") == "node2"
            assert r.service.counters.retries == 1
            assert r.inflight() == 0

    try:
        run(work)
    finally:
        decode.kill()
        decode.start()
        decode.wait_until_ready()


def test_kill_9_of_the_decode_engine_in_the_middle_of_an_answer(split_engines: list[RealEngine]) -> None:
    """The client has a part of the answer: it sees that the rest is missing."""
    prefill, decode, mixed = split_engines

    async def work() -> None:
        async with split_router(prefill, decode, mixed) as r:
            await r.admin("POST", "/admin/nodes/node2/drain")
            peer = await r.connect()
            peer.write(post(chat(120, 100, stream=True, max_tokens=600, ignore_eos=True)))
            assert (await peer.head(PATIENCE_S)).status == 200
            decode.kill()
            rest = await peer.rest(PATIENCE_S)
            assert b'data: {"error"' in rest and b"[DONE]" not in rest
            assert r.service.counters.split_requests == {"transferred": 1} and r.service.counters.interrupted == 1
            assert r.inflight() == 0

    try:
        run(work)
    finally:
        decode.start()
        decode.wait_until_ready()


@pytest.mark.parametrize("frozen", ["prefill", "decode", ""])
def test_a_client_that_leaves_frees_both_engines(split_engines: list[RealEngine], frozen: str) -> None:
    """`frozen`: which engine has the request when the client disconnects; "": the answer has begun."""
    prefill, decode, _mixed = split_engines
    assert prefill.process is not None and decode.process is not None
    group = {"prefill": prefill.process.pid, "decode": decode.process.pid}.get(frozen)

    async def work() -> None:
        async with split_router(prefill, decode) as r:
            assert text(await ask(r, post(chat(130))))
            if group is not None:
                os.killpg(group, signal.SIGSTOP)
            peer = await r.connect()
            peer.write(post(chat(131, 100, stream=True, max_tokens=600, ignore_eos=True)))
            checked = r.service.brain.calls.checked
            if frozen:
                wanted = frozen == "decode"
                await until(
                    lambda: any(a.split and a.split.decode_sent == wanted for a in checked), patience_s=PATIENCE_S
                )
            else:
                await peer.head(PATIENCE_S)
            peer.disconnect()
            await until(lambda: r.inflight() == 0 and not checked)
            assert r.service.counters.disconnects == 1
            if group is not None:
                os.killpg(group, signal.SIGCONT)
            for engine in (prefill, decode):
                await idle(engine)
            assert text(await ask(r, post(chat(132))))

    try:
        run(work)
    finally:
        if group is not None:
            os.killpg(group, signal.SIGCONT)


async def idle(engine: RealEngine) -> None:
    """Wait until the engine has no request."""
    counts = (b"vllm:num_requests_running", b"vllm:num_requests_waiting{")
    deadline_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline_s:
        lines = (await asyncio.to_thread(metrics, engine)).splitlines()
        found = [float(line.split()[-1]) for line in lines if line.startswith(counts)]
        assert found
        if not any(found):
            return
        await asyncio.sleep(0.2)
    raise AssertionError(f"{engine.name} still has requests: {found}")


def metrics(engine: RealEngine) -> bytes:
    with urllib.request.urlopen(f"{engine.url}/metrics", timeout=60) as answer:
        found: bytes = answer.read()
        return found


def test_a_frozen_prefill_engine_is_left(split_engines: list[RealEngine]) -> None:
    prefill, decode, _mixed = split_engines
    assert prefill.process is not None
    group = prefill.process.pid

    async def work() -> None:
        async with split_router(prefill, decode, hang_s=2.0) as r:
            assert text(await ask(r, post(chat(100))))
            os.killpg(group, signal.SIGSTOP)
            assert text(await ask(r, post(chat(101, 200, stream=True))))
            assert r.inflight() == 0

    try:
        run(work)
    finally:
        os.killpg(group, signal.SIGCONT)
