"""What the engines say: which engine a node runs, its load, its KV events, its KV transfers; discovery of nodes.

    engine.py              what the router knows of an engine; vllm.py, sglang.py and trtllm.py have it of one each
    node_watcher.py        health, models, load and events of each node, read with jitter
    kv_events.py           KV events: payloads, gaps, restarts, applied to a node's cache; no I/O
    kv_subscription.py     where a node publishes them, and a connection for each rank; zmtp.py is ZMQ's protocol
    block_reports.py       the same by push, for engines without KV events
    discovery/             nodes that somebody else starts: files, DNS, Kubernetes

To add an engine, write a file like vllm.py with its Engine (engine.py), and name it in ENGINES below and in EngineName
(config/nodes.py).

This file also reads /v1/models, for all engines: `read_cards` and `parse_model_cards`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from warmroute.core.messages import KvTransfer
from warmroute.core.node import Node
from warmroute.core.reported_values import MAX_MODELS, MAX_NAME_LENGTH, ReportedValues, decode_json
from warmroute.engines import sglang, trtllm, vllm
from warmroute.engines.engine import Engine

# The engines by the name that the configuration has for them, in the order of detection.

ENGINES: Final[dict[str, Engine]] = {"vllm": vllm.ENGINE, "sglang": sglang.ENGINE, "trtllm": trtllm.ENGINE}
_NAMES: Final = [f'"{name}"' for name in ENGINES]
ENGINE_LINE: Final = f"engine = {_NAMES[0]}  # or {', '.join(_NAMES[1:])}"
"""A line for [[nodes]]."""
_UNKNOWN: Final = Engine(
    title="",
    # Every engine that the router detects by its page has it at the first path.
    metrics_paths=tuple(dict.fromkeys(path for engine in ENGINES.values() for path in engine.metrics_paths)),
    to_publish_kv_events=vllm.ENGINE.to_publish_kv_events.replace("vLLM", "the engine, if it is vLLM,"),
    to_report_load=f"Name the engine in [[nodes]]: engine = {', '.join(_NAMES[:-1])} or {_NAMES[-1]}",
)
KV_TRANSFERS: Final[dict[str, KvTransfer]] = {
    name: engine.kv_transfer for name, engine in ENGINES.items() if engine.kv_transfer is not None
}


def engine_of(name: str) -> Engine:
    """Return an engine by its name; one that says nothing for `auto`, and for an engine that is not known."""
    return ENGINES.get(name, _UNKNOWN)


def detect_engine(page: bytes) -> str | None:
    """Return the engine that wrote a metrics page."""
    found = (name for name, engine in ENGINES.items() if any(marker in page for marker in engine.markers))
    return next(found, None)


def engine_of_cards(cards: Sequence[Mapping[str, object]]) -> str | None:
    """Return the engine that wrote a list of models, if the list is enough to know it."""
    owners = {card.get("owned_by") for card in cards}
    found = (name for name, engine in ENGINES.items() if engine.detected_by_owner and engine.owner in owners)
    return next(found, None)


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
