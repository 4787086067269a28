"""The blocks that one rank has in a shared KV store, by the engine's hashes. They are no hits of the node's own, which
the store counts for it. But later events name them: as the parent of new blocks, or when the store loses them.

They lie in two holders of the index that no cache owns, a younger and an older one. Engines report no evictions from a
store, so the older one is forgotten once the younger one has half of what fits into the store.
"""

from __future__ import annotations

from array import array

from warmroute._kernel import BlockIndex
from warmroute.index.tiers import Tier


class OffloadedBlocks:
    __slots__ = ("_index", "_older", "_younger")

    def __init__(self, index: BlockIndex) -> None:
        self._index = index
        self._younger = index.add_holder()
        self._older = index.add_holder()

    def own_hash(self, engine_hash: int | bytes) -> int | None:
        """Return the index's own hash; None for a block that is not there."""
        found = self._index.block_hash(self._younger, engine_hash)
        return found if found is not None else self._index.block_hash(self._older, engine_hash)

    def add(self, engine_hashes: list[int | bytes], own_hashes: list[int], most_blocks: int) -> None:
        """`most_blocks`: what fits into the store."""
        index = self._index
        if index.pair_count(self._younger) + len(own_hashes) > most_blocks // 2:
            index.clear(self._older)
            self._younger, self._older = self._older, self._younger
        index.store_hashes(self._younger, array("Q", own_hashes), Tier.GPU, engine_hashes)

    def remove(self, engine_hash: int | bytes) -> None:
        for holder in (self._younger, self._older):
            if self._index.block_hash(holder, engine_hash) is not None:
                self._index.remove(holder, [engine_hash], Tier.GPU)
                return

    def close(self) -> None:
        self._index.remove_holder(self._younger)
        self._index.remove_holder(self._older)
