"""The inputs of one scaling decision: the fleet view with the demand and the fleet sizes that follow from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from warmroute.config import Scaling
from warmroute.scaling.capacity import Demand, FleetSize, GpuSpeeds, size_of
from warmroute.scaling.fleet_observer import FleetView, NodeView
from warmroute.scaling.scaling_decision import PendingNode

WAIT_SHARE: Final = 0.3
"""Requests may wait for `max_mean_wait_ms`, or for this fraction of their own service time if that is longer."""


class ScalingInputs:
    def __init__(self, config: Scaling, view: FleetView, pending: Sequence[PendingNode], growth: float) -> None:
        """`growth`: load when a node that is requested now would serve, relative to the current load."""
        self.config = config
        self.view = view
        self.growth = growth
        self.panicking = False
        self.speeds = speeds = GpuSpeeds(view.nodes)
        self.serving = [node for node in view.nodes if node.serving]
        self.pending = [*pending, *(_pending(node) for node in view.nodes if node.unchecked)]
        self.demand = Demand(view, view.stable, speeds)
        self.panic_demand = Demand(view, view.panic, speeds)
        self.serving_size = size_of(self.serving, speeds)
        self.size = self.serving_size
        """The fleet's size once the pending nodes serve."""
        for one in self.pending:
            self.size = self.size.plus(speeds.weight(one.gpu), speeds.blocks(one.gpu))

    @property
    def node_count(self) -> int:
        return len(self.serving) + len(self.pending)

    def max_wait_ms(self, demand: Demand, size: FleetSize) -> float:
        return max(self.config.max_mean_wait_ms, WAIT_SHARE * demand.service_ms(size))


def _pending(node: NodeView) -> PendingNode:
    return PendingNode(offer=node.offer, island=node.island, gpu=node.gpu, usd_per_hour=node.usd_per_hour)
