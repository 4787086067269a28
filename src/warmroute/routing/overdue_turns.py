"""Which overdue request gets a node that has room (see waiting_guarantee.py). No I/O."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from warmroute.config.priority import LOW
from warmroute.fleet.node import Node
from warmroute.prompt.routing_request import RoutingRequest
from warmroute.routing.admission_queue import AdmissionQueue, Key
from warmroute.routing.queued_request import QueuedRequest
from warmroute.routing.router import Router

EXAMINED_OVERDUE: Final = 4
"""How many of the oldest overdue requests are examined, and how many of the oldest that wait for this node."""
OVERDUE: Final = "its waiting guarantee came due"
"""Reason of a decision by which an overdue request gets its node."""


class OverdueTurns:
    def __init__(
        self,
        queue: AdmissionQueue,
        router: Router,
        is_current: Callable[[Key, QueuedRequest, float], bool],
        over_threshold: Callable[[RoutingRequest, Node], bool],
    ) -> None:
        """`is_current` updates the decision of a queued request, and returns False if it does not wait any more.
        `over_threshold`: whether the node's own queue is too long for the request."""
        self._queue = queue
        self._router = router
        self._is_current = is_current
        self._over_threshold = over_threshold

    def next_for(self, node: Node, without_low: bool, now_s: float) -> tuple[Key, QueuedRequest] | None:
        """Return the overdue request that gets this node by its guarantee."""
        guarantee = self._queue.guarantee
        if guarantee.credit_ms(node) < 0.0:
            return None
        for queued in guarantee.oldest_overdue(node, EXAMINED_OVERDUE):
            request = queued.pending.request
            key = (request.priority, request.tenant)
            if (without_low and key[0] == LOW) or not self._is_current(key, queued, now_s):
                continue
            if queued.decision.is_full:
                continue
            waits_for_it = queued.decision.entry_node is node
            if not (waits_for_it or queued.may_go_to(node)) or self._over_threshold(request, node):
                continue
            if waits_for_it:
                queued.decision.reason = OVERDUE
                return key, queued
            return (key, queued) if self._credit_pays_for(node, key, queued) else None
        return None

    def _credit_pays_for(self, node: Node, key: Key, queued: QueuedRequest) -> bool:
        """Decide for this node if its credit pays for the whole prefill, although another node is cheaper."""
        query, credit_ms = queued.decision.query, self._queue.guarantee.credit_ms(node)
        if query is None or credit_ms <= 0.0:
            return False
        decision = self._router.decide_among((node,), query)
        if (
            decision.entry_node is not node
            or decision.is_full
            or decision.price is None
            or decision.price.prefill > credit_ms
        ):
            return False
        decision.reason, decision.query = OVERDUE, query
        self._queue.update_decision(key, queued, decision)
        return True

    def oldest_of(self, key: Key, node: Node, now_s: float) -> QueuedRequest | None:
        """Return the oldest overdue request of this tenant whose cheapest node this is, if it is among the oldest."""
        for queued in self._queue.guarantee.oldest_overdue(node, EXAMINED_OVERDUE):
            request = queued.pending.request
            if (request.priority, request.tenant) != key or not self._is_current(key, queued, now_s):
                continue
            decision = queued.decision
            if decision.entry_node is node and not decision.is_full and not self._over_threshold(request, node):
                return queued
        return None
