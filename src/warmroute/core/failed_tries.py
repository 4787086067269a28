"""What is kept of a try that failed, and the log of such tries.

A try is one sending of a request to one node. The decision of its request keeps what failed and why; the log gets at
most one line a second for each node, with the number of failed tries that it leaves out. No I/O but the log.
"""

from __future__ import annotations

import math
from typing import Final

import msgspec

from warmroute.core.messages import NodeError, Outcome
from warmroute.event_log import EventLog

log = EventLog("warmroute.fleet")

LOG_INTERVAL_S: Final = 1.0
"""Between two lines about one node."""
MAX_TRIES: Final = 16
"""Failed tries that are kept of one request."""
WHOLE: Final = "whole"
HEDGE: Final = "hedge"
PREFILL: Final = "prefill"
DECODE: Final = "decode"
"""What a node was asked for: the whole request, the whole request as a second node, or a part of it."""


class FailedTry(msgspec.Struct, eq=False, gc=False):
    """It refers to nothing but names and numbers, so that the many that a flood leaves cost no garbage collection."""

    node: str
    role: str
    """WHOLE, HEDGE, PREFILL or DECODE."""
    outcome: Outcome
    status: int
    """0 if the node sent no status."""
    reason: str
    """In the router's words."""
    opened_s: float
    failed_s: float
    error: NodeError | None
    """None if the node sent no error response."""


class _Unlogged(msgspec.Struct, eq=False):
    """Failed tries on one node since the last line about it."""

    first: FailedTry
    request_id: bytes
    left_out: int = 0


class FailedTryLog:
    """Collects the failed tries of all requests. `write` writes the lines."""

    def __init__(self) -> None:
        self._unlogged: dict[str, _Unlogged] = {}
        self._logged_s: dict[str, float] = {}

    def add(self, failed: FailedTry, request_id: bytes) -> None:
        unlogged = self._unlogged.get(failed.node)
        if unlogged is None:
            self._unlogged[failed.node] = _Unlogged(failed, request_id)
        else:
            unlogged.left_out += 1

    def write(self, now_s: float = math.inf) -> None:
        """Write a line for each node with failed tries, unless the last one is too young. Call this a few times a
        second: by then the rest of an error's body has arrived."""
        if self._logged_s:
            self._logged_s = {node: at_s for node, at_s in self._logged_s.items() if now_s - at_s < LOG_INTERVAL_S}
        for node, unlogged in list(self._unlogged.items()):
            if node in self._logged_s:
                continue
            self._logged_s[node] = now_s
            del self._unlogged[node]
            failed, error = unlogged.first, unlogged.first.error
            status = {"status": failed.status} if failed.status else {}
            read = {} if error is None else {"class": error.kind, "type": error.type, "code": error.code}
            log.warning(
                "try_failed",
                "The node did not complete a request.",
                node=node, **status, reason=failed.reason, role=failed.role, **read,
                request_id=unlogged.request_id.decode("ascii", "replace"), left_out=unlogged.left_out,
            )  # fmt: skip
