"""What the attempts of all requests share: the parts of the router that they use, and which of them wait for a node.

A request that waits for the first byte of its response leaves its node when the node goes down or is removed, and goes
to another node that is up. If there is none, it stays: a node that is only suspected to be down may answer after all.
`tick` looks for requests that are overdue (hedging.py). No I/O.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Protocol

from warmroute.config import Hedging as HedgingConfig
from warmroute.event_log import EventLog
from warmroute.fleet.fleet import Fleet
from warmroute.fleet.health import HealthState
from warmroute.fleet.node import Node, Outcome
from warmroute.fleet.ticket import Ticket
from warmroute.routing.admission import Admission
from warmroute.routing.attempt_history import ClosedTicket
from warmroute.routing.hedging import Hedging
from warmroute.routing.router import Router

if TYPE_CHECKING:
    from warmroute.routing.attempts import Attempts

log = EventLog("warmroute.routing")

MAX_MOVES: Final = 64
"""Requests that leave a node at once. The others follow with the next ticks, so that the event loop is not blocked."""


class AttemptJournal(Protocol):
    on: bool

    def begin(self, attempts: Attempts, queued_ms: float) -> Any:
        """Start the entry of a request that got a decision. Return it."""

    def complete(self, entry: Any, attempts: Attempts, outcome: Outcome, now_s: float) -> None:
        """Complete the entry."""


class AttemptCounters(Protocol):
    responses: Counter[int]
    interrupted: int
    disconnects: int
    retries: int
    hedges: int
    hedges_won: int


class Dispatcher:
    def __init__(
        self,
        fleet: Fleet,
        router: Router,
        admission: Admission,
        counters: AttemptCounters,
        journal: AttemptJournal | None,
        max_attempts: int,
        now: Callable[[], float],
        node_freed: Callable[[Node, float], object],
        ticket_closed: Callable[[Attempts, Ticket, float], object] | None = None,
        hedging: HedgingConfig | None = None,
    ) -> None:
        """`node_freed` is called when a node may have room for a queued request, `ticket_closed` before it."""
        self.fleet = fleet
        self.router = router
        self.admission = admission
        self.counters = counters
        self.journal = journal
        self.max_attempts = max_attempts
        """Nodes that a request may be sent to; 0: all of them."""
        self.now = now
        self.node_freed = node_freed
        self._ticket_closed = ticket_closed
        self.request_completed: Callable[[Attempts, float], object] | None = None
        """Called after a complete response with a status below 400."""
        self.capture: Callable[[Attempts, Any, Outcome | None, float], object] | None = None
        """Called with what was `captured` of a request when it has ended; without an outcome if it was not admitted."""
        self.hedging = Hedging(hedging or HedgingConfig())
        self.sent = 0
        """Requests that were sent to a first node."""
        self.waiting: dict[Attempts, None] = {}
        """Requests that were sent to a node and have no byte of a response, in the order in which they were sent."""
        self._leaving: dict[Node, str] = {}
        """Nodes that requests have to leave, and why."""
        fleet.observe_health(self._health_changed)

    def close_ticket(
        self, attempts: Attempts, ticket: Ticket, outcome: Outcome, now_s: float, reason: str = ""
    ) -> None:
        self.fleet.close_ticket(ticket, outcome, now_s, reason)
        if attempts.history is not None:
            attempts.history.closed.append(ClosedTicket(ticket, outcome, now_s, reason))
        if self._ticket_closed is not None:
            self._ticket_closed(attempts, ticket, now_s)
        self.node_freed(ticket.node, now_s)

    def may_try_another(self, attempts: Attempts) -> bool:
        return not self.max_attempts or attempts.tried < self.max_attempts

    # Nodes that go down.

    def _health_changed(self, node: Node, _before: HealthState) -> None:
        state = node.health.state
        if state is HealthState.DOWN:
            self.leave(node, f"the node is down: {node.health.reason}")
        elif state is HealthState.UP and self.waiting:  # requests may wait on nodes that went down before
            down = {other for group in node.groups for other in group.members}
            for other in down:
                if other.health.state is HealthState.DOWN:
                    self.leave(other, f"the node is down: {other.health.reason}")

    def leave(self, node: Node, reason: str) -> None:
        """Send the requests that wait on this node to others. Call this also when a node was removed."""
        if self.waiting:
            self._leaving[node] = reason
            self._move(self.now())

    def _move(self, now_s: float) -> None:
        leaving, moved = self._leaving, Counter[Node]()
        for attempts in list(self.waiting):
            node = attempts.waits_on(leaving)
            if node is None:
                continue
            try:
                moved[node] += attempts.leave(node, leaving[node], now_s)
            except Exception as error:  # ends this request, and no other
                attempts.driver.internal_error(error)
            if moved.total() >= MAX_MOVES:
                break
        else:
            leaving.clear()
        for node, count in moved.items():
            if count:
                log.info("requests_moved", "They had no response yet.", node=node.name, requests=count)

    # Periodic work.

    def tick(self, now_s: float) -> None:
        """Move and hedge requests. Call this every hedging.CHECK_S."""
        if self._leaving:
            self._move(now_s)
        hedging = self.hedging
        hedging.refill(self.sent)
        if not self.waiting or not hedging.config.max_ratio:
            return
        oldest_s = now_s - hedging.config.min_delay_s
        overdue: list[Attempts] = []
        for attempts in self.waiting:
            if attempts.ticket.opened_s > oldest_s or len(overdue) + 1 > hedging.budget:
                break
            if attempts.hedge is None and hedging.is_overdue(attempts, now_s):
                overdue.append(attempts)
        for attempts in overdue:
            try:
                if attempts.send_hedge(now_s):
                    hedging.budget -= 1.0
                    self.counters.hedges += 1
            except Exception as error:  # ends this request, and no other
                attempts.driver.internal_error(error)
