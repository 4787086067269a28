"""One node's cache as the router knows it: blocks by source and tier, their age, and how far predictions are right.

SAVED_SHARE has the value of a hit in each tier, `freshness` how it falls with the age of the node's last event. The
two ages are EVENT_AGES_S in core/cache_view.py.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterable, Sequence
from enum import IntEnum
from math import inf
from typing import TYPE_CHECKING, Final

from warmroute._kernel import (
    ACCURACY_HALF_LIFE_S,
    ACCURACY_PRIOR_TOKENS,
    MAX_BLOCK_TOKENS,
    ROUTED_RANK,
    TIER_CPU,
    TIER_DISK,
    TIER_GPU,
    TIER_REMOTE,
    UNKNOWN_PARENT,
    AccuracyState,
    BlockIndex,
    CacheState,
    Recency,
)
from warmroute.core.messages import namespace_seed, salted

if TYPE_CHECKING:
    from warmroute.core.kv_store import KvStore


# Confidence: how much the router trusts what it knows of a cache, from 0 (route by load only) to 1.
#
# Two measures. Freshness: how long ago the node last confirmed its events. Accuracy: how much of the predicted cached
# tokens the engine then reported. Both scale the tokens of a hit.

FADE: Final = 0.97
"""Weight that older responses keep with each new one."""


class Accuracy(AccuracyState):
    """Predicted against reported cached tokens, recent responses first."""

    __slots__ = (
        "_either", "compared", "exact", "predicted_tokens", "reported_tokens",
    )  # fmt: skip

    def __init__(self) -> None:
        self._predicted = 0.0
        self._confirmed = 0.0
        self._either = 0.0
        self._at_s = 0.0
        self.compared = 0
        """Responses that reported cached tokens."""
        self.exact = 0
        """Of these, responses that reported exactly the prediction."""
        self.predicted_tokens = 0
        self.reported_tokens = 0

    def compare(self, predicted: int, reported: int, now_s: float) -> None:
        left = self._left(now_s) * FADE
        both = min(predicted, reported)
        self._predicted = self._predicted * left + predicted
        self._confirmed = self._confirmed * left + both
        self._either = self._either * left + max(predicted, reported)
        self._at_s = now_s
        self.compared += 1
        self.predicted_tokens += predicted
        self.reported_tokens += reported
        self.exact += predicted == reported

    def trust(self, now_s: float) -> float:
        """Return the share of predicted tokens that engines confirm. More cached tokens than predicted cost nothing."""
        if self._confirmed == self._predicted:
            return 1.0
        left = self._left(now_s)
        return (ACCURACY_PRIOR_TOKENS + self._confirmed * left) / (ACCURACY_PRIOR_TOKENS + self._predicted * left)

    def agreement(self) -> float:
        """Return tokens both predicted and reported, divided by tokens predicted or reported; 1 before the first."""
        return self._confirmed / self._either if self._either else 1.0

    def _left(self, now_s: float) -> float:
        return float(0.5 ** (max(0.0, now_s - self._at_s) / ACCURACY_HALF_LIFE_S))


def freshness(age_s: float, stale_s: float, gone_s: float) -> float:
    """Return 1 up to `stale_s`, then a value that falls linearly to 0 at `gone_s`."""
    if age_s <= stale_s:
        return 1.0
    return max(0.0, (gone_s - age_s) / (gone_s - stale_s)) if gone_s > stale_s else 0.0


# The storage tiers of a KV block, nearest to the GPU first, and how much of its prefill a block in each tier saves.


class Tier(IntEnum):
    GPU = TIER_GPU
    CPU = TIER_CPU
    DISK = TIER_DISK
    REMOTE = TIER_REMOTE


SAVED_SHARE: Final = (1.0, 0.9, 0.6, 0.5)
"""Share of its prefill that a block in each tier saves, since the engine has to load it first. Loading from host memory
takes a tenth of the prefill (measured: 8 to 21 times cheaper). Disk and remote are cautious guesses."""


# The blocks that one rank has in a shared KV store, by the engine's hashes. They are no hits of the node's own, which
# the store counts for it. But later events name them: as the parent of new blocks, or when the store loses them.
#
# They lie in two holders of the index that no cache owns, a younger and an older one. Engines report no evictions from
# a store, so the older one is forgotten once the younger one has half of what fits into the store.


class OffloadedBlocks:
    __slots__ = ("_index", "_older", "_younger")

    def __init__(self, index: BlockIndex) -> None:
        self._index = index
        self._younger = index.add_holder()
        self._older = index.add_holder()

    def own_hash(self, engine_hash: int | bytes) -> int | None:
        """Return the index's own hash; None for a block that is not there."""
        found = self._index.block_hash(self._younger, engine_hash)
        return found if found is not None else self._index.block_hash(self._older, engine_hash)

    def add(self, engine_hashes: list[int | bytes], own_hashes: list[int], most_blocks: int) -> None:
        """`most_blocks`: what fits into the store."""
        index = self._index
        if index.pair_count(self._younger) + len(own_hashes) > most_blocks // 2:
            index.clear(self._older)
            self._younger, self._older = self._older, self._younger
        index.store_hashes(self._younger, array("Q", own_hashes), Tier.GPU, engine_hashes)

    def remove(self, engine_hash: int | bytes) -> None:
        for holder in (self._younger, self._older):
            if self._index.block_hash(holder, engine_hash) is not None:
                self._index.remove(holder, [engine_hash], Tier.GPU)
                return

    def close(self) -> None:
        self._index.remove_holder(self._younger)
        self._index.remove_holder(self._older)


# What the router knows of one node's KV cache, from three sources:
#
#     from_events  the engine's KV events (or block reports to the admin API): a holder in the index for each rank
#     routed       the prompts that this router sent to the node: a holder that evicts as the node's LRU would
#     pending      the prompts that the node is prefilling now: a holder that holds them until events report them
#
# If the events cover everything in the cache (`complete`), routed prompts count only for requests that events cannot
# match. They are recorded all the same, for the time when events are lost.

EngineHash = int | bytes
"""An engine's own hash of a block."""
Uses = list[tuple[int, int, float]]
"""(first, end, stamp) of blocks that were used together."""
ROUTED: Final = ROUTED_RANK
"""The rank of what was routed to a node."""
PENDING: Final = -2
"""The rank of what a node is prefilling."""
DEFAULT_BLOCK_TOKENS: Final = 16
"""Block size of a node that does not report one."""
NEVER_S: Final = -1e9
MAX_EVICTED_AT_ONCE: Final = 1024
"""Blocks that one response may evict from what was routed."""
MAX_TOKEN_MISMATCHES: Final = 8
"""After this many prompts in a row with other tokens, the node has another tokenizer or chat template."""
MAX_PROMPTS_WITHOUT_EVENTS: Final = 8
"""After this many prefilled prompts in a row without any event, the node's events are lost on the way."""


class NodeCache(CacheState):
    """One node's cache. The fields that hits and prices read lie in CacheState, where the kernel reads them."""

    accuracy: Accuracy
    __slots__ = (
        "__weakref__", "_complete", "_index", "_offloaded", "_on_block_size", "_owners", "disagrees", "gaps",
        "generation", "loads_always", "model", "output_tokens", "pending_holder", "predicted_tokens", "prefilled_s",
        "prompts_without_events", "ranks", "recency", "routed_holder", "routed_prompts", "routed_tokens", "store",
        "store_events", "token_mismatches",
    )  # fmt: skip

    def __init__(
        self,
        name: str,
        index: BlockIndex,
        owners: dict[int, tuple[NodeCache, int]],
        assumed_blocks: int,
        on_block_size: Callable[[], None],
    ) -> None:
        self.name = name
        self._index = index
        self._on_block_size = on_block_size
        """Called when the block size changes."""
        self._owners = owners
        """Holder → its cache and rank."""
        self.model = ""
        """The base model that its blocks belong to."""
        self.block_size = DEFAULT_BLOCK_TOKENS
        self.capacity_blocks = 0
        """Blocks that its GPU cache holds; 0 until the node reports it."""
        self.ranks: dict[int, int] = {}
        """Data-parallel rank → its holder."""
        self._complete: dict[int, bool] = {}
        self.complete = False
        """Whether events cover everything it holds: no rank has lost events since it was empty, and the engine's tokens
        are those that this router computes."""
        self._open_routed(assumed_blocks)
        self.pending_holder = index.add_holder()
        owners[self.pending_holder] = (self, PENDING)
        self.store: KvStore | None = None
        """The shared KV store that the node reads and writes."""
        self.loads_always = False
        """Whether the engine has loaded from the store what it could have prefilled in less time. Ends with a response
        that reports less than half of what it should have loaded, or with a new generation."""
        self._offloaded: dict[int, OffloadedBlocks] = {}
        """Rank → what it has in the store."""
        self.accuracy = Accuracy()
        self.last_contact_s = NEVER_S
        """When the node last sent an event or answered a poll."""
        self.event_lag_s = 0.0
        """How much later its events arrive than the fastest of them."""
        self.generation = 0
        """Changes when everything routed is forgotten; below 0 when the node is gone."""
        self.prefilled_s = NEVER_S
        """When the latest prompt that the node has prefilled was sent."""
        self.routed_prompts = self.routed_tokens = self.predicted_tokens = 0
        """Prompts that were sent to the node, their tokens, and those of them that were predicted to be cached."""
        self.output_tokens = 0
        """Tokens that the node generated for this process."""
        self.disagrees = False
        """Whether the engine's own hit rate is far from the predicted one."""
        self.gaps = 0
        """Times that events were lost for good."""
        self.store_events = 0
        """Events that reported stored blocks with their content."""
        self.token_mismatches = 0
        """Prompts in a row whose tokens the engine reported differently."""
        self.prompts_without_events = 0
        """Prompts in a row that the node prefilled without sending any event since their dispatch."""
        self.token_mismatch = False
        """Whether the engine's tokens differ from the router's: its events cannot match any prompt."""

    # Size.

    def set_size(self, block_size: int, capacity_tokens: int) -> None:
        """Set the block size and capacity that the engine reports. 0 leaves a value as it is, and so does a block size
        that no prompt can be hashed with."""
        if 0 < block_size <= MAX_BLOCK_TOKENS and block_size != self.block_size:
            before, self.block_size = self.block_size, block_size
            self._clear_routed()
            self._on_block_size()
            self.capacity_blocks = self.capacity_blocks * before // block_size
            self.recency.resize(max(1, self.recency.capacity * before // block_size))
        if capacity_tokens > 0:
            self.capacity_blocks = max(1, capacity_tokens // self.block_size)
            evicted = self.recency.resize(self.capacity_blocks)
            self._index.remove_hashes(self.routed_holder, evicted, Tier.GPU)
        self._update_room()

    # From events.

    @property
    def has_events(self) -> bool:
        return bool(self.ranks)

    def add_rank(self, rank: int) -> None:
        """Open a holder for a rank's events. They count as incomplete until `set_complete`."""
        if rank not in self.ranks:
            holder = self.ranks[rank] = self._index.add_holder()
            self._owners[holder] = (self, rank)
            self._complete[rank] = self.complete = False

    def remove_rank(self, rank: int) -> None:
        """Forget a rank: no more events will come."""
        holder = self.ranks.pop(rank, None)
        self._complete.pop(rank, None)
        if holder is not None:
            del self._owners[holder]
            self._index.remove_holder(holder)
            self._forget_offloaded(rank)
            self._update_complete()

    def set_complete(self, rank: int, complete: bool) -> None:
        """Set whether a rank's events cover everything it holds."""
        if rank in self._complete:
            self._complete[rank] = complete
            self._update_complete()

    def _update_complete(self) -> None:
        complete = bool(self._complete) and all(self._complete.values())
        self.complete = complete and not self.token_mismatch and not self.events_missing

    def blocks_stored(
        self,
        rank: int,
        parent: EngineHash | None,
        hashes: list[EngineHash],
        token_ids: list[int],
        block_size: int,
        tier: Tier = Tier.GPU,
        *,
        lora: str = "",
        salt: str = "",
        extra: Sequence[bytes | None] | None = None,
    ) -> bool:
        """Store blocks that an event reports. Return False if their parent is unknown: events were lost.

        Without token ids, only blocks count that the rank has stored before, in another tier. Raises ValueError or
        TypeError if hashes, tokens and block size do not fit together."""
        holder = self.ranks[rank]
        shared = self.store if tier is not Tier.GPU else None
        if not token_ids:
            if shared is None:
                self._index.store_known(holder, hashes, tier)
            else:
                self._offload(rank, shared, hashes, self.block_size)
            return True
        self.store_events += 1
        if self.prompts_without_events:
            self.note_events(True)
        if salt and parent is None:
            extra = salted(extra, len(hashes), salt)
        seed = namespace_seed(self.model, lora, block_size)
        lent = self._lend_parent(rank, parent)
        try:
            stored = self._index.store(holder, seed, parent, hashes, token_ids, block_size, tier, extra)
        finally:
            if lent:
                self._index.remove(holder, lent, Tier.REMOTE)
        if block_size != self.block_size and parent is None:
            self.set_size(block_size, 0)
        if shared is not None and stored != UNKNOWN_PARENT:  # it is in the store, for all nodes there
            self._offload(rank, shared, hashes, block_size)
            self._index.remove(holder, hashes, tier)
        return stored != UNKNOWN_PARENT

    def hashes_stored(self, rank: int, parent: int | None, hashes: list[int], tier: Tier = Tier.GPU) -> bool:
        """Store blocks whose engine hashes are the index's own, as those of replay's simulated engines are. Return
        False if their parent is unknown. Does not count in `store_events`."""
        holder = self.ranks[rank]
        if parent is not None and self._index.block_hash(holder, parent) is None:
            return False
        self._index.store_hashes(holder, array("Q", hashes), tier, hashes)
        return True

    def knows(self, rank: int, hash: EngineHash) -> bool:
        return self._own_hash(rank, hash) is not None

    def blocks_removed(self, rank: int, hashes: list[EngineHash], tier: Tier = Tier.GPU) -> None:
        if tier is not Tier.GPU and self.store is not None:
            found = {one: own for one in hashes if (own := self._own_hash(rank, one)) is not None}
            self.store.removed(list(found.values()), self.block_size)
            if (offloaded := self._offloaded.get(rank)) is not None:
                for one in found:
                    offloaded.remove(one)
        self._index.remove(self.ranks[rank], hashes, tier)  # also what it had there before it had a store

    def all_blocks_cleared(self, rank: int) -> None:
        self._clear_rank(rank)
        if len(self.ranks) == 1:
            self._clear_routed()

    def events_lost(self, rank: int) -> None:
        """Forget what a rank reported: some of its events are lost for good, and removals may be among them."""
        self.gaps += 1
        self._clear_rank(rank)
        self.set_complete(rank, False)

    def restarted(self, current_ranks: Collection[int] = ()) -> None:
        """Empty the cache: the engine runs as a new process. `current_ranks` have reported its new blocks already."""
        for rank in self.ranks:
            if rank not in current_ranks:
                self._clear_rank(rank)
        self._clear_routed()
        self.token_mismatches = self.prompts_without_events = 0
        self.token_mismatch = False
        self._update_complete()

    def _clear_rank(self, rank: int) -> None:
        self._index.clear(self.ranks[rank])
        self._forget_offloaded(rank)

    # In the shared KV store.

    def _own_hash(self, rank: int, hash: EngineHash) -> int | None:
        """Return the index's own hash of a block that the rank has, itself or in the store."""
        own = self._index.block_hash(self.ranks[rank], hash)
        if own is None and (offloaded := self._offloaded.get(rank)) is not None:
            own = offloaded.own_hash(hash)
        return own

    def _offload(self, rank: int, store: KvStore, hashes: list[EngineHash], block_size: int) -> None:
        """The rank has stored those of these blocks that it has in the shared KV store."""
        found = {one: own for one in hashes if (own := self._own_hash(rank, one)) is not None}
        if not found:
            return
        own_hashes = list(found.values())
        store.reported(own_hashes, block_size)
        if rank not in self._offloaded:
            self._offloaded[rank] = OffloadedBlocks(self._index)
        self._offloaded[rank].add(list(found), own_hashes, store.capacity_blocks(block_size))

    def _lend_parent(self, rank: int, parent: EngineHash | None) -> list[EngineHash]:
        """Give the rank a parent that it has only in the store. Return what to take back: the parent, or nothing."""
        offloaded = self._offloaded.get(rank)
        if offloaded is None or parent is None or self._index.block_hash(self.ranks[rank], parent) is not None:
            return []
        own = offloaded.own_hash(parent)
        if own is None or not self._index.store_hashes(self.ranks[rank], array("Q", [own]), Tier.REMOTE, [parent]):
            return []
        return [parent]

    def _forget_offloaded(self, rank: int) -> None:
        if (offloaded := self._offloaded.pop(rank, None)) is not None:
            offloaded.close()

    def set_store(self, store: KvStore | None) -> None:
        for rank in list(self._offloaded):
            self._forget_offloaded(rank)
        self.store = store
        self.loads_always = False

    # Checks of the events.

    def note_tokens(self, match: bool) -> None:
        """Note whether the engine's tokens of a prompt were the router's: the same blocks, the same length."""
        if match:
            self.token_mismatches = 0
            return
        self.token_mismatches += 1
        if self.token_mismatches == MAX_TOKEN_MISMATCHES:
            self.token_mismatch = True
            self.complete = False

    @property
    def events_missing(self) -> bool:
        """Whether the node prefills prompts without sending events, although their numbers show no gap."""
        return self.prompts_without_events >= MAX_PROMPTS_WITHOUT_EVENTS

    def note_events(self, arrived: bool) -> None:
        """Note whether any event arrived after a prompt that the node prefilled."""
        were_missing = self.events_missing
        self.prompts_without_events = 0 if arrived else self.prompts_without_events + 1
        if were_missing or self.events_missing:
            self._update_complete()

    # Routed.

    def record_routed(self, chain: bytes, tokens: int, now_s: float) -> tuple[bytes, Uses | None]:
        """Record a prompt that was sent to the node.

        Return the blocks that are new there, and when the blocks of the first `tokens` tokens were last used. The
        latter covers only blocks that the node has prefilled: those of prompts that still wait there may be missing."""
        depth = tokens // self.block_size
        return self._touch(self._index, self.routed_holder, chain, now_s, depth, self.prefilled_s)

    def restore_routed(self, block_size: int, pieces: Iterable[tuple[float, bytes]]) -> bool:
        """Take over the blocks that another process has recorded, the oldest first: when they were last used, and their
        hashes. Return False if this process has recorded prompts already."""
        if len(self.recency):
            return False
        if block_size != self.block_size:
            self.set_size(block_size, 0)
        for stamp_s, hashes in pieces:
            if hashes:
                self._touch(self._index, self.routed_holder, hashes, stamp_s, 0, self.prefilled_s)
        return True

    def last_used_s(self, chain: bytes, tokens: float) -> float | None:
        """Return when a prompt with the same first `tokens` tokens was last sent there; None if there was none."""
        depth = int(tokens) // self.block_size
        uses = self.recency.last_uses(chain, depth, inf) if 0 < depth <= len(chain) // 8 else ()
        return uses[-1][2] if uses and uses[-1][1] == depth else None

    def undo_routed(self, chain: bytes, new: bytes) -> None:
        """Remove the new blocks that `record_routed` returned: the prompt never reached the node."""
        self.recency.drop(chain, new)
        self._update_room()
        self._index.remove_hashes(self.routed_holder, new, Tier.GPU)

    def record_output(self, tokens: int, now_s: float) -> None:
        """Account for generated tokens, which take room in the node's cache."""
        self.output_tokens += tokens
        self.record_peer_output(tokens, now_s)

    def record_peer_output(self, tokens: int, now_s: float) -> None:
        """Account for tokens that the node generated for a peer."""
        if tokens >= self.block_size:
            self._add_anonymous(self._index, self.routed_holder, tokens // self.block_size, now_s)

    def evict_older_than(self, stamp_s: float) -> None:
        """Evict what was last used up to `stamp_s`: the engine has evicted a block of that age."""
        recency = self.recency
        capacity = recency.capacity
        for _ in range(MAX_EVICTED_AT_ONCE):
            if len(recency) < 2 or (oldest := recency.oldest) is None or oldest > stamp_s:
                break
            self._index.remove_hashes(self.routed_holder, recency.resize(len(recency) - 1), Tier.GPU)
        recency.resize(capacity)
        self._update_room()

    def _clear_routed(self) -> None:
        self.generation += 1
        self.loads_always = False
        self._index.clear(self.pending_holder)
        del self._owners[self.routed_holder]
        self._index.remove_holder(self.routed_holder)
        self._open_routed(self.recency.capacity)

    def _open_routed(self, blocks: int) -> None:
        self.recency = Recency(blocks)
        self.routed_holder = self._index.add_holder(self.recency)
        self._owners[self.routed_holder] = (self, ROUTED)
        self._update_room()

    def _update_room(self) -> None:
        """Copy what prices read from the recency list. Must follow each of its changes."""
        self.free_blocks, self.oldest_s = self.recency.room

    # Pending.

    def add_pending(self, chain: bytes) -> None:
        self._index.store_hashes(self.pending_holder, chain, Tier.GPU)

    def remove_pending(self, chain: bytes) -> None:
        self._index.remove_hashes(self.pending_holder, chain, Tier.GPU)

    def close(self) -> None:
        """Forget everything: the node is gone."""
        self.generation = -1
        for rank in list(self.ranks):
            self.remove_rank(rank)
        for holder in (self.routed_holder, self.pending_holder):
            del self._owners[holder]
            self._index.remove_holder(holder)

    # Confidence.

    def event_confidence(self, now_s: float, stale_s: float, gone_s: float) -> float:
        """Return the confidence in hits that events report."""
        age_s = max(now_s - self.last_contact_s, self.event_lag_s)
        return self.accuracy.trust(now_s) * freshness(age_s, stale_s, gone_s)

    def confidence(self, now_s: float, stale_s: float, gone_s: float) -> float:
        """Return the confidence in the node's hits, whatever their source."""
        return self.event_confidence(now_s, stale_s, gone_s) if self.complete else self.accuracy.trust(now_s)
