"""Parses a node's /v1/models: the base model whose blocks its cache holds, its aliases and its adapters. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple


class ServedModels(NamedTuple):
    base: str
    aliases: tuple[str, ...]
    adapters: tuple[str, ...]


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
