"""Who may know of which blocks. Engines do not know tenants: a block that an engine tells of may be anybody's. So a
tenant (or a group of tenants that share) is given a place of its own in the index, with the blocks of the prompts that
it sent through this router. It may know of a node's blocks as far as it sent them itself; and of what follows (answers,
which nobody sent yet) where nobody else has sent even the first block, and so can't have been given that answer.

    prompt of A     [b1 b2 b3 b4 | a5 a6]        told by a node: b1 … a6 (a5, a6: blocks of the answer)
    A's next turn   [b1 b2 b3 b4   a5 a6 b7]     A sent 4, B nothing of it: all 6 count; B sent b1: 4
    B's prompt      [b1 c2 …]                    B sent 1: at most 1 counts, whoever else had b1 in the cache
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from warmroute._kernel._index import BlockIndex
from warmroute._kernel._recency import Recency
from warmroute.index.tiers import Tier

KEPT_BLOCKS: Final = 1 << 20
"""Blocks remembered of all tenants together; those of the tenant that has most of them go first."""
BYTES_A_BLOCK: Final = 256
"""Of a small index there are fewer of them: one for so many bytes of its budget."""
WHOLE: Final = 1 << 62

Row = tuple[int, int, int, int, int]


class _Sent:
    """What one tenant sent."""

    __slots__ = ("place", "recency")

    def __init__(self, index: BlockIndex, most_blocks: int) -> None:
        self.recency = Recency(most_blocks)
        self.place = index.open_place(self.recency)


class Sharing:
    def __init__(self, index: BlockIndex) -> None:
        self._index = index
        self._most = min(KEPT_BLOCKS, index.stats()["budget_bytes"] // BYTES_A_BLOCK)
        self._sent: dict[str, _Sent] = {}
        self._places: set[int] = set()
        self._kept = 0

    def sent(self, sharing: str, chain: bytes, now_s: float) -> None:
        one = self._sent.get(sharing)
        if one is None:
            one = self._sent[sharing] = _Sent(self._index, self._most)
            self._places.add(one.place)
        before = len(one.recency)
        self._index.keep(one.place, chain, now_s)
        self._kept += len(one.recency) - before
        if self._kept > self._most:
            self._make_room()

    def _make_room(self) -> None:
        self._kept = sum(len(one.recency) for one in self._sent.values())  # the index may have let some go
        if self._kept <= self._most:
            return
        largest = max(self._sent.values(), key=lambda one: len(one.recency))
        before = len(largest.recency)
        evicted = largest.recency.resize(max(1, before - (self._kept - self._most)))
        largest.recency.resize(self._most)
        self._index.remove_chain(largest.place, evicted, Tier.GPU)
        self._kept += len(largest.recency) - before

    def owned_depth(self, sharing: str, rows: Sequence[Row]) -> int:
        """How many leading blocks of a match may count for it."""
        one = self._sent.get(sharing)
        if one is None:
            return 0
        mine, alone = 0, True
        places = self._places
        for place, depth, *_ in rows:
            if place == one.place:
                mine = depth
            elif place in places:
                alone = False
        return WHOLE if mine and alone else mine
