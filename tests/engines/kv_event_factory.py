"""A cache with one node, hand-made KV events, and the lookups that should find them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from warmroute.config import Index
from warmroute.core.cache_view import CacheView
from warmroute.core.messages import Lookup
from warmroute.core.node_cache import NodeCache
from warmroute.engines.kv_events import BlockStored

MODEL = "m"
RECORDED_PAYLOADS = Path(__file__).parents[1] / "fixtures" / "vllm-0.32" / "frames"
"""KV event messages that vLLM 0.32 published."""


def one_node(model: str = MODEL) -> tuple[CacheView, NodeCache]:
    cache_view = CacheView(Index())
    cache = cache_view.add_node("node", [model])
    return cache_view, cache


def lookup(tokens: Sequence[int], salt: str = "") -> Lookup:
    """Return a lookup with one more token, since an engine computes at least one."""
    return Lookup(array("I", [*tokens, 7]).tobytes(), len(tokens) + 1, len(tokens) + 1, salt=salt)


def hit(cache_view: CacheView, tokens: Sequence[int], model: str = MODEL, salt: str = "", name: str = "node") -> int:
    """Return the tokens of a prompt that the node holds by its events."""
    found = cache_view.hits(model, lookup(tokens, salt), 0.0).get(name)
    return found.tokens if found is not None else 0


def prompt(seed: int, blocks: int = 4, size: int = 16) -> list[int]:
    return [1000 + (seed * 7919 + index) % 100_000 for index in range(blocks * size)]


def stored(
    hashes: list[int | bytes], tokens: list[int], parent: int | bytes | None = None, size: int = 16, **more: Any
) -> BlockStored:
    if "extra_keys" in more:
        more["extra_keys"] = msgspec.Raw(msgspec.msgpack.encode(more["extra_keys"]))
    return BlockStored(hashes, parent, tokens, size, **more)


def payload(*events: Any, sent_s: float = 1.0, rank: int = 0) -> bytes:
    return msgspec.msgpack.encode([sent_s, list(events), rank])


def recorded(name: str) -> bytes:
    return (RECORDED_PAYLOADS / f"{name}.payload").read_bytes()
