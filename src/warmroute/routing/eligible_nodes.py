"""Checks whether a decision's node is eligible for the request, and decides again among the nodes that are.

A node is not eligible if its own queue is too long, or if it would miss the request's deadline.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from warmroute.config.priority import HIGH, LOW
from warmroute.fleet.arrival_rate import UNMEASURED_S
from warmroute.fleet.node import Node
from warmroute.prompt.routing_request import RoutingRequest
from warmroute.routing.admission_queue import AdmissionQueue
from warmroute.routing.deadline_check import check_deadlines, max_ttft_ms
from warmroute.routing.decision import Decision
from warmroute.routing.router import Router
from warmroute.routing.routing_errors import NodeQueuesFull, WouldQueue

SOME_FULL: Final = "other nodes are at max_inflight"
"""Reason of a decision for a node that was not full, where a better one was."""
SOME_BUSY: Final = "other nodes are at their learned concurrency limit"
ALL_BUSY: Final = "every node is at its learned concurrency limit"
ALL_FULL: Final = "every node is at max_inflight"
"""Reason of a decision for a full node: the request waits for it."""


def eligible(router: Router, request: RoutingRequest, decision: Decision, threshold: int, now_s: float) -> Decision:
    """Return a decision for a node whose queue is short enough and that meets the deadlines. Raises NotAdmitted."""
    if threshold:
        decision = below_queue_threshold(router, request, decision, threshold)
    if not request.may_queue:
        decision = without_queue(router, decision)
    if request.deadline_s or request.total_deadline_s:
        decision = within_deadlines(router, request, decision, now_s)
    return decision


def queue_limit(request: RoutingRequest, threshold: int) -> float:
    """Return the length of a node's own queue from which on the request may not go there."""
    return threshold / 2 if request.priority == LOW else threshold


def is_over_threshold(request: RoutingRequest, node: Node, threshold: int) -> bool:
    """Return whether the node's own queue is too long for the request."""
    return bool(threshold) and request.priority != HIGH and node.queued >= queue_limit(request, threshold)


def below_queue_threshold(router: Router, request: RoutingRequest, decision: Decision, threshold: int) -> Decision:
    """Return a decision for a node whose own queue is below the threshold. Raises NodeQueuesFull if there is none."""
    limit = queue_limit(request, threshold)
    if decision.node.queued < limit:
        return decision
    found = _among(router, decision, lambda node: node.queued < limit, "other nodes are over the queue threshold")
    if found is None and request.priority != HIGH:
        raise NodeQueuesFull(_queue_s(decision, limit))
    return found or decision


def below_limits(
    router: Router, request: RoutingRequest, decision: Decision, threshold: int, now_s: float, *, counts_learned: bool
) -> Decision:
    """Return a decision for nodes with fewer requests than their `max_inflight` and, if that counts, their learned
    concurrency limit. If there is none, or none that meets the request's deadlines, return the same decision."""
    some, all_ = (SOME_FULL, ALL_FULL) if decision.is_full else (SOME_BUSY, ALL_BUSY)

    def has_place(node: Node) -> bool:
        return not (
            node.is_full
            or (counts_learned and node.at_concurrency_limit)
            or is_over_threshold(request, node, threshold)
            or (node.waiting and not request.may_queue)
        )  # fmt: skip

    found = _among(router, decision, has_place, some)
    has_deadline = request.deadline_s or request.total_deadline_s
    if found is None or found.is_full or (has_deadline and check_deadlines(request, found, now_s) is not None):
        decision.reason = all_
        return decision
    return found


def without_queue(router: Router, decision: Decision) -> Decision:
    """Return a decision for a node without a queue of its own. Raises WouldQueue if there is none."""
    if not decision.node.waiting:
        return decision
    found = _among(router, decision, lambda node: not node.waiting, "other nodes have a queue")
    if found is None:
        raise WouldQueue(_queue_s(decision, 1.0))
    return found


def within_deadlines(router: Router, request: RoutingRequest, decision: Decision, now_s: float) -> Decision:
    """Return a decision for a node that meets the request's deadlines. Raises DeadlineUnreachable if there is none."""
    missed = check_deadlines(request, decision, now_s)
    if missed is None:
        return decision
    prices, query = decision.prices, decision.query
    if prices is not None and query is not None:
        index = prices.cheapest_within(max_ttft_ms(request, decision, now_s))
        if index >= 0 and decision.candidates[index] is not decision.node:
            other = router.decide_among((decision.candidates[index],), query)
            other.reason = "other nodes would miss its deadline"
            if check_deadlines(request, other, now_s) is None:
                return other
    raise missed


def check_deadlines_behind_queue(
    queue: AdmissionQueue, request: RoutingRequest, decision: Decision, now_s: float
) -> None:
    """Raise DeadlineUnreachable if the request would miss a deadline because of the requests queued ahead of it.

    The nodes of the model share the work of those requests.
    """
    price, query = decision.price, decision.query
    if price is None or query is None:
        return
    queue_ms = queue.work_ahead_ms(request, query.group, price.prefill, now_s) / len(query.candidates)
    missed = check_deadlines(request, decision, now_s, queue_ms=queue_ms)
    if missed is not None:
        raise missed


def _queue_s(decision: Decision, limit: float) -> float:
    """Return after how long the first node's own queue is shorter than `limit`. By Little's law, a node ends as many
    requests per second as it has, divided by how long one takes."""
    query = decision.query
    assert query is not None
    return min(
        (node.latency_ms / 1000.0 * (node.queued + 1.0 - limit) / (node.running + node.queued)
         if node.latency_ms and node.queued else UNMEASURED_S)
        for node in query.candidates.nodes
    )  # fmt: skip


def _among(router: Router, decision: Decision, eligible: Callable[[Node], bool], reason: str) -> Decision | None:
    query = decision.query
    assert query is not None
    nodes = [node for node in query.candidates.nodes if eligible(node)]
    if not nodes:
        return None
    found = router.decide_among(nodes, query)
    found.reason = reason
    return found
