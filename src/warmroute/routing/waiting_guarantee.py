"""The guarantee of queued requests: none waits for ever, whatever its length and whatever else waits.

A request whose prefill takes w is due GRACE_S + PATIENCE × w after its arrival. If it still waits then, it is overdue.
Overdue requests get, in the order of their arrival, at least SHARE of the prefill time of each node. So a request waits
at most

    GRACE_S + PATIENCE × w + (L + P / n) / SHARE

P is the prefill time of the requests that waited when it arrived, of all priorities and tenants, n the number of nodes
that may serve it, and L the longest prefill of a single request. Requests that arrive later cannot delay it further.

Each node has a credit, in ms of prefill. Every request that the node gets adds SHARE of its prefill. A request that is
admitted by its guarantee takes its prefill away, in equal parts from all nodes that may serve it. A node gives the
oldest overdue request that it may serve its turn

- while its credit is not negative, if the node is the cheapest for this request;
- when its credit pays for the whole prefill on this node, although another node is cheaper.

Without overdue requests no credit is above zero.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from warmroute.fleet.node import Node
from warmroute.routing.queued_request import QueuedRequest
from warmroute.routing.queued_requests import RequestsByNode, SortedRequests

GRACE_S: Final = 10.0
PATIENCE: Final = 2.0
SHARE: Final = 0.15


class WaitingGuarantee:
    def __init__(self, share: float = SHARE) -> None:
        self._share = share
        """0: no guarantee."""
        self._not_due = SortedRequests()
        """In the order in which they become due."""
        self._overdue = RequestsByNode()
        """In the order of their arrival."""
        self._work = 0.0
        """Prefill work of all queued requests, in tokens of a short prompt: the nodes' speeds may not be known yet."""
        self._longest = 0.0
        """Longest prefill of a request that was queued, or sent while others waited, so far; likewise."""
        self._credit_ms: dict[Node, float] = {}
        self.longest_wait_ratio = 0.0
        """Largest wait of an admitted request, relative to its guarantee."""
        self.exceeded = 0
        """Requests that waited longer than their guarantee."""

    # Requests that wait.

    def add(self, queued: QueuedRequest) -> None:
        if not self._share:
            return
        work_ms = queued.prefill_ms
        queued.work = work_ms / queued.decision.node.speed.ms_per_token
        queued.work_ahead, queued.work_on_node = self._work, queued.decision.entry_node.pending_work
        queued.due_s = queued.pending.request.arrived_s + GRACE_S + PATIENCE * work_ms / 1000.0
        self._work += queued.work
        self._longest = max(self._longest, queued.work)
        self._not_due.add(queued.due_s, queued)

    def remove(self, queued: QueuedRequest) -> None:
        if not self._share:
            return
        self._work -= queued.work
        if not queued.is_overdue:
            self._not_due.remove(queued.due_s, queued)
            return
        self._overdue.remove(queued.pending.request.arrived_s, queued, queued.decision.entry_node)
        if not self._overdue.all:
            self._credit_ms = {node: credit_ms for node, credit_ms in self._credit_ms.items() if credit_ms < 0.0}

    def decision_changed(self, queued: QueuedRequest, from_node: Node) -> None:
        if queued.is_overdue:
            self._overdue.move(queued.pending.request.arrived_s, queued, from_node)

    def forget_removed_nodes(self) -> None:
        self._credit_ms = {node: credit_ms for node, credit_ms in self._credit_ms.items() if node.groups}

    def queue_is_empty(self) -> None:
        self._work = 0.0
        self._credit_ms.clear()

    # Turns.

    def find_overdue(self, now_s: float) -> bool:
        """Find the requests that have become overdue. Return whether any request is."""
        not_due = self._not_due
        while not_due and (queued := not_due.first).due_s <= now_s:
            not_due.remove(queued.due_s, queued)
            queued.is_overdue = True
            self._overdue.add(queued.pending.request.arrived_s, queued)
        return bool(self._overdue.all)

    def oldest_overdue(self, node: Node, limit: int) -> list[QueuedRequest]:
        """Return the oldest overdue requests, then the oldest ones that wait for this node: `limit` of each."""
        return self._overdue.first_ones(node, limit)

    def next_overdue(self, node: Node) -> QueuedRequest | None:
        """Return the overdue request that waits for this node, if it is its turn."""
        return self._overdue.head_for(node) if self.credit_ms(node) >= 0.0 else None

    def credit_ms(self, node: Node) -> float:
        return self._credit_ms.get(node, 0.0)

    def admitted(self, node: Node, work_ms: float) -> None:
        """A node gets a request with this much prefill."""
        if self._share:
            self._longest = max(self._longest, work_ms / node.speed.ms_per_token)
            credit_ms = self._credit_ms.get(node, 0.0) + self._share * work_ms
            self._credit_ms[node] = credit_ms if self._overdue.all else min(0.0, credit_ms)

    def admitted_overdue(self, nodes: Iterable[Node], work_ms: float) -> None:
        """One of these nodes gets a request with this much prefill by its guarantee."""
        nodes = tuple(nodes)
        for node in nodes:
            self._credit_ms[node] = self._credit_ms.get(node, 0.0) - work_ms / len(nodes)

    def record_wait(self, queued: QueuedRequest, now_s: float) -> None:
        """A request leaves the queue for a node."""
        wait_s = now_s - queued.pending.request.arrived_s
        if self._share and wait_s > GRACE_S:
            ratio = wait_s / self._guaranteed_s(queued)
            self.longest_wait_ratio = max(self.longest_wait_ratio, ratio)
            self.exceeded += ratio > 1.0

    def _guaranteed_s(self, queued: QueuedRequest) -> float:
        """Return the request's guarantee at the present speeds of the nodes."""
        query, node = queued.decision.query, queued.decision.node
        nodes = query.candidates.nodes if query is not None else (node,)
        ms_per_token = node.speed.ms_per_token
        all_nodes_ms_per_token = 1.0 / sum(1.0 / one.speed.ms_per_token for one in nodes)
        longest = max(self._longest, queued.work_on_node)
        turn_ms = longest * ms_per_token + queued.work_ahead * all_nodes_ms_per_token
        return GRACE_S + (PATIENCE * queued.work * ms_per_token + turn_ms / self._share) / 1000.0
