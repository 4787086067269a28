"""AIBrix's prefix-cache policy, as of AIBrix 0.7.0 (pkg/plugins/gateway/algorithms/prefix_cache.go, August 2026).

    candidates:                        if max − min > 16, over requests in flight: the least loaded nodes; else all
    of these with load ≤ mean + 2 σ:   the longest match, then the least loaded
    no match:                          the least loaded

The code's own defaults are 8 and 1 σ; its manifests (config/gateway/gateway-plugin) ship 16 and 2 σ, as here. The match
is approximate: it is estimated from routed requests, with as many blocks as the node has, evicted LRU.
"""

from __future__ import annotations

from random import Random
from statistics import fmean, stdev

from warmroute.replay.peers.block_holders import RoutedBlocks
from warmroute.replay.peers.peer_policy import PeerPolicy
from warmroute.routing.decision import Decision
from warmroute.routing.query import Query


class Aibrix(PeerPolicy):
    def __init__(self, random: Random, *, imbalance: int = 16, sigmas: float = 2.0) -> None:
        super().__init__("aibrix", random, RoutedBlocks())
        self._imbalance = imbalance
        self._sigmas = sigmas

    def decide(self, query: Query) -> Decision:
        nodes = query.candidates.nodes
        loads = [node.inflight for node in nodes]
        least, most = min(loads), max(loads)
        bound = fmean(loads) + (self._sigmas * stdev(loads) if len(loads) > 1 else 0.0)
        if most - least > self._imbalance:
            bound = least
        _, depths = self._depths(query.request, nodes)
        if any(depth and load <= bound for depth, load in zip(depths, loads, strict=True)):
            # The longest match first, then the lowest load; nodes above the bound come last.
            costs = [
                (load - depth * 1e6) if load <= bound else 1e12 + load
                for depth, load in zip(depths, loads, strict=True)
            ]
            return self._pick_lowest(nodes, costs, "longest match")
        return self._pick_lowest(nodes, loads, "least loaded")
