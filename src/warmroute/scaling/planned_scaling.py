"""How many nodes to add and to remove by a fleet plan. Between two replays, thresholds react to what a plan could not
know.

    add     what the plan wants beyond the current nodes
    add     a burst: the stable window has BURST times the arrivals of the plan, more than chance explains, and requests
            wait: as many nodes as the plan has, scaled by the arrivals, at most MAX_BURST times as many
    add     the router rejects requests, or the objective is missed while more than `max_queue_per_node` requests wait
            for each node: 1, if none is starting
    remove  what the plan can spare, if the objective is met now

The hit ratio, the utilisation and the KV memory do not count: they are part of the replay.
"""

from __future__ import annotations

from math import ceil
from typing import Final

from warmroute.config import LOW_QUEUE_PER_NODE
from warmroute.scaling.capacity import ScalingInputs
from warmroute.scaling.fleet_plan import FleetPlan
from warmroute.scaling.scale_down import RemovalCandidate, rank_candidates, removable_nodes
from warmroute.scaling.scaling_decision import count_of_nodes

BURST: Final = 1.5
MAX_BURST: Final = 2.0
CHANCE_ERRORS: Final = 4.0
"""Arrivals above the expected ones by less than this many standard errors are chance. Conversations arrive less evenly
than chance alone would have it."""
MIN_FIRST_TOKENS: Final = 20
"""A p90 of fewer first tokens is unknown."""


def burst_ratio(inputs: ScalingInputs, plan: FleetPlan) -> float:
    """Return the arrivals of the stable window relative to those of the plan, if they are a burst; 0 if not."""
    stable = inputs.view.stable
    expected = plan.arrivals_per_s * plan.growth * stable.span_s
    if stable.arrivals < max(BURST * expected, expected + CHANCE_ERRORS * expected**0.5) or expected <= 0:
        return 0.0
    if stable.waiting <= LOW_QUEUE_PER_NODE * len(inputs.serving):
        return 0.0
    return min(MAX_BURST, stable.arrivals / expected)


def planned_nodes(inputs: ScalingInputs, plan: FleetPlan, burst: float) -> tuple[int, list[str]]:
    """Return how many nodes to add, and the reasons. `burst`: the result of `burst_ratio`."""
    explained = plan.explain(inputs.config.objective)
    reasons = [explained, plan.assumed_load] if explained else []
    wanted = plan.desired_nodes
    if burst:
        wanted = max(wanted, ceil(wanted * burst))
        reasons.append(f"{burst:.1f} × the arrivals that were replayed, and requests wait")
    needed = max(0, wanted - inputs.node_count)
    symptom = _symptom(inputs)
    if symptom:
        reasons.append(symptom)
        if not inputs.pending:
            needed = max(needed, 1)
    return needed, reasons


def _symptom(inputs: ScalingInputs) -> str:
    """Return what shows that the fleet is too small whatever was replayed, or an empty string."""
    stable, config = inputs.view.stable, inputs.config
    if stable.shed_per_s > 0:
        return f"the router rejects {stable.shed_per_s:.2g} requests/s"
    queue = stable.waiting / len(inputs.serving) if inputs.serving else 0.0
    if queue > config.max_queue_per_node and _misses_objective(inputs):
        return f"{queue:.1f} requests wait per node, limit {config.max_queue_per_node:g}; the objective is missed"
    return ""


def _misses_objective(inputs: ScalingInputs) -> bool:
    stable, objective = inputs.view.stable, inputs.config.objective
    if stable.first_tokens < MIN_FIRST_TOKENS:
        return False
    observed = ((stable.ttft_p90_ms, objective.ttft_p90_ms), (stable.ttft_p99_ms, objective.ttft_p99_ms))
    return any(limit_ms and (value_ms or 0.0) > limit_ms for value_ms, limit_ms in observed)


def planned_removals(
    inputs: ScalingInputs, minimum: int, plan: FleetPlan, *, any_node: bool
) -> tuple[list[RemovalCandidate], str]:
    """Return the nodes that the plan can spare, the best candidate first, and why."""
    serving = len(inputs.serving)
    if not minimum or serving > inputs.config.max_nodes:
        return removable_nodes(inputs, minimum, any_node=any_node)
    spare = min(serving - minimum, serving - plan.desired_nodes)
    if spare <= 0 or inputs.pending or inputs.panicking or _misses_objective(inputs):
        return [], ""
    chosen = rank_candidates(inputs, any_node=any_node)[:spare]
    return chosen, f"without {count_of_nodes(len(chosen))} the objective would be met" if chosen else ""
