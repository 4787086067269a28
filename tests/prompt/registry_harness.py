"""Tokenizer registries for tests: a clock, model cards, and the records of the log."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from sample_requests import user
from support.polling import until

from warmroute.config import ModelConfig, Prompts
from warmroute.prompt.registry import TokenizerRegistry

CHAT = b"/v1/chat/completions"
HI = json.dumps({"messages": [user("hi")]}).encode()


class Clock:
    def __init__(self) -> None:
        self.s = 1000.0

    def __call__(self) -> float:
        return self.s


@asynccontextmanager
async def new_registry(
    *models: ModelConfig, clock: Clock | None = None, **prompts: Any
) -> AsyncIterator[TokenizerRegistry]:
    registry = TokenizerRegistry(Prompts(**prompts), models, clock or time.monotonic)
    try:
        yield registry
    finally:
        registry.close()


def card(name: str, root: Any = None, parent: str | None = None, length: Any = 4096) -> dict[str, object]:
    return {"id": name, "object": "model", "root": root, "parent": parent, "max_model_len": length}


async def loading_done(registry: TokenizerRegistry, patience_s: float = 5.0) -> None:
    await until(lambda: not registry._tasks, "loading", patience_s)


def has_tokenizer(registry: TokenizerRegistry, model: str) -> bool:
    return registry.prompt_tokenizer(model).tokenizer is not None


def path_in_use(registry: TokenizerRegistry, model: str) -> str:
    loaded = registry._entries[model].loaded
    return loaded.path if loaded is not None else ""


def warnings(caplog: pytest.LogCaptureFixture) -> list[tuple[str, dict[str, Any]]]:
    """Return event names and fields of warnings and errors."""
    records = [record for record in caplog.records if record.levelno >= logging.WARNING]
    return [(record.event, record.fields) for record in records]  # type: ignore[attr-defined]
