"""Tokens that vLLM 0.32 gave for requests of every endpoint, with the small tokenizer (make_golden_tokens.py)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from prompt_data import token_ids
from sample_requests import SAMPLE_REQUESTS

GOLDEN = json.loads((Path(__file__).parent / "golden_tokens.json").read_text())


@pytest.mark.parametrize("name", GOLDEN)
def test_every_request_gets_the_tokens_of_vllm(name, new_prompt_tokenizer):
    tokenizer = new_prompt_tokenizer(name)
    assert len(GOLDEN[name]) == len(SAMPLE_REQUESTS)
    exact = 0
    for (path, body), expected in zip(SAMPLE_REQUESTS, GOLDEN[name], strict=True):
        for _repetition in range(2):  # the second time from the token cache
            prompt = tokenizer.tokenize(path.encode(), json.dumps(body).encode())
            if isinstance(expected, str):
                assert not prompt.exact, body
            elif prompt.exact:
                assert (token_ids(prompt.tokens), prompt.exact_tokens) == (expected, len(expected)), body
                exact += 1
    assert exact >= 2 * 34


def test_an_inexact_prompt_has_a_reason(new_prompt_tokenizer):
    """With this template, vLLM moves system messages to the front. The router does not reproduce that."""
    tokenizer, reasons = new_prompt_tokenizer("alternating"), set()
    for path, body in SAMPLE_REQUESTS:
        prompt = tokenizer.tokenize(path.encode(), json.dumps(body).encode())
        if not prompt.exact:
            assert prompt.exact_tokens == 0
            reasons.add(prompt.inexact_reason)
    assert reasons == {
        "the chat template rejects the conversation",
        "the engine moves a system message to the front",
    }
