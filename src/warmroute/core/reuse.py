"""The probability that a block is used again, by the time since its last use, learned from the traffic.

The router samples one block in 64, chosen by its hash. A block that was last used `age` ago and is used now is a reuse
at that age. The probability at `age` is the share of uses followed by a later use, among all uses that were not
followed by another one within `age`.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from math import inf, log2
from typing import Final

from warmroute._kernel import REUSE_FIRST_S, Recency

MAX_BLOCKS: Final = 1 << 16
BUCKETS: Final = 32
FADE: Final = 0.9998
UPDATE_EVERY: Final = 32
"""Prompts between two updates of the probabilities."""
UPDATE_FADE: Final = FADE**UPDATE_EVERY

sample_of = Recency.sample
_NONE: Final = (0, 0)


class Reuse:
    def __init__(self) -> None:
        self._recency = Recency(MAX_BLOCKS)
        self._reused = [0.0] * BUCKETS
        self._uses = 0.0
        self.chances = array("d", [0.0] * BUCKETS)
        """Probability by bucket of age."""
        self._until_update = 1

    def record(self, chain: bytes, now_s: float) -> tuple[int, int]:
        """Count the blocks of a prompt, whichever node serves it. Return how many of them were sampled, and how many of
        these an earlier prompt had."""
        self._uses *= FADE
        sample = sample_of(chain)
        counts = self._record_blocks(sample, now_s) if sample else _NONE
        left = self._until_update = self._until_update - 1
        if left <= 0:
            self._until_update = UPDATE_EVERY
            self._update()
        return counts

    def _record_blocks(self, sample: bytes, now_s: float) -> tuple[int, int]:
        recency, reused = self._recency, self._reused
        blocks, known = len(sample) // 8, 0
        for first, end, stamp in recency.last_uses(sample, blocks, inf):
            reused[_bucket(now_s - stamp)] += end - first
            known += end - first
        self._uses += blocks
        recency.touch(sample, now_s)
        return blocks, known

    def _update(self) -> None:
        reused, chances = self._reused, self.chances
        total = sum(reused)
        never = max(0.0, self._uses - total)
        later = 0.0
        for bucket in range(BUCKETS - 1, -1, -1):
            uses = reused[bucket]
            if uses:
                later += uses
                reused[bucket] = uses * UPDATE_FADE
            chances[bucket] = later / (later + never + 1.0)

    def export(self) -> tuple[float, tuple[float, ...], list[tuple[float, bytes]]]:
        """Return the uses, the reuses by age, and the sampled blocks, for another process."""
        return self._uses, tuple(self._reused), self._recency.pieces()

    def restore(self, uses: float, reused: Sequence[float], pieces: Iterable[tuple[float, bytes]]) -> None:
        """Take over what another process has learned, unless this one has learned something already."""
        if self._uses or len(reused) != BUCKETS:
            return
        self._uses, self._reused = uses, list(reused)
        for stamp_s, hashes in pieces:
            self._recency.touch(hashes, stamp_s)
        self._update()

    def chance(self, age_s: float) -> float:
        """Return the probability that a block unused for `age_s` is used again."""
        return self.chances[_bucket(age_s)]

    def share_within(self, age_s: float) -> float:
        """Return the hit rate of a cache that keeps every block for `age_s` after its last use."""
        if not self._uses:
            return 0.0
        bucket = _bucket(age_s)
        whole = sum(self._reused[:bucket])
        first_s = REUSE_FIRST_S * 2.0 ** ((bucket - 1) / 2.0) if bucket else 0.0
        last_s = REUSE_FIRST_S * 2.0 ** (bucket / 2.0)
        part = min(1.0, max(0.0, (age_s - first_s) / (last_s - first_s)))
        return float(min(1.0, (whole + self._reused[bucket] * part) / self._uses))


def _bucket(age_s: float) -> int:
    if age_s <= REUSE_FIRST_S:
        return 0
    return min(BUCKETS - 1, int(2.0 * log2(age_s / REUSE_FIRST_S)) + 1)
