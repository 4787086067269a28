"""A KV store that several simulated engines share: an LRU of block hashes behind a network with a bandwidth."""

from collections import OrderedDict

import msgspec


class SharedStoreConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str = "store"
    capacity_tokens: int = 1_000_000
    gigabytes_per_s: float = 10.0
    """Bandwidth of all engines together."""


class SharedStore:
    """Engines write each block that they have computed, and load what they find. Writing takes no time."""

    def __init__(self, config: SharedStoreConfig, block_size: int, bytes_per_token: float) -> None:
        self.config = config
        self._capacity = max(1, config.capacity_tokens // block_size)
        self._ms_per_token = bytes_per_token / (config.gigabytes_per_s * 1e6)
        self._blocks: OrderedDict[int, None] = OrderedDict()
        self._free_ms = 0.0
        """When the last load ends."""
        self.loaded_tokens = 0

    def __len__(self) -> int:
        return len(self._blocks)

    def match(self, hashes: list[int], start: int, limit: int) -> int:
        """Return how many consecutive hashes from `start` up to `limit` the store holds."""
        blocks, stop = self._blocks, start
        while stop < limit and hashes[stop] in blocks:
            blocks.move_to_end(hashes[stop])
            stop += 1
        return stop - start

    def put(self, hashes: list[int]) -> None:
        blocks = self._blocks
        for one in hashes:
            blocks[one] = None
            blocks.move_to_end(one)
        while len(blocks) > self._capacity:
            blocks.popitem(last=False)

    def load_ms(self, tokens: int, now_ms: float) -> float:
        """Return how long it takes from now on to load this many tokens, after the loads that began before."""
        self.loaded_tokens += tokens
        self._free_ms = max(now_ms, self._free_ms) + tokens * self._ms_per_token
        return self._free_ms - now_ms
