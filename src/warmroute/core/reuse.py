"""How likely a block or prefix is used again."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from math import inf, log2
from typing import Final

from warmroute._kernel import REUSE_FIRST_S, Recency

# The probability that a block is used again, by the time since its last use, learned from the traffic.
#
# The router samples one block in 64, chosen by its hash. A block that was last used `age` ago and is used now is a
# reuse at that age. The probability at `age` is the share of uses followed by a later use, among all uses that were not
# followed by another one within `age`.

MAX_BLOCKS: Final = 1 << 16
BUCKETS: Final = 32
FADE: Final = 0.9998
UPDATE_EVERY: Final = 32
"""Prompts between two updates of the probabilities."""
UPDATE_FADE: Final = FADE**UPDATE_EVERY

sample_of = Recency.sample


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
        recency, reused = self._recency, self._reused
        blocks = known = 0
        sample = sample_of(chain)
        if sample:
            blocks = len(sample) // 8
            for first, end, stamp in recency.last_uses(sample, blocks, inf):
                age_s = now_s - stamp
                bucket = 0
                if age_s > REUSE_FIRST_S:
                    bucket = min(BUCKETS - 1, int(2.0 * log2(age_s / REUSE_FIRST_S)) + 1)
                reused[bucket] += end - first
                known += end - first
            self._uses += blocks
            recency.touch(sample, now_s)
        left = self._until_update = self._until_update - 1
        if left <= 0:
            self._until_update = UPDATE_EVERY
            self._update()
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


# How often prefixes are used: the mean time between the requests for each of them.
#
# A prefix is known by its last block. One short interval says little: of requests that come at random, every third pair
# is less than half the mean interval apart. So the router averages over several uses, and a prefix that it sees for the
# first time counts as one that is used every FIRST_INTERVAL_S. The table has a bounded size: prefixes that were not
# used for long leave it, many at once, so that a request costs no search.

FIRST_INTERVAL_S: Final = 10.0
WEIGHT: Final = 0.3
"""Of the latest interval in the average."""
MAX_PREFIXES: Final = 4096


class PrefixUses:
    def __init__(self) -> None:
        self._latest: dict[bytes, tuple[float, float]] = {}
        """Last block → when the prefix was last used, and the mean interval."""
        self._earlier: dict[bytes, tuple[float, float]] = {}
        """The same, of prefixes that were used before those in `_latest`. Dropped when `_latest` is full."""

    def __len__(self) -> int:
        return len(self._latest.keys() | self._earlier.keys())

    def record(self, block: bytes, now_s: float) -> None:
        """A request for the prefix that ends with this block goes to a node."""
        known, interval_s = self._latest.get(block) or self._earlier.get(block), FIRST_INTERVAL_S
        if known is not None:
            last_s, interval_s = known
            interval_s += WEIGHT * (max(0.0, now_s - last_s) - interval_s)
        self._latest[block] = (now_s, interval_s)
        if len(self._latest) >= MAX_PREFIXES // 2:
            self._earlier, self._latest = self._latest, {}

    def interval_s(self, block: bytes, now_s: float) -> float | None:
        """Return the mean time between two uses, if the prefix is used now; None if it was never used."""
        known = self._latest.get(block) or self._earlier.get(block)
        return _average(known, now_s) if known is not None else None


def _average(known: tuple[float, float], now_s: float) -> float:
    last_s, interval_s = known
    return interval_s + WEIGHT * (max(0.0, now_s - last_s) - interval_s)
