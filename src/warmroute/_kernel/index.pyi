from collections.abc import Sequence
from typing import Final, TypeAlias

from warmroute._kernel.block_hash import EngineHash, EngineHashes, Hashes, TokenIds
from warmroute._kernel.recency import Recency

MatchRow: TypeAlias = tuple[int, int, int, int, int]
"""A holder, and how many leading blocks it has on GPU, with CPU, with disk, with remote storage."""

MIN_BUDGET_BYTES: Final[int]
UNKNOWN_PARENT: Final[int]
"""As the result of `BlockIndex.store`: the holder never stored that parent, so events were lost."""
EVICTED_PARENT: Final[int]
"""As the result of `BlockIndex.store`: the index may have evicted that parent."""
TIER_GPU: Final[int]
TIER_CPU: Final[int]
TIER_DISK: Final[int]
TIER_REMOTE: Final[int]

class BlockIndex:
    """Which holder has which block, within a budget of bytes. A holder is one cache, and has a number as its id.

    Arguments of the wrong type or size raise TypeError or ValueError, and then nothing has changed.
    """

    def __new__(cls, budget_bytes: int) -> BlockIndex: ...
    def add_holder(self, recency: Recency | None = None, /) -> int:
        """Return the id of a new holder that has nothing yet. OverflowError beyond 32,767 of them.

        With a recency list (an LRU holder), the holder has the blocks that the list has, all on the GPU. `touch` adds
        blocks. What other calls make the list evict has to be removed by `remove_hashes`. At the budget, the oldest
        blocks leave the list, too. An LRU holder can't be cleared; removing it leaves its list empty. A list belongs to
        one holder.
        """
    def remove_holder(self, holder: int, /) -> None:
        """Forget a holder; its id may be given to another one."""
    def clear(self, holder: int, /) -> None:
        """Forget everything that a holder has."""
    def store(
        self,
        holder: int,
        namespace: int,
        parent_engine_hash: EngineHash | None,
        engine_hashes: EngineHashes,
        token_ids: TokenIds,
        block_size: int,
        tier: int,
        extra: Sequence[bytes | None] | None = None,
        /,
    ) -> int:
        """Store blocks as KV events report them; return how many were stored (fewer than given at the budget).

        UNKNOWN_PARENT or EVICTED_PARENT if the holder does not have the parent.
        """
    def store_known(self, holder: int, engine_hashes: EngineHashes, tier: int, /) -> int:
        """Store engine hashes, which the holder has stored before, in another tier; return how many were known."""
    def store_hashes(self, holder: int, hashes: Hashes, tier: int, engine_hashes: EngineHashes | None = None, /) -> int:
        """Store blocks by our own hashes. `remove` takes them back by engine hash; without those, `remove_hashes`."""
    def touch(self, holder: int, hashes: bytes, stamp: float, /) -> bytes:
        """Touch a prompt in a holder's recency list; return the hashes that are new there.

        If the budget refuses the last of them, these are neither in the list nor in the index.
        """
    def remove(self, holder: int, engine_hashes: EngineHashes, tier: int, /) -> int:
        """Take back one store of each engine hash; return how many of them were known."""
    def remove_hashes(self, holder: int, hashes: Hashes, tier: int, /) -> int:
        """Take back one `store_hashes` of each hash, or what a recency list evicted; return how many were known."""
    def match(self, hashes: Hashes, /) -> list[MatchRow]:
        """Return a row for every holder of the first block: how many leading blocks it has, by tier.

        Each number counts the blocks without a gap in this tier and the nearer ones.
        """
    def block_hash(self, holder: int, engine_hash: EngineHash, /) -> int | None:
        """Return our hash for an engine hash of the holder; None if it has none."""
    def holdings(self, holder: int, /) -> list[tuple[int, int, int, int, int]]:
        """Return (our hash, stores by tier…) for every pair of the holder. Takes time for all of them."""
    def pair_count(self, holder: int, /) -> int:
        """Return how many pairs the holder has: engine hashes, or blocks of its recency list."""
    def sweep(self, max_pairs: int, /) -> int:
        """Sweep up to this number of pairs of cleared or removed holders; return how many are left."""
    def stats(self) -> dict[str, int]:
        """Return sizes and counters: budget_bytes, bytes, charged_bytes, pairs, blocks, sets, aliases, unswept_pairs,
        evicted, refused, unknown_removes, unresolved, saturated, conflicts."""
