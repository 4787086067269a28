from array import array
from typing import TypeAlias

Packed: TypeAlias = bytes | bytearray | memoryview | array[int]
"""Block hashes of 8 bytes each, as `chain` gives them; the first block first."""

Hashes: TypeAlias = bytes
"""The same, as it comes back."""

class Recency:
    """An engine's KV blocks by last use, within a number of blocks: what it would still have, and what it let go.

    Memory follows what is held: under 32 bytes a block, and up to 60 kB of slack. Entries lie in segments, the table
    is a linear hash that grows one chain at a time: there is no rehash, and a call takes as long as the blocks it is
    given and those it evicts.
    Input of the wrong kind or size raises TypeError or ValueError, and then nothing has changed.
    """

    def __new__(cls, capacity: int) -> Recency: ...
    def __len__(self) -> int:
        """Blocks held, with and without names."""
    def touch(self, hashes: Packed, stamp: float, /) -> tuple[Hashes, Hashes]:
        """A prompt becomes the most recent of all, its first block the most. Returns (new, evicted).

        `new` were not held before, in the prompt's order; `evicted` had to go, oldest first, and none of them was kept
        of this prompt. A hash that comes twice counts where it comes first. Beyond `capacity` of them, none is kept.
        """
    def push(self, count: int, stamp: float, /) -> Hashes:
        """So many blocks without names become the most recent. Returns the hashes evicted, oldest first."""
    def drop(self, hashes: Packed, /) -> int:
        """Forgets these. Returns how many of them were held."""
    def resize(self, capacity: int, /) -> Hashes:
        """Returns the hashes evicted, oldest first."""
    def clear(self) -> None:
        """Forgets all, and gives the memory back."""
    def held(self, hashes: Packed, /) -> int:
        """How many leading ones are held. Does not count as a use."""
    def stamp_of(self, hash: Packed, /) -> float | None:
        """When the block was last touched, exactly as given; None where it is not held."""
    def stamps(self, hashes: Packed, depth: int, step: int, latest: float, /) -> list[tuple[int, float]]:
        """Of the last of each `step` blocks of the first `depth`: number and stamp, where held and not touched after
        `latest`."""
    @staticmethod
    def sample(hashes: Packed, /) -> Hashes:
        """One in 64 of them, chosen by the hash: the same ones in every prompt that has them."""
    @property
    def oldest(self) -> float | None:
        """Stamp of what would be evicted next; None where nothing is held."""
    @property
    def capacity(self) -> int: ...
    @property
    def bytes(self) -> int:
        """Memory allocated."""
