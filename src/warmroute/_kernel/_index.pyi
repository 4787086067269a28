from array import array
from collections.abc import Sequence
from typing import Final, TypeAlias

from warmroute._kernel._recency import Recency

Packed: TypeAlias = bytes | bytearray | memoryview | array[int]
"""Integers as they lie in memory: an array or a memoryview of them, or their bytes."""

EngineHash: TypeAlias = int | bytes
"""What an engine calls a block: an unsigned or signed 64-bit integer, or 1 to 64 bytes."""

NO_PARENT: Final = -1
PARENT_LOST: Final = -2
MIN_BUDGET_BYTES: Final = 65536

def chain(
    namespace: int,
    parent: int | None,
    token_ids: Packed | list[int] | tuple[int, ...],
    block_size: int,
    extra: Sequence[bytes | None] | None = None,
    /,
) -> bytes:
    """Hashes of the full blocks of token_ids, 8 bytes each, native order; what is left over after the last is ignored.

    `token_ids` are 32-bit or 64-bit integers, or bytes that hold 32-bit ones. `parent` is the hash of the block before,
    or None. `extra` has what else makes a block different (LoRA, salt, pictures): a list or tuple, one entry a block.
    """

def engine_hash(hash: EngineHash, /) -> int:
    """An engine's hash as the index knows it: 64 bits, unsigned."""

class BlockIndex:
    """Which place holds which block, within a budget of bytes.

    Hashes go in as `chain` gives them (packed), or as a list or tuple of ints. Tiers are index.Tier: 0 GPU to 3 remote.
    Input of the wrong kind or size raises TypeError or ValueError, and then nothing has changed.
    """

    def __new__(cls, budget_bytes: int) -> BlockIndex: ...
    def open_place(self, mirror: Recency | None = None, /) -> int:
        """A number for a place that holds nothing yet. OverflowError beyond 32,767 of them.

        A mirrored place holds, on the GPU, what its mirror does, without pairs of its own. `keep` brings it there; what
        the mirror is made to let go of by other calls is to be told by `remove_chain`. At the budget, the oldest go,
        from the mirror too. It is closed rather than cleared, which leaves the mirror empty. A mirror is of one place
        only, until that is closed.
        """
    def close_place(self, place: int, /) -> None:
        """Forgets the place; its number may be handed out again."""
    def clear(self, place: int, /) -> None:
        """The place holds nothing any more, and stays open."""
    def store(
        self,
        place: int,
        namespace: int,
        parent_engine_hash: EngineHash | None,
        engine_hashes: Packed | list[int] | list[bytes] | list[EngineHash] | tuple[EngineHash, ...],
        token_ids: Packed | list[int] | tuple[int, ...],
        block_size: int,
        tier: int,
        extra: Sequence[bytes | None] | None = None,
        /,
    ) -> int:
        """A store as KV events bring it. Returns how many blocks it stored (fewer than given at the budget).

        NO_PARENT where the place never stored that parent (a gap); PARENT_LOST where the budget may have cost it.
        """
    def store_known(
        self,
        place: int,
        engine_hashes: Packed | list[int] | list[bytes] | list[EngineHash] | tuple[EngineHash, ...],
        tier: int,
        /,
    ) -> int:
        """A store without tokens, of hashes that the place has stored before (in a nearer tier); how many it knew."""
    def store_chain(
        self,
        place: int,
        hashes: Packed | list[int] | tuple[int, ...],
        tier: int,
        engine_hashes: Packed | list[int] | list[bytes] | list[EngineHash] | tuple[EngineHash, ...] | None = None,
        /,
    ) -> int:
        """A store by our own hashes. `remove` takes it back by engine hash; `remove_chain`, where none were given."""
    def keep(self, place: int, hashes: bytes, stamp: float, /) -> bytes:
        """A prompt is used at a mirrored place: `touch` of its mirror. Returns the hashes that are new there.

        The last of them are not kept, in the mirror either, where the budget refuses them.
        """
    def remove(
        self,
        place: int,
        engine_hashes: Packed | list[int] | list[bytes] | list[EngineHash] | tuple[EngineHash, ...],
        tier: int,
        /,
    ) -> int:
        """Takes back one store of each engine hash; returns how many of them were known."""
    def remove_chain(self, place: int, hashes: Packed | list[int] | tuple[int, ...], tier: int, /) -> int:
        """Takes back one `store_chain` without engine hashes of each hash, or what a mirror let go of; returns how many
        of them were known."""
    def match(self, hashes: Packed | list[int] | tuple[int, ...], /) -> list[tuple[int, int, int, int, int]]:
        """(place, blocks on GPU, … with CPU, … with disk, … with remote) for every place that holds the first block.

        Each number is how many leading blocks the place holds without a gap in this tier and the nearer ones.
        """
    def our_hash(self, place: int, engine_hash: EngineHash, /) -> int | None: ...
    def holdings(self, place: int, /) -> list[tuple[int, int, int, int, int]]:
        """(our hash, count by tier…) for every pair of the place. Takes as long as the place is large."""
    def pairs_of(self, place: int, /) -> int: ...
    def sweep(self, max_pairs: int, /) -> int:
        """Sweeps up to so many pairs of cleared places, for idle moments; returns how many are left."""
    def stats(self) -> dict[str, int]:
        """Sizes and counters: budget_bytes, bytes, charged_bytes, pairs, blocks, sets, aliases, unswept_pairs, evicted,
        refused, unknown_removes, unresolved, saturated, conflicts."""
