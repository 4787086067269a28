"""The choice that most peers share: the node with the lowest cost, with ties broken at random."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from warmroute.fleet.node import Node
from warmroute.prompt.routing_request import RoutingRequest
from warmroute.replay.simulation.simulated_request import SimulatedRequest
from warmroute.routing.decision import Decision


def simulated(request: RoutingRequest) -> SimulatedRequest:
    assert isinstance(request, SimulatedRequest), "other routers' policies run in simulations only"
    return request


def pick_lowest(nodes: Sequence[Node], costs: Sequence[float], random: Random, policy: str, reason: str) -> Decision:
    """Choose the node with the lowest cost; the fallbacks are the other nodes in the order of their cost."""
    least = min(costs)
    tied = [node for node, cost in zip(nodes, costs, strict=True) if cost == least]
    chosen = tied[0] if len(tied) == 1 else tied[int(random.random() * len(tied))]

    def by_cost() -> list[Node]:
        order = sorted(range(len(nodes)), key=lambda at: costs[at])
        return [nodes[at] for at in order]

    return Decision(chosen, policy, reason, by_cost)
