"""The load generator against simulated engines over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import islice

import msgspec
import pytest

from warmroute.lab.engine.server import EngineServer, ServerConfig
from warmroute.lab.engine.timing import profile
from warmroute.lab.engine.tokenizers import FakeTokenizer
from warmroute.lab.engine.values import EngineConfig
from warmroute.lab.load import (
    ConversationHistory,
    LoadOptions,
    LoadRun,
    RequestFailed,
    RequestRefused,
    build_request,
    chat_messages,
    extend_history,
    send_streaming,
)
from warmroute.lab.replay_setup import parse_policy
from warmroute.lab.run import Setup, replay
from warmroute.lab.simulated_node import Conditions, Island, NodeSpec
from warmroute.lab.workloads import parse_workload
from warmroute.lab.workloads.workload_prompt import words

SPEED = 20.0
SEED = 5


@asynccontextmanager
async def engine(blocks: int = 2000) -> AsyncIterator[EngineServer]:
    hardware = profile("l4-1.5b")
    server = EngineServer(
        ServerConfig(
            engine=EngineConfig(
                num_blocks=blocks, max_num_batched_tokens=2048, max_num_seqs=256, every_token=True, max_model_len=16_000
            ),
            timing=hardware.timing,
            profile=hardware.name,
            tokenizer=FakeTokenizer(),
            port=0,
            speed=SPEED,
        )
    )
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


def test_prompts_with_the_same_tokens_have_the_same_words() -> None:
    prompts = list(islice(parse_workload(["shared_system_prompts", "prompts=1"]).arrivals(1), 3))
    a, b, c = (chat_messages(prompt, ConversationHistory()) for prompt in prompts)
    assert a[0] == b[0] == c[0]
    assert a[0].role == "system"
    assert a[1] != b[1]
    prompt = prompts[0]
    assert len(words(prompt, 0, prompt.prompt_tokens).split()) == prompt.prompt_tokens
    assert words(prompt, 0, 40).startswith(words(prompt, 0, 30))
    tokenizer = FakeTokenizer()
    assert len(tokenizer.encode(words(prompt, 0, prompt.prompt_tokens))) == prompt.prompt_tokens
    path, body = build_request(prompt, (), "sim", "tokens")
    assert path == "/v1/completions"
    assert len(msgspec.json.decode(body)["prompt"]) == prompt.prompt_tokens


def test_the_next_turn_contains_the_real_response() -> None:
    first = next(iter(parse_workload(["multi_turn_chat", "turns=3", "spread=0"]).arrivals(1)))
    first_turn = chat_messages(first, ConversationHistory())
    history = extend_history(first, first_turn, "an answer")
    assert first.next_turn is not None
    follow_up = first.next_turn()
    assert follow_up is not None
    next_turn = chat_messages(follow_up.prompt, history)
    assert next_turn[: len(first_turn)] == first_turn
    assert [message.role for message in next_turn] == ["system", "user", "assistant", "user"]
    assert next_turn[2].content == "an answer"
    assert len(next_turn[3].content.split()) == 100


async def test_a_live_run_and_a_replay_have_the_same_hit_rate() -> None:
    workload = ["shared_system_prompts", "system_tokens=500", "output_tokens=8"]
    async with engine() as server:
        load = LoadOptions(url=f"http://127.0.0.1:{server.port}", form="tokens", concurrency=1, limit=40, speed=SPEED)
        live = await LoadRun(load, parse_workload(workload).arrivals(SEED)).run()
    node = NodeSpec("node-0", profile("l4-1.5b"), blocks=2000)
    setup = Setup(
        workload=parse_workload(workload),
        nodes=(node,),
        policy=parse_policy("round_robin"),
        conditions=Conditions(islands={"local": Island(0.0)}, seed=SEED),
        concurrency=1,
        limit=40,
    )
    replayed = replay(setup)
    assert live["finished"] == replayed["finished"] == 40
    assert live["failed"] == 0
    assert live["hit_rate"] == pytest.approx(replayed["hit_rate"], abs=1e-6)
    assert live["ttft_ms"]["p50"] >= replayed["ttft_ms"]["p50"] * 0.9


async def test_the_next_turn_hits_the_blocks_of_the_response() -> None:
    async with engine() as server:
        chat = parse_workload(["multi_turn_chat", "turns=4", "spread=0", "think_s=0.5", "output_tokens=96"])
        load = LoadOptions(url=f"http://127.0.0.1:{server.port}", concurrency=2, limit=24, speed=SPEED)
        live = await LoadRun(load, chat.arrivals(1)).run()
    assert live["finished"] == 24
    assert live["hit_rate"] > 0.75  # all but the new message and a partial block is cached


async def test_failed_requests_are_counted_by_reason() -> None:
    async with engine(blocks=30) as server:
        url = f"http://127.0.0.1:{server.port}"
        load = LoadOptions(url=url, form="tokens", limit=3, speed=SPEED)
        live = await LoadRun(load, parse_workload(["unique_batch", "prompt_tokens=4000"]).arrivals(1, rate=50.0)).run()
        assert live["errors"] == {"status 400": 3}
        with pytest.raises(RequestRefused):
            await send_streaming(url, "/v1/nothing", b"{}", {}, 5.0)
    with pytest.raises(RequestFailed):
        await send_streaming(url, "/v1/completions", b"{}", {}, 5.0)


async def test_a_response_that_breaks_off_is_a_failure() -> None:
    async def break_off(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        event = b'data: {"choices": [{"text": "so"}]}\n\n'
        writer.write(b"%x\r\n%b\r\n" % (len(event), event))
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(break_off, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    with pytest.raises(RequestFailed, match="broke off"):
        await send_streaming(f"http://127.0.0.1:{port}", "/v1/completions", b"{}", {}, 5.0)
    server.close()
