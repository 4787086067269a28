"""Applies decoded KV events to one rank of a NodeCache. No I/O.

Models with several kinds of attention publish each block once for each group of layers, under the same hash. The
applier follows one group, one of full attention if there is any: a prefix that full attention does not cover is no hit,
whatever the other groups hold.
"""

from __future__ import annotations

import enum
from typing import Final

from warmroute.engines.kv_events import (
    NO_EXTRA_KEYS,
    BlockRemoved,
    BlockStored,
    Event,
    HashesStored,
    salt_and_extra_keys,
)
from warmroute.index.node_cache import NodeCache
from warmroute.index.tiers import Tier

FULL_ATTENTION: Final = frozenset({"full_attention", "mla_attention", "sink_full_attention"})
_TIERS: Final = {
    "GPU": Tier.GPU,
    "CPU": Tier.CPU, "CPU_PINNED": Tier.CPU, "HOST": Tier.CPU,
    "DISK": Tier.DISK, "STORAGE": Tier.DISK,
    "EXTERNAL": Tier.REMOTE, "REMOTE": Tier.REMOTE,
}  # fmt: skip


class Applied(enum.IntEnum):
    DONE = 0
    CLEARED = 1
    """The cache is empty: from here on the events cover everything in it."""
    ORPHANED = 2
    """The block's parent is unknown, or the event is inconsistent: earlier events were lost."""


def tier_of(medium: str | None, locality: str | None = None) -> Tier:
    """Return the tier of a block. An unknown medium counts as remote."""
    if locality == "REMOTE":
        return Tier.REMOTE
    return Tier.GPU if medium is None else _TIERS.get(medium.upper(), Tier.REMOTE)


class KvEventApplier:
    def __init__(self, cache: NodeCache, rank: int) -> None:
        self._cache = cache
        self._rank = rank
        self._group: int | None = None
        self._full_attention = False
        self.block_size = 0
        """Block size of the events; 0 before the first."""

    def apply(self, event: Event) -> Applied:
        try:
            return self._apply(event)
        except (ValueError, TypeError, OverflowError, RecursionError):
            return Applied.ORPHANED

    def _apply(self, event: Event) -> Applied:
        """Raises ValueError, TypeError, OverflowError or RecursionError if the event contains impossible values."""
        if isinstance(event, BlockStored):
            return self._stored(event)
        if isinstance(event, BlockRemoved):
            if event.group_idx is None or event.group_idx == self._group:
                self._cache.blocks_removed(self._rank, event.block_hashes, tier_of(event.medium, event.locality))
            return Applied.DONE
        if isinstance(event, HashesStored):
            known = self._cache.hashes_stored(self._rank, event.parent_block_hash, event.block_hashes)
            return Applied.DONE if known else Applied.ORPHANED
        self._cache.all_blocks_cleared(self._rank)
        return Applied.CLEARED

    def _stored(self, event: BlockStored) -> Applied:
        if not event.block_hashes or not self._follows_group_of(event):
            return Applied.DONE
        tier = tier_of(event.medium, event.locality)
        if not event.token_ids:
            self._store_known(event.block_hashes, tier)
            return Applied.DONE
        if self.block_size and event.block_size != self.block_size:
            return Applied.DONE  # part of a block
        if tier is not Tier.GPU:
            self._store_offloaded(event, tier)
        elif not self._store(event, tier):
            return Applied.ORPHANED
        self.block_size = event.block_size
        return Applied.DONE

    def _follows_group_of(self, event: BlockStored) -> bool:
        group = event.group_idx
        if group is None or group == self._group:
            return True
        full_attention = event.kv_cache_spec_kind in FULL_ATTENTION
        if not event.token_ids or not (self._group is None or (full_attention and not self._full_attention)):
            return False
        if self._group is not None:
            self._cache.all_blocks_cleared(self._rank)  # so far it held another group's blocks
            self.block_size = 0
        self._group, self._full_attention = group, full_attention
        return True

    def _store(self, event: BlockStored, tier: Tier) -> bool:
        lora = event.lora_name or ""
        if not lora and event.lora_id is not None:
            lora = f"\0{event.lora_id}"  # an adapter without a name: no request can ask for it
        salt, extra = salt_and_extra_keys(event)
        return self._cache.blocks_stored(
            self._rank, event.parent_block_hash, event.block_hashes, event.token_ids, event.block_size, tier,
            lora=lora, salt=salt or "", extra=extra,
        )  # fmt: skip

    def _store_offloaded(self, event: BlockStored, tier: Tier) -> None:
        """Store blocks outside the GPU. vLLM sends no salt with offloaded blocks, so a first block counts only if it is
        known already. An unknown parent is no sign of lost events, since offloaded blocks outlive their parents."""
        if event.parent_block_hash is None and event.extra_keys == NO_EXTRA_KEYS and event.cache_salt is None:
            first, *rest = event.block_hashes
            if not self._cache.knows(self._rank, first):
                return
            self._store_known([first], tier)
            if not rest:
                return
            event.parent_block_hash, event.block_hashes = first, rest
            event.token_ids = event.token_ids[event.block_size :]
        if not self._store(event, tier):
            self._store_known(event.block_hashes, tier)

    def _store_known(self, hashes: list[int | bytes], tier: Tier) -> None:
        self._cache.blocks_stored(self._rank, None, hashes, [], 0, tier)
