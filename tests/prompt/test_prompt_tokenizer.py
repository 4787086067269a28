"""How many tokens of a prompt are exact, and why not all of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prompt_data import MakePromptTokenizer, token_ids
from sample_requests import TOOL, assistant, system, text, user

from warmroute.prompt.prompt_tokenizer import PromptTokenizer
from warmroute.prompt.template_messages import EngineOptions
from warmroute.prompt.tokenizer import Tokenizer

CHAT, COMPLETIONS = b"/v1/chat/completions", b"/v1/completions"
PATHS = [CHAT, COMPLETIONS, b"/v1/responses", b"/v1/messages", b"/v1/embeddings", b"/v1/models"]
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


def tokenize(tokenizer: PromptTokenizer, path: bytes = CHAT, **body: Any) -> Any:
    return tokenizer.tokenize(path, json.dumps(body).encode())


@pytest.fixture(scope="module")
def tokenizer(new_prompt_tokenizer: MakePromptTokenizer) -> PromptTokenizer:
    return new_prompt_tokenizer("thinking")


def test_of_several_prompts_the_first_is_tokenized(tokenizer: PromptTokenizer) -> None:
    one = tokenize(tokenizer, COMPLETIONS, prompt="one")
    many = tokenize(tokenizer, COMPLETIONS, prompt=["one", "two", "three"])
    assert many.tokens == one.tokens
    ids = tokenize(tokenizer, COMPLETIONS, prompt=[[7, 8, 9], [1]])
    assert token_ids(ids.tokens) == [7, 8, 9] and ids.exact_tokens == 3
    assert tokenize(tokenizer, b"/v1/embeddings", input=["one", "two"]).tokens == one.tokens


def test_special_tokens_are_added_to_texts_and_not_to_chats(tokenizer: PromptTokenizer) -> None:
    assert tokenizer.tokenizer is not None
    bos = tokenizer.tokenizer.special_prefix
    assert len(bos) == 4
    assert tokenize(tokenizer, COMPLETIONS, prompt="hi").tokens[:4] == bos
    assert tokenize(tokenizer, COMPLETIONS, prompt="hi", add_special_tokens=False).tokens[:4] != bos
    assert tokenize(tokenizer, messages=[user("hi")]).tokens[:4] != bos
    assert tokenize(tokenizer, messages=[user("hi")], add_special_tokens=True).tokens[:4] == bos


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
def test_a_prompt_that_the_engine_may_change_has_no_exact_tokens(
    tokenizer: PromptTokenizer, more: dict[str, Any]
) -> None:
    prompt = tokenize(tokenizer, messages=[user("hello"), assistant("well")], **more)
    assert prompt.exact_tokens == 0 and prompt.inexact_reason
    assert "hello" not in prompt.inexact_reason


def test_a_prompt_below_the_truncation_limit_is_exact(
    tokenizer: PromptTokenizer, new_prompt_tokenizer: MakePromptTokenizer
) -> None:
    prompt = tokenize(tokenizer, messages=[user("hello")], truncate_prompt_tokens=1000)
    assert prompt.exact_tokens == prompt.token_count > 0
    known = new_prompt_tokenizer("thinking", engine=EngineOptions(max_model_len=4096))
    assert tokenize(known, messages=[user("hello")], truncate_prompt_tokens=-1).exact_tokens > 0
    assert tokenize(known, messages=[user("hello " * 5000)], truncate_prompt_tokens=-1).exact_tokens == 0


def test_the_requests_own_template_is_used_if_the_engine_trusts_it(new_prompt_tokenizer: MakePromptTokenizer) -> None:
    trusting = new_prompt_tokenizer("thinking", engine=EngineOptions(trust_request_chat_template=True))
    prompt = tokenize(trusting, messages=[user("hello")], chat_template="{{ messages[0].content }}!")
    assert prompt.tokens == tokenize(trusting, COMPLETIONS, prompt="hello!", add_special_tokens=False).tokens


def test_the_engines_options_change_the_prompt(new_prompt_tokenizer: MakePromptTokenizer) -> None:
    usual = tokenize(new_prompt_tokenizer("thinking"), messages=[user("hi")], tools=[TOOL], tool_choice="none")
    without = new_prompt_tokenizer("thinking", engine=EngineOptions(exclude_tools_when_tool_choice_none=True))
    assert tokenize(without, messages=[user("hi")], tools=[TOOL], tool_choice="none").token_count < usual.token_count
    quiet = new_prompt_tokenizer(
        "thinking", engine=EngineOptions(default_chat_template_kwargs={"enable_thinking": False})
    )
    explicit = tokenize(
        new_prompt_tokenizer("thinking"), messages=[user("hi")], chat_template_kwargs={"enable_thinking": False}
    )
    assert tokenize(quiet, messages=[user("hi")]).tokens == explicit.tokens


@pytest.mark.parametrize("name", ["thinking", "parts"])
def test_exact_tokens_end_before_a_picture_which_is_identified_by_its_content(
    name: str, new_prompt_tokenizer: MakePromptTokenizer
) -> None:
    tokenizer = new_prompt_tokenizer(name)
    before = [system("s"), user("first question"), assistant("answer")]
    question = user([*text("look at this"), PICTURE, *text("what is it?")])
    prompt = tokenize(tokenizer, messages=[*before, question])
    plain = tokenize(tokenizer, messages=[*before, user("something else")])
    assert prompt.exact and prompt.inexact_reason
    assert 0 < prompt.exact_tokens < prompt.token_count
    assert prompt.tokens[: 4 * prompt.exact_tokens] == plain.tokens[: 4 * prompt.exact_tokens]
    ((at, key),) = prompt.media
    assert prompt.exact_tokens <= at < prompt.token_count and len(key) == 33
    other = {**PICTURE, "image_url": {"url": "data:image/png;base64,BBBB"}}
    assert tokenize(tokenizer, messages=[*before, user([*text("look at this"), other])]).media[0][1] != key
    two = tokenize(tokenizer, messages=[*before, question, assistant("a cat"), user([other, *text("and this?")])])
    assert two.media[0] == (at, key) and two.media[1][0] > at and len(two.media) == 2


def test_a_template_that_prints_another_text_for_pictures_has_no_exact_tokens_after_it(
    model_tokenizer: Callable[..., Tokenizer],
) -> None:
    seen = "{% set ns = namespace(seen=false) %}{% for m in messages %}{% for part in m.content %}"
    seen += "{% if part.type == 'image' %}{% set ns.seen = true %}{% endif %}{% endfor %}{% endfor %}"
    rest = "<|start|>system\n{{ 'with pictures' if ns.seen else 'without' }}<|end|>"
    rest += "{% for m in messages %}<|start|>{% for part in m.content %}{{ part.text }}{% endfor %}<|end|>{% endfor %}"
    tokenizer = PromptTokenizer(model_tokenizer("parts"), EngineOptions(chat_template=seen + rest))
    assert tokenize(tokenizer, messages=[user("x")]).exact_tokens > 10
    prompt = tokenize(tokenizer, messages=[user("one"), assistant("two"), user([PICTURE])])
    assert prompt.exact_tokens == 1  # <|start|>


def test_without_a_tokenizer_the_text_is_used_as_tokens() -> None:
    tokenizer = PromptTokenizer(None)
    short = tokenize(tokenizer, model="m", messages=[user("hello " * 50)])
    longer = tokenize(tokenizer, model="m", messages=[user("hello " * 50), assistant("yes"), user("no")])
    assert not short.exact and short.exact_tokens == 0 and short.inexact_reason == "no tokenizer for this model"
    assert short.token_count > 50
    assert longer.tokens.startswith(short.tokens[:-8])
    assert tokenize(tokenizer, COMPLETIONS, prompt="hello").token_count > 0
    job = tokenizer.begin(CHAT, b'{"messages": []}')
    assert job is not None and job.cost_ms < 1


def test_a_job_estimates_its_duration(tokenizer: PromptTokenizer) -> None:
    body: dict[str, Any] = {"messages": [user("a question of some length " * 500)]}
    cold = tokenizer.begin(CHAT, json.dumps(body).encode())
    assert cold is not None and not cold.is_warm and cold.cost_ms > 0.5
    cold.run()
    body["messages"] += [assistant("short"), user("short")]
    warm = tokenizer.begin(CHAT, json.dumps(body).encode())
    assert warm is not None and warm.is_warm and warm.cost_ms < 0.3


def test_a_path_without_prompts_and_an_invalid_body_have_no_prompt(tokenizer: PromptTokenizer) -> None:
    assert tokenizer.tokenize(b"/v1/models", b"{}") is None
    assert tokenizer.tokenize(CHAT, b"not json") is None
    assert tokenizer.tokenize(CHAT, b'{"messages": [}') is None
    assert tokenizer.tokenize(CHAT, b"[]") is None


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
def test_any_valid_json_is_handled(
    tokenizer: PromptTokenizer, path: bytes, fields: dict[str, Any], conversation: list[Any]
) -> None:
    for name in ("messages", "input"):
        body = json.dumps({name: conversation, **fields}).encode()
        prompt = tokenizer.tokenize(path, body)
        if prompt is not None:
            assert prompt.exact_tokens <= prompt.token_count
            assert len(prompt.tokens) % 4 == 0
            assert prompt.exact or prompt.inexact_reason


@given(st.sampled_from(PATHS), st.binary(max_size=60))
def test_any_bytes_are_handled(tokenizer: PromptTokenizer, path: bytes, body: bytes) -> None:
    tokenizer.tokenize(path, body)
    tokenizer.tokenize(path, b'{"messages":[{"role":"user","content":"' + body + b'"}]}')
