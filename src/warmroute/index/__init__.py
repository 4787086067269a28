"""Who holds which block: block hashes over a namespace, and for each block the places that hold it.

A place is a node's cache as one data-parallel rank of one incarnation has it. The index hands out numbers for places;
who stands behind a number is the caller's to know. The inner part is `_kernel/_index.c`, and `plain.py` says the same.
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
