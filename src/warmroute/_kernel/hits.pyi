from array import array
from collections.abc import Mapping
from typing import Final, TypeAlias

from warmroute._kernel.index import BlockIndex, MatchRow

Doubles: TypeAlias = bytes | array[float]

ROUTED_RANK: Final[int]
"""In place of a rank: the prompts that the router sent to the node."""
ACCURACY_PRIOR_TOKENS: Final[float]
"""A new node is trusted as if this many predicted tokens had been confirmed."""
ACCURACY_HALF_LIFE_S: Final[float]
"""Without answers, distrust halves in this time, so that the node gets another chance."""

class AccuracyState:
    """How many predicted cached tokens the engine confirmed."""

    _predicted: float
    _confirmed: float
    _at_s: float

class CacheState:
    """What hits and prices read of a node's cache."""

    name: str
    accuracy: AccuracyState
    block_size: int
    capacity_blocks: int
    free_blocks: int
    oldest_s: float
    """nan if nothing is held."""
    last_contact_s: float
    event_lag_s: float
    complete: bool
    """Whether its KV events report everything that it holds."""
    token_mismatch: bool
    """Whether its KV events report other blocks than its prompts have."""
    def _touch(
        self, index: BlockIndex, holder: int, hashes: bytes, now_s: float, depth: int, latest_s: float, /
    ) -> tuple[bytes, list[tuple[int, int, float]] | None]:
        """`BlockIndex.touch`, and `Recency.last_uses` from before it (None if `depth` is 0). Updates the cache's
        room."""
    def _add_anonymous(self, index: BlockIndex, holder: int, count: int, now_s: float, /) -> None:
        """`Recency.add_anonymous` of an LRU holder, whose evicted blocks leave the index. Updates the cache's room."""

class Hit:
    """Leading tokens of a prompt that a node's cache holds."""

    def __new__(cls, tokens: int, expected: float, rank: int) -> Hit: ...
    @property
    def tokens(self) -> int:
        """As the index has them."""
    @property
    def expected(self) -> float:
        """The tokens weighted by tier and confidence."""
    @property
    def rank(self) -> int:
        """The data-parallel rank that holds them; below 0 if that is not known."""

def add_hits(
    found: dict[str, Hit],
    rows: list[MatchRow],
    owners: Mapping[int, tuple[CacheState, int]],
    block_size: int,
    limits: tuple[int, int, bool],
    now_s: float,
    ages_s: tuple[float, float],
    worth: tuple[float, float, float],
    /,
) -> None:
    """Add a hit for each node that has a row of `BlockIndex.match`, by name; of several, the most valuable one.

    `owners`, a dict: the cache and rank of each holder. `limits`: blocks that may count, those of them whose tokens are
    exact, and whether all tokens of the prompt are exact. `ages_s`: KV events count in full up to the first age, and
    nothing from the second on. `worth`: of a block on CPU, on disk and in remote storage.
    """

def match_hits(
    found: dict[str, Hit],
    index: BlockIndex,
    hashes: bytes,
    owners: Mapping[int, tuple[CacheState, int]],
    block_size: int,
    limits: tuple[int, int, bool],
    now_s: float,
    ages_s: tuple[float, float],
    worth: tuple[float, float, float],
    /,
) -> None:
    """`add_hits` of `index.match(hashes)`, without making the rows."""
