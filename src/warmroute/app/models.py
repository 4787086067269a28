"""Watches how well the router reads each model's prompts: warns once if a tokenizer is missing, and compares the
router's tokens once with each node's /tokenize."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import Final

from warmroute.config import Config
from warmroute.engines.node_http import Post
from warmroute.engines.remote_tokenizer import tokenize_request
from warmroute.event_log import EventLog, where_it_failed
from warmroute.fleet.fleet import Fleet
from warmroute.fleet.health import HealthState
from warmroute.fleet.node import Node
from warmroute.prompt.engine_agreement import Agreement, NodeDidNotAnswer, Tokenize, compare_tokens
from warmroute.prompt.prompt_tokenizer import PromptTokenizer
from warmroute.prompt.tokenizer_registry import TokenizerRegistry
from warmroute.prompt.tokenizer_status import TokenizerStatus, models_table

log = EventLog("warmroute.service")

INTERVAL_S: Final = 1.0
RETRY_S: Final = 30.0
"""How long after a failed comparison it is repeated."""
TIMEOUT_S: Final = 5.0
CHAT_ENGINES: Final = ("vllm",)
"""Engines whose /tokenize takes chats. That of SGLang takes text only; TensorRT-LLM has none."""
TEXT_ENGINES: Final = ("sglang",)


def node_tokenize(node: Node, post: Post) -> Tokenize:
    """Return a function that asks a node for the tokens of a request."""

    async def tokenize(path: bytes, body: bytes) -> tuple[int, bytes]:
        request = tokenize_request(path, body)
        assert isinstance(request, bytes)
        return await post(node, "/tokenize", request, TIMEOUT_S)

    return tokenize


def missing_advice(status: TokenizerStatus, has_table: bool, may_download: bool) -> str:
    """Return what to change so that the router finds a tokenizer, with lines of TOML to copy."""
    table = models_table(status.model, status.hub_id, has_table)
    lines = "".join(f"\n    {line}" for line in table.splitlines())
    advice = "Put its tokenizer files on the router's machine and add to the configuration:"
    if status.hub_id and not may_download:
        advice = (
            "Let the router download its tokenizer files (download_tokenizers = true in [prompts]), or put them on the "
            "router's machine and add to the configuration:"
        )
    return advice + lines


class ModelWatch:
    def __init__(
        self,
        fleet: Fleet,
        registry: TokenizerRegistry,
        post: Post,
        config: Callable[[], Config],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fleet = fleet
        self._registry = registry
        self._post = post
        self._config = config
        self._now = now
        self._warned: set[str] = set()
        self._compared: dict[tuple[str, str], tuple[PromptTokenizer, float, Agreement]] = {}
        """By node and model: the tokenizer, the engine's start, and the result."""
        self._retry_at_s: dict[tuple[str, str], float] = {}

    def agreement(self, node: str, model: str) -> Agreement | None:
        """Return the result for a node and a base model; None if they were not compared."""
        found = self._compared.get((node, model))
        return found[2] if found is not None else None

    async def run(self) -> None:
        while True:
            await asyncio.sleep(INTERVAL_S)
            try:
                if self._config().uses_kv_events:
                    self.warn_missing()
                    await self.compare()
            except Exception as error:
                log.error("model_watch_failed", "The router tries again.", reason=where_it_failed(error))

    def warn_missing(self) -> None:
        """Log models whose prompts are matched as text, each once until it gets a tokenizer."""
        prompts = self._config().prompts
        for model in self._registry.listed_models():
            status = self._registry.status(model)
            if status.state == "loaded":
                self._warned.discard(model)
            elif status.state == "missing" and model not in self._warned and not self._asks_nodes(model):
                self._warned.add(model)
                advice = missing_advice(status, self._registry.is_named(model), prompts.download_tokenizers)
                log.warning(
                    "tokenizer_missing",
                    f"The router matches this model's prompts by their text, and its cache predictions are inexact. "
                    f"{advice}",
                    model=model,
                    reason=f"{status.hub_id}: {status.reason}" if status.hub_id else status.reason,
                )

    def _asks_nodes(self, model: str) -> bool:
        """Return whether a node's /tokenize is used instead of a tokenizer."""
        group = self._fleet.group(model)
        members = group.members if group is not None else ()
        return self._config().prompts.remote_tokenize and any(node.engine == "vllm" for node in members)

    async def compare(self) -> None:
        """Compare each tokenizer once with each process of an engine that can be asked."""
        nodes = list(self._fleet)
        names = {node.name for node in nodes}
        for key in [key for key in self._compared if key[0] not in names]:
            del self._compared[key]
        self._retry_at_s = {key: at_s for key, at_s in self._retry_at_s.items() if key[0] in names}
        for node in nodes:
            if node.health.state is HealthState.UP and node.engine in (*CHAT_ENGINES, *TEXT_ENGINES):
                for model in _base_models(node):
                    await self._compare(node, model)

    async def _compare(self, node: Node, model: str) -> None:
        key, tokenizer = (node.name, model), self._registry.status(model).tokenizer
        before = self._compared.get(key)
        if tokenizer is None or self._now() < self._retry_at_s.get(key, 0.0):
            return
        if before is not None and before[0] is tokenizer and before[1] == node.incarnation:
            return
        incarnation = node.incarnation
        try:
            ask = node_tokenize(node, self._post)
            found = await compare_tokens(model, tokenizer, ask, node.engine in CHAT_ENGINES)
        except NodeDidNotAnswer:
            self._retry_at_s[key] = self._now() + RETRY_S
            return
        self._compared[key] = tokenizer, incarnation, found
        self._retry_at_s.pop(key, None)
        if found.state == "differs" and (before is None or before[2] != found):
            log.warning(
                "tokenize_mismatch",
                "Prompts for this node get wrong tokens, so its cache is not used. "
                + (
                    "Set chat_template and default_chat_template_kwargs in [[models]] as the engine was started."
                    if found.differs == "chat_template"
                    else "Set tokenizer in [[models]] to the files that the engine uses."
                ),
                node=node.name,
                model=model,
                differs=found.differs,
                reason=found.reason,
            )


def _base_models(node: Node) -> Iterable[str]:
    return [model for model in node.models or () if model not in node.adapter_names]
