"""What most peers share: an estimate of which nodes hold which blocks, and the choice of the cheapest node."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from warmroute.fake_engine.core.kv_event_types import KvEvent
from warmroute.fleet.node import Node
from warmroute.prompt.routing_request import RoutingRequest
from warmroute.replay.peers.block_holders import EventBlocks, RoutedBlocks
from warmroute.replay.simulation.policy_listener import PolicyListener
from warmroute.replay.simulation.simulated_request import SimulatedRequest
from warmroute.routing.decision import Decision


def simulated(request: RoutingRequest) -> SimulatedRequest:
    assert isinstance(request, SimulatedRequest), "other routers' policies run in simulations only"
    return request


class PeerPolicy(PolicyListener):
    wants_tokens = False
    queues_at_router = False

    def __init__(self, name: str, random: Random, blocks: RoutedBlocks | EventBlocks) -> None:
        self.name = name
        self.wants_kv_events = isinstance(blocks, EventBlocks)
        self._random = random
        self._blocks = blocks
        self._block_size = 16

    def _depths(self, request: RoutingRequest, nodes: Sequence[Node]) -> tuple[list[int], list[int]]:
        """Return the prompt's blocks, and for each node how many of the first ones it holds."""
        chain = simulated(request).blocks(self._block_size)
        return chain, self._blocks.depths(chain, nodes)

    def _pick_lowest(self, nodes: Sequence[Node], costs: Sequence[float], reason: str) -> Decision:
        """Choose the node with the lowest cost, with ties broken at random. The fallbacks are the others by cost."""
        least = min(costs)
        tied = [node for node, cost in zip(nodes, costs, strict=True) if cost == least]
        chosen = tied[0] if len(tied) == 1 else tied[int(self._random.random() * len(tied))]

        def by_cost() -> list[Node]:
            return [nodes[at] for at in sorted(range(len(nodes)), key=costs.__getitem__)]

        return Decision(chosen, self.name, reason, by_cost)

    def node_joined(self, node: Node, block_size: int, num_blocks: int) -> None:
        self._block_size = block_size
        self._blocks.capacity = max(self._blocks.capacity, num_blocks)

    def node_left(self, node: Node) -> None:
        self._blocks.clear(node)

    def request_sent(self, request: SimulatedRequest, node: Node, now_s: float) -> None:
        if isinstance(self._blocks, RoutedBlocks):
            self._blocks.add(node, request.blocks(self._block_size))

    def kv_events(self, node: Node, incarnation: int, sequence: int, events: list[KvEvent], now_s: float) -> None:
        if isinstance(self._blocks, EventBlocks):
            self._blocks.apply(node, incarnation, events)
