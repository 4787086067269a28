"""Dynamo: its router and its queue."""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import dataclass, field
from random import Random

from warmroute.core.decision import Decision
from warmroute.core.node import Node
from warmroute.core.routing_context import Query
from warmroute.lab.peers import EventBlocks, PeerPolicy, simulated
from warmroute.lab.request_flow import SimulatedRequest

# The queue in front of Dynamo's KV router, as of Dynamo 1.4.1 (lib/kv-router/src/scheduling/queue.rs, policy.rs).
#
# A request queues if requests of its class queue already, or if every node has more than `threshold` × 8,192 (its
# max_num_batched_tokens) prompt tokens without a first token. When a first token comes or a request ends, the first
# requests of the queue leave it until all nodes are that busy again.
#
#     fcfs   in the order of arrival
#     wspt   the fewest new tokens first: prompt − the longest overlap on any node, when the request was queued
#
# The queue was on by default, with a threshold of 16, until Dynamo 1.3. Since 1.4 it is off unless an operator sets
# one.

MAX_BATCHED_TOKENS = 8192


class DynamoQueue:
    def __init__(self, shortest_first: bool) -> None:
        self._shortest_first = shortest_first
        self._heap: list[tuple[int, int, SimulatedRequest]] = []
        self._waiting: set[int] = set()

    def __len__(self) -> int:
        return len(self._waiting)

    def push(self, request: SimulatedRequest, new_tokens: int) -> None:
        order = max(1, new_tokens) if self._shortest_first else 0
        heapq.heappush(self._heap, (order, request.number, request))
        self._waiting.add(request.number)

    def pop(self) -> SimulatedRequest | None:
        while self._heap:
            request = heapq.heappop(self._heap)[2]
            if request.number in self._waiting:
                self._waiting.discard(request.number)
                return request
        return None

    def remove(self, request: SimulatedRequest) -> None:
        self._waiting.discard(request.number)


# Dynamo's KV router, as of Dynamo 1.4.1 (lib/kv-router/src/scheduling/selector/default.rs): the node with the lowest
#
#     max(0, (prefill tokens in flight + prompt tokens) / block size − overlap blocks) + decode blocks
#
# The overlap comes from KV events. Prefill tokens in flight are the uncached tokens of prompts without a first token.
# Decode blocks are the blocks of the node's running requests and of this one, shared blocks counted once. The weights
# are its defaults, and the temperature is 0: the lowest cost always wins, with ties broken at random.
#
# `dynamo` has no queue, as by default. `dynamo_fcfs` and `dynamo_wspt` have the queue above.


@dataclass(slots=True)
class _Active:
    """The running requests of one node."""

    blocks: Counter[int] = field(default_factory=Counter)  # block → requests that use it
    prefilling: dict[int, int] = field(default_factory=dict)  # request → uncached tokens
    prefilling_tokens: int = 0


class Dynamo(PeerPolicy):
    kind = "dynamo"
    tells_replicas = True  # its replica sync

    def __init__(self, random: Random, *, overlap_weight: float = 1.0) -> None:
        super().__init__(self.kind, random, EventBlocks())
        self._overlap_weight = overlap_weight
        self._active: dict[str, _Active] = {}

    def decide(self, query: Query) -> Decision:
        nodes, size = query.candidates.nodes, self._block_size
        prompt_tokens = simulated(query.request).prompt_tokens
        chain, depths = self._depths(query.request, nodes)
        costs: list[float] = []
        for node, depth in zip(nodes, depths, strict=True):
            active = self._active[node.name]
            prefill = (active.prefilling_tokens + prompt_tokens) / size - depth
            held = active.blocks
            new = len(chain) - sum(map(held.__contains__, chain)) if held else len(chain)
            costs.append(self._overlap_weight * max(0.0, prefill) + len(held) + new)
        return self._pick_lowest(nodes, costs, "lowest cost")

    def node_joined(self, node: Node, block_size: int, num_blocks: int) -> None:
        super().node_joined(node, block_size, num_blocks)
        self._active.setdefault(node.name, _Active())

    def request_sent(self, request: SimulatedRequest, node: Node, now_s: float) -> None:
        active = self._active[node.name]
        chain, depths = self._depths(request, (node,))
        uncached = max(0, request.prompt_tokens - depths[0] * self._block_size)
        active.prefilling[request.number] = uncached
        active.prefilling_tokens += uncached
        active.blocks.update(chain)

    def first_token(self, request: SimulatedRequest, node: Node, cached_tokens: int, now_s: float) -> None:
        active = self._active[node.name]
        active.prefilling_tokens -= active.prefilling.pop(request.number, 0)

    def request_ended(self, request: SimulatedRequest, node: Node, now_s: float) -> None:
        self.first_token(request, node, 0, now_s)
        held = self._active[node.name].blocks
        for block in request.blocks(self._block_size):
            count = held[block] - 1
            if count:
                held[block] = count
            else:
                del held[block]


class _QueueingDynamo(Dynamo):
    """Dynamo with its router queue."""

    shortest_first = False

    def __init__(self, random: Random, *, overlap_weight: float = 1.0, queue_threshold: float = 1.0) -> None:
        super().__init__(random, overlap_weight=overlap_weight)
        self._busy_tokens = queue_threshold * MAX_BATCHED_TOKENS
        self._queue = DynamoQueue(self.shortest_first)
        self._nodes: dict[str, Node] = {}

    def node_joined(self, node: Node, block_size: int, num_blocks: int) -> None:
        super().node_joined(node, block_size, num_blocks)
        self._nodes[node.name] = node

    def node_left(self, node: Node) -> None:
        super().node_left(node)
        self._nodes.pop(node.name, None)

    def _all_busy(self) -> bool:
        return bool(self._nodes) and all(
            self._active[name].prefilling_tokens > self._busy_tokens for name in self._nodes
        )

    def queues(self, request: SimulatedRequest, now_s: float) -> bool:
        if not self._queue and not self._all_busy():
            return False
        _, depths = self._depths(request, tuple(self._nodes.values()))
        self._queue.push(request, request.prompt_tokens - max(depths, default=0) * self._block_size)
        return True

    def next_queued(self, now_s: float) -> SimulatedRequest | None:
        return None if self._all_busy() else self._queue.pop()

    def client_left(self, request: SimulatedRequest) -> None:
        self._queue.remove(request)


class DynamoFcfs(_QueueingDynamo):
    kind = "dynamo_fcfs"


class DynamoWspt(_QueueingDynamo):
    kind = "dynamo_wspt"
    shortest_first = True
