"""What the peers' rules share: their view of an ask, and a choice by the best value with ties by chance."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from warmroute.fleet.node import Node
from warmroute.prompt.routing_request import RoutingRequest
from warmroute.replay.world.simulated_request import SimulatedRequest
from warmroute.routing.decision import Decision


def sim(request: RoutingRequest) -> SimulatedRequest:
    assert isinstance(request, SimulatedRequest), "peers' rules run in the simulator only"
    return request


def lowest(nodes: Sequence[Node], costs: Sequence[float], random: Random, policy: str, reason: str) -> Decision:
    """The node of the lowest cost, ties by chance; the others stand in by their cost."""
    least = min(costs)
    tied = [node for node, cost in zip(nodes, costs, strict=True) if cost == least]
    chosen = tied[0] if len(tied) == 1 else tied[int(random.random() * len(tied))]

    def by_cost() -> list[Node]:
        order = sorted(range(len(nodes)), key=lambda at: costs[at])
        return [nodes[at] for at in order]

    return Decision(chosen, policy, reason, by_cost)
