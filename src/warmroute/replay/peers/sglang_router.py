"""SGLang's cache_aware policy.

    if max − min > 64 and max > 1.5 × min, over requests in flight:  the least loaded
    else if the longest match in its tree > 0.3 of the prompt:       the node with that match
    else:                                                            the node with the smallest tree

The tree is estimated from routed requests. It holds blocks here instead of characters, and evicts LRU over 2^26
characters a node (taken as 4 characters a token).
"""

from __future__ import annotations

from random import Random

from warmroute.fleet.node import Node
from warmroute.replay.peers.block_holders import RoutedBlocks
from warmroute.replay.peers.lowest_cost import pick_lowest, simulated
from warmroute.replay.simulation.policy_listener import PolicyListener
from warmroute.replay.simulation.simulated_request import SimulatedRequest
from warmroute.routing.decision import Decision
from warmroute.routing.query import Query


class Sglang(PolicyListener):
    name = "sglang"
    wants_tokens = False
    queues_at_router = False

    def __init__(
        self,
        random: Random,
        *,
        cache_threshold: float = 0.3,
        balance_abs: int = 64,
        balance_rel: float = 1.5,
        tree_tokens: int = 2**26 // 4,
    ) -> None:
        self._random = random
        self._cache_threshold = cache_threshold
        self._balance_abs = balance_abs
        self._balance_rel = balance_rel
        self._tree_tokens = tree_tokens
        self._block_size = 16
        self._tree = RoutedBlocks(tree_tokens // self._block_size)

    def decide(self, query: Query) -> Decision:
        nodes = query.candidates.nodes
        loads = [node.inflight for node in nodes]
        if max(loads) - min(loads) > self._balance_abs and max(loads) > self._balance_rel * min(loads):
            return pick_lowest(nodes, loads, self._random, self.name, "out of balance: least loaded")
        chain = simulated(query.request).blocks(self._block_size)
        depths = self._tree.depths(chain, nodes)
        if chain and max(depths) / len(chain) > self._cache_threshold:
            return pick_lowest(nodes, [-depth for depth in depths], self._random, self.name, "longest match")
        sizes = [self._tree.size(node) for node in nodes]
        return pick_lowest(nodes, sizes, self._random, self.name, "smallest tree")

    def node_joined(self, node: Node, block_size: int, num_blocks: int) -> None:
        self._block_size = block_size
        self._tree.capacity = self._tree_tokens // block_size

    def node_left(self, node: Node) -> None:
        self._tree.forget(node)

    def request_sent(self, request: SimulatedRequest, node: Node, now_s: float) -> None:
        self._tree.add(node, request.blocks(self._block_size))
