"""How the router reads each model's prompts: watched, and reported by GET /admin/models."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from warmroute.config import Config, ModelConfig
from warmroute.core.fleet import Fleet
from warmroute.core.health import HealthState
from warmroute.core.node import Node
from warmroute.core.traffic import PROMPT_READINGS, Counters
from warmroute.engines import Post, engine_of
from warmroute.event_log import EventLog, where_it_failed
from warmroute.prompt.node_tokenizer import Agreement, NodeDidNotAnswer, Tokenize, compare_tokens, tokenize_request
from warmroute.prompt.prompt_tokenizer import PromptTokenizer
from warmroute.prompt.registry import ModelRoot, TokenizerRegistry, TokenizerStatus, models_table, read_model_cards

# Watches how well the router reads each model's prompts: warns once if a tokenizer is missing, and compares the
# router's tokens once with each node's /tokenize.

log = EventLog("warmroute.service")

INTERVAL_S: Final = 1.0
RETRY_S: Final = 30.0
"""How long after a failed comparison it is repeated."""
TIMEOUT_S: Final = 5.0


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
        """What was compared, by node and model: the tokenizer, the engine's start, and the result."""
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
            if node.health.state is HealthState.UP and engine_of(node.engine).tokenizes:
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
            found = await compare_tokens(model, tokenizer, ask, engine_of(node.engine).tokenizes == "chats")
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


# GET /admin/models: how the router reads each model's prompts, and which nodes serve it.


def describe_models(
    fleet: Fleet,
    registry: TokenizerRegistry,
    watch: ModelWatch,
    counters: Counters,
    configured: Mapping[str, ModelConfig],
    remote_tokenize: bool,
) -> list[dict[str, Any]]:
    """Describe the models that nodes serve, and those that [[models]] names."""
    reports = []
    listed = {node.name: read_model_cards(node.model_cards) for node in fleet}
    for name in dict.fromkeys([*fleet.models, *configured]):
        group = fleet.group(name)
        members = group.members if group is not None else ()
        if not members and name not in configured:
            continue
        base = registry.base_model(name)
        status = registry.status(base)
        asks_nodes = remote_tokenize and any(node.engine == "vllm" for node in members)
        nodes = [
            _node(node, name, listed[node.name].roots.get(base), watch.agreement(node.name, base)) for node in members
        ]
        reports.append(
            {
                "name": name,
                "base_model": base if base != name else None,
                "tokenizer": _tokenizer(status, asks_nodes),
                "chat_template": _chat_template(status, configured.get(base), nodes),
                "prompts": {reading: counters.prompts[name, reading] for reading in PROMPT_READINGS},
                "context_windows": sorted({node["context_window"] for node in nodes if node["context_window"]}),
                "nodes": nodes,
            }
        )
    return reports


def _tokenizer(status: TokenizerStatus, asks_nodes: bool) -> dict[str, Any]:
    tokenizer = status.tokenizer.tokenizer if status.tokenizer is not None else None
    return {
        "state": status.state,
        "path": status.path or None,
        "source": status.source or ("remote_tokenize" if asks_nodes else "none"),
        "hub_id": status.hub_id or None,
        "reason": status.reason or None,
        "inexact_reason": tokenizer.inexact_reason or None if tokenizer is not None else None,
        "slow_reason": tokenizer.slow_reason or None if tokenizer is not None else None,
    }


def _chat_template(
    status: TokenizerStatus, model: ModelConfig | None, nodes: list[dict[str, Any]]
) -> dict[str, Any] | None:
    tokenizer = status.tokenizer.tokenizer if status.tokenizer is not None else None
    if tokenizer is None:
        return None
    configured = model.chat_template if model is not None else ""
    states = {node["tokenize"]["state"] for node in nodes if node["tokenize"] is not None}
    agrees = False if "differs" in states else True if "agrees" in states else None
    return {
        "source": "configured" if configured else "model" if tokenizer.templates else "none",
        "path": configured or None,
        "inexact_reason": tokenizer.chat_inexact_reason or None,
        "agrees_with_nodes": agrees,
    }


def _node(node: Node, model: str, root: ModelRoot | None, agreement: Agreement | None) -> dict[str, Any]:
    return {
        "name": node.name,
        "state": "draining" if node.draining else node.health.state.value,
        "engine": node.engine,
        "root": root.path or None if root is not None else None,
        "context_window": node.context_window(model) or None,
        "tokenize": None
        if agreement is None
        else {
            "state": agreement.state,
            "differs": agreement.differs or None,
            "reason": agreement.reason or None,
            "chats_compared": agreement.chats,
        },
    }
