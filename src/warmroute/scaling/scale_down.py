"""Which nodes the fleet can do without.

A node can be removed when few requests wait, utilisation is below its floor, and the remaining nodes would hold the
load, the KV memory and the hit ratio with room to spare. The best candidate costs the most for its speed and has the
least valuable cache:

    saved = usd_per_hour / weight · STAY_S                      price of its time, for the speed it adds
    lost  = held blocks · block_tokens · chance · ms_per_token  prefilling again what its cache holds and requests will
                                                                need, at the price of the same time

Only nodes that a provisioner created are removed, and none that its island needs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

import msgspec

from warmroute.config import LOW_QUEUE_PER_NODE, LOW_UTILISATION
from warmroute.scaling.capacity import ScalingInputs
from warmroute.scaling.fleet_observer import NodeView
from warmroute.scaling.offer_selection import OfferSelector
from warmroute.scaling.scale_up import inter_token_ms
from warmroute.scaling.scaling_decision import PaidNode, count_of_nodes

STAY_S: Final = 600.0
"""How long a node that is not removed now is assumed to stay."""
DEFAULT_USD_PER_HOUR: Final = 1.0
"""For a node without a known price."""
BLOCK_TOKENS: Final = 16.0
MAX_REMAINING_LOAD: Final = 0.75
"""Fraction of `target_utilisation` and `max_kv_usage` that the remaining nodes may reach."""
MAX_REMAINING_WAIT: Final = 0.4
"""Fraction of `max_mean_wait_ms` that the remaining nodes may reach."""


class RemovalCandidate(msgspec.Struct, frozen=True):
    node: NodeView
    saved_usd: float
    lost_usd: float

    @property
    def reason(self) -> str:
        if self.node.usd_per_hour <= 0:
            return "least valuable cache"
        return f"highest price for its speed ({self.saved_usd:.2g} USD), least valuable cache ({self.lost_usd:.2g} USD)"


def rank_candidates(inputs: ScalingInputs, *, any_node: bool = False) -> list[RemovalCandidate]:
    """Return the nodes that may be removed, one after the other and all together, the best candidate first.
    `any_node`: also those that no provisioner created."""
    speeds = inputs.speeds
    candidates = []
    for node in inputs.serving:
        if not node.removable or (node.offer is None and not any_node):
            continue
        usd = node.usd_per_hour if node.usd_per_hour > 0 else DEFAULT_USD_PER_HOUR
        weight = speeds.weight(node.gpu)
        # Its blocks are between 0 and this old; the chance at half of it stands for all.
        chance = inputs.view.reuse_chance(0.5 * node.oldest_age_s)
        lost_s = node.held_blocks * BLOCK_TOKENS * chance * speeds.usual_ms / 1000.0
        candidates.append(RemovalCandidate(node, usd / weight * STAY_S / 3600.0, usd * lost_s / 3600.0))
    candidates.sort(key=lambda one: (one.lost_usd - one.saved_usd, one.node.load, one.node.name))
    spare = Counter(node.island for node in inputs.serving)
    spare.subtract({one.island: one.min_nodes for one in inputs.config.islands})
    removable = []
    for candidate in candidates:
        if spare[candidate.node.island] > 0:
            spare[candidate.node.island] -= 1
            removable.append(candidate)
    return removable


def removable_nodes(inputs: ScalingInputs, minimum: int, *, any_node: bool) -> tuple[list[RemovalCandidate], str]:
    """Return the nodes that the rest could do without, the best candidate first, and why these or none."""
    config, view, stable, demand = inputs.config, inputs.view, inputs.view.stable, inputs.demand
    spare = len(inputs.serving) - minimum
    if spare <= 0 or inputs.pending or inputs.panicking:
        return [], "no node is removed in panic mode" if inputs.panicking and spare > 0 else ""
    candidates = rank_candidates(inputs, any_node=any_node)
    if not minimum:
        return candidates, f"no request for {view.idle_s:,.0f} s"
    queue = stable.waiting / len(inputs.serving)
    used = demand.utilisation(inputs.size)
    if len(inputs.serving) > config.max_nodes:
        return candidates[: len(inputs.serving) - config.max_nodes], f"maximum is {count_of_nodes(config.max_nodes)}"
    if queue >= LOW_QUEUE_PER_NODE or used >= LOW_UTILISATION or view.waiting > len(inputs.serving):
        return [], ""
    chosen: list[RemovalCandidate] = []
    size = inputs.size
    for candidate in candidates[:spare]:
        node = candidate.node
        rest = size.plus(-inputs.speeds.weight(node.gpu), -(node.cache_blocks or inputs.speeds.blocks(node.gpu)))
        if rest.weight <= 0 or demand.utilisation(rest, inputs.growth) > MAX_REMAINING_LOAD * config.target_utilisation:
            break
        if demand.wait_ms(rest, inputs.growth) > MAX_REMAINING_WAIT * inputs.max_wait_ms(demand, rest):
            break
        if demand.kv_usage(rest) > MAX_REMAINING_LOAD * config.max_kv_usage:
            break
        limit_ms = config.objective.inter_token_p90_ms
        if limit_ms and inter_token_ms(inputs, len(inputs.serving) - len(chosen) - 1) > MAX_REMAINING_LOAD * limit_ms:
            break
        now, then = demand.hit_ratio(size), demand.hit_ratio(rest)
        if now is not None and then is not None and then < config.min_hit_ratio <= now:
            break
        chosen.append(candidate)
        size = rest
    if not chosen:
        return [], ""
    after = demand.utilisation(size)
    return chosen, f"utilisation is {used:.0%}; without {count_of_nodes(len(chosen))} it would be {after:.0%}"


def exchange_candidate(
    inputs: ScalingInputs, paid: Sequence[PaidNode], missing: dict[str, int], offers: OfferSelector
) -> tuple[list[RemovalCandidate], str]:
    """Return a node to remove so that an island can reach its minimum, where the fleet has reached `max_nodes` and an
    offer on that island is available."""
    if inputs.node_count < inputs.config.max_nodes or not offers.offers:
        return [], ""
    view = inputs.view
    for candidate in rank_candidates(inputs)[:1]:
        rest = list(paid)
        rest.remove(paid_node(candidate.node))
        for island in missing:
            offer, _ = offers.select(
                rest, inputs.speeds, view.now_s, prefill_work=view.stable.prefill_work or 0.0, island=island
            )
            if offer is not None:
                return [candidate], f"island {island} needs a node, and the fleet has its maximum"
    return [], ""


def paid_node(node: NodeView) -> PaidNode:
    """A machine of a provisioner counts towards the limits until it is gone, whether it answers or not. A node that
    somebody else added counts only while it serves: the autoscaler could not remove it."""
    counts = not node.reclaimed and (node.serving or node.unchecked or node.offer is not None)
    return PaidNode(node.offer, node.island, node.usd_per_hour, node.gpu, counts, node.role)
