"""What a request wishes by its headers: a priority, a deadline, not to wait.

X-Priority: high | normal | low      who goes first
X-Queue: yes | no                    no: 429 at once rather than waiting for a node
X-Deadline-Ttft-Ms: 800              when the first token is due, counted from the request's arrival
X-Deadline-Ms: 20000                 when the whole answer is due
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Final

from warmroute.edge import errors
from warmroute.edge.head import RequestHead
from warmroute.prompt.routing_request import HIGH, LOW, NORMAL, RoutingRequest

PRIORITY: Final = b"x-priority"
QUEUE: Final = b"x-queue"
DEADLINE_TTFT: Final = b"x-deadline-ttft-ms"
DEADLINE: Final = b"x-deadline-ms"
PRIORITIES: Final = {b"high": HIGH, b"normal": NORMAL, b"low": LOW}


def read_wishes(head: RequestHead, request: RoutingRequest, now: Callable[[], float]) -> None:
    """Takes them into the ask, whose own values are what counts without a wish. Raises Refusal."""
    if not head.wishes:
        return
    get = head.get
    if value := get(PRIORITY):
        said = PRIORITIES.get(value.lower())
        if said is None:
            raise errors.bad_wish(PRIORITY.decode(), "high, normal or low")
        request.priority, request.priority_said = said, True
    if value := get(QUEUE):
        wish = value.lower()
        if wish not in (b"yes", b"no"):
            raise errors.bad_wish(QUEUE.decode(), "yes or no")
        request.may_queue = wish == b"yes"
    if value := get(DEADLINE_TTFT):
        request.deadline_s = now() + _after_s(value, DEADLINE_TTFT)
    if value := get(DEADLINE):
        request.total_deadline_s = now() + _after_s(value, DEADLINE)


def _after_s(value: bytes, name: bytes) -> float:
    try:
        after_ms = float(value)
    except ValueError:
        after_ms = 0.0
    if not 0.0 < after_ms < inf:
        raise errors.bad_deadline(name.decode())
    return after_ms / 1000.0
