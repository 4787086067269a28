from array import array
from collections.abc import Mapping
from typing import TypeAlias

from warmroute._kernel._books import NodeState, PaceState
from warmroute._kernel._index import BlockIndex

Doubles: TypeAlias = bytes | array[float]

class AccuracyState:
    """What a hit takes from the accuracy of a node's cache."""

    _predicted: float
    _came_true: float
    _at_s: float

class CacheState:
    """What hits and prices take from a node's cache."""

    name: str
    accuracy: AccuracyState
    block_size: int
    capacity_blocks: int
    free_blocks: int
    oldest_s: float
    """Not a number where nothing is held."""
    heard_s: float
    lag_s: float
    complete: bool
    doubted: bool
    def _send(
        self, index: BlockIndex, place: int, chain: bytes, now_s: float, depth: int, latest_s: float, /
    ) -> tuple[bytes, list[tuple[int, int, float]] | None]:
        """`BlockIndex.keep` at a mirrored place: what is new there. With it, of the moment before, the mirror's `uses`
        (None where `depth` is 0), and the mirror's room is noted."""
    def _push(self, index: BlockIndex, place: int, count: int, now_s: float, /) -> None:
        """`Recency.push` of a mirrored place: what that lets go of is removed, and the mirror's room is noted."""

class Hit:
    """Leading tokens of a prompt that a node holds."""

    def __new__(cls, tokens: int, expected: float, rank: int) -> Hit: ...
    @property
    def tokens(self) -> int:
        """As believed."""
    @property
    def expected(self) -> float:
        """What they are worth, by tier and confidence."""
    @property
    def rank(self) -> int:
        """The data-parallel rank that holds them; below 0 where that is not known."""

def add_hits(
    found: dict[str, Hit],
    rows: list[tuple[int, int, int, int, int]],
    owners: Mapping[int, tuple[CacheState, int]],
    block_size: int,
    limits: tuple[int, int, bool],
    now_s: float,
    ages_s: tuple[float, float],
    worth: tuple[float, float, float],
    /,
) -> None:
    """Adds a hit for each node that has a row of `BlockIndex.match`, by name; of several, the one worth the most.

    `owners`, a dict, says whose each place is, and of which rank. `limits`: blocks that may count, those of them that
    events can tell of, and whether the prompt is all of such. `ages_s`: what is told counts in full up to the first,
    and nothing from the second on. `worth`: of a block on CPU, on disk and remote.
    """

def match_hits(
    found: dict[str, Hit],
    index: BlockIndex,
    chain: bytes,
    owners: Mapping[int, tuple[CacheState, int]],
    block_size: int,
    limits: tuple[int, int, bool],
    now_s: float,
    ages_s: tuple[float, float],
    worth: tuple[float, float, float],
    /,
) -> None:
    """`add_hits` of what the index matches, without the rows in between."""

class Prices:
    """Of each node, by its number. An item has the fields of routing.price.Price."""

    def __len__(self) -> int: ...
    def __getitem__(self, at: int, /) -> tuple[float, ...]: ...
    def cheapest(self, times: float, /) -> list[int]:
        """Those within so many times the least price."""
    def lightest(self, among: list[int], /) -> list[int]:
        """Those of these whose node has the least load."""
    def cheapest_within(self, most_own: float, /) -> int:
        """The cheapest of those with at most this cost of its own; -1 where there is none."""
    def second_home(self, home: int, crowded: float, more: float, extra_ms: float, /) -> int:
        """Where home has something cached, and more than `crowded` times the mean of requests and so many `more`: the
        cheapest of those with at most the mean that cost the request itself at most `extra_ms` more, and with what home
        has cached would be no dearer than home. Home itself where there is none."""
    def beyond_doubt(self, times: float, crowded: float, more: float, /) -> int:
        """The cheapest, where none other is within so many times its price, and where it has nothing cached or at most
        `crowded` times the mean of requests and so many `more`; -1 where that has to be looked at."""
    @property
    def mean_load(self) -> float:
        """Requests on a node, now."""

def price_nodes(
    nodes: tuple[NodeState, ...],
    caches: tuple[CacheState | None, ...],
    hits: dict[str, Hit],
    chances: Doubles,
    adapter_ms: Doubles | None,
    now_s: float,
    request: tuple[float, float],
    due: tuple[float, float],
    behind: float,
    pace: PaceState,
    settings: tuple[float, float, bool, bool, bool],
    /,
) -> Prices:
    """What a request costs on each of the nodes; tests/routing/price_reference.py says how.

    `chances`: of reuse, as `Reuse.chances`. `adapter_ms`: for each node, what loading its adapter takes. `request`: its
    tokens and those of its answer. `due`: the time until its first token is due, and what it costs to be late; both 0
    where it has time. `behind`: requests that wait here and will be behind it, of a node. `pace`: of its model.
    `settings`: max_saving_ms, cache_weight, room, memory, congestion.
    """
