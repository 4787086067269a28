"""The headers by which a client asks for a priority, for deadlines, or not to be queued.

X-Priority: high | normal | low      which requests are served first
X-Queue: yes | no                    no: 429 at once instead of waiting for a node
X-Deadline-Ttft-Ms: 800              when the first token is due, counted from the request's arrival
X-Deadline-Ms: 20000                 when the whole response is due
X-Vllm-Priority: 5                   vLLM's own priority, in place of `priority` in the body: lower is served first
"""

from __future__ import annotations

import re
from math import inf
from typing import Final

from warmroute.config.priority import PRIORITY_NUMBERS
from warmroute.edge import errors
from warmroute.edge.http1 import RequestHead

PRIORITY: Final = b"x-priority"
QUEUE: Final = b"x-queue"
DEADLINE_TTFT: Final = b"x-deadline-ttft-ms"
DEADLINE: Final = b"x-deadline-ms"
ENGINE_PRIORITY: Final = b"x-vllm-priority"
_INTEGER: Final = re.compile(rb"-?[0-9]{1,18}")


def read_routing_headers(
    head: RequestHead, now_s: float, priority: int, deadline_s: float, total_deadline_s: float
) -> tuple[int, bool, float, float]:
    """Return priority, whether the request may queue, and its two deadlines. The arguments are the values where the
    request has no such header. Raises HttpError for a value that is not understood."""
    get = head.get
    if value := get(PRIORITY):
        named = PRIORITY_NUMBERS.get(value.lower().decode("latin-1"))
        if named is None:
            raise errors.invalid_header(PRIORITY.decode(), "high, normal or low")
        priority = named
    queue = get(QUEUE).lower()
    if queue not in (b"", b"yes", b"no"):
        raise errors.invalid_header(QUEUE.decode(), "yes or no")
    if value := get(DEADLINE_TTFT):
        deadline_s = _deadline_s(value, DEADLINE_TTFT, now_s)
    if value := get(DEADLINE):
        total_deadline_s = _deadline_s(value, DEADLINE, now_s)
    return priority, queue != b"no", deadline_s, total_deadline_s


def read_engine_priority(head: RequestHead, priority: int) -> int:
    """Return the priority that vLLM will use; `priority` is the body's. Raises HttpError for anything but an integer:
    vLLM would use the body's priority then, other servers may not."""
    value = head.get(ENGINE_PRIORITY)
    if not value:
        return priority
    if _INTEGER.fullmatch(value) is None:
        raise errors.invalid_header(ENGINE_PRIORITY.decode(), "an integer")
    return int(value)


def _deadline_s(value: bytes, name: bytes, now_s: float) -> float:
    try:
        after_ms = float(value)
    except ValueError:
        after_ms = 0.0
    if not 0.0 < after_ms < inf:
        raise errors.invalid_header(name.decode(), "a number of milliseconds above 0")
    return now_s + after_ms / 1000.0
