"""A reference implementation of `_kernel/_index.c` in plain Python, as simple as possible and without its budget."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from warmroute._kernel._recency import Recency
from warmroute.index.tiers import Tier

NO_PARENT = -1
COUNT_MAX = {Tier.GPU: 16383, Tier.CPU: 15, Tier.DISK: 15, Tier.REMOTE: 15}

MASK = (1 << 64) - 1
K = (
    0xA0761D6478BD642F,
    0xE7037ED1A0B428DB,
    0x8EBC6AF09C88C6E3,
    0x589965CC75374CC3,
    0x1D8E4E27C47D124F,
    0xEB44ACCAB455D165,
    0x9E3779B97F4A7C15,
    0xD6E8FEB86659FD93,
)


def fold(a: int, b: int) -> int:
    product = a * b
    return a ^ b ^ (product & MASK) ^ (product >> 64)


def content(seed: int, data: bytes) -> int:
    a = fold(seed ^ K[0], len(data) ^ K[1])
    b = a ^ K[2]
    while len(data) >= 32:
        w0, w1, w2, w3 = struct.unpack_from("<4Q", data)
        a = fold(w0 ^ K[1], w1 ^ a)
        b = fold(w2 ^ K[2], w3 ^ b)
        data = data[32:]
    a = fold(a ^ K[3], b ^ K[4])
    while len(data) >= 16:
        w0, w1 = struct.unpack_from("<2Q", data)
        a = fold(w0 ^ K[1], w1 ^ a)
        data = data[16:]
    if data:
        w0, w1 = struct.unpack("<2Q", data.ljust(16, b"\0"))
        a = fold(w0 ^ K[5], w1 ^ a)
    return fold(a ^ K[6], K[7])


def chain(
    namespace: int,
    parent: int | None,
    token_ids: Sequence[int],
    block_size: int,
    extra: Sequence[bytes | None] | None = None,
) -> list[int]:
    hashes = []
    before = namespace if parent is None else parent
    for number in range(len(token_ids) // block_size):
        ids = token_ids[number * block_size : (number + 1) * block_size]
        block = content(K[0], struct.pack(f"<{block_size}I", *ids))
        more = extra[number] if extra else None
        if more:
            block = fold(block ^ K[2], content(K[1], more) ^ K[3])
        before = fold(fold(block ^ K[4], before ^ K[5]) ^ K[6], namespace ^ K[7])
        hashes.append(before)
    return hashes


def engine_hash(hash: int | bytes) -> int:
    return content(K[3], hash) if isinstance(hash, bytes) else hash & MASK


class Pair:
    """One engine hash at one place: its block, and for each tier the stores that were not removed."""

    def __init__(self, block: int) -> None:
        self.block = block
        self.counts = dict.fromkeys(Tier, 0)


Key = tuple[str, int]
"""The engine's hash, or the index's own if no engine hash is known."""


class ReferenceIndex:
    def __init__(self) -> None:
        self.places: dict[int, dict[Key, Pair]] = {}
        self.mirrors: dict[int, Recency] = {}

    def open_place(self, place: int, mirror: Recency | None = None) -> None:
        self.places[place] = {}
        if mirror is not None:
            self.mirrors[place] = mirror

    def close_place(self, place: int) -> None:
        del self.places[place]
        self.mirrors.pop(place, None)

    def clear(self, place: int) -> None:
        self.places[place] = {}

    def _store(self, place: int, key: Key, block: int, tier: Tier) -> None:
        pairs = self.places[place]
        if key not in pairs or pairs[key].block != block:
            pairs[key] = Pair(block)
        counts = pairs[key].counts
        counts[tier] = min(counts[tier] + 1, COUNT_MAX[tier])

    def _remove(self, place: int, key: Key, tier: Tier) -> bool:
        pair = self.places[place].get(key)
        if pair is None or not pair.counts[tier]:
            return False
        pair.counts[tier] -= 1
        if not any(pair.counts.values()):
            del self.places[place][key]
        return True

    def store(
        self,
        place: int,
        namespace: int,
        parent_engine_hash: int | bytes | None,
        engine_hashes: Sequence[int | bytes],
        token_ids: Sequence[int],
        block_size: int,
        tier: Tier,
        extra: Sequence[bytes | None] | None = None,
    ) -> int:
        parent = None
        if parent_engine_hash is not None:
            pair = self.places[place].get(("engine", engine_hash(parent_engine_hash)))
            if pair is None:
                return NO_PARENT
            parent = pair.block
        self.store_chain(place, chain(namespace, parent, token_ids, block_size, extra), tier, engine_hashes)
        return len(engine_hashes)

    def store_known(self, place: int, engine_hashes: Sequence[int | bytes], tier: Tier) -> int:
        keys = [key for hash in engine_hashes if (key := ("engine", engine_hash(hash))) in self.places[place]]
        for key in keys:
            self._store(place, key, self.places[place][key].block, tier)
        return len(keys)

    def store_chain(
        self, place: int, hashes: Sequence[int], tier: Tier, engine_hashes: Sequence[int | bytes] | None = None
    ) -> int:
        for number, block in enumerate(hashes):
            key = ("engine", engine_hash(engine_hashes[number])) if engine_hashes is not None else ("own", block)
            self._store(place, key, block, tier)
        return len(hashes)

    def keep(self, place: int, hashes: Sequence[int], stamp: float) -> list[int]:
        """Store what is new in the mirror, and remove what it evicted."""
        size = len(hashes)
        changes = self.mirrors[place].touch(struct.pack(f"={size}Q", *hashes), stamp)
        new, evicted = (list(struct.unpack(f"={len(part) // 8}Q", part)) for part in changes)
        self.remove_chain(place, evicted, Tier.GPU)
        self.store_chain(place, new, Tier.GPU)
        return new

    def remove(self, place: int, engine_hashes: Sequence[int | bytes], tier: Tier) -> int:
        return sum(self._remove(place, ("engine", engine_hash(hash)), tier) for hash in engine_hashes)

    def remove_chain(self, place: int, hashes: Sequence[int], tier: Tier) -> int:
        return sum(self._remove(place, ("own", hash), tier) for hash in hashes)

    def match(self, hashes: Sequence[int]) -> list[tuple[int, int, int, int, int]]:
        rows = []
        for place, pairs in self.places.items():
            nearest: dict[int, Tier] = {}
            for pair in pairs.values():
                held = min(tier for tier, count in pair.counts.items() if count)
                nearest[pair.block] = min(held, nearest.get(pair.block, held))
            depths = [self._depth(nearest, hashes, tier) for tier in Tier]
            if depths[Tier.REMOTE]:
                rows.append((place, depths[0], depths[1], depths[2], depths[3]))
        return rows

    @staticmethod
    def _depth(nearest: dict[int, Tier], hashes: Sequence[int], tier: Tier) -> int:
        for depth, block in enumerate(hashes):
            if block not in nearest or nearest[block] > tier:
                return depth
        return len(hashes)

    def holdings(self, place: int) -> list[tuple[int, int, int, int, int]]:
        return [
            (pair.block, pair.counts[Tier.GPU], pair.counts[Tier.CPU], pair.counts[Tier.DISK], pair.counts[Tier.REMOTE])
            for pair in self.places[place].values()
        ]
