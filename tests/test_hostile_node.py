"""A node that reports absurd values everywhere: it and others serve requests, and the log stays readable."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from typing import Any

import msgspec
import pytest
import zmq
from support.engine_scripts import http_response, normal, script
from support.polling import until
from support.raw_client import chat, post
from support.running_router import router
from support.scripted_engine import ScriptedEngine, engines

ABSURD = 2**64 - 1
SIZES = (65_537, 2**31, ABSURD, 1, 65_536)
METRICS = """
vllm:num_requests_running{engine="0"} 1e300
vllm:num_requests_waiting{engine="0"} 99999999999999999999999999
vllm:kv_cache_usage_perc{engine="0"} -1e308
vllm:cache_config_info{block_size="999999999",kv_cache_size_tokens="999999999999999"} 1
vllm:lora_requests_info{max_lora="999999999",running_lora_adapters="a,b"} 1e300
process_start_time_seconds %s
"""
USAGE = {
    "prompt_tokens": 999_999_999,
    "completion_tokens": 999_999_999,
    "prompt_tokens_details": {"cached_tokens": 10**9},
}
MODELS: list[Any] = [
    {"id": "m", "root": 7, "parent": None, "max_model_len": ABSURD, "owned_by": "vllm"},
    {"id": "x" * 100_000}, {"id": "\x1b[31m"}, {"id": ABSURD}, 7, None, {"id": "m2", "max_model_len": "long"},
]  # fmt: skip


def json_script(value: Any) -> Any:
    return script(http_response(json.dumps(value).encode()))


def make_hostile(engine: ScriptedEngine, events_port: int, kind: str) -> None:
    engine.behave = normal(json.dumps({"choices": [], "usage": USAGE}).encode(), b"Retry-After: 99999999999999\r\n")
    polls = iter(range(1, 10**9))

    async def metrics(engine: ScriptedEngine, received: Any, writer: asyncio.StreamWriter) -> None:
        page = METRICS % (1e9 + next(polls))
        if kind == "sglang":
            page = page.replace("vllm:num_requests_running", "sglang:num_running_reqs")
        writer.write(http_response(page.encode(), content_type=b"text/plain"))

    engine.metrics = metrics
    engine.list_models = json_script({"data": MODELS})
    endpoint = f"tcp://*:{events_port}"
    sources = {"0": {"endpoint": endpoint}, str(ABSURD): {"endpoint": endpoint}, "-1": {"endpoint": "tcp://*:99999"}}
    info = {
        "page_size": ABSURD, "max_total_num_tokens": ABSURD,
        "kv_events": {
            "endpoint_port_base": events_port, "dp_size": ABSURD, "block_size": 10**6,
            "publishers": [{"dp_rank": 10**9, "endpoint": endpoint}],
        },
    }  # fmt: skip
    engine.own_paths[b"/kv_event_sources" if kind == "vllm" else b"/server_info"] = json_script(
        sources if kind == "vllm" else info
    )


async def publish_absurd_events(socket: zmq.Socket[bytes]) -> None:
    numbers = (0, 1, ABSURD, 2, 2**62, 3, 10**15, 4, 0)
    for round_number in range(6):
        for number, size in zip(numbers, SIZES * 2, strict=False):
            tokens = [ABSURD] * 4 if round_number % 2 else list(range(min(size, 70_000)))
            event = {
                "type": "BlockStored",
                "block_hashes": [b"x" * 99, ABSURD],
                "token_ids": tokens,
                "block_size": size,
            }
            fitting = {**event, "block_hashes": [number], "lora_name": "n" * 10_000 if round_number == 2 else None}
            for batch in ([event], [fitting], [{**event, "token_ids": [], "group_idx": -ABSURD // 4}]):
                body = msgspec.msgpack.encode([float("nan"), batch, ABSURD])
                socket.send_multipart([b"", number.to_bytes(8, "big"), body])
        socket.send_multipart([b"", b"short", b"\xff"])
        socket.send_multipart([b"x"] * 30)
        socket.send_multipart([b"", b"\0" * 8, b"x" * (9 << 20)])
        await asyncio.sleep(0.05)


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_no_request_fails_beside_or_on_a_node_that_reports_absurd_values(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    context = zmq.Context[zmq.Socket[bytes]]()
    publisher = context.socket(zmq.PUB)
    events_port = publisher.bind_to_random_port("tcp://127.0.0.1")
    words = "a long prompt of a patient person " * 600
    try:
        async with engines(2) as (hostile, healthy):
            make_hostile(hostile, events_port, kind)
            async with router(hostile, healthy, routing={"policy": "price"}, index={"min_prompt_tokens": 32}) as r:
                await until(lambda: r.node(0).engine == kind, "the engine is detected")
                await until(lambda: r.service.cache_view.cache("node0").ranks, "its KV events are subscribed to")  # type: ignore[union-attr]
                publishing = asyncio.create_task(publish_absurd_events(publisher))
                statuses = Counter[int]()
                while not publishing.done():
                    prompts = [post(chat(f"{number} {words}")) for number in range(8)]
                    for found in await asyncio.gather(*map(r.request, prompts)):
                        statuses[found.status] += 1
                    await asyncio.sleep(0.02)
                publishing.result()
                assert set(statuses) == {200}
                assert hostile.seen and healthy.seen
                node, cache = r.node(0), r.service.cache_view.cache("node0")
                assert cache is not None and 1 <= cache.block_size <= 65_536
                assert (node.running, node.waiting, node.kv_usage) == (0, 0, 0.0)
                assert node.models == ("m", "m2")
                models = (await r.request(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")).json["data"]
                assert {model["id"] for model in models} == {"m", "m2"}
    finally:
        publisher.close(0)
        context.term()
    tracebacks = [record.getMessage() for record in caplog.records if record.exc_info]
    assert not tracebacks
    ignored = Counter(record.fields["name"] for record in caplog.records if record.event == "node_value_ignored")  # type: ignore[attr-defined]
    assert ignored and set(ignored.values()) == {1}, "each kind of value is logged once"
    names = {"running", "block_size", "max_model_len", "model_id", "prompt_tokens", "output_tokens", "sequence_number"}
    assert names <= ignored.keys()
