"""When a request that waits for its first token is sent to a second node as well. No I/O.

A hedge is sent if all of these hold:
1. The client has received nothing, and the router knows the path: sending the request twice changes nothing.
2. Its first token is overdue: it takes longer than `min_delay_s` and than `factor` times what the router expected.
   There is an estimate if the policy reads prompts and the node has answered before. For a response that is not
   streamed, it includes the output.
3. Its node looks as if it hangs. One of:
     - its last health check timed out, and it made no progress for `min_delay_s`;
     - it is not busy: the engine reports no queue, and a KV cache that is half empty. Without streaming, it also made
       no progress for as long as the request is expected to take;
     - it is busy, or there is no estimate, but it made no progress for HANGS_S.
   Progress is the beginning or the end of any response, and a change of its KV usage. A busy node may just be slow, and
   hedges would make a saturated fleet slower still.
4. Another node is up and has room.
5. The request has no hedge yet, and the budget allows one: `max_ratio` of all requests, and MAX_BURST at once.

The response that begins first goes to the client, and the other attempt is cancelled. If the hedge wins, the other node
has failed at this request: a node that loses `health.consecutive_failures` times in a row is down.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from warmroute.config import Hedging as HedgingConfig

if TYPE_CHECKING:
    from warmroute.core.brain import Dispatcher
    from warmroute.core.calls import Attempts


MAX_BURST: Final = 10.0
"""Hedges that may be sent at once: enough to notice that a node hangs."""
CHECK_S: Final = 0.2
"""Time between two searches for overdue requests."""
HALF_EMPTY: Final = 0.5
"""KV usage up to which a node is not busy."""
HANGS_S: Final = 30.0
"""A busy node that makes no progress for so long hangs."""
LONG_OUTPUT: Final = 4.0
"""A response without `max_tokens` may be this many times as long as expected."""


class Hedging:
    def __init__(self, config: HedgingConfig) -> None:
        self.config = config
        self.budget = MAX_BURST
        self._sent = 0

    def refill(self, sent: int) -> None:
        """`sent`: requests that the router has sent since its start."""
        self.budget = min(MAX_BURST, self.budget + self.config.max_ratio * (sent - self._sent))
        self._sent = sent

    def is_overdue(self, attempts: Attempts, now_s: float) -> bool:
        ticket, min_delay_s = attempts.ticket, self.config.min_delay_s
        opened_s, node = ticket.opened_s, ticket.node
        if not attempts.repeatable or now_s < opened_s + min_delay_s:
            return False
        if not attempts.overdue_s:
            attempts.overdue_s = opened_s + self.config.factor * _expected_ms(attempts) / 1000.0
        if now_s < attempts.overdue_s:
            return False
        silent_s = now_s - max(opened_s, node.last_progress_s)
        if node.health.check_has_timed_out:
            return silent_s >= min_delay_s
        if node.waiting or node.kv_usage > HALF_EMPTY or attempts.overdue_s == opened_s:
            return silent_s >= HANGS_S
        return attempts.request.streams or silent_s >= attempts.overdue_s - opened_s


def send_hedge(attempts: Attempts, dispatcher: Dispatcher, now_s: float) -> bool:
    """Send a request to a second node. Return False if none is up and has room."""
    node, has_room = attempts.ticket.node, dispatcher.admission.has_room
    other = attempts.other_node(now_s, lambda o: o is not node and not o.needs_partner and has_room(o, now_s))
    if other is None:
        return False
    attempts.hedge = dispatcher.router.dispatch(attempts.get_failover().decision, other, now_s)
    attempts.tried += 1
    attempts.driver.send_hedge(other)
    return True


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
