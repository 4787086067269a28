"""What a prompt says of itself: how much of it is sure, and what else the request asks for."""

from __future__ import annotations

import json
from typing import Any

import pytest
from asks import TOOL, assistant, system, text, user
from hypothesis import given
from hypothesis import strategies as st

from warmroute.prompt.chat_setting import EngineOptions
from warmroute.prompt.reading import PromptTokenizer
from warmroute.prompt.tokenizer import unpacked

CHAT, COMPLETIONS = b"/v1/chat/completions", b"/v1/completions"
PATHS = [CHAT, COMPLETIONS, b"/v1/responses", b"/v1/messages", b"/v1/embeddings", b"/v1/models"]
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


def read(reader: PromptTokenizer, path: bytes = CHAT, **body: Any) -> Any:
    return reader.read(path, json.dumps(body).encode())


@pytest.fixture(scope="module")
def reader(fresh_reader):
    return fresh_reader("thinking")


def test_what_a_request_asks_for_beside_its_prompt(reader):
    prompt = read(
        reader,
        model="a-lora",
        messages=[user("hi")],
        stream=True,
        max_tokens=5,
        max_completion_tokens=7,
        priority=-3,
        cache_salt="salt",
    )
    assert (prompt.model, prompt.stream, prompt.max_output_tokens) == ("a-lora", True, 7)
    assert (prompt.priority, prompt.cache_salt, prompt.prompts) == (-3, "salt", 1)
    assert read(reader, COMPLETIONS, prompt="x").max_output_tokens == 16
    assert read(reader, b"/v1/responses", input="x", max_output_tokens=9).max_output_tokens == 9
    nonsense = read(reader, model=5, messages=[user("hi")], stream="yes", max_tokens="many", priority=None)
    assert (nonsense.model, nonsense.stream, nonsense.max_output_tokens, nonsense.priority) == ("", False, None, 0)


def test_the_first_prompt_of_several_is_read(reader):
    one, many = read(reader, COMPLETIONS, prompt="one"), read(reader, COMPLETIONS, prompt=["one", "two", "three"])
    assert many.tokens == one.tokens and many.prompts == 3
    ids = read(reader, COMPLETIONS, prompt=[[7, 8, 9], [1]])
    assert ids.token_ids == [7, 8, 9] and ids.prompts == 2 and ids.sure_tokens == 3
    assert read(reader, b"/v1/embeddings", input=["one", "two"]).tokens == one.tokens


def test_special_tokens_are_added_to_texts_and_not_to_chats(reader):
    bos = unpacked(reader.tokenizer.before)
    assert len(bos) == 1
    assert read(reader, COMPLETIONS, prompt="hi").token_ids[:1] == bos
    assert read(reader, COMPLETIONS, prompt="hi", add_special_tokens=False).token_ids[:1] != bos
    assert read(reader, messages=[user("hi")]).token_ids[:1] != bos
    assert read(reader, messages=[user("hi")], add_special_tokens=True).token_ids[:1] == bos


@pytest.mark.parametrize(
    "more",
    [
        {"chat_template": "{{ messages }}"},
        {"chat_template_kwargs": {"chat_template": "x"}},
        {"chat_template_kwargs": {"tokenize": True}},
        {"kv_transfer_params": {"prompt_token_ids": [1, 2]}},
        {"truncate_prompt_tokens": 3},
        {"truncate_prompt_tokens": -1},
        {"add_generation_prompt": True, "continue_final_message": True},
        {"tools": "all of them"},
        {"add_special_tokens": "perhaps"},
    ],
)
def test_what_the_engine_may_do_otherwise_is_not_sure(reader, more):
    prompt = read(reader, messages=[user("hello"), assistant("well")], **more)
    assert prompt.sure_tokens == 0 and prompt.doubt
    assert "hello" not in prompt.doubt


def test_cutting_that_cuts_nothing_is_sure(reader, fresh_reader):
    prompt = read(reader, messages=[user("hello")], truncate_prompt_tokens=1000)
    assert prompt.sure_tokens == prompt.token_count > 0
    known = fresh_reader("thinking", engine=EngineOptions(max_model_len=4096))
    assert read(known, messages=[user("hello")], truncate_prompt_tokens=-1).sure_tokens > 0
    assert read(known, messages=[user("hello " * 5000)], truncate_prompt_tokens=-1).sure_tokens == 0


def test_the_requests_own_template_counts_where_the_engine_trusts_it(fresh_reader):
    trusting = fresh_reader("thinking", engine=EngineOptions(trust_request_chat_template=True))
    prompt = read(trusting, messages=[user("hello")], chat_template="{{ messages[0].content }}!")
    assert prompt.tokens == read(trusting, COMPLETIONS, prompt="hello!", add_special_tokens=False).tokens


def test_options_of_the_engine_change_the_prompt(fresh_reader):
    usual = read(fresh_reader("thinking"), messages=[user("hi")], tools=[TOOL], tool_choice="none")
    without = fresh_reader("thinking", engine=EngineOptions(exclude_tools_when_tool_choice_none=True))
    assert read(without, messages=[user("hi")], tools=[TOOL], tool_choice="none").token_count < usual.token_count
    quiet = fresh_reader("thinking", engine=EngineOptions(default_chat_template_kwargs={"enable_thinking": False}))
    explicit = read(fresh_reader("thinking"), messages=[user("hi")], chat_template_kwargs={"enable_thinking": False})
    assert read(quiet, messages=[user("hi")]).tokens == explicit.tokens


@pytest.mark.parametrize("name", ["thinking", "parts"])
def test_pictures_end_what_is_sure_and_are_told_by_their_content(name, fresh_reader):
    reader = fresh_reader(name)
    before = [system("s"), user("first question"), assistant("answer")]
    question = user([*text("look at this"), PICTURE, *text("what is it?")])
    prompt = read(reader, messages=[*before, question])
    plain = read(reader, messages=[*before, user("something else")])
    assert prompt.exact and prompt.doubt
    assert 0 < prompt.sure_tokens < prompt.token_count
    assert prompt.token_ids[: prompt.sure_tokens] == plain.token_ids[: prompt.sure_tokens]
    ((at, key),) = prompt.media
    assert prompt.sure_tokens <= at < prompt.token_count and len(key) == 33
    other = {**PICTURE, "image_url": {"url": "data:image/png;base64,BBBB"}}
    assert read(reader, messages=[*before, user([*text("look at this"), other])]).media[0][1] != key
    two = read(reader, messages=[*before, question, assistant("a cat"), user([other, *text("and this?")])])
    assert two.media[0] == (at, key) and two.media[1][0] > at and len(two.media) == 2


def test_a_template_that_says_something_else_where_there_are_pictures_is_sure_of_nothing_else(small_tokenizer):
    seen = "{% set ns = namespace(seen=false) %}{% for m in messages %}{% for part in m.content %}"
    seen += "{% if part.type == 'image' %}{% set ns.seen = true %}{% endif %}{% endfor %}{% endfor %}"
    rest = "<|start|>system\n{{ 'with pictures' if ns.seen else 'without' }}<|end|>"
    rest += "{% for m in messages %}<|start|>{% for part in m.content %}{{ part.text }}{% endfor %}<|end|>{% endfor %}"
    reader = PromptTokenizer(small_tokenizer("parts"), EngineOptions(chat_template=seen + rest))
    assert read(reader, messages=[user("x")]).sure_tokens > 10
    prompt = read(reader, messages=[user("one"), assistant("two"), user([PICTURE])])
    assert prompt.sure_tokens == 1  # <|start|>


def test_without_a_tokenizer_the_text_stands_in():
    reader = PromptTokenizer(None)
    short = read(reader, model="m", messages=[user("hello " * 50)])
    longer = read(reader, model="m", messages=[user("hello " * 50), assistant("yes"), user("no")])
    assert not short.exact and short.sure_tokens == 0 and short.doubt == "the tokenizer is not known"
    assert short.token_count > 50
    assert longer.tokens.startswith(short.tokens[:-8])
    assert read(reader, COMPLETIONS, prompt="hello").token_count > 0
    assert reader.begin(CHAT, b'{"messages": []}').cost_ms < 1


def test_a_reading_knows_what_it_will_cost(reader):
    body: dict[str, Any] = {"messages": [user("a question of some length " * 500)]}
    cold = reader.begin(CHAT, json.dumps(body).encode())
    assert not cold.is_warm and cold.cost_ms > 0.5
    cold.prompt()
    body["messages"] += [assistant("short"), user("short")]
    warm = reader.begin(CHAT, json.dumps(body).encode())
    assert warm.is_warm and warm.cost_ms < 0.3


def test_a_path_without_a_prompt_has_none(reader):
    assert reader.read(b"/v1/models", b"{}") is None
    assert reader.read(CHAT, b"not json") is None
    assert reader.read(CHAT, b'{"messages": [}') is None
    assert reader.read(CHAT, b"[]") is None


values = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(), st.text(max_size=8), st.just("\ud800")
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from(["role", "content", "type", "text", "tool_calls", "function", "x"]), inner, max_size=4
        ),
    ),
    max_leaves=8,
)
FIELDS = [
    "messages",
    "prompt",
    "input",
    "instructions",
    "system",
    "tools",
    "tool_choice",
    "documents",
    "chat_template",
    "chat_template_kwargs",
    "reasoning_effort",
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
    "thinking",
    "output_config",
    "model",
    "stream",
    "max_tokens",
    "priority",
    "cache_salt",
    "truncate_prompt_tokens",
    "truncation",
    "padding",
    "kv_transfer_params",
    "suffix",
    "prompt_embeds",
]
messages = st.lists(
    st.one_of(
        values,
        st.fixed_dictionaries(
            {"role": st.sampled_from(["user", "assistant", "tool", "system", "developer", "x"])},
            optional={"content": values, "tool_calls": values, "reasoning": values, "name": values, "tools": values},
        ),
    ),
    max_size=4,
)


@given(st.sampled_from(PATHS), st.dictionaries(st.sampled_from(FIELDS), values, max_size=4), messages)
def test_no_body_breaks_it(reader, path, fields, spoken):
    for name in ("messages", "input"):
        body = json.dumps({name: spoken, **fields}).encode()
        prompt = reader.read(path, body)
        if prompt is not None:
            assert prompt.sure_tokens <= prompt.token_count
            assert len(prompt.tokens) % 4 == 0
            assert prompt.exact or prompt.doubt


@given(st.sampled_from(PATHS), st.binary(max_size=60))
def test_no_bytes_break_it(reader, path, body):
    reader.read(path, body)
    reader.read(path, b'{"messages":[{"role":"user","content":"' + body + b'"}]}')
