"""GET /admin/models: how the router reads each model's prompts, and which nodes serve it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from warmroute.config import ModelConfig
from warmroute.fleet.fleet import Fleet
from warmroute.fleet.node import Node
from warmroute.prompt.engine_agreement import Agreement
from warmroute.prompt.model_cards import ModelRoot, read_model_cards
from warmroute.prompt.tokenizer_registry import TokenizerRegistry
from warmroute.prompt.tokenizer_status import TokenizerStatus
from warmroute.service.model_watch import ModelWatch
from warmroute.telemetry.counters import PROMPT_READINGS, Counters


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
