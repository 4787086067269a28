"""The queue in front of Dynamo's KV router, as of Dynamo 1.4.1 (lib/kv-router/src/scheduling/queue.rs, policy.rs).

A request queues if requests of its class queue already, or if every node has more than `threshold` × 8,192 (its
max_num_batched_tokens) prompt tokens without a first token. When a first token comes or a request ends, the first
requests of the queue leave it until all nodes are that busy again.

    fcfs   in the order of arrival
    wspt   the fewest new tokens first: prompt − the longest overlap on any node, as it was when the request was queued

The queue was on by default, with a threshold of 16, until Dynamo 1.3. Since 1.4 it is off unless an operator sets one.
"""

from __future__ import annotations

import heapq

from warmroute.replay.simulation.simulated_request import SimulatedRequest

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
