"""Whether the node of a decision will do: another one, where its queue is too long or it would be too late."""

from __future__ import annotations

from collections.abc import Callable

from warmroute.fleet.node import Node
from warmroute.prompt.routing_request import HIGH, LOW, RoutingRequest
from warmroute.routing.deadlines import most_own_ms, too_late
from warmroute.routing.decision import Decision
from warmroute.routing.refusals import QueuesFull, WouldWait
from warmroute.routing.router import Router
from warmroute.routing.waiting_room import WaitingRoom


def most_queued(request: RoutingRequest, threshold: int) -> float:
    """A node with so many in its own queue is passed over. Low ones pass over more of them."""
    return threshold / 2 if request.priority == LOW else threshold


def under_threshold(router: Router, request: RoutingRequest, decision: Decision, threshold: int) -> Decision:
    """Nodes with so many in their own queue are passed over, as long as there are others. Raises QueuesFull."""
    most = most_queued(request, threshold)
    if decision.node.queued < most:
        return decision
    found = _among(router, decision, lambda node: node.queued < most, "others have too long a queue")
    if found is None and request.priority != HIGH:
        raise QueuesFull(decision.node.latency_ms / 1000.0)
    return found or decision


def without_queue(router: Router, decision: Decision) -> Decision:
    """For one that does not want to wait: not on a node either that has a queue of its own. Raises WouldWait."""
    if not decision.node.waiting:
        return decision
    found = _among(router, decision, lambda node: not node.waiting, "others have a queue")
    if found is None:
        raise WouldWait(decision.node.latency_ms / 1000.0)
    return found


def in_time(router: Router, request: RoutingRequest, decision: Decision, now_s: float) -> Decision:
    """The decision, or that for a node that makes it where the first one does not. Raises TooLate."""
    late = too_late(request, decision, now_s)
    if late is None:
        return decision
    prices, query = decision.prices, decision.query
    if prices is not None and query is not None:
        at = prices.cheapest_within(most_own_ms(request, decision, now_s))
        if at >= 0 and decision.candidates[at] is not decision.node:
            other = router.decide_among((decision.candidates[at],), query)
            other.reason = "others would be too late for its deadline"
            if too_late(request, other, now_s) is None:
                return other
    raise late


def in_time_behind(room: WaitingRoom, request: RoutingRequest, decision: Decision, now_s: float) -> None:
    """For one that has to wait: those whose turn comes before its own count, too. All nodes of the model share their
    work. Raises TooLate."""
    price, query = decision.price, decision.query
    if price is None or query is None:
        return
    ahead_ms = room.ahead_ms(request, query.group, price.prefill, now_s) / len(query.candidates)
    late = too_late(request, decision, now_s, ahead_ms=ahead_ms)
    if late is not None:
        raise late


def _among(router: Router, decision: Decision, will_do: Callable[[Node], bool], why: str) -> Decision | None:
    query = decision.query
    assert query is not None
    nodes = [node for node in query.candidates.nodes if will_do(node)]
    if not nodes:
        return None
    found = router.decide_among(nodes, query)
    found.reason = why
    return found
