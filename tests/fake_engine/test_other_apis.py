"""The simulated engine's responses, messages and embeddings APIs, with the OpenAI client where it has them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest
from support.engine_processes import BLOCK, FakeEngine
from support.raw_client import Response, post
from support.running_router import RunningRouter, router

from warmroute.lab.engine.server import EngineServer, ServerConfig
from warmroute.lab.engine.timing import profile
from warmroute.lab.engine.tokenizers import FakeTokenizer
from warmroute.lab.engine.values import EngineConfig

LONG = "Tell me what a warm cache is. " * 40
BAD = "invalid_request_error"
TOOL = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}}


@pytest.fixture
def client(shared_engine: FakeEngine) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{shared_engine.url}/v1", api_key="none", max_retries=0)


def events(body: bytes) -> list[dict[str, Any]]:
    """Return the events of a stream. Each is named as its type."""
    found = []
    for event in body.decode().removesuffix("\n\n").split("\n\n"):
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


# Responses.


def test_a_streamed_response_has_the_same_text_and_usage(client: openai.OpenAI) -> None:
    whole = client.responses.create(model="sim", input=LONG, instructions="Be terse.", max_output_tokens=20)
    assert whole.status == "incomplete" and whole.incomplete_details is not None
    assert whole.incomplete_details.reason == "max_output_tokens"
    assert whole.usage is not None and whole.usage.output_tokens == 20
    stream = list(
        client.responses.create(model="sim", input=LONG, instructions="Be terse.", max_output_tokens=20, stream=True)
    )
    assert [event.type for event in stream] == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
        *["response.output_text.delta"] * 20,
        "response.output_text.done", "response.content_part.done", "response.output_item.done", "response.incomplete",
    ]  # fmt: skip
    assert [event.sequence_number for event in stream] == list(range(len(stream)))
    text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
    assert text == whole.output_text
    last = stream[-1]
    assert last.type == "response.incomplete" and last.response.output_text == text and last.response.usage is not None
    usage = last.response.usage
    assert usage.input_tokens == whole.usage.input_tokens and usage.total_tokens == usage.input_tokens + 20
    assert usage.input_tokens_details.cached_tokens == (usage.input_tokens - 1) // BLOCK * BLOCK
    with client.responses.stream(model="sim", input="How long?") as accumulated:
        answer = accumulated.get_final_response()
    assert answer.status == "completed" and answer.output_text


def test_a_response_has_the_prompt_and_the_answer_of_the_same_chat(client: openai.OpenAI) -> None:
    chat: list[Any] = [{"role": "system", "content": "Be terse."}, {"role": "user", "content": LONG}]
    tool: Any = {"type": "function", "function": {"type": "function", **TOOL}}
    as_chat = client.chat.completions.create(model="sim", messages=chat, tools=[tool], max_tokens=9)
    items: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": LONG}]}]
    fields: dict[str, Any] = {"model": "sim", "instructions": "Be terse.", "tools": [{"type": "function", **TOOL}]}
    answer = client.responses.create(input=items, max_output_tokens=9, **fields)
    assert as_chat.usage is not None and answer.usage is not None
    assert answer.output_text == as_chat.choices[0].message.content
    assert answer.usage.input_tokens == as_chat.usage.prompt_tokens
    items += [*answer.output, {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}]
    items += [{"type": "function_call_output", "call_id": "c", "output": "4"}, {"role": "user", "content": "And?"}]
    second = client.responses.create(input=items, max_output_tokens=1, **fields)
    held = answer.usage.input_tokens + 9 - 1  # the last token's KV is never computed
    assert second.usage is not None and second.usage.input_tokens_details.cached_tokens == held // BLOCK * BLOCK


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"model": "gpt", "input": "x"}, 404, "`gpt`"),
        ({"model": "sim"}, 400, "input"),
        ({"model": "sim", "input": [{"type": "image"}]}, 400, "input[0]"),
        ({"model": "sim", "input": "x", "previous_response_id": "resp_1"}, 404, "resp_1"),
        ({"model": "sim", "input": "x", "max_output_tokens": 20_000}, 400, "maximum context length"),
    ],
)
def test_errors_of_responses(shared_engine: FakeEngine, body: Any, status: int, message: str) -> None:
    found, error = shared_engine.request("/v1/responses", body)
    assert found == status and message in error["error"]["message"]


# Messages.


def ask(shared_engine: FakeEngine, path: str = "/v1/messages", **fields: Any) -> dict[str, Any]:
    body = {"model": "sim", "max_tokens": 12, "messages": [{"role": "user", "content": LONG}], **fields}
    status, answer = shared_engine.request(path, body)
    assert status == 200 and isinstance(answer, dict), answer
    return answer


def test_a_message_has_the_prompt_and_the_answer_of_the_same_chat(
    shared_engine: FakeEngine, client: openai.OpenAI
) -> None:
    chat: list[Any] = [{"role": "system", "content": "Be terse."}, {"role": "user", "content": f"m {LONG}"}]
    as_chat = client.chat.completions.create(model="sim", messages=chat, max_tokens=12)
    blocks = [{"type": "text", "text": f"m {LONG}"}]
    answer = ask(
        shared_engine, messages=[{"role": "user", "content": blocks}], system=[{"type": "text", "text": "Be terse."}]
    )
    assert answer["content"] == [{"type": "text", "text": as_chat.choices[0].message.content}]
    assert (answer["type"], answer["role"], answer["model"]) == ("message", "assistant", "sim")
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("max_tokens", None)
    usage = answer["usage"]
    assert as_chat.usage is not None and usage["output_tokens"] == 12
    cached = (as_chat.usage.prompt_tokens - 1) // BLOCK * BLOCK
    assert usage["cache_read_input_tokens"] == cached
    assert usage["input_tokens"] == as_chat.usage.prompt_tokens - cached, "Anthropic counts cached tokens apart"
    counted = ask(shared_engine, "/v1/messages/count_tokens", messages=chat[1:], system="Be terse.", max_tokens=1)
    assert counted == {"input_tokens": as_chat.usage.prompt_tokens}


@pytest.mark.parametrize(
    ("body", "status", "kind"),
    [
        ({"model": "gpt", "max_tokens": 1, "messages": [{"role": "user", "content": "x"}]}, 404, "not_found_error"),
        ({"model": "sim", "messages": [{"role": "user", "content": "x"}]}, 400, BAD),
        ({"model": "sim", "max_tokens": 1, "messages": []}, 400, BAD),
        (
            {"model": "sim", "max_tokens": 1, "messages": [{"role": "tool", "content": "x"}]},
            400,
            "invalid_request_error",
        ),
        (
            {"model": "sim", "max_tokens": 1, "messages": [{"role": "user", "content": [5]}]},
            400,
            "invalid_request_error",
        ),
    ],
)
def test_errors_of_messages(shared_engine: FakeEngine, body: Any, status: int, kind: str) -> None:
    found, error = shared_engine.request("/v1/messages", body)
    assert found == status and error["type"] == "error" and error["error"]["type"] == kind


# Embeddings.


def test_embeddings_come_in_both_encodings(client: openai.OpenAI) -> None:
    texts = ["warm", "cold", "warm"]
    floats = client.embeddings.create(model="sim", input=texts, encoding_format="float", dimensions=100)
    packed = client.embeddings.create(model="sim", input=texts, dimensions=100)  # the client asks for base64
    assert [one.index for one in floats.data] == [0, 1, 2]
    for one, other in zip(floats.data, packed.data, strict=True):
        assert len(one.embedding) == 100 and one.embedding == pytest.approx(other.embedding, abs=1e-6)
        assert sum(value * value for value in one.embedding) == pytest.approx(1)
    assert floats.data[0].embedding == floats.data[2].embedding != floats.data[1].embedding
    assert floats.usage.prompt_tokens == floats.usage.total_tokens > 0


def test_embeddings_of_tokens_are_those_of_the_text(client: openai.OpenAI, shared_engine: FakeEngine) -> None:
    _, tokenized = shared_engine.request("/tokenize", {"prompt": LONG})
    by_text = client.embeddings.create(model="sim", input=LONG)
    for tokens in (tokenized["tokens"], [tokenized["tokens"]]):
        assert client.embeddings.create(model="sim", input=tokens).data[0].embedding == by_text.data[0].embedding
    assert by_text.usage.prompt_tokens == tokenized["count"]


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"model": "gpt", "input": "x"}, 404, "`gpt`"),
        ({"model": "sim", "input": []}, 400, "1 to 2048"),
        ({"model": "sim", "input": ["x"] * 2049}, 400, "1 to 2048"),
        ({"model": "sim", "input": ""}, 400, "empty"),
        ({"model": "sim", "input": [999_999_999]}, 400, "out of vocabulary"),
        ({"model": "sim", "input": [[-1]]}, 400, "out of vocabulary"),
        ({"model": "sim", "input": [{"a": 1}]}, 400, "neither text"),
        ({"model": "sim", "input": [7] * 20_000}, 400, "maximum context length"),
        ({"model": "sim", "input": "x", "dimensions": 10**9}, 400, "dimensions"),
        ({"model": "sim", "input": "x", "encoding_format": "int8"}, 400, "encoding_format"),
    ],
)
def test_errors_of_embeddings(shared_engine: FakeEngine, body: Any, status: int, message: str) -> None:
    found, error = shared_engine.request("/v1/embeddings", body)
    assert found == status and message in error["error"]["message"]


# Through the router.


@asynccontextmanager
async def routed_engine(**more: Any) -> AsyncIterator[tuple[RunningRouter, EngineServer]]:
    config = EngineConfig(num_blocks=4000, block_size=16, max_model_len=32_768, every_token=True)
    settings = ServerConfig(
        engine=config, timing=profile("h200-1.5b").timing, profile="h200-1.5b", tokenizer=FakeTokenizer(), port=0,
        model="m", speed=50.0, **more,
    )  # fmt: skip
    engine = EngineServer(settings)
    await engine.start()
    try:
        async with router({"url": f"http://127.0.0.1:{engine.port}"}, routing={"policy": "price"}) as r:
            yield r, engine
    finally:
        await engine.stop()


BODIES: dict[str, dict[str, Any]] = {
    "/v1/responses": {"input": LONG, "instructions": "Be terse.", "max_output_tokens": 8},
    "/v1/messages": {"messages": [{"role": "user", "content": LONG}], "system": "Be terse.", "max_tokens": 8},
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
async def test_the_router_reads_their_usage_and_first_token(path: str, stream: bool) -> None:
    async with routed_engine() as (r, _engine):

        async def send() -> tuple[Response, dict[str, Any]]:
            response = await r.request(
                post(json.dumps({"model": "m", "stream": stream, **BODIES[path]}).encode(), path)
            )
            assert response.status == 200 and response.complete, response.body
            return response, (await r.admin("GET", "/admin/decisions?limit=1")).json["decisions"][0]

        await send()
        response, decision = await send()
        prompt, cached = decision["reported"]["prompt_tokens"], decision["reported"]["cached_tokens"]
        assert cached == (prompt - 1) // 16 * 16 > 200 and decision["ttft_ms"] > 0
        if path == "/v1/messages" and stream:
            found = events(response.body)
            assert [one["type"] for one in found] == [
                "message_start", "content_block_start", *["content_block_delta"] * 8, "content_block_stop",
                "message_delta", "message_stop",
            ]  # fmt: skip
            assert found[0]["message"]["usage"] == {"input_tokens": prompt, "output_tokens": 0}
            assert found[-2]["delta"]["stop_reason"] == "max_tokens"
            assert found[-2]["usage"]["output_tokens"] == 8 and found[-2]["usage"]["cache_read_input_tokens"] == cached


async def test_the_openai_client_uses_them_through_the_router() -> None:
    async with routed_engine() as (r, _engine):
        client = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{r.port}/v1", api_key="none", max_retries=0)
        async with client:
            answer = await client.responses.create(model="m", input="hi", max_output_tokens=5)
            assert answer.usage is not None and answer.usage.output_tokens == 5
            stream = await client.responses.create(model="m", input="hi", max_output_tokens=5, stream=True)
            deltas = [event.delta async for event in stream if event.type == "response.output_text.delta"]
            assert "".join(deltas) == answer.output_text
            embedding = await client.embeddings.create(model="m", input=["a", "b"])
            assert len(embedding.data) == 2 and len(embedding.data[0].embedding) == 64
