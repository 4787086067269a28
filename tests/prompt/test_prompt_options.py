"""Requests with several prompts, with prompt logprobs, with truncation; the length of a prompt for context windows."""

from __future__ import annotations

import json
from typing import Any

import pytest
from prompt_data import MakePromptTokenizer, token_ids
from sample_requests import user

from warmroute._kernel import outline_body
from warmroute.prompt.prompt import MAX_PROMPTS, Prompt, longest_prompt
from warmroute.prompt.prompt_tokenizer import PromptTokenizer
from warmroute.prompt.request_body import text_prompt

CHAT, COMPLETIONS, EMBEDDINGS = b"/v1/chat/completions", b"/v1/completions", b"/v1/embeddings"


@pytest.fixture(scope="module")
def tokenizer(new_prompt_tokenizer: MakePromptTokenizer) -> PromptTokenizer:
    return new_prompt_tokenizer("thinking")


def both_ways(tokenizer: PromptTokenizer, path: bytes = CHAT, **body: Any) -> list[Prompt]:
    """Return the prompt with exact tokens, and the one for text matching."""
    data = json.dumps(body).encode()
    found = [tokenizer.tokenize(path, data), text_prompt(path, data)]
    assert found[0] is not None and found[1] is not None
    return [prompt for prompt in found if prompt is not None]


# Several prompts.


def test_every_prompt_of_a_list_is_read_as_if_it_came_alone(tokenizer: PromptTokenizer) -> None:
    texts = ["the first one", 'the "second" one\n' * 20, ""]
    for path, field in ((COMPLETIONS, "prompt"), (EMBEDDINGS, "input")):
        many = both_ways(tokenizer, path, **{field: texts})
        for each, prompt in enumerate(many):
            alone = [both_ways(tokenizer, path, **{field: text})[each] for text in texts]
            assert [one.tokens for one in (prompt, *prompt.others)] == [one.tokens for one in alone]
            assert prompt.total_tokens == sum(one.token_count for one in alone)
            assert not prompt.unread_prompts


def test_lists_of_token_ids_are_read(tokenizer: PromptTokenizer) -> None:
    exact, text = both_ways(tokenizer, COMPLETIONS, prompt=[[7, 8, 9], [1], [2, 3]])
    assert [token_ids(one.tokens) for one in (exact, *exact.others)] == [[7, 8, 9], [1], [2, 3]]
    assert len(text.others) == 2
    one, _ = both_ways(tokenizer, COMPLETIONS, prompt=[5, 6])
    assert token_ids(one.tokens) == [5, 6] and not one.others


def test_of_very_many_prompts_the_length_of_most_is_estimated(tokenizer: PromptTokenizer) -> None:
    count = 10 * MAX_PROMPTS
    for prompt in both_ways(tokenizer, COMPLETIONS, prompt=["some words of a prompt"] * count):
        assert len(prompt.others) == MAX_PROMPTS - 1
        assert prompt.unread_prompts == pytest.approx(count - MAX_PROMPTS, rel=0.1)
        assert prompt.total_tokens == pytest.approx(count * prompt.token_count, rel=0.2)


@pytest.mark.parametrize(
    "value", [[["nested"]], [[[1]]], ["text", 5], [{"a": "b"}], [None], [[1], "x" * 50], [], "", 3]
)
def test_other_lists_are_matched_as_one_text_or_not_at_all(tokenizer: PromptTokenizer, value: Any) -> None:
    for prompt in both_ways(tokenizer, COMPLETIONS, prompt=value):
        assert len(prompt.others) <= 1 and prompt.total_tokens < 100


def test_conversations_are_not_lists_of_prompts(tokenizer: PromptTokenizer) -> None:
    for path, body in (
        (CHAT, {"messages": [user("one"), user("two")]}),
        (b"/v1/responses", {"input": [user("one"), user("two")]}),
        (EMBEDDINGS, {"messages": [user("one"), user("two")]}),
    ):
        assert not any(prompt.others for prompt in both_ways(tokenizer, path, **body))


# What the engine does with its cache.


@pytest.mark.parametrize(
    ("path", "options", "skips"),
    [
        (CHAT, {}, False),
        (CHAT, {"prompt_logprobs": 1}, True),
        (CHAT, {"prompt_logprobs": 0}, True),
        (CHAT, {"prompt_logprobs": None}, False),
        (CHAT, {"echo": True}, True),
        (CHAT, {"echo": True, "top_logprobs": 3}, True),
        (CHAT, {"echo": True, "top_logprobs": None}, False),
        (CHAT, {"echo": False}, False),
        (CHAT, {"logprobs": True, "top_logprobs": 3}, False),
        (COMPLETIONS, {"echo": True}, False),
        (COMPLETIONS, {"echo": True, "logprobs": 1}, True),
        (COMPLETIONS, {"echo": True, "logprobs": None}, False),
        (COMPLETIONS, {"prompt_logprobs": 5}, True),
    ],
)
def test_requests_for_prompt_logprobs_skip_the_engines_cache(
    tokenizer: PromptTokenizer, path: bytes, options: dict[str, Any], skips: bool
) -> None:
    asked = {"messages": [user("hello")]} if path == CHAT else {"prompt": "hello"}
    assert [prompt.skips_cache for prompt in both_ways(tokenizer, path, **asked, **options)] == [skips, skips]


def test_a_prompt_that_the_engine_may_truncate_is_marked(tokenizer: PromptTokenizer) -> None:
    for limit, truncated in ((3, True), (-1, True), (1000, False), (None, False)):
        found = both_ways(tokenizer, messages=[user("hello " * 20)], truncate_prompt_tokens=limit)
        assert [prompt.truncated for prompt in found] == [truncated, truncated]


def test_the_start_of_the_prompt_is_that_of_its_text() -> None:
    outline = outline_body(b'{"tools": [1, 2], "messages": [{"role": "user", "content": "hi there"}]}')
    for limit in (0, 1, 7, 20, 10_000):
        assert outline.text_start(limit) == outline.text_as_tokens()[:limit].rstrip(b"\0")


# Its length.


def test_the_longest_prompt_of_a_request_counts(tokenizer: PromptTokenizer) -> None:
    exact, text = both_ways(tokenizer, COMPLETIONS, prompt=["short", "long " * 100])
    assert longest_prompt(exact) == (exact.others[0].token_count, True)
    estimate, is_exact = longest_prompt(text)
    assert estimate > exact.others[0].token_count and not is_exact


def test_the_length_of_a_picture_and_of_text_is_an_estimate(tokenizer: PromptTokenizer) -> None:
    picture = {"type": "image_url", "image_url": {"url": "http://x/y.png"}}
    exact, text = both_ways(tokenizer, messages=[user([{"type": "text", "text": "look"}, picture])])
    assert longest_prompt(exact)[0] > 1000 and not longest_prompt(exact)[1] and not longest_prompt(text)[1]
    truncated, _ = both_ways(tokenizer, messages=[user("hello " * 20)], truncate_prompt_tokens=3)
    assert longest_prompt(truncated) == (0, False), "unknown"


# Marks of pictures.


@pytest.mark.parametrize("name", ["thinking", "parts"])
@pytest.mark.parametrize("mark", ["\ue0f0warmroute-media:", "\ue0f0warmroute-media:i" + "0" * 32, "\ue0f0"])
def test_text_that_looks_like_a_mark_of_a_picture_is_text(
    name: str, mark: str, new_prompt_tokenizer: MakePromptTokenizer
) -> None:
    tokenizer = new_prompt_tokenizer(name)
    assert tokenizer.chats is not None
    messages = [user("before"), user([{"type": "text", "text": f"{mark} and after"}, {"type": "text", "text": "x"}])]
    prompt, _ = both_ways(tokenizer, messages=messages)
    assert not prompt.media and prompt.exact_tokens == prompt.token_count and not prompt.inexact_reason
