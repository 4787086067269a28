"""A plain recency list as the reference of the compiled one, and prompts for both."""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Callable
from itertools import count, pairwise
from math import inf

from warmroute._kernel import Recency


def packed(*hashes: int) -> bytes:
    return struct.pack(f"={len(hashes)}Q", *hashes)


def unpacked(hashes: bytes) -> list[int]:
    return list(struct.unpack(f"={len(hashes) // 8}Q", hashes))


class Tree:
    """Makes prompts of block hashes. Two prompts share hashes exactly as far as their prefixes are equal."""

    def __init__(self, hash_of: Callable[[int], int] = lambda number: number) -> None:
        self.numbers: dict[tuple[int | None, int], int] = {}
        self.hash_of = hash_of

    def prompt(self, blocks: list[int]) -> list[int]:
        prompt: list[int] = []
        before: int | None = None
        for block in blocks:
            before = self.numbers.setdefault((before, block), self.hash_of(len(self.numbers)))
            prompt.append(before)
        return prompt


class ReferenceRecency:
    """The oldest first. An anonymous block has a key that equals no hash."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.stamps: OrderedDict[int | str, float] = OrderedDict()
        self.anonymous = (f"anonymous {n}" for n in count())

    def touch(self, hashes: list[int], stamp: float) -> tuple[list[int], list[int]]:
        kept = hashes[: self.capacity]
        new = [hash for hash in kept if hash not in self.stamps]
        for hash in reversed(kept):
            self.stamps[hash] = stamp
            self.stamps.move_to_end(hash)
        return new, self.evict()

    def add_anonymous(self, n: int, stamp: float) -> list[int]:
        for _ in range(min(n, self.capacity)):
            self.stamps[next(self.anonymous)] = stamp
        return self.evict()

    def drop(self, hashes: list[int], dropped: list[int]) -> int:
        assert set(dropped) <= set(hashes)
        return sum(self.stamps.pop(hash, None) is not None for hash in dropped)

    def resize(self, capacity: int) -> list[int]:
        self.capacity = capacity
        return self.evict()

    def match(self, hashes: list[int]) -> int:
        return next((at for at, hash in enumerate(hashes) if hash not in self.stamps), len(hashes))

    def stamps_of(self, hashes: list[int]) -> list[tuple[int, float]]:
        return [(at, self.stamps[hash]) for at, hash in enumerate(hashes) if hash in self.stamps]

    def evict(self) -> list[int]:
        gone = [self.stamps.popitem(last=False)[0] for _ in range(len(self.stamps) - self.capacity)]
        return [key for key in gone if isinstance(key, int)]

    @property
    def oldest(self) -> float | None:
        return next(iter(self.stamps.values()), None)

    def in_order(self) -> list[int]:
        return [key for key in self.stamps if isinstance(key, int)]


def touched(recency: Recency, hashes: list[int], stamp: float) -> tuple[list[int], list[int]]:
    new, evicted = recency.touch(packed(*hashes), stamp)
    return unpacked(new), unpacked(evicted)


def drained(recency: Recency) -> list[int]:
    """Evict and return all hashes, the oldest first."""
    return unpacked(recency.add_anonymous(recency.capacity, 0))


def stamped(recency: Recency, hashes: list[int], depth: int = 2**31, latest: float = inf) -> list[tuple[int, float]]:
    """Return (number, stamp) of the held blocks."""
    uses = recency.last_uses(packed(*hashes), min(depth, len(hashes)), latest)
    assert all(before[1] <= after[0] for before, after in pairwise(uses))
    return [(at, stamp) for first, end, stamp in uses for at in range(first, end)]
