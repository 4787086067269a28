"""A router that tokenizes prompts with a small real tokenizer."""

from __future__ import annotations

import copy
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from support.running_router import RunningRouter, router
from support.scripted_engine import ScriptedEngine

from warmroute.core.node_cache import NodeCache
from warmroute.prompt import chat_tokenizer
from warmroute.prompt.chat_template import ChatTemplate
from warmroute.prompt.prompt_tokenizer import PromptTokenizer
from warmroute.prompt.tail_rendering import TailCheck

SMALL_MODEL = Path(__file__).parents[1] / "prompt" / "small-model"
CHAT = "/v1/chat/completions"
BLOCK = 16
LONG = "the router reads this prompt before it sends it anywhere, block after block. " * 40
"""Some hundreds of tokens: short enough for the event loop."""


@pytest.fixture(scope="module", autouse=True)
def template_checked_once() -> Iterator[None]:
    """Check the chat template once for all routers of a file: it takes half a second. Test files import this."""
    made: dict[str, TailCheck] = {}

    def checked(template: ChatTemplate | None) -> TailCheck:
        if template is None:
            return TailCheck(None)
        if template.source not in made:
            made[template.source] = TailCheck(template)
        return copy.copy(made[template.source])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chat_tokenizer, "TailCheck", checked)
        yield


@asynccontextmanager
async def small_model_router(*nodes: ScriptedEngine, **tables: Any) -> AsyncIterator[RunningRouter]:
    tables = {"routing": {"policy": "overlap", "seed": 7}, **tables}
    models = [{"name": "m", "tokenizer": str(SMALL_MODEL)}]
    async with router(*nodes, models=models, **tables) as running:
        yield running


def prompt_tokenizer_of(r: RunningRouter) -> PromptTokenizer:
    return r.service.tokenizer_registry.prompt_tokenizer("m")


def cache_of(r: RunningRouter, number: int = 0) -> NodeCache:
    found = r.service.cache_view.cache(f"node{number}")
    assert found is not None
    return found


def tokens_in(r: RunningRouter, body: bytes, path: str = CHAT) -> int:
    prompt = prompt_tokenizer_of(r).tokenize(path.encode(), body)
    assert prompt is not None and prompt.exact and not prompt.inexact_reason
    return prompt.token_count


def unseen_text(seed: int, size: int = 60_000) -> str:
    """Return text that no prompt had before and that is too long for the event loop."""
    draws = random.Random(seed)
    words = ["cache", "block", "prefix", "node", "engine", "router", "token"]
    text = "".join(f"{draws.choice(words)} {draws.random():.3f} " for _ in range(size // 11))
    return text[:size]
