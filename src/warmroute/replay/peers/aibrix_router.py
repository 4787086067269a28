"""AIBrix's prefix-cache policy.

    if max − min > 8, over requests in flight:  the least loaded
    else, of nodes with load ≤ mean + 1 σ:      the longest match, then the least loaded
    no match:                                   the least loaded

The match is approximate: it is estimated from routed requests, with as many blocks as the node has, evicted LRU.
"""

from __future__ import annotations

from random import Random
from statistics import fmean, pstdev

from warmroute.replay.peers.block_holders import RoutedBlocks
from warmroute.replay.peers.peer_policy import PeerPolicy
from warmroute.routing.decision import Decision
from warmroute.routing.query import Query


class Aibrix(PeerPolicy):
    def __init__(self, random: Random, *, imbalance: int = 8, sigmas: float = 1.0) -> None:
        super().__init__("aibrix", random, RoutedBlocks())
        self._imbalance = imbalance
        self._sigmas = sigmas

    def decide(self, query: Query) -> Decision:
        nodes = query.candidates.nodes
        loads = [node.inflight for node in nodes]
        if max(loads) - min(loads) <= self._imbalance:
            _, depths = self._depths(query.request, nodes)
            bound = fmean(loads) + self._sigmas * pstdev(loads)
            if any(depth and load <= bound for depth, load in zip(depths, loads, strict=True)):
                # The longest match first, then the lowest load; overloaded nodes come last.
                costs = [
                    (load - depth * 1e6) if load <= bound else 1e12 + load
                    for depth, load in zip(depths, loads, strict=True)
                ]
                return self._pick_lowest(nodes, costs, "longest match")
        return self._pick_lowest(nodes, loads, "least loaded")
