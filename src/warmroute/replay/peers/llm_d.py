"""llm-d's weighted scorers, as its guide sets them: the highest of

    3 × matched share of the prompt + 2 × (1 − KV usage) + 2 × (max queue − queue) / (max queue − min queue)

KV usage and queue (requests waiting in the engine) are as last polled, every 50 ms as its picker does; with all queues
equal that score is 1. The match is approximate (`llm_d`: what was sent there, least recently used forgotten; of its
autotuned size, the node's own blocks) or precise (`llm_d_precise`: KV events). Ties by chance.
"""

from __future__ import annotations

from random import Random

from warmroute.fake_engine.core.events import KvEvent
from warmroute.fleet.node import Node
from warmroute.replay.peers.choice import lowest, sim
from warmroute.replay.peers.holders import RoutedBlocks, ToldBlocks
from warmroute.replay.world.listener import Listener
from warmroute.replay.world.simulated_request import SimulatedRequest
from warmroute.routing.decision import Decision
from warmroute.routing.query import Query


class LlmD(Listener):
    wants_tokens = False
    holds = False

    def __init__(
        self,
        random: Random,
        *,
        prefix: float = 3.0,
        kv: float = 2.0,
        queue: float = 2.0,
        poll_s: float = 0.05,
        precise: bool = False,
    ) -> None:
        self.name = "llm_d_precise" if precise else "llm_d"
        self.wants_kv_events = precise
        self.poll_interval_s = poll_s
        self._random = random
        self._weights = prefix, kv, queue
        self._block_size = 16
        self._told = ToldBlocks() if precise else None
        self._routed = RoutedBlocks(0)

    def decide(self, query: Query) -> Decision:
        nodes = query.candidates.nodes
        prefix, kv, queue = self._weights
        chain = sim(query.request).blocks(self._block_size)
        depths = (self._told or self._routed).depths(chain, nodes)
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
        return lowest(nodes, costs, self._random, self.name, "highest score")

    def node_joined(self, node: Node, block_size: int, num_blocks: int) -> None:
        self._block_size = block_size
        self._routed.capacity = max(self._routed.capacity, num_blocks)

    def node_left(self, node: Node) -> None:
        (self._told or self._routed).forget(node)

    def sent(self, request: SimulatedRequest, node: Node, now_s: float) -> None:
        if self._told is None:
            self._routed.routed(node, request.blocks(self._block_size))

    def kv_events(self, node: Node, incarnation: int, sequence: int, events: list[KvEvent], now_s: float) -> None:
        if self._told is not None:
            self._told.told(node, incarnation, events)
