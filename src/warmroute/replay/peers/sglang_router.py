"""SGLang's cache_aware policy, as of SGLang 0.5.18 (sgl-model-gateway/src/policies/cache_aware.rs, August 2026).

    if max − min > 64 and max > 1.5 × min, over requests in flight:  the least loaded
    else if the longest match in its tree > 0.3 of the prompt:       a node with that match
    else:                                                            the least loaded

The thresholds are the defaults of its launcher. Before 2026 a miss went to the node with the smallest tree;
vllm-router 0.1.16 still does that (`miss_by_tree=true`). The tree is estimated from routed requests. It holds blocks
here instead of characters, and evicts LRU over 2^26 characters a node (taken as 4 characters a token).
"""

from __future__ import annotations

from random import Random

from warmroute.fleet.node import Node
from warmroute.replay.peers.block_holders import RoutedBlocks
from warmroute.replay.peers.peer_policy import PeerPolicy
from warmroute.routing.decision import Decision
from warmroute.routing.query import Query


class Sglang(PeerPolicy):
    def __init__(
        self, random: Random, *, cache_threshold: float = 0.3, balance_abs: int = 64, balance_rel: float = 1.5,
        tree_tokens: int = 2**26 // 4, miss_by_tree: bool = False,
    ) -> None:  # fmt: skip
        self._tree = RoutedBlocks()
        super().__init__("sglang", random, self._tree)
        self._cache_threshold = cache_threshold
        self._balance_abs = balance_abs
        self._balance_rel = balance_rel
        self._tree_tokens = tree_tokens
        self._miss_by_tree = miss_by_tree

    def decide(self, query: Query) -> Decision:
        nodes = query.candidates.nodes
        loads = [node.inflight for node in nodes]
        if max(loads) - min(loads) > self._balance_abs and max(loads) > self._balance_rel * min(loads):
            return self._pick_lowest(nodes, loads, "out of balance: least loaded")
        chain, depths = self._depths(query.request, nodes)
        if chain and max(depths) / len(chain) > self._cache_threshold:
            return self._pick_lowest(nodes, [-depth for depth in depths], "longest match")
        if self._miss_by_tree:
            return self._pick_lowest(nodes, [self._tree.size(node) for node in nodes], "smallest tree")
        return self._pick_lowest(nodes, loads, "least loaded")

    def node_joined(self, node: Node, block_size: int, num_blocks: int) -> None:
        super().node_joined(node, block_size, num_blocks)
        self._tree.capacity = self._tree_tokens // block_size
