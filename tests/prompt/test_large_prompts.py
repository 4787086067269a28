"""Prompts that would take too long to tokenize are matched by their text, or go to a thread."""

from __future__ import annotations

import json
from typing import Any

import pytest
from prompt_data import MakePromptTokenizer

from warmroute._kernel import outline_body
from warmroute.prompt import tail_rendering
from warmroute.prompt.plain_chats import MAX_BODY_BYTES
from warmroute.prompt.prompt_tokenizer import MAX_MESSAGES, PromptTokenizer

CHAT = b"/v1/chat/completions"
LOOP_MS = 1.0
"""A job that is estimated at more runs in a thread (prompt/reader.py)."""


@pytest.fixture(scope="module")
def prompt_tokenizer(new_prompt_tokenizer: MakePromptTokenizer) -> PromptTokenizer:
    return new_prompt_tokenizer()


def chat(*messages: dict[str, Any]) -> bytes:
    return json.dumps({"model": "m", "messages": messages}, separators=(",", ":")).encode()


def short_messages(count: int) -> list[dict[str, Any]]:
    return [{"role": ("user", "assistant")[number % 2], "content": str(number)} for number in range(count)]


def test_many_short_messages_are_not_tokenized_on_the_event_loop(prompt_tokenizer: PromptTokenizer) -> None:
    """To encode a message costs something, however short it is."""
    body = chat(*short_messages(5001))
    outline = outline_body(body)
    assert prompt_tokenizer.tokenize_plain(CHAT, body, outline, LOOP_MS) is None
    job = prompt_tokenizer.begin(CHAT, body, outline)
    assert job is not None and job.cost_ms > LOOP_MS
    prompt = job.run()
    assert prompt.exact and not prompt.inexact_reason
    known = prompt_tokenizer.begin(CHAT, body, outline)
    assert known is not None and known.cost_ms < LOOP_MS
    assert known.run().tokens == prompt.tokens


def test_a_conversation_of_too_many_messages_is_matched_by_its_text(prompt_tokenizer: PromptTokenizer) -> None:
    for count, exact in ((MAX_MESSAGES - 1, True), (MAX_MESSAGES + 1, False)):
        prompt = prompt_tokenizer.tokenize(CHAT, chat(*short_messages(count)))
        assert prompt is not None and prompt.exact == exact
    assert prompt is not None and "too many messages" in prompt.inexact_reason


def test_a_conversation_that_is_too_long_is_matched_by_its_text(prompt_tokenizer: PromptTokenizer) -> None:
    """It has many messages of which each could be parsed."""
    text = "word " * 100_000
    messages = [{"role": "user", "content": text}] * (MAX_BODY_BYTES // len(text) + 1)
    prompt = prompt_tokenizer.tokenize(CHAT, chat(*messages))
    assert prompt is not None and not prompt.exact and prompt.inexact_reason


@pytest.mark.parametrize("field", ["tools", "documents", "chat_template_kwargs", "messages"])
def test_a_value_that_takes_too_long_to_parse_is_matched_by_its_text(
    prompt_tokenizer: PromptTokenizer, field: str
) -> None:
    huge: list[Any] = [{"a": {}}] * 60_000
    fields = {
        "messages": short_messages(1),
        field: huge if field != "messages" else [{"role": "user", "content": huge}],
    }
    prompt = prompt_tokenizer.tokenize(CHAT, json.dumps(fields).encode())
    assert prompt is not None and not prompt.exact and "too large to parse" in prompt.inexact_reason


def test_the_check_of_a_long_conversation_reads_it_a_limited_number_of_times(
    prompt_tokenizer: PromptTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No prefix can end in a conversation of users only: the check looks for one from its end."""
    assert prompt_tokenizer.chats is not None
    calls = []
    original = tail_rendering._Conversation.differs_at

    def counted(*given: Any) -> bool | None:
        calls.append(given)
        return original(*given)

    monkeypatch.setattr(tail_rendering._Conversation, "differs_at", counted)
    context = prompt_tokenizer.chats.cached_context(outline_body(chat()).chat_context())
    assert context is not None and context.tail_renderer is not None
    messages = [{"role": "user", "content": "x"}] * 2000
    assert not tail_rendering.differs_at_last_cut(context.context, context.tail_renderer, messages)
    assert 0 < len(calls) <= 64
