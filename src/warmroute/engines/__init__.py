"""Parses a node's /v1/models: the base model whose blocks its cache holds, its aliases and its adapters. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from warmroute.fleet.reported_values import MAX_MODELS, MAX_NAME_LENGTH, ReportedValues, decode_json


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
    base = bases[0]
    root = base.get("root")
    aliases = tuple(card["id"] for card in bases[1:] if root and card.get("root") == root)
    adapters = tuple(card["id"] for card in cards if card.get("parent"))
    return ServedModels(base["id"], aliases, adapters)
