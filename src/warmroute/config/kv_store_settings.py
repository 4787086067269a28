"""Settings of shared KV stores, such as LMCache's remote backend or a Mooncake store."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated

from msgspec import Meta

from warmroute.config.node_settings import NodeConfig
from warmroute.config.section import Count, Section


class KvStoreConfig(Section, frozen=True):
    """A KV store that several nodes read and write. What one of them has prefilled, the others can load."""

    name: Annotated[str, Meta(min_length=1, description="Name, for `nodes.kv_store` and the metrics.")]
    capacity_tokens: Annotated[
        Count, Meta(description="Tokens that fit: the store's bytes divided by the bytes of KV cache per token.")
    ]
    island: Annotated[
        str, Meta(description="All nodes of this island use the store. Empty: those with `nodes.kv_store`.")
    ] = ""


def kv_store_of(node: NodeConfig, stores: Sequence[KvStoreConfig]) -> str:
    """Return the name of the node's store; empty if it has none."""
    return node.kv_store or next((one.name for one in stores if one.island and one.island == node.island), "")


def kv_store_problems(stores: Sequence[KvStoreConfig], nodes: Sequence[NodeConfig]) -> Iterator[str]:
    """Find values that contradict each other."""
    names = [store.name for store in stores]
    for name in dict.fromkeys(names):
        if names.count(name) > 1:
            yield f"kv_stores: {name!r} is defined twice"
    islands = [store.island for store in stores if store.island]
    for island in dict.fromkeys(islands):
        if islands.count(island) > 1:
            yield f"kv_stores: two stores have the island {island!r}"
    for node in nodes:
        if node.kv_store and node.kv_store not in names:
            yield f"nodes.kv_store: no [[kv_stores]] has the name {node.kv_store!r}"
