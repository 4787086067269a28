"""What is read with the help of what was read before equals what is read from scratch."""

from __future__ import annotations

import json
import random
import threading
from typing import Any

import pytest
from asks import BARE_TOOL, TOOL, assistant, system, tool, user
from hypothesis import given, settings
from hypothesis import strategies as st

from warmroute.prompt.reading import PromptTokenizer

CHAT, ANTHROPIC = b"/v1/chat/completions", b"/v1/messages"
LOCAL = ["thinking", "parts", "dated", "alternating", "far_switch"]
FAR = ["far_tools", "far_counts", "far_first_question", "far_system_last", "far_shortens"]

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
    lambda text, reasoning, made: assistant(
        text, **({"reasoning_content": reasoning} if reasoning else {}), **({"tool_calls": made} if made else {})
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
    spoken = body["messages"]
    if kind == "append":
        spoken += value
    elif kind == "edit last":
        spoken[-1] = {**spoken[-1], "content": value}
    elif kind == "branch":
        del spoken[max(1, len(spoken) - value) :]
    elif kind == "system":
        body["messages"] = [system(value), *(m for m in spoken if m["role"] != "system")]
    elif kind == "tools":
        body["tools"] = [TOOL, BARE_TOOL][:value] or None
    else:
        body["chat_template_kwargs"] = None if value is None else {"enable_thinking": value}
    return body


def check(reader: PromptTokenizer, path: bytes, body: dict[str, Any]) -> bool:
    """Whether it was warm."""
    data = json.dumps(body).encode()
    prompt = reader.read(path, data)
    assert prompt is not None and reader.chats is not None
    plan = reader.begin(path, data).plan  # type: ignore[union-attr]
    if prompt.exact:
        assert prompt.tokens == reader.chats.read_plainly(plan)  # type: ignore[arg-type]
        assert prompt.sure_tokens == prompt.token_count
    return prompt.warm_tokens > 0


@pytest.mark.parametrize("name", LOCAL + FAR)
def test_any_history_of_edits_gives_the_tokens_of_the_whole(name, fresh_reader):
    reader = fresh_reader(name)
    warm = 0

    @settings(max_examples=60)
    @given(texts, edits)
    def edit(first: str, history: list[tuple[str, Any]]) -> None:
        nonlocal warm
        body: dict[str, Any] = {"model": "m", "messages": [user(first)]}
        check(reader, CHAT, body)
        for kind, value in history:
            body = edited(body, kind, value)
            warm += check(reader, CHAT, body)

    edit()
    assert reader.chats.contradictions == 0
    assert (warm > 20) == (name in LOCAL), warm


@pytest.mark.parametrize("name", ["thinking", "parts"])
def test_a_conversation_that_goes_on_is_warm_from_its_second_turn(name, fresh_reader):
    reader = fresh_reader(name)
    body: dict[str, Any] = {"model": "m", "messages": [system("s"), user("hello there")], "tools": [TOOL]}
    assert not check(reader, CHAT, body)
    for turn in range(20):
        body["messages"] += [assistant(f"answer {turn}"), user(f"question {turn}")]
        assert check(reader, CHAT, body)


def test_an_agent_at_work_is_warm_at_every_step(fresh_reader):
    reader = fresh_reader("thinking")
    call = {"id": "c", "type": "function", "function": {"name": "run", "arguments": '{"command": "ls"}'}}
    body: dict[str, Any] = {"model": "m", "messages": [system("s"), user("mend it")], "tools": [TOOL]}
    check(reader, CHAT, body)
    for step in range(20):
        body["messages"] += [assistant("", reasoning_content=f"hm {step}", tool_calls=[call]), tool(f"result {step}")]
        assert check(reader, CHAT, body)
    # the user speaks again: this template now forgets what was thought, so all that is known is up to the last question
    body["messages"] += [assistant("done"), user("thanks, and now?")]
    assert check(reader, CHAT, body)
    body["messages"] += [assistant("this"), user("fine")]
    assert check(reader, CHAT, body)


def test_claude_code_is_warm_too(fresh_reader):
    reader = fresh_reader("thinking")
    tools = [{"name": "run", "description": "runs", "input_schema": {"type": "object"}}]
    body: dict[str, Any] = {"model": "m", "max_tokens": 5, "system": "be brief", "tools": tools}
    body["messages"] = [user([{"type": "text", "text": "mend it"}])]
    check(reader, ANTHROPIC, body)
    for step in range(10):
        use = {"type": "tool_use", "id": f"t{step}", "name": "run", "input": {"n": step}}
        result = {"type": "tool_result", "tool_use_id": f"t{step}", "content": f"result {step}"}
        body["messages"] += [assistant([{"type": "thinking", "thinking": "hm"}, use]), user([result])]
        assert check(reader, ANTHROPIC, body)


def test_a_new_day_is_a_new_beginning(small_tokenizer, fresh_reader, monkeypatch):
    reader = fresh_reader("dated")
    body: dict[str, Any] = {"model": "m", "messages": [user("hello")]}
    check(reader, CHAT, body)
    body["messages"] += [assistant("yes"), user("no")]
    assert check(reader, CHAT, body)
    template = reader._templates.choose(None, has_tools=False)
    assert template.time_key()
    monkeypatch.setattr(template, "time_key", lambda: "tomorrow")
    assert not check(reader, CHAT, body)


def test_a_template_that_deceives_the_check_is_found_out_by_the_audit(fresh_reader):
    """It counts, but only beyond the length of any conversation that is made up."""
    reader = fresh_reader("thinking")
    template = reader._templates.choose(None, has_tools=False)
    original = template.render

    def render(messages: Any, **given: Any) -> str:
        return original(messages, **given) + ("!" if len(messages) > 40 else "")

    template.render = render
    try:
        body: dict[str, Any] = {"model": "m", "messages": [user("x")]}
        wrong = 0
        for turn in range(70):
            body["messages"] += [assistant(f"a{turn}"), user(f"q{turn}")]
            data = json.dumps(body).encode()
            reader.read(CHAT, data)
            wrong += reader.audit() is False
        assert wrong == 1
        assert reader.chats.contradictions == 1
        assert not check(reader, CHAT, body)
    finally:
        del template.render


def test_memory_stays_within_its_bound(fresh_reader):
    reader = fresh_reader("thinking", cache_bytes=400_000)
    chance = random.Random(0)
    for number in range(300):
        body: dict[str, Any] = {"model": "m", "messages": [user(f"{number} " + "word " * chance.randint(1, 400))]}
        if number % 10 == 0:
            body["tools"] = [{**TOOL, "function": {"name": f"f{number}", "description": "d" * 500}}]
        for turn in range(chance.randint(1, 6)):
            reader.read(CHAT, json.dumps(body).encode())
            body["messages"] += [assistant("a " * turn), user("b " * turn)]
            assert reader.chats.used_bytes <= 400_000
    stems = reader.chats.stems
    assert 0 < stems.used_bytes == sum(stem.cost_bytes() for stem in stems._stems.values())
    for stem in stems._stems.values():
        assert stem.parent is None or stem.parent.key in stems


def test_threads_and_the_loop_read_side_by_side(fresh_reader):
    reader = fresh_reader("thinking", cache_bytes=600_000)
    wrong: list[str] = []

    def work(seed: int) -> None:
        chance = random.Random(seed)
        try:
            for _round in range(15):
                body: dict[str, Any] = {"model": "m", "messages": [user(f"q{chance.randint(0, 5)} " + "w " * 200)]}
                for turn in range(8):
                    check(reader, CHAT, body)
                    body["messages"] += [assistant(f"a{turn % 3}"), user(f"b{chance.randint(0, 2)}")]
        except AssertionError as error:
            wrong.append(str(error))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
