"""Chats of plain messages, put together from the tokens of their messages, get the tokens of the rendered template."""

from __future__ import annotations

import json
from datetime import datetime
from itertools import chain
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from json_bodies import as_escapes, as_raw
from prompt_data import MakePromptTokenizer, public_chats, template_text
from sample_requests import BARE_TOOL, TOOL, assistant, system, tool, user

from warmroute._kernel import MessageTokens, outline_body
from warmroute.prompt.chat_template import ChatTemplate
from warmroute.prompt.plain_chats import LayoutCheck
from warmroute.prompt.prompt import Prompt
from warmroute.prompt.prompt_tokenizer import PromptTokenizer
from warmroute.prompt.template_messages import RenderContext, UnsupportedRequest, template_message

CHAT = b"/v1/chat/completions"
PLAIN = ["thinking", "parts", "dated", "far_switch", "far_tools", "deepseek"]
NOT_PLAIN = ["far_counts", "far_first_question", "far_system_last", "far_shortens"]
SPECIAL_TEXTS = [
    "<|end|>", "<|start|>user\n", "a<|end", "|>b", "</think>", "<think>\nhm\n</think>\n\nyes", "/no_think", "  two  ",
    "<tool_response>x</tool_response>", "\n\n", "e\u0301", "", " ", "\u00a0x", "\ud800",
    "x-anthropic-billing-header: 1\nx",
    "\ue0f0warmroute-media:i" + 32 * "0", "<｜end▁of▁sentence｜>", "<|im_start|>", "</s>",
]  # fmt: skip
TEXTS = st.one_of(
    st.text(max_size=30), st.sampled_from(SPECIAL_TEXTS), st.lists(st.sampled_from(SPECIAL_TEXTS)).map("".join)
)


def plain_tokens(tokenizer: PromptTokenizer, body: bytes) -> Prompt | None:
    """Tokenize from messages, twice: first new ones, then all from the cache. Compare with the rendered template."""
    first, again = (tokenizer.tokenize_plain(CHAT, body, outline_body(body)) for _time in range(2))
    assert (first is None) == (again is None)
    if first is not None and again is not None:
        assert first.tokens == again.tokens and again.warm_tokens == again.token_count == again.exact_tokens
        job = tokenizer.begin(CHAT, body)
        assert job is not None and job.plan is not None and tokenizer.chats is not None
        assert first.tokens == tokenizer.chats.tokenize_without_cache(job.plan)
        assert first.exact and not first.inexact_reason
    return first


# ---- Tokens ----

SAFE = st.text("abc <|>end\n\u00e9", min_size=3, max_size=40).map(lambda text: text + "x")
SAFE = st.one_of(SAFE, SAFE, SAFE, SAFE, SAFE, TEXTS)
MESSAGES = st.lists(st.one_of(TEXTS.map(user), TEXTS.map(assistant), TEXTS.map(system)), min_size=1, max_size=4)
TURNS = st.lists(st.tuples(SAFE.map(user), SAFE.map(assistant)), max_size=4).map(lambda turns: [*chain(*turns)])
CHATS = st.one_of(
    MESSAGES,
    st.builds(
        lambda first, turns, last: [*first, *turns, last],
        st.lists(SAFE.map(system), max_size=1),
        TURNS,
        SAFE.map(user),
    ),
)
OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "tools": st.sampled_from([None, [TOOL], [TOOL, BARE_TOOL]]),
        "chat_template_kwargs": st.sampled_from([None, {"enable_thinking": False}, {"enable_thinking": True}]),
        "add_generation_prompt": st.booleans(),
        "add_special_tokens": st.booleans(),
    },
)


@pytest.mark.parametrize("name", PLAIN + NOT_PLAIN + ["alternating", "llama"])
def test_any_chat_gets_the_tokens_of_the_rendered_template(
    name: str, new_prompt_tokenizer: MakePromptTokenizer
) -> None:
    tokenizer = new_prompt_tokenizer(name)
    plain = 0

    @settings(max_examples=150)
    @given(CHATS, OPTIONS)
    def compare(chat: list[dict[str, Any]], options: dict[str, Any]) -> None:
        nonlocal plain
        body = json.dumps({"model": "m", "messages": chat, **options}).encode()
        tokenizer.tokenize(CHAT, body)  # prepares the context
        plain += plain_tokens(tokenizer, body) is not None

    compare()
    assert plain > 10 if name in PLAIN else plain == 0 if name in NOT_PLAIN else True, plain


@pytest.mark.data
@pytest.mark.parametrize("name", ["qwen3", "tinyllama"])
def test_public_chats_get_the_tokens_of_the_rendered_template(
    name: str, new_prompt_tokenizer: MakePromptTokenizer, data_dir: Any
) -> None:
    tokenizer, plain, chats = new_prompt_tokenizer(name), 0, list(public_chats(data_dir))[::7]
    for body in chats:
        for end in range(1, len(body["messages"]) + 1):
            if body["messages"][end - 1]["role"] == "user":
                data = json.dumps({**body, "messages": body["messages"][:end]}).encode()
                tokenizer.tokenize(CHAT, data)
                plain += plain_tokens(tokenizer, data) is not None
    assert plain > len(chats)


@pytest.mark.data
@pytest.mark.parametrize("name", ["qwen3", "tinyllama"])
def test_any_chat_gets_the_tokens_of_a_public_template(name: str, new_prompt_tokenizer: MakePromptTokenizer) -> None:
    test_any_chat_gets_the_tokens_of_the_rendered_template(name, new_prompt_tokenizer)


def test_a_known_message_is_not_tokenized_again_wherever_it_stands(
    new_prompt_tokenizer: MakePromptTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = new_prompt_tokenizer("thinking")
    assert tokenizer.tokenizer is not None
    encoded: list[str] = []
    original = tokenizer.tokenizer.encode

    def encode(text: str) -> bytes:
        encoded.append(text)
        return original(text)

    monkeypatch.setattr(tokenizer.tokenizer, "encode", encode)

    def send(*messages: dict[str, Any]) -> None:
        body = json.dumps({"model": "m", "messages": messages}).encode()
        assert tokenizer.tokenize_plain(CHAT, body, outline_body(body)) is not None

    long = "a long text that many conversations contain"
    send(system("one"), user(long), assistant("yes"), user("first"))
    assert any(long in text for text in encoded)
    encoded.clear()
    send(system("two"), user(long), assistant("yes"), user("second"))
    assert len(encoded) == 2 and "two" in encoded[0] and "second" in encoded[1]
    encoded.clear()
    send(system("two"), user(long), assistant("yes"), user("second"), assistant("yes"), user("third"))
    assert len(encoded) == 1 and "third" in encoded[0]


@pytest.mark.parametrize("more", [{"truncate_prompt_tokens": 5}, {"kv_transfer_params": {}}, {"chat_template": "x"}])
def test_a_field_that_changes_tokens_keeps_a_chat_from_being_put_together(
    more: dict[str, Any], new_prompt_tokenizer: MakePromptTokenizer
) -> None:
    tokenizer = new_prompt_tokenizer("thinking")
    body = json.dumps({"messages": [user("hello")], **more}).encode()
    tokenizer.tokenize(CHAT, body)
    assert tokenizer.tokenize_plain(CHAT, body, outline_body(body)) is None


def test_a_long_new_text_is_left_to_a_thread(new_prompt_tokenizer: MakePromptTokenizer) -> None:
    tokenizer = new_prompt_tokenizer("thinking")
    body = json.dumps({"messages": [user("word " * 1000)]}).encode()
    assert tokenizer.tokenize_plain(CHAT, body, outline_body(body), 1e-4) is None
    assert tokenizer.tokenize_plain(CHAT, body, outline_body(body), 1e4) is not None
    assert tokenizer.tokenize_plain(CHAT, body, outline_body(body), 1e-4) is not None  # it is known now


def test_the_first_tool_call_does_not_render_the_messages_before_it(new_prompt_tokenizer: MakePromptTokenizer) -> None:
    tokenizer = new_prompt_tokenizer("thinking")
    call = {"id": "c", "type": "function", "function": {"name": "run", "arguments": "{}"}}
    messages = [system("be brief"), user("one"), assistant("two"), user("three")]
    tokenizer.tokenize(CHAT, json.dumps({"messages": messages}).encode())
    data = json.dumps({"messages": [*messages, assistant("", tool_calls=[call]), tool("result")]}).encode()
    job = tokenizer.begin(CHAT, data)
    assert job is not None and job.plan is not None and tokenizer.chats is not None
    assert job.plan.prefix is not None and len(job.plan.tail) == 2
    assert job.run().tokens == tokenizer.chats.tokenize_without_cache(job.plan)


def test_a_new_day_gets_a_new_date(new_prompt_tokenizer: MakePromptTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = new_prompt_tokenizer("dated")
    body = json.dumps({"messages": [user("hello")]}).encode()
    today = tokenizer.tokenize(CHAT, body)
    template = tokenizer._templates.choose(None, has_tools=False)
    monkeypatch.setattr(template, "_now", lambda: datetime(2031, 2, 3))
    assert tokenizer.tokenize_plain(CHAT, body, outline_body(body)) is None  # the context has to be prepared again
    assert today is not None and template.time_key() == "03 Feb 2031"
    tokenizer.tokenize(CHAT, body)
    assert tokenizer.chats is not None
    context = tokenizer.chats.cached_context(outline_body(body).chat_context())
    assert context is not None and context.plain_layout is not None
    assert context.plain_layout.layout.time_key == "03 Feb 2031"


# ---- Which messages are plain ----

VALUES = st.one_of(st.none(), TEXTS, st.just([]), st.just([{"type": "text", "text": "x"}]), st.integers(), st.just({}))
PARTS = st.one_of(
    st.fixed_dictionaries({"type": st.just("text"), "text": TEXTS}),
    st.fixed_dictionaries({"text": TEXTS, "type": st.sampled_from(["text", "refusal", "input_text"])}),
    st.just({"type": "image_url", "image_url": {"url": "x"}}),
    TEXTS,
)
CONTENTS = st.one_of(TEXTS, TEXTS, st.lists(PARTS, max_size=2), st.none())
NAMES = [
    "name", "task", "tools", "reasoning", "tool_calls", "tool_call_id", "reasoning_content", "refusal", "audio",
    "annotations",
]  # fmt: skip
MEMBERS = st.lists(
    st.one_of(
        st.tuples(st.just("role"), st.sampled_from(["user", "assistant", "system", "developer", "tool", "users"])),
        st.tuples(st.just("role"), st.just("user")),
        st.tuples(st.just("content"), CONTENTS),
        st.tuples(st.just("content"), CONTENTS),
        st.tuples(st.sampled_from(NAMES), VALUES),
    ),
    min_size=1,
    max_size=4,
)
ENCODERS = st.sampled_from([json.dumps, as_raw, as_escapes])


@settings(max_examples=600)
@given(MEMBERS, st.lists(ENCODERS, min_size=8, max_size=8), st.sampled_from(["", " ", "\n "]))
def test_a_plain_message_is_its_role_and_text_and_nothing_else(
    members: list[tuple[str, Any]], encoders: list[Any], space: str
) -> None:
    def encode(value: Any) -> str:
        return encoders[-1](value) if isinstance(value, str) else json.dumps(value)

    pairs = [
        f"{encoder(name)}{space}:{encode(value)}" for (name, value), encoder in zip(members, encoders, strict=False)
    ]
    message = "{" + f"{space},{space}".join(pairs) + "}"
    message = message.encode("utf-8", "backslashreplace").decode()  # surrogates as escapes
    outline = outline_body(f'{{"messages":[{message}]}}'.encode())
    role, text = outline.plain_roles[0], outline.plain_text(0)
    if not role:
        assert text is None
    elif text:  # an empty text is not tokenized by itself
        item = json.loads(message)
        for format in ("string", "openai"):
            expected: Any = text if format == "string" else [{"type": "text", "text": text}]
            try:
                converted = template_message(item, format)
            except UnsupportedRequest:
                raise AssertionError(message) from None
            if not text.startswith("x-anthropic-billing-header"):
                assert converted == {"role": ["system", "user", "assistant"][role - 1], "content": expected}, message


def test_ordinary_messages_are_plain() -> None:
    messages = [
        {"role": "system", "content": "s"},
        {"content": [{"type": "text", "text": "a \u00e9\n"}], "role": "user"},
        {"role": "assistant", "content": "a", "refusal": None, "tool_calls": None, "annotations": [], "audio": None},
        {"role": "user", "content": 'q"', "name": None, "tool_calls": []},
    ]
    outline = outline_body(json.dumps({"messages": messages}).encode())
    assert outline.plain_roles == bytes([1, 2, 3, 2]) and outline.message_count == 4
    assert [outline.plain_text(i) for i in range(4)] == ["s", "a \u00e9\n", "a", 'q"']
    with pytest.raises(IndexError):
        outline.plain_text(4)


# ---- Templates ----

TOKENS = {"bos_token": "<|bos|>", "eos_token": "<|end|>"}
MESSAGE = "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>{% endfor %}"
PROMPT = "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"


def check(source: str) -> LayoutCheck:
    return LayoutCheck(ChatTemplate(source, TOKENS))


@pytest.mark.parametrize("name", ["thinking", "parts", "dated", "alternating", "llama", "far_switch", "far_tools"])
def test_a_template_that_prints_fixed_texts_around_messages_has_a_layout(name: str) -> None:
    assert check(template_text(name)).enabled


@pytest.mark.parametrize("name", NOT_PLAIN)
def test_a_template_that_looks_at_other_messages_has_no_layout(name: str) -> None:
    assert not check(template_text(name)).enabled


@pytest.mark.parametrize(
    "odd",
    [
        "{{ messages | length }}",
        "{% for m in messages if m.role == 'user' %}{{ m.content[:1] }}{% endfor %}",
        "{% if messages | length > 12 %}it was long{% endif %}",
        "{% for m in messages %}{{ m.content | upper }}{% endfor %}",
        "{% for m in messages %}{{ m.content | replace(' ', '_') }}{% endfor %}",
        "{% for m in messages %}{{ m.content[:1000] }}{% endfor %}",
        "{% for m in messages %}{{ m.content | e }}{% endfor %}",
        "{% for m in messages %}{{ loop.index }}{{ m.content }}{% endfor %}",
        "{% for m in messages | reverse %}{{ m.content }}{% endfor %}",
        "{% if messages | selectattr('role', 'eq', 'assistant') | list | length > 1 %}long{% endif %}",
        "{{ messages[0].content }}{{ messages[-1].content }}",
    ],
)
@pytest.mark.parametrize("at_the_start", [True, False])
def test_an_odd_template_has_no_layout(odd: str, at_the_start: bool) -> None:
    assert check(MESSAGE + PROMPT).enabled
    assert not check(odd + MESSAGE + PROMPT if at_the_start else MESSAGE + odd + PROMPT).enabled


def test_strings_that_change_how_a_message_is_printed_are_unsafe() -> None:
    quiet = check(
        MESSAGE + "{% for m in messages %}{% if '/quiet' in m.content %}quiet{% endif %}{% endfor %}" + PROMPT
    )
    assert quiet.enabled and not quiet.is_safe("please /quiet now") and quiet.is_safe("please be quiet")
    thinking = check(template_text("thinking"))
    assert not thinking.is_safe("<think>a</think>b") and thinking.is_safe("<think>")


def test_a_layout_of_a_request_is_checked_with_its_own_tools() -> None:
    twice = "{% if tools %}{% for m in messages %}{{ m.content }}{% endfor %}{% endif %}"
    template = ChatTemplate(MESSAGE + twice + PROMPT, TOKENS)
    found = LayoutCheck(template)
    assert found.layout(RenderContext(template)) is not None
    assert found.layout(RenderContext(template, tools=[TOOL])) is None


# ---- Memory ----


def test_message_tokens_stay_within_their_budget(new_prompt_tokenizer: MakePromptTokenizer) -> None:
    tokenizer = new_prompt_tokenizer("thinking", cache_bytes=1 << 18)
    assert tokenizer.chats is not None
    messages, budget = tokenizer.chats.plain_chats.messages, (1 << 18) * 7 // 16
    for number in range(600):
        text = f"{number} " + "word " * (number % 300)
        body = json.dumps({"messages": [system("always"), user(text)]}).encode()
        assert tokenizer.tokenize_plain(CHAT, body, outline_body(body)) is not None
        assert messages.bytes <= budget
    assert 10 < len(messages) < 600
    # what every chat has is never evicted
    body = json.dumps({"messages": [system("always"), user("new")]}).encode()
    prompt = tokenizer.tokenize_plain(CHAT, body, outline_body(body))
    assert prompt is not None and prompt.warm_tokens > 0
    body = json.dumps({"messages": [user("word " * 60000)]}).encode()
    assert tokenizer.tokenize_plain(CHAT, body, outline_body(body)) is None  # larger than the whole cache
    assert messages.bytes <= budget
    messages.clear()
    assert len(messages) == 0


def test_a_cache_without_room_keeps_nothing() -> None:
    messages = MessageTokens(0)
    assert len(messages) == 0
    with pytest.raises(ValueError, match="negative"):
        MessageTokens(-1)
