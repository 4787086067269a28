"""When a request that waits for its first token is sent to a second node as well. No I/O.

A hedge is sent if all of these hold:
1. The client has received nothing, and the request generates tokens or reads text: sending it twice changes nothing.
2. Its first token is overdue: it takes longer than `min_delay_s`, and
     streamed           longer than `factor` times what the router expected;
     not streamed       the same for the whole response, and the node answered nobody meanwhile;
     without estimate   the node answered nobody for `min_delay_s`, and its last health check timed out.
   There is an estimate if the policy reads the prompt and the node has answered before.
3. Another node is up and has room.
4. The request has no hedge yet, and the budget allows one: `max_ratio` of all requests, and MAX_BURST at once.

The response that begins first goes to the client, and the other attempt is cancelled. If the hedge wins, the other node
has failed at this request: a node that loses `health.consecutive_failures` times in a row is down.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Final

from warmroute.config import Hedging as HedgingConfig

if TYPE_CHECKING:
    from warmroute.routing.attempts import Attempts

MAX_BURST: Final = 10.0
"""Hedges that may be sent at once: enough to notice that a node hangs."""
CHECK_S: Final = 0.2
"""Time between two searches for overdue requests."""
LONG_OUTPUT: Final = 4.0
"""A response without `max_tokens` may be this many times as long as expected."""


class Hedging:
    def __init__(self, config: HedgingConfig) -> None:
        self.config = config
        self.budget = MAX_BURST

    def request_sent(self) -> None:
        self.budget = min(MAX_BURST, self.budget + self.config.max_ratio)

    def is_overdue(self, attempts: Attempts, now_s: float) -> bool:
        ticket, min_delay_s = attempts.ticket, self.config.min_delay_s
        if not attempts.hedgeable or now_s < ticket.opened_s + min_delay_s:
            return False
        node = ticket.node
        silent_s = now_s - max(ticket.opened_s, node.last_answer_s)
        if not attempts.overdue_s:
            expected_ms = _expected_ms(attempts)
            attempts.overdue_s = ticket.opened_s + self.config.factor * expected_ms / 1000.0 if expected_ms else inf
        if attempts.overdue_s == inf:
            return silent_s >= min_delay_s and node.health.check_has_timed_out
        streams = attempts.request.streams
        return now_s >= attempts.overdue_s and (streams or silent_s >= attempts.overdue_s - ticket.opened_s)


def _expected_ms(attempts: Attempts) -> float:
    """Return when the router expected the first byte, after the dispatch; 0.0 without an estimate."""
    ticket, request, decision = attempts.ticket, attempts.request, attempts.decision
    node, expected_ms = ticket.node, ticket.expected_ttft_ms
    if not expected_ms or not node.speed.answers:
        return 0.0
    if decision.node is node and decision.price is not None:
        expected_ms = max(expected_ms, decision.price.own)
    if not request.streams and (query := decision.query) is not None:
        output = request.max_output_tokens or LONG_OUTPUT * attempts.expected_output
        expected_ms += output * query.group.decode_speed.token_ms(node.context_tokens) * node.speed.factor
    return expected_ms
