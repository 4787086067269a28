from typing import Final

from warmroute._kernel.accounting import DecodeSpeedState, NodeState
from warmroute._kernel.hits import CacheState, Doubles, Hit

# Terms of the price.
KV_FULL_POWER: Final[float]
KV_FULL_SCALE: Final[float]
KV_FULL_MARGIN: Final[float]
KV_MAX_FULL: Final[float]
KV_USABLE_SHARE: Final[float]
"""Share of its KV memory that a node can really use."""
KV_GROWTH_SHARE: Final[float]
"""Share of their output that running requests still have to write, beyond what requests that end free meanwhile."""
STREAMED_WEIGHT: Final[float]
"""Weight of a millisecond while an answer is streamed, relative to one before its first token: a tenth, since it can be
read meanwhile, and as much again for the other answers of the batch, which this one slows down."""
STALLED_WEIGHT: Final[float]
"""Weight of a millisecond for which a running request gets no token because its node prefills another prompt, relative
to one before its first token."""
STALLED_MAX_WORK: Final[float]
"""Prefill work for which running requests stall at most: that of one step of an engine."""
PREFILL_SPEED_NOISE: Final[float]
"""Nodes whose prefill speeds differ by up to this factor stall their requests equally long."""
EVICTED_WEIGHT: Final[float]
"""A block from within a long prompt takes this many times longer to prefill than one of a short prompt."""
RISK_POWER: Final[float]
"""How sharply the risk of missing a deadline rises: at half of the time that is left it is 1 in 17, at twice 16 in
17."""
REUSE_FIRST_S: Final[float]
"""The upper bound of the first bucket of reuse ages; each following bucket ends at √2 times the age."""

class Prices:
    """The price of each node, by its position. An item has the fields of routing.price.Price."""

    def __len__(self) -> int: ...
    def __getitem__(self, at: int, /) -> tuple[float, ...]: ...
    def cheapest(self, factor: float, /) -> list[int]:
        """Return the nodes whose price is within a factor of the least one."""
    def least_loaded(self, among: list[int], /) -> list[int]:
        """Return those of these nodes that have the least load."""
    def least_work_left(self, among: list[int], now_s: float, /) -> int:
        """Return the one of these nodes that has the least prefill work left (`NodeState.remaining_work`); of equal
        ones, the one that got a request last. -1 if the list is empty."""
    def cheapest_within(self, most_own: float, /) -> int:
        """Return the cheapest of the nodes whose own cost is at most this; -1 if there is none."""
    def second_home(self, home: int, crowded: float, more: float, extra_ms: float, /) -> int:
        """Return the node to copy a crowded node's prefix to; `home` itself if there is none.

        Home must have some of the prompt cached, and more than `crowded` × the mean number of requests and `more`
        beyond that. The result is the cheapest node that has at most the mean, costs the request itself at most
        `extra_ms` more, and would cost no more than home if it had the prefix.
        """
    def clear_winner(self, factor: float, crowded: float, more: float, /) -> int:
        """Return the cheapest node if no other is within `factor` of its price, and if it has nothing cached or is not
        crowded (as in `second_home`); else -1."""
    @property
    def mean_load(self) -> float:
        """The mean number of requests on a node, now."""

def price_nodes(
    nodes: tuple[NodeState, ...],
    caches: tuple[CacheState | None, ...],
    hits: dict[str, Hit],
    chances: Doubles,
    adapter_ms: Doubles | None,
    reserved_rates: Doubles | None,
    now_s: float,
    request: tuple[float, float, float],
    due: tuple[float, float],
    behind: float,
    decode_speed: DecodeSpeedState,
    settings: tuple[float, float, bool, bool, bool],
    /,
) -> Prices:
    """Return what a request costs on each of the nodes.

    `chances`: of reuse, as `Reuse.chances`. `adapter_ms`: for each node, the time to load the request's adapter.
    `reserved_rates`: for each node, the requests per millisecond that need a longer context window than this one and
    may go there. `request`: the tokens of its prompts, its expected output tokens, and the number of prompts. `due`:
    the time until its first token is due, and the penalty for being late; both 0 without a deadline.
    `behind`: requests that wait behind it, for each node. `decode_speed`: of its model. `settings`:
    max_saving_ms, locality, room, memory, congestion.
    """
