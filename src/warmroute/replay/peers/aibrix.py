"""AIBrix's prefix-cache routing.

    if max − min > 8, over requests in flight:  the least loaded
    else, of nodes with load ≤ mean + 1 σ:      the longest match, then the least loaded
    no match:                                   the least loaded

The match is approximate: what was sent to a node, forgotten as the node's own LRU would.
"""

from __future__ import annotations

from random import Random
from statistics import fmean, pstdev

from warmroute.fleet.node import Node
from warmroute.replay.peers.choice import lowest, sim
from warmroute.replay.peers.holders import RoutedBlocks
from warmroute.replay.world.listener import Listener
from warmroute.replay.world.simulated_request import SimulatedRequest
from warmroute.routing.decision import Decision
from warmroute.routing.query import Query


class Aibrix(Listener):
    name = "aibrix"
    wants_tokens = False
    holds = False

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
            depths = self._routed.depths(sim(query.request).blocks(self._block_size), nodes)
            bound = fmean(loads) + self._sigmas * pstdev(loads)
            best = max((depth for depth, load in zip(depths, loads, strict=True) if load <= bound), default=0)
            if best:
                # longest match first, load within it; the loaded ones behind all others
                costs = [
                    (load - depth * 1e6) if load <= bound else 1e12 + load
                    for depth, load in zip(depths, loads, strict=True)
                ]
                return lowest(nodes, costs, self._random, self.name, "longest match")
        return lowest(nodes, loads, self._random, self.name, "least loaded")

    def node_joined(self, node: Node, block_size: int, num_blocks: int) -> None:
        self._block_size = block_size
        self._routed.capacity = max(self._routed.capacity, num_blocks)

    def node_left(self, node: Node) -> None:
        self._routed.forget(node)

    def sent(self, request: SimulatedRequest, node: Node, now_s: float) -> None:
        self._routed.routed(node, request.blocks(self._block_size))
