"""llm-d's weighted scorers with the weights of its guide: choose the node with the highest

    3 × matched fraction of the prompt + 2 × (1 − KV usage) + 2 × (max queue − queue) / (max queue − min queue)

The KV usage and the queue (requests waiting in the engine) are those of the last poll, every 50 ms as in its endpoint
picker. If all queues are equal, the queue score is 1. The match is approximate (`llm_d`: estimated from routed
requests, LRU with as many blocks as the node has) or precise (`llm_d_precise`: from KV events). Ties are broken at
random.
"""

from __future__ import annotations

from random import Random

from warmroute.replay.peers.block_holders import EventBlocks, RoutedBlocks
from warmroute.replay.peers.peer_policy import PeerPolicy
from warmroute.routing.decision import Decision
from warmroute.routing.query import Query


class LlmD(PeerPolicy):
    def __init__(
        self, random: Random, *, prefix: float = 3.0, kv: float = 2.0, queue: float = 2.0, poll_s: float = 0.05,
        precise: bool = False,
    ) -> None:  # fmt: skip
        if precise:
            super().__init__("llm_d_precise", random, EventBlocks())
        else:
            super().__init__("llm_d", random, RoutedBlocks())
        self.poll_interval_s = poll_s
        self._weights = prefix, kv, queue

    def decide(self, query: Query) -> Decision:
        nodes = query.candidates.nodes
        prefix, kv, queue = self._weights
        chain, depths = self._depths(query.request, nodes)
        queues = [node.waiting for node in nodes]
        longest, shortest = max(queues), min(queues)
        between = longest - shortest
        costs = [
            -(
                prefix * (depth / len(chain) if chain else 0.0)
                + kv * (1.0 - node.kv_usage)
                + queue * ((longest - node.waiting) / between if between else 1.0)
            )
            for node, depth in zip(nodes, depths, strict=True)
        ]
        return self._pick_lowest(nodes, costs, "highest score")
