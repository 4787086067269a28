"""The load generator against simulated engines over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import islice

import msgspec
import pytest
from small_worlds import NEAR

from warmroute.demo.load_generator.load_run import LoadRun, LoadOptions
from warmroute.demo.load_generator.prompt_requests import ConversationHistory, body, extend_history, messages
from warmroute.demo.load_generator.streaming_client import RequestFailed, RequestRefused, send_request
from warmroute.fake_engine.core import EngineConfig
from warmroute.fake_engine.profiles import profile
from warmroute.fake_engine.server.engine_server import EngineServer, ServerConfig
from warmroute.fake_engine.server.fake_tokenizer import FakeTokenizer
from warmroute.replay import Setup, parse_policy, replay
from warmroute.replay.simulation import NodeSpec
from warmroute.replay.workloads import parse_workload
from warmroute.replay.workloads.prompt_text import words

SPEED = 20.0


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


def test_the_same_tokens_are_the_same_words() -> None:
    a, b, other = (one for one in islice(parse_workload(["shared_system_prompts", "prompts=1"]).arrivals(1), 3))
    assert messages(a, ConversationHistory())[0] == messages(b, ConversationHistory())[0] == messages(other, ConversationHistory())[0]
    assert messages(a, ConversationHistory())[0].role == "system"
    assert messages(a, ConversationHistory())[1] != messages(b, ConversationHistory())[1]
    assert len(words(a, 0, a.prompt_tokens).split()) == a.prompt_tokens
    assert words(a, 0, 40).startswith(words(a, 0, 30))
    tokenizer = FakeTokenizer()
    assert len(tokenizer.encode(words(a, 0, a.prompt_tokens))) == a.prompt_tokens
    path, data = body(a, (), "sim", "tokens")
    assert path == "/v1/completions"
    assert len(msgspec.json.decode(data)["prompt"]) == a.prompt_tokens


def test_a_conversation_carries_what_was_really_answered() -> None:
    first = next(iter(parse_workload(["multi_turn_chat", "turns=3", "spread=0"]).arrivals(1)))
    sent = messages(first, ConversationHistory())
    talk = extend_history(first, sent, "well said")
    assert first.next_turn is not None
    follow_up = first.next_turn()
    assert follow_up is not None
    again = messages(follow_up.prompt, talk)
    assert again[: len(sent)] == sent
    assert [message.role for message in again] == ["system", "user", "assistant", "user"]
    assert again[2].content == "well said"
    assert len(again[3].content.split()) == 100


async def test_a_live_run_and_a_replay_agree_on_hits() -> None:
    words_ = ["shared_system_prompts", "system_tokens=500", "output_tokens=8"]
    async with engine() as server:
        load = LoadOptions(url=f"http://127.0.0.1:{server.port}", form="tokens", concurrency=1, limit=40, speed=SPEED)
        live = await LoadRun(load, parse_workload(words_).arrivals(NEAR.seed)).run()
    node = NodeSpec("node-0", profile("l4-1.5b"), blocks=2000)
    setup = Setup(
        workload=parse_workload(words_),
        nodes=(node,),
        policy=parse_policy("round_robin"),
        conditions=NEAR,
        concurrency=1,
        limit=40,
    )
    replayed = replay(setup)
    assert live["finished"] == replayed["finished"] == 40
    assert live["failed"] == 0
    assert live["hit_rate"] == pytest.approx(replayed["hit_rate"], abs=1e-6)
    assert live["ttft_ms"]["p50"] >= replayed["ttft_ms"]["p50"] * 0.9


async def test_conversations_hit_what_was_answered() -> None:
    async with engine() as server:
        chat = parse_workload(["multi_turn_chat", "turns=4", "spread=0", "think_s=0.5", "output_tokens=96"])
        load = LoadOptions(url=f"http://127.0.0.1:{server.port}", concurrency=2, limit=24, speed=SPEED)
        live = await LoadRun(load, chat.arrivals(1)).run()
    assert live["finished"] == 24
    assert live["hit_rate"] > 0.75  # only the new message and a partial block are new


async def test_refusals_and_failures_are_counted_by_their_reason() -> None:
    async with engine(blocks=30) as server:
        url = f"http://127.0.0.1:{server.port}"
        load = LoadOptions(url=url, form="tokens", limit=3, speed=SPEED)
        live = await LoadRun(load, parse_workload(["unique_batch", "prompt_tokens=4000"]).arrivals(1, rate=50.0)).run()
        assert live["errors"] == {"status 400": 3}
        with pytest.raises(RequestRefused):
            await send_request(url, "/v1/nothing", b"{}", {}, 5.0)
    with pytest.raises(RequestFailed):
        await send_request(url, "/v1/completions", b"{}", {}, 5.0)


async def test_an_answer_that_breaks_off_is_not_taken_for_whole() -> None:
    async def half(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        event = b'data: {"choices": [{"text": "so"}]}\n\n'
        writer.write(b"%x\r\n%b\r\n" % (len(event), event))
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(half, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    with pytest.raises(RequestFailed, match="broke off"):
        await send_request(f"http://127.0.0.1:{port}", "/v1/completions", b"{}", {}, 5.0)
    server.close()
