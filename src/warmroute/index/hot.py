"""Hot prefixes: beginnings that many prompts share, with one of the prompts that has them, so that they can be put
into another cache before they are missed.

Of each prompt the blocks at a few depths are counted (1, 2, 3, 4, 6, 8, 12, … blocks), in a table of bounded size that
forgets the least used first (Metwally's space saving). A use a minute ago counts 1/e of one now.
"""

from __future__ import annotations

from math import exp
from typing import Final

import msgspec

from warmroute.index.lookup import Lookup

KEPT_S: Final = 60.0
REMEMBERED: Final = 4096
MOST_HOT: Final = 256
"""Of so many an example is kept."""
DEPTHS: Final = tuple(sorted({max(1, round(2.0 ** (step / 2))) for step in range(32)} | {3, 6, 12}))
NEARLY_ALL: Final = 0.8
"""A longer beginning with so much of a shorter one's use stands for it."""
HOT_USES: Final = 3.0
"""Fewer uses of late make nothing hot: a conversation is not, an application is."""


class HotPrefix(msgspec.Struct, frozen=True):
    chain: bytes
    """Its blocks."""
    uses: float
    """Of late."""
    example: Lookup
    """The beginning of a prompt that has it."""
    tokens: int


class _Count:
    __slots__ = ("at_s", "chain", "depth", "example", "size", "uses")

    def __init__(self, at_s: float, depth: int, size: int) -> None:
        self.uses = 1.0
        self.at_s = at_s
        self.depth = depth
        self.size = size
        self.chain = b""
        """Kept, with the example, only of what is hot."""
        self.example: Lookup | None = None

    def now(self, now_s: float) -> float:
        return self.uses * exp(min(0.0, self.at_s - now_s) / KEPT_S)


class HotPrefixes:
    def __init__(self) -> None:
        self._counts: dict[bytes, _Count] = {}
        self._kept = 0
        """Counts that have an example."""

    def __len__(self) -> int:
        return len(self._counts)

    def saw(self, chain: bytes, block_size: int, prompt: Lookup, now_s: float) -> None:
        """A prompt came; its blocks are these. Only of what is hot something is kept of it."""
        counts = self._counts
        blocks = len(chain) // 8
        for depth in DEPTHS:
            if depth > blocks:
                break
            key = chain[depth * 8 - 8 : depth * 8]
            found = counts.get(key)
            if found is None:
                if len(counts) >= REMEMBERED:
                    self._make_room(now_s)
                    counts = self._counts
                counts[key] = _Count(now_s, depth, block_size)
                continue
            found.uses = found.now(now_s) + 1.0
            found.at_s = now_s
            if found.example is None and found.uses >= HOT_USES and self._kept < MOST_HOT:
                found.example = prompt.beginning(depth * block_size)
                found.chain = chain[: depth * 8]
                self._kept += 1

    def _make_room(self, now_s: float) -> None:
        """Forgets the less used half, and the examples of what has cooled down."""
        ranked = sorted(self._counts.items(), key=lambda item: item[1].now(now_s), reverse=True)
        self._counts = dict(ranked[: REMEMBERED // 2])
        self._cool(now_s)

    def _cool(self, now_s: float) -> None:
        self._kept = 0
        for count in self._counts.values():
            if count.example is not None:
                if count.now(now_s) < HOT_USES / 2:
                    count.example, count.chain = None, b""
                else:
                    self._kept += 1

    def hottest(self, most: int, now_s: float) -> list[HotPrefix]:
        """Those whose loss would cost the most work, none of them the beginning of another that is used as much."""
        self._cool(now_s)
        ranked = [
            (uses, count, count.example)
            for count in self._counts.values()
            if count.example is not None and (uses := count.now(now_s)) >= HOT_USES
        ]
        ranked.sort(key=lambda item: item[1].depth, reverse=True)
        covered: dict[bytes, float] = {}
        """For each beginning of what was taken: how much of its use that stands for."""
        taken: list[HotPrefix] = []
        for uses, count, example in ranked:
            chain = count.chain
            if uses * NEARLY_ALL <= covered.get(chain[-8:], 0.0):
                continue
            taken.append(HotPrefix(chain, uses, example, count.depth * count.size))
            for depth in DEPTHS:
                if depth > count.depth:
                    break
                key = chain[depth * 8 - 8 : depth * 8]
                covered[key] = covered.get(key, 0.0) + uses
        taken.sort(key=lambda prefix: prefix.uses * prefix.tokens, reverse=True)
        return taken[:most]
