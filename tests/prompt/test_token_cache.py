"""With the token cache, a conversation gets the same tokens as without it."""

from __future__ import annotations

import json
import random
import threading
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prompt_data import MakePromptTokenizer
from sample_requests import BARE_TOOL, TOOL, assistant, system, tool, user

from warmroute.prompt.chat_template import TemplateRejected
from warmroute.prompt.prompt_tokenizer import PromptTokenizer

CHAT, ANTHROPIC = b"/v1/chat/completions", b"/v1/messages"
TAIL_SAFE = ["thinking", "parts", "dated", "alternating", "far_switch"]
LAYOUT_ONLY = ["far_tools"]
"""Its text after the last message is the same for all conversations with the same tools."""
NOT_CACHED = ["far_counts", "far_first_question", "far_system_last", "far_shortens"]

texts = st.one_of(
    st.text(max_size=30),
    st.sampled_from(
        [
            "<|end|>",
            "<|start|>user\n",
            "a<|end",
            "|>b",
            "</think>",
            "<think>\nhm\n</think>\n\nyes",
            "<tool_response>x</tool_response>",
            "/no_think",
            "  two  ",
            "\n\n",
            "e\u0301",
            "",
        ]
    ),
)
calls = st.lists(
    st.builds(
        lambda text: {
            "id": "c",
            "type": "function",
            "function": {"name": "look_up", "arguments": json.dumps({"q": text})},
        },
        texts,
    ),
    max_size=2,
)
assistants = st.builds(
    lambda text, reasoning, calls: assistant(
        text, **({"reasoning_content": reasoning} if reasoning else {}), **({"tool_calls": calls} if calls else {})
    ),
    texts,
    st.one_of(st.none(), texts),
    calls,
)
messages = st.one_of(texts.map(user), assistants, texts.map(tool), texts.map(system))
turns = st.one_of(
    st.tuples(assistants, texts.map(user)).map(list),
    st.tuples(assistants, texts.map(tool)).map(list),
    st.tuples(assistants, texts.map(tool), texts.map(tool)).map(list),
    st.lists(messages, min_size=1, max_size=2),
)
edits = st.lists(
    st.one_of(
        st.tuples(st.just("append"), turns),
        st.tuples(st.just("append"), turns),
        st.tuples(st.just("edit last"), texts),
        st.tuples(st.just("branch"), st.integers(0, 10)),
        st.tuples(st.just("system"), texts),
        st.tuples(st.just("tools"), st.integers(0, 2)),
        st.tuples(st.just("thinking"), st.sampled_from([None, True, False])),
    ),
    min_size=3,
    max_size=12,
)


def edited(body: dict[str, Any], kind: str, value: Any) -> dict[str, Any]:
    body = {**body, "messages": list(body["messages"])}
    conversation = body["messages"]
    if kind == "append":
        conversation += value
    elif kind == "edit last":
        conversation[-1] = {**conversation[-1], "content": value}
    elif kind == "branch":
        del conversation[max(1, len(conversation) - value) :]
    elif kind == "system":
        body["messages"] = [system(value), *(m for m in conversation if m["role"] != "system")]
    elif kind == "tools":
        body["tools"] = [TOOL, BARE_TOOL][:value] or None
    else:
        body["chat_template_kwargs"] = None if value is None else {"enable_thinking": value}
    return body


def is_warm(tokenizer: PromptTokenizer, path: bytes, body: dict[str, Any]) -> bool:
    """Tokenize, compare with the tokens without the cache, and return whether a prefix was cached."""
    data = json.dumps(body).encode()
    prompt = tokenizer.tokenize(path, data)
    assert prompt is not None and tokenizer.chats is not None
    plan = tokenizer.begin(path, data).plan  # type: ignore[union-attr]
    if prompt.exact and not prompt.media:  # a text can contain the mark that stands for a picture
        assert prompt.tokens == tokenizer.chats.tokenize_without_cache(plan)  # type: ignore[arg-type]
        assert prompt.exact_tokens == prompt.token_count
    return prompt.warm_tokens > 0


@pytest.mark.parametrize("name", TAIL_SAFE + LAYOUT_ONLY + NOT_CACHED)
def test_any_history_of_edits_gives_the_tokens_of_the_whole_conversation(
    name: str, new_prompt_tokenizer: MakePromptTokenizer
) -> None:
    tokenizer = new_prompt_tokenizer(name)
    warm = 0

    @settings(max_examples=60)
    @given(texts, edits)
    def edit(first: str, history: list[tuple[str, Any]]) -> None:
        nonlocal warm
        body: dict[str, Any] = {"model": "m", "messages": [user(first)]}
        is_warm(tokenizer, CHAT, body)
        for kind, value in history:
            body = edited(body, kind, value)
            try:
                warm += is_warm(tokenizer, CHAT, body)
            except TemplateRejected:  # the template forbids this order of messages
                return

    edit()
    assert tokenizer.chats is not None and tokenizer.chats.failed_checks == 0
    assert warm == 0 if name in NOT_CACHED else warm > 20, warm


@pytest.mark.parametrize("name", ["thinking", "parts"])
def test_a_conversation_is_warm_from_its_second_turn(name: str, new_prompt_tokenizer: MakePromptTokenizer) -> None:
    tokenizer = new_prompt_tokenizer(name)
    body: dict[str, Any] = {"model": "m", "messages": [system("s"), user("hello there")], "tools": [TOOL]}
    assert not is_warm(tokenizer, CHAT, body)
    for turn in range(20):
        body["messages"] += [assistant(f"answer {turn}"), user(f"question {turn}")]
        assert is_warm(tokenizer, CHAT, body)


def test_an_agents_tool_calls_are_warm_at_every_step(new_prompt_tokenizer: MakePromptTokenizer) -> None:
    tokenizer = new_prompt_tokenizer("thinking")
    call = {"id": "c", "type": "function", "function": {"name": "run", "arguments": '{"command": "ls"}'}}
    body: dict[str, Any] = {"model": "m", "messages": [system("s"), user("fix it")], "tools": [TOOL]}
    is_warm(tokenizer, CHAT, body)
    for step in range(20):
        body["messages"] += [assistant("", reasoning_content=f"hm {step}", tool_calls=[call]), tool(f"result {step}")]
        assert is_warm(tokenizer, CHAT, body)
    # after a new user message this template drops the reasoning, so the cached prefix ends at the last question
    body["messages"] += [assistant("done"), user("thanks, and now?")]
    assert is_warm(tokenizer, CHAT, body)
    body["messages"] += [assistant("this"), user("fine")]
    assert is_warm(tokenizer, CHAT, body)


def test_a_claude_code_conversation_is_warm_too(new_prompt_tokenizer: MakePromptTokenizer) -> None:
    tokenizer = new_prompt_tokenizer("thinking")
    tools = [{"name": "run", "description": "runs", "input_schema": {"type": "object"}}]
    body: dict[str, Any] = {"model": "m", "max_tokens": 5, "system": "be brief", "tools": tools}
    body["messages"] = [user([{"type": "text", "text": "fix it"}])]
    is_warm(tokenizer, ANTHROPIC, body)
    for step in range(10):
        use = {"type": "tool_use", "id": f"t{step}", "name": "run", "input": {"n": step}}
        result = {"type": "tool_result", "tool_use_id": f"t{step}", "content": f"result {step}"}
        body["messages"] += [assistant([{"type": "thinking", "thinking": "hm"}, use]), user([result])]
        assert is_warm(tokenizer, ANTHROPIC, body)


def test_prefixes_of_a_template_that_prints_the_date_are_valid_for_a_day(
    new_prompt_tokenizer: MakePromptTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = new_prompt_tokenizer("dated")
    call = {"id": "c", "type": "function", "function": {"name": "run", "arguments": "{}"}}
    body: dict[str, Any] = {"model": "m", "messages": [user("hello")]}
    is_warm(tokenizer, CHAT, body)
    body["messages"] += [assistant("", tool_calls=[call]), tool("yes")]
    assert is_warm(tokenizer, CHAT, body)
    template = tokenizer._templates.choose(None, has_tools=False)
    assert template.time_key()
    monkeypatch.setattr(template, "time_key", lambda: "tomorrow")
    assert tokenizer.chats is not None
    tokenizer.chats.plain_chats.messages.clear()
    assert not is_warm(tokenizer, CHAT, body)


@pytest.mark.parametrize("plain", [True, False])
def test_a_template_that_passes_the_check_wrongly_is_found_by_verify_sample(
    plain: bool, new_prompt_tokenizer: MakePromptTokenizer
) -> None:
    """It depends on the number of messages, but only in conversations that are longer than all probes."""
    tokenizer = new_prompt_tokenizer("thinking")
    template = tokenizer._templates.choose(None, has_tools=False)
    original = template.render

    def render(messages: Any, **options: Any) -> str:
        return original(messages, **options) + ("!" if len(messages) > 40 else "")

    template.render = render  # type: ignore[assignment, method-assign]
    try:
        body: dict[str, Any] = {"model": "m", "messages": [user("x")]}
        wrong = 0
        more = {} if plain else {"reasoning": "hm"}
        for turn in range(70):
            body["messages"] += [assistant(f"a{turn}", **more), user(f"q{turn}")]
            data = json.dumps(body).encode()
            tokenizer.tokenize(CHAT, data)
            wrong += tokenizer.verify_sample() is False
        assert wrong == 1
        assert tokenizer.chats is not None
        assert (tokenizer.chats.failed_layouts, tokenizer.chats.failed_checks) == ((1, 0) if plain else (0, 1))
        assert not is_warm(tokenizer, CHAT, body)
    finally:
        del template.render


def test_the_cache_stays_within_its_memory_budget(new_prompt_tokenizer: MakePromptTokenizer) -> None:
    tokenizer = new_prompt_tokenizer("thinking", cache_bytes=400_000)
    rng = random.Random(0)
    for number in range(300):
        body: dict[str, Any] = {"model": "m", "messages": [user(f"{number} " + "word " * rng.randint(1, 400))]}
        if number % 10 == 0:
            body["tools"] = [{**TOOL, "function": {"name": f"f{number}", "description": "d" * 500}}]
        for turn in range(rng.randint(1, 6)):
            tokenizer.tokenize(CHAT, json.dumps(body).encode())
            reasoning = {"reasoning_content": "hm"} if number % 2 else {}  # else the messages are plain
            body["messages"] += [assistant("a " * turn, **reasoning), user("b " * turn)]
            assert tokenizer.chats is not None and tokenizer.chats.used_bytes <= 400_000
    assert tokenizer.chats is not None
    cache = tokenizer.chats.token_cache
    assert 0 < cache.used_bytes == sum(prefix.cost_bytes() for prefix in cache._prefixes.values())
    for prefix in cache._prefixes.values():
        assert prefix.parent is None or cache.get(prefix.parent.key) is not None


def test_several_threads_tokenize_at_the_same_time(new_prompt_tokenizer: MakePromptTokenizer) -> None:
    tokenizer = new_prompt_tokenizer("thinking", cache_bytes=600_000)
    wrong: list[str] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        try:
            for _round in range(15):
                body: dict[str, Any] = {"model": "m", "messages": [user(f"q{rng.randint(0, 5)} " + "w " * 200)]}
                for turn in range(8):
                    is_warm(tokenizer, CHAT, body)
                    body["messages"] += [assistant(f"a{turn % 3}"), user(f"b{rng.randint(0, 2)}")]
        except AssertionError as error:
            wrong.append(str(error))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
