"""How likely a block that was not used for a while is used again, by how long: learned from the traffic.

One block in 64 is looked at, chosen by its hash. A block last used `age` ago and used now is a reuse at that age. Of
all the uses that were not followed by another one within `age`, the share that was followed by one later is the chance.
"""

from __future__ import annotations

from array import array
from math import inf, log2
from typing import Final

from warmroute._kernel._recency import Recency

REMEMBERED_BLOCKS: Final = 1 << 16
BUCKETS: Final = 32
FIRST_S: Final = 0.25
"""The first bucket ends here; each one after it is √2 times as long ago… as the one before."""
FADE: Final = 0.9998
UPDATED_EVERY: Final = 32
"""Prompts, after which the chances are worked out anew."""
FADED: Final = FADE**UPDATED_EVERY

sample_of = Recency.sample


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
        self._uses *= FADE
        sample = sample_of(chain)
        if sample:
            self._saw_blocks(sample, now_s)
        left = self._until_update = self._until_update - 1
        if left <= 0:
            self._until_update = UPDATED_EVERY
            self._update()

    def _saw_blocks(self, sample: bytes, now_s: float) -> None:
        recency, reused = self._recency, self._reused
        blocks = len(sample) // 8
        for first, end, stamp in recency.uses(sample, blocks, inf):
            reused[_bucket(now_s - stamp)] += end - first
        self._uses += blocks
        recency.touch(sample, now_s)

    def _update(self) -> None:
        reused, chances = self._reused, self.chances
        total = sum(reused)
        never = max(0.0, self._uses - total)
        later = 0.0
        for bucket in range(BUCKETS - 1, -1, -1):
            uses = reused[bucket]
            if uses:
                later += uses
                reused[bucket] = uses * FADED
            chances[bucket] = later / (later + never + 1.0)

    def chance(self, age_s: float) -> float:
        """That a block unused for so long is used again."""
        return self.chances[_bucket(age_s)]

    def share_within(self, age_s: float) -> float:
        """Of all uses of blocks, the share that a cache would have which keeps what was used that long ago."""
        if not self._uses:
            return 0.0
        bucket = _bucket(age_s)
        whole = sum(self._reused[:bucket])
        first_s = FIRST_S * 2.0 ** ((bucket - 1) / 2.0) if bucket else 0.0
        last_s = FIRST_S * 2.0 ** (bucket / 2.0)
        part = min(1.0, max(0.0, (age_s - first_s) / (last_s - first_s)))
        return float(min(1.0, (whole + self._reused[bucket] * part) / self._uses))


def _bucket(age_s: float) -> int:
    if age_s <= FIRST_S:
        return 0
    return min(BUCKETS - 1, int(2.0 * log2(age_s / FIRST_S)) + 1)
