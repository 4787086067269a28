"""AIBrix's prefix-cache policy.

    if max − min > 8, over requests in flight:  the least loaded
    else, of nodes with load ≤ mean + 1 σ:      the longest match, then the least loaded
    no match:                                   the least loaded

The match is approximate: it is estimated from routed requests, with as many blocks as the node has, evicted LRU.
"""

from __future__ import annotations

from random import Random
from statistics import fmean, pstdev

from warmroute.fleet.node import Node
from warmroute.replay.peers.block_holders import RoutedBlocks
from warmroute.replay.peers.lowest_cost import pick_lowest, simulated
from warmroute.replay.simulation.policy_listener import PolicyListener
from warmroute.replay.simulation.simulated_request import SimulatedRequest
from warmroute.routing.decision import Decision
from warmroute.routing.query import Query


class Aibrix(PolicyListener):
    name = "aibrix"
    wants_tokens = False
    queues_at_router = False

    def __init__(self, random: Random, *, imbalance: int = 8, sigmas: float = 1.0) -> None:
        self._random = random
        self._imbalance = imbalance
        self._sigmas = sigmas
        self._block_size = 16
        self._routed = RoutedBlocks(0)

    def decide(self, query: Query) -> Decision:
        nodes = query.candidates.nodes
        loads = [node.inflight for node in nodes]
        if max(loads) - min(loads) <= self._imbalance:
            depths = self._routed.depths(simulated(query.request).blocks(self._block_size), nodes)
            bound = fmean(loads) + self._sigmas * pstdev(loads)
            best = max((depth for depth, load in zip(depths, loads, strict=True) if load <= bound), default=0)
            if best:
                # The longest match first, then the lowest load; overloaded nodes come last.
                costs = [
                    (load - depth * 1e6) if load <= bound else 1e12 + load
                    for depth, load in zip(depths, loads, strict=True)
                ]
                return pick_lowest(nodes, costs, self._random, self.name, "longest match")
        return pick_lowest(nodes, loads, self._random, self.name, "least loaded")

    def node_joined(self, node: Node, block_size: int, num_blocks: int) -> None:
        self._block_size = block_size
        self._routed.capacity = max(self._routed.capacity, num_blocks)

    def node_left(self, node: Node) -> None:
        self._routed.forget(node)

    def request_sent(self, request: SimulatedRequest, node: Node, now_s: float) -> None:
        self._routed.add(node, request.blocks(self._block_size))
