"""Read the model cards in a node's /v1/models: where each model's files are, and which entries are LoRA adapters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ModelRoot:
    path: str
    """The model's path on the node, or its name on a hub; empty where the card names neither."""
    max_model_len: int
    """0 where it is unknown."""


@dataclass(slots=True)
class ListedModels:
    roots: dict[str, ModelRoot] = field(default_factory=dict)
    """By model name, without adapters."""
    adapters: dict[str, str] = field(default_factory=dict)
    """Adapter names and their base models."""


def read_model_cards(cards: Sequence[Mapping[str, object]], configured: Iterable[str] = ()) -> ListedModels:
    """Ignores invalid cards. `configured`: names of models in the configuration."""
    listed = ListedModels()
    parents: dict[str, str] = {}
    for card in cards:
        name, root, parent, max_len = (card.get(key) for key in ("id", "root", "parent", "max_model_len"))
        if not isinstance(name, str):
            continue
        if isinstance(parent, str) and parent and parent != name:
            parents[name] = parent
        else:
            length = max_len if type(max_len) is int and max_len > 0 else 0
            listed.roots[name] = ModelRoot(root if isinstance(root, str) else "", length)
    for adapter, parent in parents.items():
        # an adapter may name a base model that the node does not serve under that name
        is_known = parent in listed.roots or parent in configured
        listed.adapters[adapter] = parent if is_known else next(iter(listed.roots), parent)
    return listed
