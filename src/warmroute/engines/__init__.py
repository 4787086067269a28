"""What the engines say: which engine a node runs, its load, its KV events, its KV transfers; discovery of nodes.

    vllm.py, sglang.py, trtllm.py   all that is special about one engine
    node_watcher.py        health, models, load and events of each node, read with jitter
    kv_events.py           KV events: payloads, gaps, restarts, applied to a node's cache; no I/O
    kv_subscription.py     where a node publishes them, and a connection for each rank; zmtp.py is ZMQ's protocol
    block_reports.py       the same by push, for engines without KV events
    discovery/             nodes that somebody else starts: files, DNS, Kubernetes

To add an engine, write a file like vllm.py: `parse_load` and `MARKERS` for its metrics page, and a KvTransfer
(core/messages.py) if it can prefill for other nodes. Name it in `_ENGINES` and `KV_TRANSFERS` below, in
`NodeConfig.engine` and `DiscoveryConfig.engine` (config/nodes.py), in engine_flags.py, in `_OWNERS` of
app/doctor/answers.py, and in CHAT_ENGINES or TEXT_ENGINES of app/models.py if it has a /tokenize.

This file also reads /v1/models, for all engines: `read_cards` and `parse_model_cards`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from warmroute.core.messages import KvTransfer
from warmroute.core.node import LoadReport, Node
from warmroute.core.reported_values import MAX_MODELS, MAX_NAME_LENGTH, ReportedValues, decode_json
from warmroute.engines import sglang, trtllm, vllm
from warmroute.engines.sglang import SglangKvTransfer
from warmroute.engines.trtllm import TrtllmKvTransfer
from warmroute.engines.vllm import VllmKvTransfer

# Detects which engine a node runs, and finds the parser of its metrics page.

# The order of detection: the first engine whose marker is on the page.
_ENGINES = {"vllm": vllm, "sglang": sglang, "trtllm": trtllm}


def metrics_paths(engine: str) -> tuple[str, ...]:
    """Return where an engine may have its metrics page, the likeliest path first."""
    if engine == "trtllm":
        return trtllm.PROMETHEUS_PATH, "/metrics"
    return ("/metrics", trtllm.PROMETHEUS_PATH) if engine == "auto" else ("/metrics",)


def detect_engine(page: bytes) -> str | None:
    """Return the engine that wrote a metrics page."""
    found = (name for name, engine in _ENGINES.items() if any(marker in page for marker in engine.MARKERS))
    return next(found, None)


def engine_of_cards(cards: Sequence[Mapping[str, object]]) -> str | None:
    """Return the engine that wrote a list of models, if the list names TensorRT-LLM: its metrics page may be empty."""
    return "trtllm" if any(card.get("owned_by") == trtllm.OWNER for card in cards) else None


def parse_load(engine: str, page: bytes) -> LoadReport | None:
    """Return what a metrics page reports; None if the router cannot read the pages of this engine."""
    return _ENGINES[engine].parse_load(page) if engine in _ENGINES else None


# The KV transfer protocols by engine.

KV_TRANSFERS: Final[dict[str, KvTransfer]] = {
    "vllm": VllmKvTransfer(),
    "sglang": SglangKvTransfer(),
    "trtllm": TrtllmKvTransfer(),
}


# Parses a node's /v1/models: the base model whose blocks its cache holds, its aliases and its adapters. No I/O.


class ServedModels(NamedTuple):
    base: str
    aliases: tuple[str, ...]
    adapters: tuple[str, ...]


def read_cards(body: bytes, reported: ReportedValues) -> list[dict[str, Any]]:
    """Return the model cards with a usable name, without fields that contain impossible values. Raises ValueError."""
    listed = decode_json(body)
    cards = listed.get("data", []) if isinstance(listed, dict) else None
    if not isinstance(cards, list):
        raise ValueError("not a list of models")
    if len(cards) > MAX_MODELS:
        reported.ignore("models", len(cards), f"more than {MAX_MODELS:,}")
    return [
        _checked(card, reported) for card in cards[:MAX_MODELS] if isinstance(card, dict) and _has_name(card, reported)
    ]


def _has_name(card: dict[str, Any], reported: ReportedValues) -> bool:
    name = card.get("id")
    if isinstance(name, str) and 0 < len(name) <= MAX_NAME_LENGTH and name.isprintable():
        return True
    reported.ignore("model_id", name, f"not a name of 1 to {MAX_NAME_LENGTH} printable characters")
    return False


def _checked(card: dict[str, Any], reported: ReportedValues) -> dict[str, Any]:
    wrong = {name for name in ("root", "parent") if not isinstance(card.get(name), str | None)}
    if "max_model_len" in card and reported.whole("max_model_len", card["max_model_len"]) is None:
        wrong.add("max_model_len")
    return {name: value for name, value in card.items() if name not in wrong} if wrong else card


def parse_model_cards(cards: Sequence[dict[str, Any]]) -> ServedModels | None:
    """Return the first base model with its aliases (cards with the same root) and adapters (cards with a parent); None
    if there is no base model. The router ignores the caches of further base models of the same node."""
    bases = [card for card in cards if not card.get("parent")]
    if not bases:
        return None
    # An engine serves one base model, under a few names. KV events do not say to which base a block belongs.
    base = bases[0]
    root = base.get("root")
    aliases = tuple(card["id"] for card in bases[1:] if root and card.get("root") == root)
    adapters = tuple(card["id"] for card in cards if card.get("parent"))
    return ServedModels(base["id"], aliases, adapters)


# The HTTP calls that this room makes to nodes. The service provides them.

Get = Callable[[Node, str, float], Awaitable[tuple[int, bytes]]]
"""GET a path of a node within a timeout in seconds. Return status and body. Raises TimeoutError for a slow response,
ConnectionRefusedError if nothing listens, ConnectionError for a broken response, and another OSError if this machine
lacks a resource."""

Post = Callable[[Node, str, bytes, float], Awaitable[tuple[int, bytes]]]
"""POST a JSON body (`Content-Type: application/json`) to a path of a node. Otherwise like Get."""
