"""A reference implementation of `_kernel/index.h` in plain Python, as simple as possible and without its budget."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from warmroute._kernel import Recency
from warmroute.core.node_cache import Tier

UNKNOWN_PARENT = -1
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


def hash_blocks(
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
    """One engine hash at one holder: its block, and for each tier the stores that were not removed."""

    def __init__(self, block: int) -> None:
        self.block = block
        self.counts = dict.fromkeys(Tier, 0)


Key = tuple[str, int]
"""The engine's hash, or the index's own if no engine hash is known."""


class ReferenceIndex:
    def __init__(self) -> None:
        self.holders: dict[int, dict[Key, Pair]] = {}
        self.recency: dict[int, Recency] = {}

    def add_holder(self, holder: int, recency: Recency | None = None) -> None:
        self.holders[holder] = {}
        if recency is not None:
            self.recency[holder] = recency

    def remove_holder(self, holder: int) -> None:
        del self.holders[holder]
        self.recency.pop(holder, None)

    def clear(self, holder: int) -> None:
        self.holders[holder] = {}

    def _store(self, holder: int, key: Key, block: int, tier: Tier) -> None:
        pairs = self.holders[holder]
        if key not in pairs or pairs[key].block != block:
            pairs[key] = Pair(block)
        counts = pairs[key].counts
        counts[tier] = min(counts[tier] + 1, COUNT_MAX[tier])

    def _remove(self, holder: int, key: Key, tier: Tier) -> bool:
        pair = self.holders[holder].get(key)
        if pair is None or not pair.counts[tier]:
            return False
        pair.counts[tier] -= 1
        if not any(pair.counts.values()):
            del self.holders[holder][key]
        return True

    def store(
        self,
        holder: int,
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
            pair = self.holders[holder].get(("engine", engine_hash(parent_engine_hash)))
            if pair is None:
                return UNKNOWN_PARENT
            parent = pair.block
        self.store_hashes(holder, hash_blocks(namespace, parent, token_ids, block_size, extra), tier, engine_hashes)
        return len(engine_hashes)

    def store_known(self, holder: int, engine_hashes: Sequence[int | bytes], tier: Tier) -> int:
        keys = [key for hash in engine_hashes if (key := ("engine", engine_hash(hash))) in self.holders[holder]]
        for key in keys:
            self._store(holder, key, self.holders[holder][key].block, tier)
        return len(keys)

    def store_hashes(
        self, holder: int, hashes: Sequence[int], tier: Tier, engine_hashes: Sequence[int | bytes] | None = None
    ) -> int:
        for number, block in enumerate(hashes):
            key = ("engine", engine_hash(engine_hashes[number])) if engine_hashes is not None else ("own", block)
            self._store(holder, key, block, tier)
        return len(hashes)

    def touch(self, holder: int, hashes: Sequence[int], stamp: float) -> list[int]:
        """Store what is new in the recency list, and remove what it evicted."""
        size = len(hashes)
        changes = self.recency[holder].touch(struct.pack(f"={size}Q", *hashes), stamp)
        new, evicted = (list(struct.unpack(f"={len(part) // 8}Q", part)) for part in changes)
        self.remove_hashes(holder, evicted, Tier.GPU)
        self.store_hashes(holder, new, Tier.GPU)
        return new

    def remove(self, holder: int, engine_hashes: Sequence[int | bytes], tier: Tier) -> int:
        return sum(self._remove(holder, ("engine", engine_hash(hash)), tier) for hash in engine_hashes)

    def remove_hashes(self, holder: int, hashes: Sequence[int], tier: Tier) -> int:
        return sum(self._remove(holder, ("own", hash), tier) for hash in hashes)

    def match(self, hashes: Sequence[int]) -> list[tuple[int, int, int, int, int]]:
        rows = []
        for holder, pairs in self.holders.items():
            nearest: dict[int, Tier] = {}
            for pair in pairs.values():
                held = min(tier for tier, count in pair.counts.items() if count)
                nearest[pair.block] = min(held, nearest.get(pair.block, held))
            depths = [self._depth(nearest, hashes, tier) for tier in Tier]
            if depths[Tier.REMOTE]:
                rows.append((holder, depths[0], depths[1], depths[2], depths[3]))
        return rows

    @staticmethod
    def _depth(nearest: dict[int, Tier], hashes: Sequence[int], tier: Tier) -> int:
        for depth, block in enumerate(hashes):
            if block not in nearest or nearest[block] > tier:
                return depth
        return len(hashes)

    def holdings(self, holder: int) -> list[tuple[int, int, int, int, int]]:
        return [
            (pair.block, pair.counts[Tier.GPU], pair.counts[Tier.CPU], pair.counts[Tier.DISK], pair.counts[Tier.REMOTE])
            for pair in self.holders[holder].values()
        ]
