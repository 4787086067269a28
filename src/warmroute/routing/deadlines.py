"""Deadlines: whether a request can be answered in time on the node that is meant for it.

    first token    price.own                                  ≤ what is left until it is due       [ms]
    whole answer   price.own + output · token_ms of the node  ≤ what is left until it is due       [ms]

Of one that has to wait, the work of those who go before it counts, too, when it comes.

Nothing is said of a node that is idle, or whose speed nobody has seen: it may try. So a wrong belief mends itself.
"""

from __future__ import annotations

from math import inf

from warmroute.prompt.routing_request import RoutingRequest
from warmroute.routing.decision import Decision
from warmroute.routing.refusals import TooLate


def too_late(
    request: RoutingRequest, decision: Decision, now_s: float, margin_s: float = 0.0, ahead_ms: float = 0.0
) -> TooLate | None:
    """Why it can't make it, or None where it may. `margin_s` is what it has to be earlier, `ahead_ms` what others who
    wait take before its turn comes."""
    price, node = decision.price, decision.node
    expected_ms = answer_ms = 0.0
    if price is not None and node.load and node.speed.answers:
        expected_ms = price.own + ahead_ms
        if request.total_deadline_s:
            answer_ms = _answer_ms(decision)
    if request.deadline_s:
        left_ms = (request.deadline_s - now_s - margin_s) * 1000.0
        if expected_ms > left_ms or left_ms <= 0.0:
            return TooLate(True, expected_ms, left_ms)
    if request.total_deadline_s:
        left_ms = (request.total_deadline_s - now_s - margin_s) * 1000.0
        if expected_ms + answer_ms > left_ms or left_ms <= 0.0:
            return TooLate(False, expected_ms + answer_ms, left_ms)
    return None


def most_own_ms(request: RoutingRequest, decision: Decision, now_s: float) -> float:
    """How long it may take until its first token."""
    left_s = request.deadline_s - now_s if request.deadline_s else inf
    if request.total_deadline_s:
        left_s = min(left_s, request.total_deadline_s - now_s - _answer_ms(decision) / 1000.0)
    return left_s * 1000.0


def _answer_ms(decision: Decision) -> float:
    """How long its answer flows there; 0.0 where nobody has seen one yet."""
    price, node, query = decision.price, decision.node, decision.query
    if price is None or query is None or not query.group.pace.answers:
        return 0.0
    return price.output * query.group.pace.token_ms(node.context) * node.speed.factor
