"""What a shared KV store holds: a tier that several nodes read, such as LMCache's remote backend or a Mooncake
store.

A node attached to a store finds there what any node has stored. Two sources tell what that is:

    routed     the prompts that attached nodes have prefilled: an LRU list of the store's capacity
    reported   blocks that attached engines report outside the GPU in their KV events

Engines report no evictions from a store, so the router forgets all reports once more different blocks were
reported than fit.

A hit in the store counts for every attached node, for the tokens that the node lacks, and only as much as loading
them is cheaper than prefilling them:

    saved share = 1 − load ms per token / prefill ms per token          0 if loading takes longer

Engines such as vLLM with LMCache do not compare: they load whatever the store holds. If a response reports cached
tokens that only the store had and that seemed slower to load, the router expects loads from this engine in any
case (NodeCache.loads_always). Such loads save nothing, and the router does not learn the node's prefill speed
from them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, MutableMapping, Sequence
from math import inf
from typing import Final

from warmroute._kernel import BlockIndex, Hit
from warmroute.core.node_cache import ROUTED, Accuracy, NodeCache, Tier

REPORTED: Final = 0
"""The rank of what engines report."""
NAME_PREFIX: Final = "\0store "
"""A store's place among the names of nodes, which have no control characters."""

SavedShares = Callable[[str, str, Collection[str], float], Sequence[float]]
"""Returns the saved share for a model, a store and each of some nodes at a time."""


class KvStore:
    def __init__(
        self, name: str, capacity_tokens: int, index: BlockIndex, owners: dict[int, tuple[NodeCache, int]]
    ) -> None:
        self.name = name
        self.capacity_tokens = capacity_tokens
        self._index = index
        self._owners = owners
        self._by_block_size: dict[int, NodeCache] = {}
        self.nodes: dict[str, NodeCache] = {}
        """The caches of the attached nodes."""
        self.accuracy = Accuracy()
        """Tokens that were expected from the store, and those of them that engines loaded."""

    @property
    def blocks(self) -> int:
        """Blocks that the store should hold by the prompts of attached nodes."""
        return sum(len(contents.recency) for contents in self._by_block_size.values())

    def attach(self, cache: NodeCache) -> None:
        self.nodes[cache.name] = cache
        cache.set_store(self)

    def detach(self, cache: NodeCache) -> None:
        self.nodes.pop(cache.name, None)
        cache.set_store(None)

    def capacity_blocks(self, block_size: int) -> int:
        return max(1, self.capacity_tokens // block_size)

    def resize(self, capacity_tokens: int) -> None:
        self.capacity_tokens = capacity_tokens
        for contents in self._by_block_size.values():
            contents.set_size(0, capacity_tokens)

    def close(self) -> None:
        for cache in list(self.nodes.values()):
            self.detach(cache)
        for contents in self._by_block_size.values():
            contents.close()
        self._by_block_size.clear()

    # What it holds.

    def _contents(self, block_size: int) -> NodeCache:
        contents = self._by_block_size.get(block_size)
        if contents is None:
            name, blocks = NAME_PREFIX + self.name, self.capacity_blocks(block_size)
            contents = NodeCache(name, self._index, self._owners, blocks, lambda: None)
            contents.set_size(block_size, self.capacity_tokens)
            contents.accuracy = self.accuracy
            contents.last_contact_s = inf
            contents.add_rank(REPORTED)
            self._by_block_size[block_size] = contents
        return contents

    def prefilled(self, chain: bytes, block_size: int, now_s: float) -> None:
        """An attached node has prefilled a prompt, and stores it."""
        self._contents(block_size).record_routed(chain, 0, now_s)

    def reported(self, hashes: list[int], block_size: int) -> None:
        """An attached engine has stored these blocks, given by the index's own hashes."""
        contents = self._contents(block_size)
        holder = contents.ranks[REPORTED]
        new = sum(not contents.knows(REPORTED, one) for one in hashes)
        if new and self._index.pair_count(holder) + new > self.capacity_blocks(block_size):
            self._index.clear(holder)
        contents.hashes_stored(REPORTED, None, hashes, Tier.GPU)

    def removed(self, hashes: list[int], block_size: int) -> None:
        """An attached engine reports that these blocks are gone."""
        self._contents(block_size).blocks_removed(REPORTED, list(hashes), Tier.GPU)

    # Hits.

    def held_blocks(self, rows: Sequence[tuple[int, ...]], block_size: int) -> int:
        """Return how many leading blocks of a prompt the store should hold. `rows`: the index's matches."""
        contents = self._by_block_size.get(block_size)
        if contents is None:
            return 0
        own = (contents.routed_holder, *contents.ranks.values())
        return max((row[-1] for row in rows if row[0] in own), default=0)

    def add_hits(self, found: MutableMapping[str, Hit], model: str, saved_shares: SavedShares, now_s: float) -> None:
        """Replace the store's own hit by one for each attached node."""
        in_store = found.pop(NAME_PREFIX + self.name, None)
        if in_store is None:
            return
        in_store_tokens = in_store.tokens
        trust = in_store.expected / in_store_tokens
        get = found.get
        for name, share in zip(self.nodes, saved_shares(model, self.name, self.nodes, now_s), strict=True):
            if share <= 0.0:
                if not self.nodes[name].loads_always:
                    continue
                share = 0.0
            known = get(name)
            if known is None:
                found[name] = Hit(in_store_tokens, trust * share * in_store_tokens, ROUTED)
            elif known.tokens < in_store_tokens:
                more = in_store_tokens - known.tokens
                found[name] = Hit(in_store_tokens, known.expected + trust * share * more, known.rank)
