"""Puts together what a search by replay needs: the fleet, the offers and the learned speeds.

The speed of a kind of node is the median over the nodes with the same GPU. A GPU without a measured node counts as the
most frequent one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from math import isfinite
from statistics import median
from typing import Final

from warmroute.config import Config
from warmroute.scaling.capacity import ScalingInputs
from warmroute.scaling.fleet_observer import FleetView, NodeView
from warmroute.scaling.fleet_plan import FleetNode, NodeFigures, OfferedNode, PlanRequest
from warmroute.scaling.offer_selection import OfferSelector
from warmroute.scaling.scale_down import paid_node, rank_candidates
from warmroute.scaling.scaling_decision import PaidNode

MIN_KV_TOKENS: Final = 1024
MAX_CONTEXT_STEPS: Final = 6.0
"""A decode step reads the weights once and the KV cache of its context. A full cache is at most about this many times
as large as the weights. With short answers the learned slope is mostly the prefills between tokens, and too high."""
MIN_CPU_S: Final = 5.0
MIN_INTERVALS: Final = 0.2
"""If more requests arrive than expected, a search starts this many times `scaling.replay.interval_s` after the last
one."""
MAX_INTERVALS: Final = 1.5
"""A search takes at most this many times `scaling.replay.interval_s`."""
MAX_NODES: Final = 512
"""Larger fleets are not replayed."""


class CannotPlan(Exception):
    """Why nothing can be replayed."""


def router_settings(config: Config) -> Config:
    """Return the settings that matter for routing, without names of nodes, keys and files."""
    return Config(
        routing=config.routing,
        price=config.price,
        admission=config.admission,
        hedging=config.hedging,
        islands=config.islands,
        island_affinity=config.island_affinity,
    )


def plan_request(
    inputs: ScalingInputs, offers: OfferSelector, terminating: Sequence[PaidNode], router: Config
) -> PlanRequest:
    """Return the request without what the planner adds. Raises CannotPlan."""
    config, view = inputs.config, inputs.view
    figures = node_figures(view)
    removable = rank_candidates(inputs, any_node=not offers.offers)
    names = [one.node.name for one in removable]
    fixed = [node for node in inputs.serving if node.name not in names]
    leaving = [one.node for one in reversed(removable)]  # the best candidate is the last one
    nodes = [
        *(FleetNode(one.gpu, one.island, _usd(one.usd_per_hour)) for one in fixed),
        *(FleetNode(one.gpu, one.island, _usd(one.usd_per_hour)) for one in inputs.pending),
        *(FleetNode(one.gpu, one.island, _usd(one.usd_per_hour)) for one in leaving),
    ]
    if not nodes:
        raise CannotPlan("no node serves")
    if len(nodes) > MAX_NODES:
        raise CannotPlan(f"more than {MAX_NODES} nodes")
    paid = [*(paid_node(node) for node in view.nodes if not node.unchecked), *inputs.pending, *terminating]
    offered: dict[tuple[str, str], OfferedNode] = {}
    for offer, most in offers.ranked(paid, inputs.speeds, view.now_s, view.stable.prefill_work or 0.0):
        node = FleetNode(offer.gpu, offer.island, offer.usd_per_hour)
        offered.setdefault((offer.gpu, offer.island), OfferedNode(offer.key, node, most))
    starts_s = [offers.start_s(offer) for offer in offers.offers]
    if not offers.offers:  # somebody else adds nodes, such as those there are
        room = max(0, config.max_nodes - len(nodes))
        offered[("", "")] = OfferedNode(("", "node"), _most_frequent(nodes), room)
    places = {node.island for node in nodes} | {one.node.island for one in offered.values()}
    round_trips = {one.island: offers.round_trip_ms(one) for one in offers.offers}
    return PlanRequest(
        nodes=tuple(nodes),
        removable=len(leaving),
        offers=tuple(offered.values()),
        figures=figures,
        round_trip_ms={place: round_trips.get(place, offers.island_round_trip_ms(place)) for place in places},
        objective=config.objective,
        margin=config.replay.margin,
        max_requests=config.replay.max_requests,
        lead_s=min(starts_s, default=0.0) + MIN_INTERVALS * config.replay.interval_s,
        max_cpu_s=max(MIN_CPU_S, MAX_INTERVALS * config.replay.interval_s * config.replay.cpu_share),
        router=router,
    )


def node_figures(view: FleetView) -> dict[str, NodeFigures]:
    """Return the speed and memory of each GPU with a measured node, the most frequent one first. Raises CannotPlan."""
    by_gpu: dict[str, list[NodeView]] = {}
    for node in view.nodes:
        if node.learned:
            by_gpu.setdefault(node.gpu, []).append(node)
    if not by_gpu:
        raise CannotPlan("the speed of no node is known yet")
    figures: dict[str, NodeFigures] = {}
    for gpu, nodes in sorted(by_gpu.items(), key=lambda one: -len(one[1])):
        capacities = [node.kv_tokens for node in nodes if node.kv_tokens >= MIN_KV_TOKENS]
        if not capacities:
            continue
        steps_ms = [node.step_ms for node in nodes if node.step_ms > 0]
        step_ms, kv_tokens = min([view.decode_base_ms, *([median(steps_ms)] if steps_ms else [])]), median(capacities)
        slope_ms = max(0.0, view.slope_ms) if isfinite(view.slope_ms) else 0.0
        figures[gpu] = NodeFigures(
            ms_per_token=median(node.long_ms_per_token for node in nodes),
            step_ms=step_ms,
            slope_ms=min(slope_ms, MAX_CONTEXT_STEPS * step_ms / kv_tokens),
            kv_tokens=int(kv_tokens),
        )
    if not figures:
        raise CannotPlan("no node reports the size of its KV cache")
    return figures


def _most_frequent(nodes: Iterable[FleetNode]) -> FleetNode:
    return Counter(nodes).most_common(1)[0][0]


def _usd(usd_per_hour: float) -> float:
    return usd_per_hour if isfinite(usd_per_hour) else 0.0
