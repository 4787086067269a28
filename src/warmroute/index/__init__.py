"""Which node holds which KV block.

Prompts become chains of block hashes in a namespace (`chain`, `namespace_seed`). `BlockIndex` maps each block to the
places that hold it. A place is a number for one cache, for example one data-parallel rank of a node; `CacheView` knows
which node each place belongs to. The index itself is compiled (`_kernel/_index.c`).
"""

from warmroute._kernel._index import MIN_BUDGET_BYTES, NO_PARENT, PARENT_LOST, BlockIndex, chain, engine_hash
from warmroute._kernel._recency import Recency
from warmroute.index.namespace import namespace_seed
from warmroute.index.tiers import Tier

__all__ = [
    "MIN_BUDGET_BYTES",
    "NO_PARENT",
    "PARENT_LOST",
    "BlockIndex",
    "Recency",
    "Tier",
    "chain",
    "engine_hash",
    "namespace_seed",
]
