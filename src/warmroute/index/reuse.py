"""How likely a block that was not used for a while is used again, by how long: learned from the traffic.

Some blocks are looked at, chosen by their hash. A block last used `age` ago and used now is a reuse at that age. Of
all the uses that were not followed by another one within `age`, the share that was followed by one later is the chance.
"""

from __future__ import annotations

from array import array
from math import log2
from typing import Final

from warmroute._kernel._recency import Recency

REMEMBERED_BLOCKS: Final = 1 << 16
MARKS: Final = (b"\x00", b"\x40", b"\x80", b"\xc0")
"""Blocks whose hash begins so are looked at, one in 64: the same ones in every prompt that has them."""
BUCKETS: Final = 32
FIRST_S: Final = 0.25
"""The first bucket ends here; each one after it is √2 times as long ago… as the one before."""
FADE: Final = 0.9998


class Reuse:
    def __init__(self) -> None:
        self._recency = Recency(REMEMBERED_BLOCKS)
        self._reused = [0.0] * BUCKETS
        self._uses = 0.0
        self.chances = array("d", [0.0] * BUCKETS)
        """By the bucket of its age."""
        self._until_update = 1

    def saw(self, chain: bytes, now_s: float) -> None:
        """A prompt came, whoever takes it."""
        recency, reused = self._recency, self._reused
        self._uses *= FADE
        first_bytes = chain[::8]
        for mark in MARKS:
            at = first_bytes.find(mark)
            while at >= 0:
                block = chain[at * 8 : at * 8 + 8]
                stamp = recency.stamp_of(block)
                if stamp is not None:
                    reused[_bucket(now_s - stamp)] += 1.0
                self._uses += 1.0
                recency.touch(block, now_s)
                at = first_bytes.find(mark, at + 1)
        self._until_update -= 1
        if self._until_update <= 0:
            self._until_update = 32
            self._update()

    def _update(self) -> None:
        reused = self._reused
        total = sum(reused)
        never = max(0.0, self._uses - total)
        later = 0.0
        for bucket in range(BUCKETS - 1, -1, -1):
            later += reused[bucket]
            self.chances[bucket] = later / (later + never + 1.0)
            reused[bucket] *= FADE**32

    def chance(self, age_s: float) -> float:
        """That a block unused for so long is used again."""
        return self.chances[_bucket(age_s)]


def _bucket(age_s: float) -> int:
    if age_s <= FIRST_S:
        return 0
    return min(BUCKETS - 1, int(2.0 * log2(age_s / FIRST_S)) + 1)
