"""The learned limit of a node's concurrent requests, while it has some that are not streamed.

Nobody sees the first token of a response that is not streamed. The router assumes when its prefill ends, and sends the
next request. If the node is slower than assumed, or has no place in its batch, the requests wait in the engine's own
queue, which knows no tenants. The engine reports how many wait there:

    waiting more than the router expects    the limit falls by one step, a quarter, down to what the engine runs
    nobody waits, and the limit was hit     the limit rises by one step, an eighth

A report only moves the limit. The limit itself is never below 1, so an idle node always gets a request. The first
report of waiting requests starts from the requests that the node has then. Without reports there is no limit.
"""

from __future__ import annotations

from typing import Final

LOWER_BY: Final = 4
"""One step down is this part of the limit, and at least one request."""
RAISE_BY: Final = 8
UNUSED_REPORTS: Final = 60
"""A limit that was not hit for this number of reports ends."""


class ConcurrencyLimit:
    __slots__ = ("_unused", "most", "was_hit")

    def __init__(self) -> None:
        self.most = 0
        """Requests that the node gets at the same time; 0: there is no limit."""
        self.was_hit = False
        """Whether it kept a request waiting since the last report."""
        self._unused = 0

    def forget(self) -> None:
        """The engine has restarted, or its reports are too old."""
        self.most = self._unused = 0
        self.was_hit = False

    def reported(self, running: int, waiting: int, expected_waiting: int, inflight: int) -> None:
        """Take over a report. `expected_waiting`: requests without a first token, as far as the router knows;
        `inflight`: all requests of this router and its peers on the node."""
        if waiting > expected_waiting and inflight:
            now = min(self.most, inflight) if self.most else inflight
            self.most = max(1, min(running, now), now - max(1, now // LOWER_BY))
            self._unused = 0
        elif self.was_hit:
            if not waiting:
                self.most += max(1, self.most // RAISE_BY)
            self._unused = 0
        elif self.most:
            self._unused += 1
            if self._unused >= UNUSED_REPORTS:
                self.forget()
        self.was_hit = False
