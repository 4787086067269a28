"""Limits what a tenant can learn from cache hits to prompts that it sent itself.

Engines do not know tenants: a block that an engine reports may be any tenant's. So each tenant, or group of tenants
that share, has a holder of its own in the index with the blocks of the prompts it sent through this router. A match
counts for a tenant

- as deep as the tenant has sent these blocks itself;
- beyond that (blocks of responses, which no tenant has sent yet) only if no other tenant has sent even the first block,
  since only then the response must have gone to this tenant.

    A's prompt      [b1 b2 b3 b4 | a5 a6]        a node reports b1 … a6 (a5, a6: blocks of the response)
    A's next turn   [b1 b2 b3 b4   a5 a6 b7]     A sent 4. Nobody else sent b1: 6 blocks count. B sent b1: 4 count.
    B's prompt      [b1 c2 …]                    B sent 1: at most 1 block counts, whatever the caches hold.

Hidden hits are still hits: the engine prefills such a prompt sooner than a tenant's own hits explain. The router learns
no speed from it (Prediction.has_hidden_hits), or the node would look fast, get all requests, and show each tenant by
its time to first token what others have cached. Only what the engine reports as cached makes such a time count.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from warmroute._kernel import BlockIndex, Recency
from warmroute.core.node_cache import Tier

MAX_BLOCKS: Final = 1 << 20
"""Blocks remembered for all tenants together. The tenant with the most blocks loses its oldest first."""
BYTES_PER_BLOCK: Final = 256
"""A small index remembers fewer: one block for this many bytes of its budget."""
UNLIMITED: Final = 1 << 62

Row = tuple[int, int, int, int, int]


class _SentBlocks(NamedTuple):
    """The blocks that one group of tenants sent."""

    recency: Recency
    holder: int


class TenantIsolation:
    def __init__(self, index: BlockIndex) -> None:
        self._index = index
        self._max_blocks = min(MAX_BLOCKS, index.stats()["budget_bytes"] // BYTES_PER_BLOCK)
        self._sent: dict[str, _SentBlocks] = {}
        self._holders: set[int] = set()
        self._blocks = 0

    def record(self, group: str, chain: bytes, now_s: float) -> None:
        """Remember that a tenant of `group` sent these blocks."""
        sent = self._sent.get(group)
        if sent is None:
            recency = Recency(self._max_blocks)
            sent = self._sent[group] = _SentBlocks(recency, self._index.add_holder(recency))
            self._holders.add(sent.holder)
        before = len(sent.recency)
        self._index.touch(sent.holder, chain, now_s)
        self._blocks += len(sent.recency) - before
        if self._blocks > self._max_blocks:
            self._make_room()

    def groups(self) -> Iterator[tuple[str, list[tuple[float, bytes]]]]:
        """Yield each group with the blocks that it sent, as Recency.pieces returns them."""
        for group, sent in list(self._sent.items()):
            yield group, sent.recency.pieces()

    def _make_room(self) -> None:
        self._blocks = sum(len(sent.recency) for sent in self._sent.values())  # the index may have evicted some
        if self._blocks <= self._max_blocks:
            return
        largest = max(self._sent.values(), key=lambda sent: len(sent.recency))
        before = len(largest.recency)
        evicted = largest.recency.resize(max(1, before - (self._blocks - self._max_blocks)))
        largest.recency.resize(self._max_blocks)
        self._index.remove_hashes(largest.holder, evicted, Tier.GPU)
        self._blocks += len(largest.recency) - before

    def visible_depth(self, group: str, rows: Sequence[Row]) -> int:
        """Return how many leading blocks of a match count for this group."""
        sent = self._sent.get(group)
        if sent is None:
            return 0
        own_depth, alone = 0, True
        holders = self._holders
        for holder, depth, *_ in rows:
            if holder == sent.holder:
                own_depth = depth
            elif holder in holders:
                alone = False
        return UNLIMITED if own_depth and alone else own_depth
