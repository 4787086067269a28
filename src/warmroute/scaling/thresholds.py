"""How many nodes more or fewer the fleet needs by thresholds, and why; and which nodes it can do without.

`rank_candidates` orders the nodes that may be removed, by price and by the value of their caches. Plans ask it too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from math import ceil
from typing import Final

import msgspec

from warmroute.config import LOW_QUEUE_PER_NODE, LOW_UTILISATION
from warmroute.scaling.capacity import Demand, FleetSize, ScalingInputs
from warmroute.scaling.observer import NodeView
from warmroute.scaling.offer_selection import OfferSelector
from warmroute.scaling.scaling_decision import PaidNode, count_of_nodes

# How many nodes the fleet needs in addition, and why.
#
#     reason                                                                                     nodes
#     ----------------------------------------------------------------------------------------   -----------------
#     requests wait and no node serves                                                           1, at once
#     utilisation is above `target_utilisation`, or the estimated wait above `max_mean_wait_ms`  as many as it takes
#     running requests fill more of the KV memory than `max_kv_usage`                            as many as it takes
#     the p90 of the time between tokens is above `objective.inter_token_p90_ms`                 up to twice the fleet
#     `max_queue_per_node` requests wait per node, TTFT or latency is above its limit,           1 at a time
#     or the router rejects requests
#     the hit ratio is below `min_hit_ratio`, and more cache would raise it                      1 at a time
#
# Pending nodes count as if they served, except where requests wait.

MIN_FIRST_TOKENS: Final = 20
"""Fewest responses: a percentile of fewer is unknown."""
CACHE_FACTOR: Final = 1.5
"""A fleet half as large again is what an operator would try."""
MIN_HIT_GAIN: Final = 0.02
"""More cache helps if CACHE_FACTOR times as much raises the hit ratio by MIN_HIT_GAIN."""
HEADROOM: Final = 0.85
"""Where a limit is broken, nodes are added until the estimate is below this fraction of it. Just below the limit, the
next minute would break it again."""
MISSES_SAVED: Final = 0.1
"""With CACHE_FACTOR times the cache, this share of the misses has to go: less is within the error of the estimate."""
CACHE_STEP: Final = 0.2
"""Where response times are over a limit and more cache would save MISSES_SAVED of the misses, the fleet grows by this
fraction of its nodes instead of by one."""
MIN_BUSY: Final = 0.5
"""Fraction of `max_mean_wait_ms`. If the estimated wait is below it and no requests wait, more nodes would not help."""
MAX_TOKEN_STEP: Final = 2
"""The time between tokens of a fleet of up to this many times the nodes that serve can be estimated."""
MAX_NODES: Final = 1024
"""An estimate that needs more nodes than this is wrong."""


def nodes_needed(inputs: ScalingInputs) -> tuple[int, list[str]]:
    """Return how many nodes to add, and the reasons."""
    if not inputs.serving:
        return _first_node(inputs)
    config, size, demand = inputs.config, inputs.size, inputs.demand
    weight, blocks = size.weight / inputs.node_count, size.blocks / inputs.node_count
    needed, reasons = 0, []
    windows = [("", demand)] + ([(" in the panic window", inputs.panic_demand)] if inputs.panicking else [])
    for where, window in windows:
        reason = _over_capacity(inputs, window, where)
        if reason:
            max_wait_ms = inputs.max_wait_ms(window, size)
            needed = max(needed, _for_work(inputs, window, max_wait_ms, weight, blocks))
            reasons.append(reason)
    kv_usage = demand.kv_usage(size)
    if kv_usage > config.max_kv_usage:
        needed = max(needed, _until(lambda s: demand.kv_usage(s) <= config.max_kv_usage, size, weight, blocks))
        reasons.append(f"running requests fill {kv_usage:.0%} of KV memory, limit {config.max_kv_usage:.0%}")
    slow, more = _slow_tokens(inputs)
    if slow:
        reasons.append(slow)
        needed = max(needed, more)
    symptoms = _symptoms(inputs)
    if symptoms:
        reasons.extend(symptoms)
        if not inputs.pending:
            needed = max(needed, _for_symptoms(inputs))
    hit_reason, more_cache_helps = _low_hit_ratio(inputs)
    if hit_reason:
        reasons.append(hit_reason)
        if more_cache_helps and not inputs.pending:
            needed = max(needed, 1)
    return needed, reasons


def _first_node(inputs: ScalingInputs) -> tuple[int, list[str]]:
    view, pending = inputs.view, len(inputs.pending)
    scaled_to_zero = 0 < inputs.config.scale_to_zero_after_s <= view.idle_s
    if not view.waiting and (scaled_to_zero or not view.stable.arrivals_per_s):
        return 0, []
    if pending:
        return 0, [f"{view.waiting} requests wait for the first node; {count_of_nodes(pending)} starting"]
    return 1, [f"{view.waiting} requests wait and no node serves"]


def _over_capacity(inputs: ScalingInputs, demand: Demand, where: str) -> str:
    """Return what the work exceeds, or an empty string."""
    limit, growth = inputs.config.target_utilisation, inputs.growth
    used = demand.utilisation(inputs.size, growth)
    wait_ms = demand.wait_ms(inputs.size, growth)
    max_wait_ms = inputs.max_wait_ms(demand, inputs.size)
    forecast = f" (forecast: {growth:.0%} of the current load when a new node serves)" if growth > 1.005 else ""
    if used > limit:
        return f"utilisation{where} is {used:.0%}, limit {limit:.0%}{forecast}"
    if wait_ms > max_wait_ms:
        return f"estimated wait{where} is {wait_ms:,.0f} ms, limit {max_wait_ms:,.0f} ms{forecast}"
    return ""


def inter_token_ms(inputs: ScalingInputs, nodes: float) -> float:
    """Return the p90 of the time between tokens with this many nodes: a step over an empty context, and a part that
    shrinks with the requests of each node. 0 if nothing was measured."""
    view = inputs.view
    now_ms, base_ms = view.stable.inter_token_p90_ms, view.decode_base_ms
    if now_ms is None or now_ms <= base_ms or nodes <= 0 or view.stable.inter_token_samples < MIN_FIRST_TOKENS:
        return 0.0
    return base_ms + (now_ms - base_ms) * len(inputs.serving) / nodes


def _slow_tokens(inputs: ScalingInputs) -> tuple[str, int]:
    """Return why tokens come too slowly, or an empty string, and how many nodes would help."""
    limit_ms, count = inputs.config.objective.inter_token_p90_ms, inputs.node_count
    if not limit_ms or inter_token_ms(inputs, count) <= limit_ms:
        return "", 0
    reason = f"inter-token p90 is {inputs.view.stable.inter_token_p90_ms:.0f} ms, objective {limit_ms:g} ms"
    if inputs.view.decode_base_ms >= HEADROOM * limit_ms:
        return f"{reason}; more nodes would not help, because a step takes {inputs.view.decode_base_ms:.0f} ms", 0
    most = max(0, MAX_TOKEN_STEP * len(inputs.serving) - count)
    more = min(1, most)
    while more < most and inter_token_ms(inputs, count + more) > HEADROOM * limit_ms:
        more += 1
    return reason, more


def _symptoms(inputs: ScalingInputs) -> list[str]:
    """Return what clients notice, whatever the utilisation is."""
    config, stable, demand, size = inputs.config, inputs.view.stable, inputs.demand, inputs.size
    found = []
    queue = stable.waiting / len(inputs.serving)
    if queue > config.max_queue_per_node:
        found.append(f"{queue:.1f} requests wait per node, limit {config.max_queue_per_node:g}")
    busy = queue > LOW_QUEUE_PER_NODE or demand.wait_ms(size) > MIN_BUSY * inputs.max_wait_ms(demand, size)
    for name, value, limit in (
        ("TTFT", stable.ttft_p99_ms, config.max_ttft_p99_ms),
        ("latency", stable.latency_p99_ms, config.max_latency_p99_ms),
    ):
        if limit and value is not None and value > limit and stable.first_tokens >= MIN_FIRST_TOKENS and busy:
            found.append(f"{name} p99 is {value:,.0f} ms, limit {limit:,.0f} ms")
    if stable.shed_per_s > 0:
        found.append(f"the router rejects {stable.shed_per_s:.2g} requests/s")
    return found


def _low_hit_ratio(inputs: ScalingInputs) -> tuple[str, bool]:
    """Return why the hit ratio is too low, or an empty string, and whether more cache would raise it."""
    stable, minimum = inputs.view.stable, inputs.config.min_hit_ratio
    ratio = stable.hit_ratio
    if ratio is None or ratio >= minimum or stable.arrivals_per_s <= 0 or stable.first_tokens < MIN_FIRST_TOKENS:
        return "", False
    reason = f"hit ratio is {ratio:.0%}, minimum {minimum:.0%}"
    now, then = _hit_ratios(inputs)
    if now is None or then is None or then - now < MIN_HIT_GAIN:
        return f"{reason}; more cache would not help, because few blocks are reused", False
    return f"{reason}; {CACHE_FACTOR:g} × the cache would raise it to {then:.0%}", True


def _for_symptoms(inputs: ScalingInputs) -> int:
    """Return how many nodes to try where the utilisation does not explain the symptoms."""
    now, then = _hit_ratios(inputs)
    if now is None or then is None or 1.0 - then > (1.0 - MISSES_SAVED) * (1.0 - now):
        return 1
    return max(1, ceil(CACHE_STEP * len(inputs.serving)))


def _hit_ratios(inputs: ScalingInputs) -> tuple[float | None, float | None]:
    """Return the hit ratio with the current cache, and with CACHE_FACTOR times as much."""
    size = inputs.size
    larger = FleetSize(CACHE_FACTOR * size.weight, CACHE_FACTOR * size.blocks)
    return inputs.demand.hit_ratio(size), inputs.demand.hit_ratio(larger)


def _for_work(inputs: ScalingInputs, demand: Demand, max_wait_ms: float, weight: float, blocks: float) -> int:
    growth, limit = inputs.growth, inputs.config.target_utilisation

    def enough(larger: FleetSize) -> bool:
        fast = demand.wait_ms(larger, growth) <= HEADROOM * max_wait_ms
        return fast and demand.utilisation(larger, growth) <= HEADROOM * limit

    return _until(enough, inputs.size, weight, blocks)


def _until(enough: Callable[[FleetSize], bool], size: FleetSize, weight: float, blocks: float) -> int:
    """Return how many average nodes to add until the fleet is large enough."""
    for count in range(1, MAX_NODES + 1):
        size = size.plus(weight, blocks)
        if enough(size):
            return count
    return MAX_NODES


# Which nodes the fleet can do without.
#
# A node can be removed when few requests wait, utilisation is below its floor, and the remaining nodes would hold the
# load, the KV memory and the hit ratio with room to spare. The best candidate costs the most for its speed and has the
# least valuable cache:
#
#     saved = usd_per_hour / weight · STAY_S                      price of its time, for the speed it adds
#     lost  = held blocks · block_tokens · chance · ms_per_token  prefilling again what its cache holds and requests
#                                                                 will need, at the price of the same time
#
# Only nodes that a provisioner created are removed, and none that its island needs.

STAY_S: Final = 600.0
"""How long a node that is not removed now is assumed to stay."""
DEFAULT_USD_PER_HOUR: Final = 1.0
"""Assumed price of a node without a known one. All such nodes cost the same, so their caches decide."""
BLOCK_TOKENS: Final = 16.0
"""The usual block of vLLM, for a node that does not report its own."""
MAX_REMAINING_LOAD: Final = 0.75
"""Fraction of `target_utilisation` and `max_kv_usage` that the remaining nodes may reach. Above it, the node that was
removed would be bought again within minutes."""
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
    # Candidates leave together: each one takes from its island what the next one may no longer take.
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
