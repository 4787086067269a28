"""llm-d's weighted scorers with the weights of its guide: choose the node with the highest

    3 × matched fraction of the prompt + 2 × (1 − KV usage) + 2 × (max queue − queue) / (max queue − min queue)

The KV usage and the queue (requests waiting in the engine) are those of the last poll, every 50 ms as in its endpoint
picker. If all queues are equal, the queue score is 1. The match is approximate (`llm_d`: estimated from routed
requests, LRU with as many blocks as the node has) or precise (`llm_d_precise`: from KV events). Ties are broken at
random.
"""

from __future__ import annotations

from random import Random

from warmroute.fake_engine.core.kv_event_types import KvEvent
from warmroute.fleet.node import Node
from warmroute.replay.peers.block_holders import EventBlocks, RoutedBlocks
from warmroute.replay.peers.lowest_cost import pick_lowest, simulated
from warmroute.replay.simulation.policy_listener import PolicyListener
from warmroute.replay.simulation.simulated_request import SimulatedRequest
from warmroute.routing.decision import Decision
from warmroute.routing.query import Query


class LlmD(PolicyListener):
    wants_tokens = False
    queues_at_router = False

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
        self._from_events = EventBlocks() if precise else None
        self._routed = RoutedBlocks(0)

    def decide(self, query: Query) -> Decision:
        nodes = query.candidates.nodes
        prefix, kv, queue = self._weights
        chain = simulated(query.request).blocks(self._block_size)
        depths = (self._from_events or self._routed).depths(chain, nodes)
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
        return pick_lowest(nodes, costs, self._random, self.name, "highest score")

    def node_joined(self, node: Node, block_size: int, num_blocks: int) -> None:
        self._block_size = block_size
        self._routed.capacity = max(self._routed.capacity, num_blocks)

    def node_left(self, node: Node) -> None:
        (self._from_events or self._routed).forget(node)

    def request_sent(self, request: SimulatedRequest, node: Node, now_s: float) -> None:
        if self._from_events is None:
            self._routed.add(node, request.blocks(self._block_size))

    def kv_events(self, node: Node, incarnation: int, sequence: int, events: list[KvEvent], now_s: float) -> None:
        if self._from_events is not None:
            self._from_events.apply(node, incarnation, events)
