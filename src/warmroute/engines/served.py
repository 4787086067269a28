"""What a node's /v1/models says of its caches: the base model, its other names, and the adapters on it. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple


class Served(NamedTuple):
    base: str
    aliases: tuple[str, ...]
    adapters: tuple[str, ...]


def read_cards(cards: Sequence[dict[str, Any]]) -> Served | None:
    """A card with a parent is an adapter; cards of the base's root are its other names. None where there is no base.
    A node that serves several models has one of them: nothing is known of the caches of the others."""
    bases = [card for card in cards if not card.get("parent")]
    if not bases:
        return None
    base = bases[0]
    root = base.get("root")
    aliases = tuple(card["id"] for card in bases[1:] if root and card.get("root") == root)
    adapters = tuple(card["id"] for card in cards if card.get("parent"))
    return Served(base["id"], aliases, adapters)
