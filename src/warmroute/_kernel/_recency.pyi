from array import array
from typing import TypeAlias

Packed: TypeAlias = bytes | bytearray | memoryview | array[int]
"""Hashes of a prompt's blocks, 8 bytes each, as `chain` gives them: the first block first. A hash says all those before
it, and none comes twice. So they are always given from the prompt's beginning."""

Hashes: TypeAlias = bytes
"""The same, as it comes back."""

class Recency:
    """An engine's KV blocks by last use, within a number of blocks: what it would still have, and what it let go.

    Blocks that follow one another and were last used together are one piece. Memory follows what is held: 8 bytes a
    block and 64 a piece (48 for one of a single block), and up to 60 kB of slack. Pieces lie in segments, the table is
    a linear hash that grows one chain at a time: there is no rehash, and a call takes as long as the pieces it is given
    and those it evicts.
    Input of the wrong kind or size raises TypeError or ValueError, and then nothing has changed.
    """

    def __new__(cls, capacity: int) -> Recency: ...
    def __len__(self) -> int:
        """Blocks held, with and without names."""
    def touch(self, hashes: Packed, stamp: float, /) -> tuple[Hashes, Hashes]:
        """A prompt becomes the most recent of all, its first block the most. Returns (new, evicted).

        `new` were not held before, in the prompt's order; `evicted` had to go, oldest first, and none of them was kept
        of this prompt. Beyond `capacity` of them, none is kept.
        """
    def push(self, count: int, stamp: float, /) -> Hashes:
        """So many blocks without names become the most recent. Returns the hashes evicted, oldest first."""
    def drop(self, hashes: Packed, dropped: Packed, /) -> int:
        """Forgets some of a prompt's blocks, given in the prompt's order. Returns how many of them were held."""
    def resize(self, capacity: int, /) -> Hashes:
        """Returns the hashes evicted, oldest first."""
    def clear(self) -> None:
        """Forgets all, and gives the memory back."""
    def held(self, hashes: Packed, /) -> int:
        """How many leading ones are held. Does not count as a use."""
    def uses(self, hashes: Packed, depth: int, latest: float, /) -> list[tuple[int, int, float]]:
        """When the first `depth` blocks were last touched, as (first, end, stamp) of those that were touched together:
        where held and not touched after `latest`."""
    @staticmethod
    def sample(hashes: Packed, /) -> Hashes:
        """One in 64 of them, chosen by the hash: the same ones in every prompt that has them."""
    @property
    def oldest(self) -> float | None:
        """Stamp of what would be evicted next; None where nothing is held."""
    @property
    def room(self) -> tuple[int, float]:
        """Blocks that can come before one has to go, and the stamp of that one; nan where nothing is held."""
    @property
    def capacity(self) -> int: ...
    @property
    def bytes(self) -> int:
        """Memory allocated."""
