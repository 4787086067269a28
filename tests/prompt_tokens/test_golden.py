"""Tokens that vLLM 0.32 itself gave for requests of all shapes, with a small tokenizer (make_golden.py)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from asks import ASKS

GOLDEN = json.loads((Path(__file__).parent / "golden.json").read_text())


@pytest.mark.parametrize("name", GOLDEN)
def test_every_request_has_the_tokens_that_vllm_gives_it(name, fresh_reader):
    reader = fresh_reader(name)
    assert len(GOLDEN[name]) == len(ASKS)
    sure = 0
    for (path, body), expected in zip(ASKS, GOLDEN[name], strict=True):
        for _again in range(2):  # the second time with what was remembered
            prompt = reader.read(path.encode(), json.dumps(body).encode())
            if isinstance(expected, str):
                assert not prompt.exact, body
            elif prompt.exact:
                assert (prompt.token_ids, prompt.sure_tokens) == (expected, len(expected)), body
                sure += 1
    assert sure >= 2 * 34


def test_what_is_not_sure_says_so(fresh_reader):
    """With this template, vLLM moves system messages to the front; that is not followed."""
    reader, doubts = fresh_reader("alternating"), set()
    for path, body in ASKS:
        prompt = reader.read(path.encode(), json.dumps(body).encode())
        if not prompt.exact:
            assert prompt.sure_tokens == 0
            doubts.add(prompt.doubt)
    assert doubts == {
        "the chat template refuses the conversation",
        "a system message that the engine moves to the front",
    }
