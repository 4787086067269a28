"""Whether a request can meet its deadlines on the node chosen for it.

    first token      price.own                                  ≤ time left until it is due        [ms]
    whole response   price.own + output · token_ms of the node  ≤ time left until it is due        [ms]

For a queued request, the work of the requests ahead of it counts, too. On an idle node, or one without a measured
speed, the estimate does not count: the request may try, which corrects a wrong estimate.
"""

from __future__ import annotations

from math import inf

from warmroute.prompt.routing_request import RoutingRequest
from warmroute.routing.decision import Decision
from warmroute.routing.routing_errors import DeadlineUnreachable


def check_deadlines(
    request: RoutingRequest, decision: Decision, now_s: float, margin_s: float = 0.0, queue_ms: float = 0.0
) -> DeadlineUnreachable | None:
    """Return the error if the request would miss a deadline, else None.

    `margin_s`: how much earlier than the deadline it has to be. `queue_ms`: work of the queued requests ahead of it.
    """
    price, node = decision.price, decision.node
    expected_ms = decode_ms = 0.0
    if price is not None and node.load and node.speed.answers:
        expected_ms = price.own + queue_ms
        if request.total_deadline_s:
            decode_ms = _decode_ms(decision)
    if request.deadline_s:
        left_ms = (request.deadline_s - now_s - margin_s) * 1000.0
        if expected_ms > left_ms or left_ms <= 0.0:
            return DeadlineUnreachable(True, expected_ms, left_ms)
    if request.total_deadline_s:
        left_ms = (request.total_deadline_s - now_s - margin_s) * 1000.0
        if expected_ms + decode_ms > left_ms or left_ms <= 0.0:
            return DeadlineUnreachable(False, expected_ms + decode_ms, left_ms)
    return None


def max_ttft_ms(request: RoutingRequest, decision: Decision, now_s: float) -> float:
    """Return the longest time to first token that meets the request's deadlines on the decision's node."""
    left_s = request.deadline_s - now_s if request.deadline_s else inf
    if request.total_deadline_s:
        left_s = min(left_s, request.total_deadline_s - now_s - _decode_ms(decision) / 1000.0)
    return left_s * 1000.0


def _decode_ms(decision: Decision) -> float:
    """Return how long decoding the expected output takes on the node; 0.0 before the first measurement."""
    price, node, query = decision.price, decision.node, decision.query
    if price is None or query is None or not query.group.decode_speed.answers:
        return 0.0
    return price.output * query.group.decode_speed.token_ms(node.context_tokens) * node.speed.factor
