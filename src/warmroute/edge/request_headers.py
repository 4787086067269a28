"""The headers by which a client asks for a priority, for deadlines, or not to be queued.

X-Priority: high | normal | low      which requests are served first
X-Queue: yes | no                    no: 429 at once instead of waiting for a node
X-Deadline-Ttft-Ms: 800              when the first token is due, counted from the request's arrival
X-Deadline-Ms: 20000                 when the whole response is due
"""

from __future__ import annotations

from math import inf
from typing import Final

import msgspec

from warmroute.config.priority import PRIORITY_NUMBERS
from warmroute.edge import errors
from warmroute.edge.http1 import RequestHead

PRIORITY: Final = b"x-priority"
QUEUE: Final = b"x-queue"
DEADLINE_TTFT: Final = b"x-deadline-ttft-ms"
DEADLINE: Final = b"x-deadline-ms"


class RoutingHeaders(msgspec.Struct, frozen=True):
    """None where the request has no such header."""

    priority: int | None = None
    may_queue: bool | None = None
    deadline_s: float | None = None
    total_deadline_s: float | None = None


def read_routing_headers(head: RequestHead, now_s: float) -> RoutingHeaders:
    """Raises HttpError for a value that is not understood."""
    get = head.get
    priority: int | None = None
    may_queue: bool | None = None
    if value := get(PRIORITY):
        priority = PRIORITY_NUMBERS.get(value.lower().decode("latin-1"))
        if priority is None:
            raise errors.invalid_header(PRIORITY.decode(), "high, normal or low")
    if value := get(QUEUE):
        if value.lower() not in (b"yes", b"no"):
            raise errors.invalid_header(QUEUE.decode(), "yes or no")
        may_queue = value.lower() == b"yes"
    return RoutingHeaders(
        priority,
        may_queue,
        _deadline_s(get(DEADLINE_TTFT), DEADLINE_TTFT, now_s),
        _deadline_s(get(DEADLINE), DEADLINE, now_s),
    )


def _deadline_s(value: bytes, name: bytes, now_s: float) -> float | None:
    if not value:
        return None
    try:
        after_ms = float(value)
    except ValueError:
        after_ms = 0.0
    if not 0.0 < after_ms < inf:
        raise errors.invalid_header(name.decode(), "a number of milliseconds above 0")
    return now_s + after_ms / 1000.0
