"""Random draws that the generators share."""

from __future__ import annotations

from bisect import bisect
from itertools import accumulate
from random import Random


def draw_length(random: Random, mean: int, spread: float) -> int:
    """Return a length drawn uniformly from `mean` × (1 ± `spread`), at least one token."""
    return max(1, round(mean * (1.0 - spread + 2.0 * spread * random.random()))) if spread else max(1, mean)


class Popularity:
    """Picks one of `count` items by Zipf's law: the k-th has the weight 1/k^exponent. Exponent 0 is uniform."""

    __slots__ = ("_sums",)

    def __init__(self, count: int, exponent: float) -> None:
        self._sums = list(accumulate(rank**-exponent for rank in range(1, count + 1)))

    def pick(self, random: Random) -> int:
        return bisect(self._sums, random.random() * self._sums[-1], hi=len(self._sums) - 1)
