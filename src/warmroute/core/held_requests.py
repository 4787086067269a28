"""Requests that Envoy holds, and sends itself. No I/O.

The wait of a queued request ends before Envoy's filter would time out:

    high, normal    the request goes to its best node, although that has no room
    low             the request is shed

Envoy may send a request to another node than the router has chosen: then that node gets its ticket.
"""

from __future__ import annotations

from warmroute.config.routing import LOW
from warmroute.core.admission import Admission
from warmroute.core.brain import Dispatcher
from warmroute.core.calls import Attempts
from warmroute.core.messages import Outcome
from warmroute.core.node import Node
from warmroute.core.rejections import RoutingError
from warmroute.core.router import Router


def send_or_shed(admission: Admission, router: Router, attempts: Attempts, now_s: float) -> None:
    """Call this for a request that is queued."""
    if attempts.request.priority == LOW:
        admission.shed_held(attempts, now_s)
        return
    admission.queue.cancel(attempts)
    try:
        decision = router.decide(attempts.request, now_s, attempts.lookup)
    except RoutingError as error:
        attempts.on_rejected(error)
    else:
        if decision.is_full:
            decision = admission.below_limits(attempts.request, decision, now_s)
        if decision.is_full:
            attempts.on_rejected(admission.nodes_full(decision))
        else:
            attempts.on_admitted(decision)


def served_by(attempts: Attempts, dispatcher: Dispatcher, node: Node, now_s: float) -> None:
    """Envoy could not use the request's node, and another one answers. The ticket moves there, as old as it was."""
    opened_s = attempts.ticket.opened_s
    failover = attempts.give_up(Outcome.FAILED, "Envoy used a fallback", now_s, answered=True)
    dispatcher.counters.retries += 1
    attempts.tried += 1
    attempts.request.streams = False  # its time includes that of the failed attempt: an upper bound of its prefill
    attempts.ticket = dispatcher.router.dispatch(failover.decision, node, opened_s)
