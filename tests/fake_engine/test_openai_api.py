"""The simulated engine answers the OpenAI client, and in vLLM's own shapes."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from engine_processes import BLOCK, CAPTURES, Engine

needs_captures = pytest.mark.skipif(not CAPTURES.exists(), reason=f"no recorded vLLM answers at {CAPTURES}")


@pytest.fixture
def client(shared_engine: Engine) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{shared_engine.url}/v1", api_key="none", max_retries=0)


def messages(text: str) -> list[Any]:
    return [{"role": "system", "content": "You are terse."}, {"role": "user", "content": text}]


def test_a_chat_is_answered_whole_and_streamed_alike(client: openai.OpenAI) -> None:
    asked = messages("What is a warm cache? " * 30)
    whole = client.chat.completions.create(model="sim", messages=asked, max_tokens=20)
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 20
    assert whole.choices[0].finish_reason == "length"
    stream = client.chat.completions.create(
        model="sim", messages=asked, max_tokens=20, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(texts) == whole.choices[0].message.content
    assert len(texts) == 1 + 20  # the role, then a token each
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens
    assert chunks[-1].usage.prompt_tokens_details is not None
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == (whole.usage.prompt_tokens - 1) // BLOCK * BLOCK


@pytest.mark.parametrize("max_tokens", [1, 15, 16, 17, 50, None])
def test_the_next_turn_finds_the_blocks_of_this_one_and_of_its_answer(
    client: openai.OpenAI, max_tokens: int | None
) -> None:
    asked = messages(f"Tell me of {max_tokens} things, the first of which is water. " * 8)
    first = client.chat.completions.create(model="sim", messages=asked, max_completion_tokens=max_tokens or openai.omit)
    assert first.usage is not None
    asked += [{"role": "assistant", "content": first.choices[0].message.content}, {"role": "user", "content": "And?"}]
    second = client.chat.completions.create(model="sim", messages=asked, max_tokens=1)
    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    held = first.usage.prompt_tokens + first.usage.completion_tokens - 1  # the last token's KV is never computed
    assert second.usage.prompt_tokens_details.cached_tokens == held // BLOCK * BLOCK


def test_an_answer_without_a_limit_ends_of_itself_and_is_the_same_each_time(client: openai.OpenAI) -> None:
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


def test_completions_take_text_and_tokens(client: openai.OpenAI, shared_engine: Engine) -> None:
    text = "A prompt of some words, which is the same in tokens. " * 5
    _, tokenized = shared_engine.ask("/tokenize", {"prompt": text})
    _, back = shared_engine.ask("/detokenize", {"tokens": tokenized["tokens"]})
    assert back["prompt"] == text
    by_text = client.completions.create(model="sim", prompt=text, max_tokens=5)
    by_tokens = client.completions.create(model="sim", prompt=tokenized["tokens"], max_tokens=5)
    assert by_text.choices[0].text == by_tokens.choices[0].text
    assert by_tokens.usage is not None
    assert by_tokens.usage.prompt_tokens_details is not None
    assert by_tokens.usage.prompt_tokens_details.cached_tokens == (tokenized["count"] - 1) // BLOCK * BLOCK
    streamed = client.completions.create(model="sim", prompt=text, max_tokens=5, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == by_text.choices[0].text


def test_a_chat_is_tokenized_as_it_is_prefilled(client: openai.OpenAI, shared_engine: Engine) -> None:
    asked = messages("Count me, with some parts.")
    _, tokenized = shared_engine.ask("/tokenize", {"messages": asked})
    usage = client.chat.completions.create(model="sim", messages=asked, max_tokens=1).usage
    assert usage is not None
    assert usage.prompt_tokens == tokenized["count"]


def test_tools_parts_and_unknown_fields_are_taken(client: openai.OpenAI) -> None:
    tool: Any = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    parts: Any = [{"role": "user", "content": [{"type": "text", "text": "Look: "}, {"type": "text", "text": "this."}]}]
    answer = client.chat.completions.create(
        model="sim", messages=parts, tools=[tool], max_tokens=3, temperature=0.5, extra_body={"top_k": 3, "odd": [1]}
    )
    assert answer.choices[0].message.content


@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
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
def test_errors_are_vllms(shared_engine: Engine, path: str, body: Any, status: int, said: str) -> None:
    got, answer = shared_engine.ask(path, body)
    assert got == status
    assert answer["error"]["code"] == status
    assert said in answer["error"]["message"]
    assert set(answer["error"]) == {"message", "type", "param", "code"}


def test_unknown_paths_and_methods_are_told_as_fastapi_tells_them(shared_engine: Engine) -> None:
    assert shared_engine.ask("/nowhere") == (404, {"detail": "Not Found"})
    assert shared_engine.ask("/v1/completions") == (405, {"detail": "Method Not Allowed"})


def test_what_it_tells_of_itself(shared_engine: Engine) -> None:
    assert shared_engine.ask("/health") == (200, "")
    assert shared_engine.ask("/version") == (200, {"version": "0.32.0"})
    assert shared_engine.ask("/load") == (200, {"server_load": 0})
    assert shared_engine.ask("/reset_prefix_cache", b"", "POST") == (200, {"success": True})


def shape(value: Any) -> Any:
    """A JSON value without its contents: keys in their order, kinds of values, nulls kept."""
    if isinstance(value, dict):
        return [(key, shape(inner)) for key, inner in value.items()]
    if isinstance(value, list):
        return [shape(inner) for inner in value]
    return value if value is None or isinstance(value, bool) else type(value).__name__


@needs_captures
@pytest.mark.parametrize(
    ("capture", "path", "body"),
    [
        ("chat_nonstream.json", "/v1/chat/completions", {"messages": messages("x"), "max_tokens": 8}),
        ("completions.json", "/v1/completions", {"prompt": "x", "max_tokens": 8}),
        ("v1_models.json", "/v1/models", None),
        ("kv_event_sources.json", "/kv_event_sources", None),
    ],
)
def test_answers_have_the_shape_of_recorded_ones(shared_engine: Engine, capture: str, path: str, body: Any) -> None:
    status, answer = shared_engine.ask(path, body)
    assert status == 200
    assert shape(answer) == shape(json.loads((CAPTURES / capture).read_text()))


@needs_captures
@pytest.mark.parametrize(
    ("capture", "tokens", "options"),
    [("chat_stream.sse", 6, {"stream_options": {"include_usage": True}}), ("chat_stream_nousage.sse", 3, {})],
)
def test_streams_have_the_events_of_recorded_ones(
    shared_engine: Engine, capture: str, tokens: int, options: dict[str, Any]
) -> None:
    asked = {"messages": messages("x"), "max_tokens": tokens, "stream": True, **options}
    _, text = shared_engine.ask("/v1/chat/completions", asked)

    def events(stream: str) -> list[Any]:
        parts = stream.strip().split("\n\n")
        assert parts[-1] == "data: [DONE]"
        return [shape(json.loads(part.removeprefix("data: "))) for part in parts[:-1]]

    assert events(text) == events((CAPTURES / capture).read_text())
