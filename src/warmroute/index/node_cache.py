"""What is believed of one node's cache, from three sources:

    told      by the engine's KV events (or a node's own reports): a place in the index for each data-parallel rank
    routed    by what was sent there: a place that forgets as the node's LRU would
    expected  by what is being prefilled there just now: a place that holds it for a short time, until it is told

`complete` says whether what is told is all there is. Then what was routed counts only for prompts that events cannot
tell of; it is kept for all of them, so that it is there when events are lost.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from math import inf
from typing import Final

from warmroute._kernel._index import NO_PARENT, BlockIndex
from warmroute._kernel._price import CacheState
from warmroute._kernel._recency import Recency
from warmroute.index.confidence import Accuracy, freshness
from warmroute.index.lookup import salted, told_seed
from warmroute.index.tiers import Tier

EngineHash = int | bytes
Uses = list[tuple[int, int, float]]
"""(first, end, stamp) of blocks that were used together."""
ROUTED: Final = -1
"""In the place of a rank: what was routed there."""
EXPECTED: Final = -2
"""In the place of a rank: what is expected there."""
USUAL_BLOCK_TOKENS: Final = 16
"""Where a node does not say."""
NEVER_S: Final = -1e9
OUTLIVED_AT_ONCE: Final = 1024
"""Blocks that one answer's report may make forgotten."""
SURPRISES: Final = 8
"""So many prompts in a row that were others to the node mean that it has another tokenizer or template."""
SILENCES: Final = 8
"""So many prompts in a row that were prefilled there, without an event since, mean that its events are lost."""


class NodeCache(CacheState):
    """What hits and prices are made of lies in CacheState, for the kernel to read; it is used like the rest."""

    accuracy: Accuracy
    __slots__ = (
        "__weakref__",
        "_complete",
        "_index",
        "_on_size",
        "_owners",
        "era",
        "expected_place",
        "gaps",
        "model",
        "prefilled_s",
        "ranks",
        "recency",
        "routed_place",
        "silences",
        "stores",
        "surprises",
    )

    def __init__(
        self,
        name: str,
        index: BlockIndex,
        owners: dict[int, tuple[NodeCache, int]],
        assumed_blocks: int,
        on_size: Callable[[], None],
    ) -> None:
        self.name = name
        self._index = index
        self._on_size = on_size
        """Called when its block size is another."""
        self._owners = owners
        """Whose each place is, and of which rank."""
        self.model = ""
        """The base model that its blocks belong to."""
        self.block_size = USUAL_BLOCK_TOKENS
        self.capacity_blocks = 0
        """What its GPU cache holds; 0 where it has not said."""
        self.ranks: dict[int, int] = {}
        self._complete: dict[int, bool] = {}
        self.complete = False
        """Everything it holds is told, in tokens that this router makes: no rank has lost events since it was empty."""
        self._open_routed(assumed_blocks)
        self.expected_place = index.open_place()
        owners[self.expected_place] = (self, EXPECTED)
        self.accuracy = Accuracy()
        self.heard_s = NEVER_S
        """When it last told something, or answered a poll."""
        self.lag_s = 0.0
        """How late its events come, beyond the quickest of them."""
        self.era = 0
        """Changes when what was routed there is forgotten in whole; below 0 when the node is gone."""
        self.prefilled_s = NEVER_S
        """When the last prompt that it has prefilled was sent there."""
        self.gaps = 0
        self.stores = 0
        """Events of blocks stored, with their tokens."""
        self.surprises = 0
        """Prompts in a row that it prefilled and then told of other blocks than theirs."""
        self.silences = 0
        """Prompts in a row that it prefilled, and has told of nothing since they were sent."""
        self.doubted = False
        """Its tokens are not those that this router makes: what it tells is of no use."""

    # What it is.

    def describe(self, block_size: int, capacity_tokens: int) -> None:
        """Takes what the engine says of its cache."""
        if block_size > 0 and block_size != self.block_size:
            before, self.block_size = self.block_size, block_size
            self._forget_routed()
            self._on_size()
            self.capacity_blocks = self.capacity_blocks * before // block_size
            self.recency.resize(max(1, self.recency.capacity * before // block_size))
        if capacity_tokens > 0:
            self.capacity_blocks = max(1, capacity_tokens // self.block_size)
            evicted = self.recency.resize(self.capacity_blocks)
            self._index.remove_chain(self.routed_place, evicted, Tier.GPU)
        self._recency_changed()

    @property
    def is_told(self) -> bool:
        return bool(self.ranks)

    def _see_whether_complete(self) -> None:
        told = bool(self._complete) and all(self._complete.values())
        self.complete = told and not self.doubted and not self.is_silent

    # What it tells.

    def follow(self, rank: int) -> None:
        """Its events are listened to from now on; until `tells_all` says so, they may not be all."""
        if rank not in self.ranks:
            place = self.ranks[rank] = self._index.open_place()
            self._owners[place] = (self, rank)
            self._complete[rank] = self.complete = False

    def unfollow(self, rank: int) -> None:
        """Nobody tells of this rank any more."""
        place = self.ranks.pop(rank, None)
        self._complete.pop(rank, None)
        if place is not None:
            del self._owners[place]
            self._index.close_place(place)
            self._see_whether_complete()

    def tells_all(self, rank: int, complete: bool) -> None:
        if rank in self._complete:
            self._complete[rank] = complete
            self._see_whether_complete()

    def stored(
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
        """False where the parent is not known: events were lost. Without token ids: hashes told of before, in another
        tier. Raises ValueError or TypeError where they do not fit together."""
        place = self.ranks[rank]
        if not token_ids:
            self._index.store_known(place, hashes, tier)
            return True
        self.stores += 1
        if self.silences:
            self.heard_of(True)
        if block_size != self.block_size and parent is None:
            self.describe(block_size, 0)
        if salt and parent is None:
            extra = salted(extra, len(hashes), salt)
        seed = told_seed(self.model, lora, block_size)
        return self._index.store(place, seed, parent, hashes, token_ids, block_size, tier, extra) != NO_PARENT

    def knows(self, rank: int, hash: EngineHash) -> bool:
        return self._index.our_hash(self.ranks[rank], hash) is not None

    def removed(self, rank: int, hashes: list[EngineHash], tier: Tier = Tier.GPU) -> None:
        self._index.remove(self.ranks[rank], hashes, tier)

    def cleared(self, rank: int) -> None:
        """The rank dropped everything."""
        self._index.clear(self.ranks[rank])
        if len(self.ranks) == 1:
            self._forget_routed()

    def lost(self, rank: int) -> None:
        """Events of a rank were lost for good: what it was told to hold is forgotten."""
        self.gaps += 1
        self._index.clear(self.ranks[rank])
        self.tells_all(rank, False)

    def restarted(self, begun: Collection[int] = ()) -> None:
        """Another process stands there, with an empty cache. Of the ranks that have `begun` to tell, what they told is
        the new one's already."""
        for rank, place in self.ranks.items():
            if rank not in begun:
                self._index.clear(place)
        self._forget_routed()
        self.surprises = self.silences = 0
        self.doubted = False
        self._see_whether_complete()

    def surprised(self, surprised: bool) -> None:
        """Whether a prompt that it prefilled was another to it than to this router: other blocks, or another length."""
        if not surprised:
            self.surprises = 0
            return
        self.surprises += 1
        if self.surprises == SURPRISES:
            self.doubted = True
            self.complete = False

    @property
    def is_silent(self) -> bool:
        """It prefills and tells nothing, though no gap shows in its events: they do not come."""
        return self.silences >= SILENCES

    def heard_of(self, heard: bool) -> None:
        """Whether anything was told of what it prefilled."""
        was_silent = self.is_silent
        self.silences = 0 if heard else self.silences + 1
        if was_silent or self.is_silent:
            self._see_whether_complete()

    def heard(self, now_s: float) -> None:
        self.heard_s = now_s

    # What is kept for it.

    def keep(self, chain: bytes, tokens: int, now_s: float) -> tuple[bytes, Uses | None]:
        """It was sent these blocks. Those that it is not believed to have had; and when the blocks of its first so many
        tokens were last used until now, of those that the node has had for sure: what is still waiting there to be
        prefilled may well be missing."""
        depth = tokens // self.block_size
        return self._send(self._index, self.routed_place, chain, now_s, depth, self.prefilled_s)

    def last_used_s(self, chain: bytes, tokens: float) -> float | None:
        """When the blocks of a prompt's first so many tokens were last sent there; None where they never were."""
        depth = int(tokens) // self.block_size
        uses = self.recency.uses(chain, depth, inf) if 0 < depth <= len(chain) // 8 else ()
        return uses[-1][2] if uses and uses[-1][1] == depth else None

    def drop(self, chain: bytes, new: bytes) -> None:
        """Takes back what `keep` returned of a prompt: it never got there."""
        self.recency.drop(chain, new)
        self._recency_changed()
        self._index.remove_chain(self.routed_place, new, Tier.GPU)

    def keep_answer(self, tokens: int, now_s: float) -> None:
        """It made so many tokens, which take room in its cache."""
        if tokens >= self.block_size:
            self._push(self._index, self.routed_place, tokens // self.block_size, now_s)

    def outlived(self, stamp_s: float) -> None:
        """Something last used at that moment is gone from its cache: so is everything older."""
        recency = self.recency
        capacity = recency.capacity
        for _ in range(OUTLIVED_AT_ONCE):
            if len(recency) < 2 or (oldest := recency.oldest) is None or oldest > stamp_s:
                break
            self._index.remove_chain(self.routed_place, recency.resize(len(recency) - 1), Tier.GPU)
        recency.resize(capacity)
        self._recency_changed()

    def expect(self, chain: bytes) -> None:
        """It is about to prefill these blocks."""
        self._index.store_chain(self.expected_place, chain, Tier.GPU)

    def stop_expecting(self, chain: bytes) -> None:
        self._index.remove_chain(self.expected_place, chain, Tier.GPU)

    def _forget_routed(self) -> None:
        self.era += 1
        self._index.clear(self.expected_place)
        del self._owners[self.routed_place]
        self._index.close_place(self.routed_place)
        self._open_routed(self.recency.capacity)

    def _open_routed(self, blocks: int) -> None:
        """A place for what is routed there, which nothing is yet."""
        self.recency = Recency(blocks)
        self.routed_place = self._index.open_place(self.recency)
        self._owners[self.routed_place] = (self, ROUTED)
        self._recency_changed()

    def _recency_changed(self) -> None:
        """Notes what a price asks of it. To be called after every change."""
        self.free_blocks, self.oldest_s = self.recency.room

    def close(self) -> None:
        """The node is gone: nothing is believed of it."""
        self.era = -1
        for rank in list(self.ranks):
            self.unfollow(rank)
        for place in (self.routed_place, self.expected_place):
            del self._owners[place]
            self._index.close_place(place)

    # How much it counts.

    def told_confidence(self, now_s: float, stale_s: float, gone_s: float) -> float:
        trust = self.accuracy.trust(now_s)
        if now_s - self.heard_s <= stale_s and self.lag_s <= stale_s:
            return trust
        return trust * freshness(max(now_s - self.heard_s, self.lag_s), stale_s, gone_s)

    def confidence(self, now_s: float, stale_s: float, gone_s: float) -> float:
        """Of its hits, by whatever source they are known."""
        return self.told_confidence(now_s, stale_s, gone_s) if self.complete else self.accuracy.trust(now_s)
