"""The simulated engine serves the OpenAI client, with the same response fields as vLLM."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from support.engine_processes import BLOCK, FakeEngine
from support.vllm_recordings import RECORDINGS


@pytest.fixture
def client(shared_engine: FakeEngine) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{shared_engine.url}/v1", api_key="none", max_retries=0)


def messages(text: str) -> list[Any]:
    return [{"role": "system", "content": "You are terse."}, {"role": "user", "content": text}]


def test_a_streamed_chat_has_the_same_text_and_usage(client: openai.OpenAI) -> None:
    chat = messages("What is a warm cache? " * 30)
    whole = client.chat.completions.create(model="sim", messages=chat, max_tokens=20)
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 20
    assert whole.choices[0].finish_reason == "length"
    stream = client.chat.completions.create(
        model="sim", messages=chat, max_tokens=20, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(texts) == whole.choices[0].message.content
    assert len(texts) == 1 + 20  # the role, then one event per token
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens
    assert chunks[-1].usage.prompt_tokens_details is not None
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == (whole.usage.prompt_tokens - 1) // BLOCK * BLOCK


@pytest.mark.parametrize("max_tokens", [1, 15, 16, 17, 50, None])
def test_the_next_turn_hits_the_blocks_of_the_prompt_and_the_output(
    client: openai.OpenAI, max_tokens: int | None
) -> None:
    chat = messages(f"Tell me of {max_tokens} things, the first of which is water. " * 8)
    first = client.chat.completions.create(model="sim", messages=chat, max_completion_tokens=max_tokens or openai.omit)
    assert first.usage is not None
    chat += [
        {"role": "assistant", "content": first.choices[0].message.content},
        {"role": "user", "content": "And?"},
    ]
    second = client.chat.completions.create(model="sim", messages=chat, max_tokens=1)
    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    held = first.usage.prompt_tokens + first.usage.completion_tokens - 1  # the last token's KV is never computed
    assert second.usage.prompt_tokens_details.cached_tokens == held // BLOCK * BLOCK


def test_an_output_without_max_tokens_stops_by_itself_and_is_reproducible(client: openai.OpenAI) -> None:
    answers = [client.chat.completions.create(model="sim", messages=messages("How long?")) for _ in range(2)]
    assert answers[0].choices[0].finish_reason == "stop"
    assert answers[0].choices[0].message.content == answers[1].choices[0].message.content
    assert answers[0].usage is not None
    lengths = set()
    for number in range(5):
        usage = client.chat.completions.create(model="sim", messages=messages(f"How long, {number}?")).usage
        assert usage is not None
        lengths.add(usage.completion_tokens)
    assert len(lengths) > 1


def test_completions_accept_text_and_tokens(client: openai.OpenAI, shared_engine: FakeEngine) -> None:
    text = "A prompt of some words, which is the same in tokens. " * 5
    _, tokenized = shared_engine.request("/tokenize", {"prompt": text})
    _, back = shared_engine.request("/detokenize", {"tokens": tokenized["tokens"]})
    assert back["prompt"] == text
    by_text = client.completions.create(model="sim", prompt=text, max_tokens=5)
    by_tokens = client.completions.create(model="sim", prompt=tokenized["tokens"], max_tokens=5)
    assert by_text.choices[0].text == by_tokens.choices[0].text
    assert by_tokens.usage is not None
    assert by_tokens.usage.prompt_tokens_details is not None
    assert by_tokens.usage.prompt_tokens_details.cached_tokens == (tokenized["count"] - 1) // BLOCK * BLOCK
    streamed = client.completions.create(model="sim", prompt=text, max_tokens=5, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == by_text.choices[0].text


def test_tokenize_counts_the_tokens_that_are_prefilled(client: openai.OpenAI, shared_engine: FakeEngine) -> None:
    chat = messages("Count me, with some parts.")
    _, tokenized = shared_engine.request("/tokenize", {"messages": chat})
    usage = client.chat.completions.create(model="sim", messages=chat, max_tokens=1).usage
    assert usage is not None
    assert usage.prompt_tokens == tokenized["count"]


def test_tools_content_parts_and_unknown_fields_are_accepted(client: openai.OpenAI) -> None:
    tool: Any = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    parts: Any = [{"role": "user", "content": [{"type": "text", "text": "Look: "}, {"type": "text", "text": "this."}]}]
    answer = client.chat.completions.create(
        model="sim", messages=parts, tools=[tool], max_tokens=3, temperature=0.5, extra_body={"top_k": 3, "odd": [1]}
    )
    assert answer.choices[0].message.content


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/v1/chat/completions", {"model": "gpt", "messages": [{"role": "user", "content": "x"}]}, 404, "`gpt`"),
        ("/v1/chat/completions", {"model": "sim"}, 400, "messages"),
        ("/v1/chat/completions", {"messages": [], "model": "sim"}, 400, "messages"),
        ("/v1/chat/completions", b'{"messages": [', 400, "body"),
        ("/v1/completions", {"prompt": "x", "max_tokens": 0}, 400, "max_tokens"),
        ("/v1/completions", {"prompt": [999_999_999]}, 400, "out of vocabulary"),
        ("/v1/completions", {"prompt": ""}, 400, "empty"),
        ("/v1/completions", {"prompt": "x", "n": 2}, 400, "n must be 1"),
        ("/v1/completions", {"prompt": [7] * 20_000}, 400, "maximum context length is 15984 tokens"),
        ("/v1/completions", {"prompt": [7] * 10_000, "max_tokens": 9_000}, 400, "for a total of 19000 tokens"),
    ],
)
def test_errors_have_the_format_of_vllm(
    shared_engine: FakeEngine, path: str, body: Any, status: int, message: str
) -> None:
    actual, answer = shared_engine.request(path, body)
    assert actual == status
    assert answer["error"]["code"] == status
    assert message in answer["error"]["message"]
    assert set(answer["error"]) == {"message", "type", "param", "code"}


def test_unknown_paths_and_methods_get_the_errors_of_fastapi(shared_engine: FakeEngine) -> None:
    assert shared_engine.request("/nowhere") == (404, {"detail": "Not Found"})
    assert shared_engine.request("/v1/completions") == (405, {"detail": "Method Not Allowed"})


def test_health_version_and_load(shared_engine: FakeEngine) -> None:
    assert shared_engine.request("/health") == (200, "")
    assert shared_engine.request("/version") == (200, {"version": "0.32.0", "simulated_by": "warmroute"})
    assert shared_engine.request("/load") == (200, {"server_load": 0})
    assert shared_engine.request("/reset_prefix_cache", b"", "POST") == (200, {"success": True})


def shape(value: Any) -> Any:
    """Reduce a JSON value to its ordered keys and the types of its values, with nulls and booleans."""
    if isinstance(value, dict):
        return [(key, shape(inner)) for key, inner in value.items()]
    if isinstance(value, list):
        return [shape(inner) for inner in value]
    return value if value is None or isinstance(value, bool) else type(value).__name__


@pytest.mark.parametrize(
    ("recording", "path", "body"),
    [
        ("chat_nonstream.json", "/v1/chat/completions", {"messages": messages("x"), "max_tokens": 8}),
        ("completions.json", "/v1/completions", {"prompt": "x", "max_tokens": 8}),
        ("v1_models.json", "/v1/models", None),
        ("kv_event_sources.json", "/kv_event_sources", None),
    ],
)
def test_responses_have_the_fields_of_recorded_ones(
    shared_engine: FakeEngine, recording: str, path: str, body: Any
) -> None:
    status, answer = shared_engine.request(path, body)
    assert status == 200
    assert shape(answer) == shape(json.loads((RECORDINGS / recording).read_text()))


@pytest.mark.parametrize(
    ("recording", "tokens", "options"),
    [("chat_stream.sse", 6, {"stream_options": {"include_usage": True}}), ("chat_stream_nousage.sse", 3, {})],
)
def test_streams_have_the_events_of_recorded_ones(
    shared_engine: FakeEngine, recording: str, tokens: int, options: dict[str, Any]
) -> None:
    body = {"messages": messages("x"), "max_tokens": tokens, "stream": True, **options}
    _, text = shared_engine.request("/v1/chat/completions", body)

    def events(stream: str) -> list[Any]:
        parts = stream.strip().split("\n\n")
        assert parts[-1] == "data: [DONE]"
        return [shape(json.loads(part.removeprefix("data: "))) for part in parts[:-1]]

    assert events(text) == events((RECORDINGS / recording).read_text())
