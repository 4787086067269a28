"""Requests of every endpoint, and many chats, get the tokens that vLLM 0.32 gave them (make_golden_tokens.py)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from make_chats import chat_lines
from prompt_data import CHAT, PUBLIC_CASES, SMALL_CASES, MakePromptTokenizer, public_chats, requests, small_chats
from sample_requests import SAMPLE_REQUESTS
from vllm_reference import assert_tokens_of_vllm

from warmroute.prompt.prompt_tokenizer import PromptTokenizer

HERE = Path(__file__).parent
GOLDEN = json.loads((HERE / "golden_tokens.json").read_text())
PUBLIC = pytest.mark.data


@pytest.mark.parametrize(
    ("model", "kind"), [*SMALL_CASES, *(pytest.param(*case, marks=PUBLIC) for case in PUBLIC_CASES)]
)
def test_every_request_gets_the_tokens_of_vllm(
    model: str, kind: str, new_prompt_tokenizer: MakePromptTokenizer, request: pytest.FixtureRequest
) -> None:
    data = request.getfixturevalue("data_dir") if (model, kind) in PUBLIC_CASES else None
    sent = requests(kind, data)
    exact = assert_tokens_of_vllm(new_prompt_tokenizer(model), sent, GOLDEN[f"{model} {kind}"])
    assert exact >= 2 * 34


def test_an_inexact_prompt_has_a_reason(new_prompt_tokenizer: MakePromptTokenizer) -> None:
    """With this template, vLLM moves system messages to the front. The router does not reproduce that."""
    tokenizer, reasons = new_prompt_tokenizer("alternating"), set()
    for path, body in SAMPLE_REQUESTS:
        prompt = tokenizer.tokenize(path.encode(), json.dumps(body).encode())
        assert prompt is not None
        if not prompt.exact:
            assert prompt.exact_tokens == 0
            reasons.add(prompt.inexact_reason)
    assert reasons == {
        "the chat template rejects the conversation",
        "the engine moves a system message to the front",
    }


def test_the_committed_chats_are_those_that_the_script_makes() -> None:
    assert (HERE / "chats.jsonl").read_text() == chat_lines()


def accepted_chats(model: str) -> list[dict[str, Any]]:
    """Return the chats of the repository that vLLM and the model's template accept."""
    chats = zip(small_chats(), GOLDEN[f"{model} chats"], strict=True)
    return [chat for chat, entry in chats if not isinstance(entry, dict)]


@pytest.mark.parametrize("model", ["thinking", "llama", "deepseek"])
def test_chats_turn_by_turn_are_warm_and_get_the_same_tokens(
    model: str, new_prompt_tokenizer: MakePromptTokenizer
) -> None:
    assert_warm_turn_by_turn(new_prompt_tokenizer(model), accepted_chats(model))


@pytest.mark.data
@pytest.mark.parametrize("model", ["qwen3", "tinyllama", "deepseek"])
def test_public_chats_turn_by_turn_are_warm_and_get_the_same_tokens(
    model: str, new_prompt_tokenizer: MakePromptTokenizer, data_dir: Path
) -> None:
    assert_warm_turn_by_turn(new_prompt_tokenizer(model), list(public_chats(data_dir))[80::80])


def assert_warm_turn_by_turn(tokenizer: PromptTokenizer, chats: list[dict[str, Any]]) -> None:
    path, warm = CHAT.encode(), 0
    assert tokenizer.chats is not None
    for body in chats:
        for end, message in enumerate(body["messages"], 1):
            if message["role"] == "assistant":
                continue
            data = json.dumps({**body, "messages": body["messages"][:end]}).encode()
            prompt = tokenizer.tokenize(path, data)
            job = tokenizer.begin(path, data)
            assert prompt is not None and job is not None and job.plan is not None
            assert prompt.tokens == tokenizer.chats.tokenize_without_cache(job.plan)
            warm += prompt.warm_tokens > 0
    assert warm > 10
    assert tokenizer.verify_sample() in (True, None)
