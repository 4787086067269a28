"""Applies KV events to what is believed of one rank of a node's cache. No I/O.

Models with several kinds of attention publish each block once for each group of layers, under the same hash. One group
is believed, of full attention where there is one: a prefix that it does not cover is no hit, whatever the others hold.
"""

from __future__ import annotations

import enum
from typing import Final

from warmroute.engines.kv_events import BlockRemoved, BlockStored, Event, extra_of, salt_of
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
    """The cache is empty: from here on, everything in it is known."""
    ORPHANED = 2
    """A block whose parent is not known, or that makes no sense: something was lost before."""


def tier_of(medium: str | None, locality: str | None = None) -> Tier:
    """Where a block lies; a medium that nobody knows is taken for the farthest."""
    if locality == "REMOTE":
        return Tier.REMOTE
    return Tier.GPU if medium is None else _TIERS.get(medium.upper(), Tier.REMOTE)


class Applier:
    def __init__(self, cache: NodeCache, rank: int) -> None:
        self._cache = cache
        self._rank = rank
        self.begin_anew()

    def begin_anew(self) -> None:
        """What follows is told by a new process."""
        self._group: int | None = None
        self._full = False
        self.block_size = 0
        """Of its blocks, as it told; 0 before the first."""

    def apply(self, event: Event) -> Applied:
        if isinstance(event, BlockStored):
            return self._stored(event)
        if isinstance(event, BlockRemoved):
            if event.group_idx is None or event.group_idx == self._group:
                self._cache.removed(self._rank, event.block_hashes, tier_of(event.medium, event.locality))
            return Applied.DONE
        self._cache.cleared(self._rank)
        return Applied.CLEARED

    def _stored(self, event: BlockStored) -> Applied:
        if not event.block_hashes or not self._believes(event):
            return Applied.DONE
        tier = tier_of(event.medium, event.locality)
        try:
            if not event.token_ids:
                self._again(event.block_hashes, tier)
                return Applied.DONE
            if self.block_size and event.block_size != self.block_size:
                return Applied.DONE  # part of a block
            if tier is Tier.GPU:
                known = self._store(event, tier)
            else:
                self._offloaded(event, tier)
                known = True
        except (ValueError, TypeError):
            known = False
        if known:
            self.block_size = event.block_size
        return Applied.DONE if known else Applied.ORPHANED

    def _believes(self, event: BlockStored) -> bool:
        group = event.group_idx
        if group is None or group == self._group:
            return True
        full = event.kv_cache_spec_kind in FULL_ATTENTION
        if not event.token_ids or not (self._group is None or (full and not self._full)):
            return False
        if self._group is not None:
            self._cache.cleared(self._rank)  # so far, only another group's blocks were told
            self.block_size = 0
        self._group, self._full = group, full
        return True

    def _store(self, event: BlockStored, tier: Tier) -> bool:
        lora = event.lora_name or ""
        if not lora and event.lora_id is not None:
            lora = f"\0{event.lora_id}"  # an adapter without a name: no request can mean it
        return self._cache.stored(
            self._rank, event.parent_block_hash, event.block_hashes, event.token_ids, event.block_size, tier,
            lora=lora, salt=salt_of(event) or "", extra=extra_of(event),
        )  # fmt: skip

    def _offloaded(self, event: BlockStored, tier: Tier) -> None:
        """vLLM does not say the salt of what it offloads: a first block counts only where it is known already. What
        can't be placed is no sign of a loss, since offloaded blocks outlive their parents."""
        if event.parent_block_hash is None and event.extra_keys is None and event.cache_salt is None:
            first, *rest = event.block_hashes
            if not self._cache.knows(self._rank, first):
                return
            self._again([first], tier)
            if not rest:
                return
            event.parent_block_hash, event.block_hashes = first, rest
            event.token_ids = event.token_ids[event.block_size :]
        if not self._store(event, tier):
            self._again(event.block_hashes, tier)

    def _again(self, hashes: list[int | bytes], tier: Tier) -> None:
        self._cache.stored(self._rank, None, hashes, [], 0, tier)
