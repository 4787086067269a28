from warmroute._kernel.block_hash import Packed

class Recency:
    """An engine's KV blocks by last use, within a number of blocks: what it should still have, and what it evicted.

    Hashes are always given from a prompt's first block on, without repetition. Blocks that follow one another and were
    last used together are one piece. Memory: 8 bytes a block and 64 a piece (48 for a piece of one block), and up to 60
    kB more. A call takes time for the pieces it is given and those it evicts. Arguments of the wrong type or size raise
    TypeError or ValueError, and then nothing has changed.
    """

    def __new__(cls, capacity: int) -> Recency: ...
    def __len__(self) -> int:
        """Return the number of blocks, with and without hashes."""
    def touch(self, hashes: Packed, stamp: float, /) -> tuple[bytes, bytes]:
        """Make a prompt the most recent, its first block the most; return (new hashes, evicted hashes).

        New hashes were not held before, and are in the prompt's order. Evicted hashes are in the order of eviction, and
        never of this prompt. Of a prompt longer than `capacity`, only the first blocks are held.
        """
    def add_anonymous(self, count: int, stamp: float, /) -> bytes:
        """Add blocks without hashes as the most recent; return the evicted hashes, oldest first."""
    def drop(self, hashes: Packed, dropped: Packed, /) -> int:
        """Forget some of a prompt's blocks, given in the prompt's order; return how many of them were held."""
    def resize(self, capacity: int, /) -> bytes:
        """Change the capacity; return the evicted hashes, oldest first."""
    def clear(self) -> None:
        """Forget everything, and free the memory."""
    def pieces(self) -> list[tuple[float, bytes]]:
        """Return all blocks with hashes, as (stamp, hashes) of each piece, the oldest first. Touching the pieces in
        this order fills an empty list alike."""
    def match(self, hashes: Packed, /) -> int:
        """Return how many leading blocks are held. Does not count as a use."""
    def last_uses(self, hashes: Packed, depth: int, latest: float, /) -> list[tuple[int, int, float]]:
        """Return when the first `depth` blocks were last touched, as (first, end, stamp) of those touched together.

        Blocks that are not held, or were touched after `latest`, are left out.
        """
    @staticmethod
    def sample(hashes: Packed, /) -> bytes:
        """Return one in 64 of the hashes, chosen by the hash: the same ones in every prompt that has them."""
    @property
    def oldest(self) -> float | None:
        """The stamp of the block that would be evicted next; None if nothing is held."""
    @property
    def room(self) -> tuple[int, float]:
        """(blocks that fit before one is evicted, the stamp of that one); nan if nothing is held."""
    @property
    def capacity(self) -> int: ...
    @property
    def bytes(self) -> int:
        """Memory allocated."""
