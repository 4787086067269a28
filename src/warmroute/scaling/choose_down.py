"""Which node to give back: the one that costs most for what it does, and whose cache is worth least.

    saved = usd_per_hour / weight · STAY_S                      what its time costs, for the speed it brings
    lost  = held blocks · block_tokens · chance · ms_per_token  computing again what its cache holds and others will ask
                                                                for, at the price of the same time

Only nodes that a provisioner made are given back, and none that its island needs. What only this node holds of hot
prefixes is named, to be moved to another node first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Final

import msgspec

from warmroute.config import Scaling
from warmroute.index.cache_view import CacheView
from warmroute.index.hot import HotPrefix, HotPrefixes
from warmroute.scaling.capacity import Speeds
from warmroute.scaling.observe import NodeView

STAY_S: Final = 600.0
"""What a node that is not given back now would cost, until it is."""
USUAL_USD: Final = 1.0
"""An hour of a node whose price nobody knows."""
BLOCK_TOKENS: Final = 16.0
MOST_MOVED: Final = 8


class Victim(msgspec.Struct, frozen=True):
    node: NodeView
    saved_usd: float
    lost_usd: float


def ranked(
    nodes: Sequence[NodeView],
    speeds: Speeds,
    config: Scaling,
    reuse_chance: Callable[[float], float],
    *,
    anybodys: bool = False,
) -> list[Victim]:
    """Those that may go, one after the other and all of them together, the best to give back first; `anybodys`: also
    those that no provisioner made."""
    serving = [node for node in nodes if node.serving]
    victims = []
    for node in serving:
        if not node.endable or (node.offer is None and not anybodys):
            continue
        usd = node.usd_per_hour if node.usd_per_hour > 0 else USUAL_USD
        weight = speeds.weight(node.gpu)
        # What is still to be used of a cache whose blocks are between 0 and this old: half way is a fair middle.
        chance = reuse_chance(0.5 * node.oldest_age_s)
        lost_s = node.held_blocks * BLOCK_TOKENS * chance * speeds.usual_ms / 1000.0
        victims.append(Victim(node, usd / weight * STAY_S / 3600.0, usd * lost_s / 3600.0))
    victims.sort(key=lambda one: (one.lost_usd - one.saved_usd, one.node.load, one.node.name))
    spare = Counter(node.island for node in serving)
    spare.subtract({one.island: one.min_nodes for one in config.islands})
    may_go = []
    for victim in victims:
        if spare[victim.node.island] > 0:
            spare[victim.node.island] -= 1
            may_go.append(victim)
    return may_go


def only_here(
    hot: HotPrefixes | None, cache_view: CacheView, name: str, others: Collection[str], now_s: float
) -> tuple[HotPrefix, ...]:
    """Hot prefixes that this node holds and none of the others does."""
    if hot is None:
        return ()
    found = []
    for prefix in hot.hottest(64, now_s):
        holders = cache_view.holders(prefix.chain)
        if name in holders and not holders & set(others):
            found.append(prefix)
    return tuple(found[:MOST_MOVED])
