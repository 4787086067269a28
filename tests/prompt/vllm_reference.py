"""Tokenize requests with vLLM itself, and compare the router's tokens with the result."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from prompt_data import digest, token_ids
from sample_requests import SampleRequest
from support.vllm_environment import vllm_python

from warmroute.prompt.prompt_tokenizer import PromptTokenizer


def tokenize_with_vllm(requests: list[dict[str, Any]]) -> list[Any]:
    """Return for each request its token ids, or {"error": message}."""
    lines = "".join(json.dumps(request) + "\n" for request in requests)
    script = Path(__file__).parent / "vllm_reference_script.py"
    done = subprocess.run([vllm_python(), script], input=lines, capture_output=True, text=True, check=True)
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(results) == len(requests), done.stderr[-2000:]
    return results


def assert_tokens_of_vllm(tokenizer: PromptTokenizer, requests: list[SampleRequest], expected: list[Any]) -> int:
    """Compare with entries like those of golden_tokens.json. Return how many prompts were exact, of two per request."""
    exact = 0
    for (path, body), entry in zip(requests, expected, strict=True):
        for _repetition in range(2):  # the second time from the token cache
            prompt = tokenizer.tokenize(path.encode(), json.dumps(body).encode())
            assert prompt is not None
            if prompt.exact:
                ids = token_ids(prompt.tokens)
                assert entry == (ids if isinstance(entry, list) else digest(ids)), body
                assert prompt.exact_tokens == len(ids), body
                exact += 1
            else:
                refused = isinstance(entry, dict)
                assert refused or "to the front" in prompt.inexact_reason, (body, prompt.inexact_reason)
                assert prompt.exact_tokens == 0
    return exact
