"""The same requests as in test_golden_tokens.py get the tokens of the vLLM that is installed.

`make test-real ARGS="--data DIR"` compares all public chats, too, which takes some minutes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from prompt_data import PUBLIC_CASES, SMALL_CASES, MakePromptTokenizer, requests
from vllm_reference import assert_tokens_of_vllm, tokenize_with_vllm

pytestmark = [pytest.mark.real, pytest.mark.timeout(1200)]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    cases = [*SMALL_CASES, *(PUBLIC_CASES if metafunc.config.getoption("--data") else [])]
    metafunc.parametrize(("model", "kind"), cases)


def test_every_request_gets_the_tokens_of_vllm(
    model: str,
    kind: str,
    model_folder: Callable[[str], Path],
    new_prompt_tokenizer: MakePromptTokenizer,
    request: pytest.FixtureRequest,
) -> None:
    data = request.getfixturevalue("data_dir") if (model, kind) in PUBLIC_CASES else None
    sent = requests(kind, data, all_chats=True)
    folder = str(model_folder(model))
    expected = tokenize_with_vllm([{"tokenizer": folder, "path": path, "body": body} for path, body in sent])
    assert_tokens_of_vllm(new_prompt_tokenizer(model), sent, expected)
