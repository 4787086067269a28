"""The first token of a stream is found by its content, in the formats of every API and however the bytes are split."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from reference_first_token import has_first_token
from support.cpu_limit import cpu_limit
from support.engine_scripts import chunk

from warmroute._kernel import FIRST_TOKEN_EMPTY_CHUNKS, FIRST_TOKEN_SEARCH_BYTES, FirstTokenSearch
from warmroute.edge.response import FirstTokenDetector


def sse(*events: dict[str, Any] | str) -> bytes:
    return b"".join(f"data: {each if isinstance(each, str) else json.dumps(each)}\n\n".encode() for each in events)


def named(*events: dict[str, Any]) -> bytes:
    return b"".join(f"event: {each['type']}\ndata: {json.dumps(each)}\n\n".encode() for each in events)


def chat(delta: dict[str, Any], finish: str | None = None, **more: Any) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish, **more}
    return {"id": "x", "object": "chat.completion.chunk", "choices": [choice], "usage": None}


def completion(text: str, finish: str | None = None) -> dict[str, Any]:
    return {"id": "x", "choices": [{"index": 0, "text": text, "finish_reason": finish}]}


ROLE = chat({"role": "assistant", "content": "", "reasoning_content": None, "tool_calls": []})
CALL = {"index": 0, "id": "c", "type": "function", "function": {"name": "f", "arguments": ""}}
RESPONSE = {"id": "r", "output": [], "status": "in_progress", "instructions": 'say "delta": {"content": "x"}'}
CREATED = named(
    {"type": "response.created", "response": RESPONSE},
    {"type": "response.in_progress", "response": RESPONSE},
    {"type": "response.output_item.added", "item": {"type": "message", "content": []}},
    {"type": "response.content_part.added", "part": {"type": "output_text", "text": ""}},
)
MESSAGE_START = named(
    {"type": "message_start", "message": {"role": "assistant", "content": [], "usage": {"input_tokens": 5}}},
    {"type": "ping"},
    {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
)

STREAMS: dict[str, tuple[bytes, bytes]] = {
    # name: what comes before the first token, and the event with the first token
    "text": (sse(ROLE), sse(chat({"content": "Hi"}))),
    "role without content": (sse(chat({"role": "assistant"})), sse(chat({"content": " "}))),
    "role and text": (b"", sse(chat({"role": "assistant", "content": "Hi"}))),
    "a role for each choice": (sse(*[ROLE] * 20), sse(chat({"content": "Hi"}))),
    "comments": (b": ping\n\n" * 50 + b":\r\n\r\n" + sse(ROLE), sse(chat({"content": "Hi"}))),
    "reasoning": (sse(ROLE), sse(chat({"reasoning": "hm"}))),
    "reasoning_content": (sse(ROLE), sse(chat({"reasoning_content": "hm", "content": None}))),
    "tool call": (sse(ROLE), sse(chat({"tool_calls": [CALL]}))),
    "function call": (sse(ROLE), sse(chat({"function_call": {"name": "f"}}))),
    "refusal": (sse(ROLE), sse(chat({"refusal": "no"}))),
    "audio": (sse(ROLE), sse(chat({"audio": {"data": "UklG"}}))),
    "token ids": (sse(ROLE), sse(chat({"content": ""}, token_ids=[5]))),
    "no token": (sse(ROLE), sse(chat({}, "stop"))),
    "only an end": (sse(ROLE), sse("[DONE]")),
    "usage first": (sse({"choices": [], "usage": {"prompt_tokens": 5}}, ROLE), sse(chat({"content": "Hi"}))),
    "some empty chunks": (sse(ROLE, chat({"content": ""}), chat({})), sse(chat({"content": "Hi"}))),
    "error": (sse(ROLE), sse({"error": {"message": "out of memory", "code": 500}})),
    "error event": (b"event: error\n", b'data: {"error": "x"}\n'),
    "completion": (sse(completion("")), sse(completion("Hi"))),
    "completion without tokens": (sse(completion("")), sse(completion("", "length"))),
    "responses": (CREATED, named({"type": "response.output_text.delta", "delta": "Hi"})),
    "responses, reasoning": (CREATED, named({"type": "response.reasoning_text.delta", "delta": "hm"})),
    "responses, call": (CREATED, named({"type": "response.function_call_arguments.delta", "delta": "{"})),
    "responses, empty delta": (
        CREATED + named({"type": "response.output_text.delta", "delta": ""}),
        named({"type": "response.output_text.delta", "delta": "Hi"}),
    ),
    "responses, failed": (CREATED, named({"type": "response.failed", "response": RESPONSE})),
    "responses, incomplete": (CREATED, named({"type": "response.incomplete", "response": RESPONSE})),
    "messages": (MESSAGE_START, named({"type": "content_block_delta", "delta": {"type": "text_delta", "text": "Hi"}})),
    "messages, thinking": (
        MESSAGE_START,
        named({"type": "content_block_delta", "delta": {"type": "thinking_delta", "thinking": "hm"}}),
    ),
    "messages, call": (
        MESSAGE_START + named({"type": "content_block_delta", "delta": {"type": "input", "partial_json": ""}}),
        named({"type": "content_block_delta", "delta": {"type": "input_json_delta", "partial_json": "{"}}),
    ),
    "messages, no token": (MESSAGE_START, named({"type": "message_delta", "delta": {"stop_reason": "end_turn"}})),
    "messages, error": (MESSAGE_START, named({"type": "error", "error": {"type": "overloaded_error"}})),
    # what the router does not know counts as a token
    "another API": (b": ping\n\n", named({"type": "transcript.text.delta", "delta": "Hi"})),
    "no type": (b"id: 1\nretry: 5\n\n", sse({"text": "Hi"})),
    "text events": (b"", sse("Hi")),
    "malformed": (sse(ROLE), sse('{"choices": [')),
    "not an event stream": (b"", b"{}\n"),
}  # fmt: skip


@pytest.mark.parametrize("name", list(STREAMS))
def test_the_first_token_is_found_by_its_content(name: str) -> None:
    before, event = STREAMS[name]
    for crlf in (False, True):
        head, token = (part.replace(b"\n", b"\r\n") if crlf else part for part in (before, event))
        search = FirstTokenSearch()
        assert not search.feed(head)
        name_line, _, _ = token.rpartition(b"data:")
        assert not search.feed(name_line), "the name of an event is not its content"
        assert search.feed(token.removeprefix(name_line))
        assert search.feed(b": ping\n\n"), "once found, it stays found"
        assert not has_first_token(head) and has_first_token(head + token)


@pytest.mark.parametrize("name", list(STREAMS))
def test_a_stream_may_be_split_anywhere(name: str) -> None:
    before, event = STREAMS[name]
    stream = before + event
    search = FirstTokenSearch()
    found = [search.feed(stream[at : at + 1]) for at in range(len(stream))]
    assert found.index(True) >= len(before), "found too early"
    for cut in range(1, len(stream)):
        detector = FirstTokenDetector(chunked=True)
        framed = chunk(stream[:cut])
        assert detector.feed(framed[:3]) is False
        assert detector.feed(framed[3:]) == has_first_token(stream[:cut])
        assert detector.feed(chunk(stream[cut:]) + b"0\r\n\r\n")


def test_tokens_without_text_are_tokens() -> None:
    """A stream of special tokens, or of parts of characters: chunks without text come one by one."""
    search = FirstTokenSearch()
    assert not search.feed(sse(ROLE))
    found = [search.feed(sse(chat({"content": ""}))) for _ in range(20)]
    assert found == [False] * (FIRST_TOKEN_EMPTY_CHUNKS - 1) + [True] * (21 - FIRST_TOKEN_EMPTY_CHUNKS)


@pytest.mark.parametrize("filler", [b": ping\n\n", b"data: " + b" " * 10_000, sse(ROLE)])
def test_the_search_is_bounded(filler: bytes) -> None:
    search, sent = FirstTokenSearch(), 0
    while not search.feed(filler):
        sent += len(filler)
        assert sent <= FIRST_TOKEN_SEARCH_BYTES
    assert sent + len(filler) > FIRST_TOKEN_SEARCH_BYTES
    with pytest.raises(TypeError):
        search.feed("text")  # type: ignore[arg-type]


NAMES = st.sampled_from(
    ["choices", "delta", "text", "type", "error", "role", "content", "finish_reason", "token_ids", "x"]
)
TYPES = st.sampled_from(
    [
        "ping",
        "message_start",
        "content_block_delta",
        "response.created",
        "response.a.delta",
        "response.",
        "response.x.added",
    ]
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.sampled_from(["", "a", '"', "\\", "\u00e9\n"]) | TYPES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=4),
    max_leaves=12,
)
CHOICE = st.fixed_dictionaries({}, optional={"delta": VALUES, "text": VALUES, "finish_reason": VALUES})
EVENTS = st.one_of(
    st.dictionaries(NAMES, VALUES, max_size=4),
    st.fixed_dictionaries({"choices": st.lists(CHOICE, max_size=3)}),
    st.fixed_dictionaries({"type": TYPES}, optional={"delta": VALUES}),
)
OTHER_LINES = [b"", b":", b": ping", b"event: x", b"id", b"retry:5", b"data", b"data:", b"data:  ", b"data: 5", b"x"]
LINES = st.one_of(
    EVENTS.map(lambda event: b"data: " + json.dumps(event).encode()),
    EVENTS.map(lambda event: b"data:" + json.dumps(event, ensure_ascii=False, separators=(",", ":")).encode()),
    st.tuples(EVENTS, st.integers(0, 40)).map(lambda pair: b"data: " + json.dumps(pair[0]).encode()[: pair[1]]),
    st.sampled_from(OTHER_LINES),
)


@given(st.lists(st.tuples(LINES, st.sampled_from([b"\n", b"\r\n", b"\r"])), max_size=12), st.integers(1, 50))
def test_the_kernel_finds_what_the_reference_finds(lines: list[tuple[bytes, bytes]], step: int) -> None:
    stream = b"".join(line + end for line, end in lines)
    search = FirstTokenSearch()
    for at in range(0, len(stream), step):
        assert search.feed(stream[at : at + step]) == has_first_token(stream[: at + step])


@pytest.mark.parametrize("line", [b"\r", b"\n", b"\r\n", b":a\r", b": a\r\r\n"])
def test_many_short_lines_take_time_that_grows_with_their_number(line: bytes) -> None:
    with cpu_limit(2.0):
        for _ in range(40):
            assert not FirstTokenSearch().feed(line * (FIRST_TOKEN_SEARCH_BYTES // len(line)))
