"""Ends the wait of a queued request that cannot wait longer: Envoy's filter would time out. No I/O.

high, normal    the request goes to its best node, although that has no room
low             the request is shed
"""

from __future__ import annotations

from warmroute.config.priority import LOW
from warmroute.routing.admission import Admission
from warmroute.routing.attempts import Attempts
from warmroute.routing.router import Router
from warmroute.routing.routing_errors import HeldTooLong, RoutingError


def send_or_shed(admission: Admission, router: Router, attempts: Attempts, now_s: float) -> None:
    """Call this for a request that is queued."""
    admission.queue.cancel(attempts)
    if attempts.request.priority == LOW:
        if router.demand_meter is not None:
            router.demand_meter.shed += 1
        attempts.on_rejected(HeldTooLong())
        return
    try:
        decision = router.decide(attempts.request, now_s, attempts.lookup)
    except RoutingError as error:
        attempts.on_rejected(error)
    else:
        attempts.on_admitted(decision)
