"""What the attempts of all requests share: the parts of the router that they use, and which of them wait for a node.

A request that waits for the first byte of its response leaves its node when the node goes down or is removed, and goes
to another node that is up. If there is none, it stays: a node that is only suspected to be down may answer after all.
So does a request that may not be repeated, unless the node is known to be dead.
`tick` looks for requests that are overdue (overdue.py). No I/O.
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable
from itertools import chain, takewhile
from typing import TYPE_CHECKING, Any, Final, Protocol

from warmroute.config import Hedging as HedgingConfig
from warmroute.core.admission import Admission
from warmroute.core.decision import Deadlines, Decision
from warmroute.core.failed_tries import MAX_TRIES, WHOLE, FailedTry, FailedTryLog, NodeError
from warmroute.core.fleet import Fleet
from warmroute.core.health import HealthState
from warmroute.core.messages import Outcome
from warmroute.core.node import Node, Ticket
from warmroute.core.overdue import Hedging, send_hedge
from warmroute.core.router import Router
from warmroute.core.tickets import ClosedTicket
from warmroute.event_log import EventLog

if TYPE_CHECKING:
    from warmroute.core.calls import Attempts


SERVES_S: Final = 5.0
"""A node serves other requests if it served one no longer than this before it failed."""


log = EventLog("warmroute.routing")

ANOTHER_ISLAND: Final = "moves to another island"
MAX_MOVES: Final = 64
"""Requests that leave a node at once."""
MOVE_SLICE_S: Final = 0.005
"""How long requests leave a node before the event loop does other work. A move includes a decision for a new node."""


MAX_FAILED_HEDGES: Final = 32
"""Overdue requests for which a tick finds no second node. The next tick continues behind them."""


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
    split_requests: Counter[str]


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
        call_soon: Callable[[Callable[[], None]], object] | None = None,
    ) -> None:
        """`node_freed` is called when a node may have room for a queued request, `ticket_closed` before it.

        `call_soon` calls a function after the event loop has done other work. Without it, in virtual time, `tick`
        continues what a slice could not finish.
        """
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
        self.deadlines = Deadlines(self)
        self.decisions: dict[tuple[str, str], int] = {}
        """Requests that were sent to a first node, by policy and reason."""
        self.sent = 0
        """Requests that were sent to a first node."""
        self.waiting: dict[Attempts, None] = {}
        """Requests that were sent to a node and have no byte of a response, in the order in which they were sent."""
        self.splits: dict[Attempts, None] = {}
        """Those of them that another node prefills, or has prefilled, for the one that will answer."""
        self.failed_tries = FailedTryLog()
        self._leaving: dict[Node, str] = {}
        """Nodes that requests have to leave, and why."""
        self._to_move: deque[Attempts] = deque()
        """Requests that have to leave them and have not been looked at."""
        self._moving = self._continues = False
        self._call_soon = call_soon
        self._hedge_start = 0
        """Position in `waiting` at which the search for overdue requests continues."""
        fleet.observe_health(self._health_changed)

    def close_ticket(
        self, attempts: Attempts, ticket: Ticket, outcome: Outcome, now_s: float, reason: str = "", *,
        sent: bool = True, frees: bool = True, role: str = WHOLE, status: int = 0, error: NodeError | None = None,
        answered: bool = False,
    ) -> None:  # fmt: skip
        """`sent`: whether the node got the request. If not, it is no attempt. `frees`: whether others may have its
        place on the node at once; else the caller calls `node_freed` later. `reason`: why it failed, if it did.
        `answered`: it may have answered with 5xx, although its `status` is not known."""
        if reason:
            failed = FailedTry(ticket.node.name, role, outcome, status, reason, ticket.opened_s, now_s, error)
            if len(attempts.failed_tries) < MAX_TRIES:
                attempts.failed_tries += (failed,)
            if outcome is not Outcome.REJECTED:  # which is the client's mistake
                ticket.node.last_failure = failed
                self.failed_tries.add(failed, attempts.request_id)
        if (
            now_s - ticket.node.last_served_s <= SERVES_S
            and outcome is Outcome.FAILED
            and (status >= 500 or answered)
            and attempts.get_failover().may_be_poison(ticket.node, now_s, reason)
        ):
            self.fleet.close_ticket(ticket, outcome, now_s, reason, judged=False)
        else:
            self.fleet.close_ticket(ticket, outcome, now_s, reason)
        if attempts.history is not None and sent:
            attempts.history.closed.append(ClosedTicket(ticket, outcome, now_s, reason))
        if self._ticket_closed is not None:
            self._ticket_closed(attempts, ticket, now_s)
        if frees:
            self.node_freed(ticket.node, now_s)

    def count_decision(self, decision: Decision) -> None:
        query, decisions = decision.query, self.decisions
        # The reason of a move names islands and times.
        reason = decision.reason if query is None or not query.move_reason else ANOTHER_ISLAND
        key = (decision.policy, reason)
        decisions[key] = decisions.get(key, 0) + 1

    def may_try_another(self, attempts: Attempts) -> bool:
        return not attempts.envoy_retries and (not self.max_attempts or attempts.tried < self.max_attempts)

    # Nodes that go down.

    def _health_changed(self, node: Node, _before: HealthState) -> None:
        state = node.health.state
        if state is HealthState.DOWN:
            self.leave(node, f"the node is down: {node.health.reason}")
        elif state is HealthState.UP and self.waiting:  # requests may wait on nodes that went down before
            waited_on = {
                ticket.node: None for attempts in self.waiting for ticket in (attempts.ticket, attempts.hedge) if ticket
            }
            for other in waited_on:
                if other.health.state is HealthState.DOWN and not set(other.groups).isdisjoint(node.groups):
                    self._leaving[other] = f"the node is down: {other.health.reason}"
            self._begin_moving()

    def leave(self, node: Node, reason: str) -> None:
        """Send the requests that wait on this node to others. Call this also when a node was removed."""
        if self.waiting:
            self._leaving[node] = reason
            self._begin_moving()

    def _begin_moving(self) -> None:
        leaving = self._leaving
        if leaving:
            self._to_move = deque(attempts for attempts in self.waiting if attempts.waits_on(leaving) is not None)
            self._move(self.now())

    def _move(self, now_s: float) -> None:
        """Move requests until all are moved, or for one slice."""
        if self._moving:  # a node went down because of a move
            return
        self._moving = True
        leaving, moved, call_soon = self._leaving, Counter[Node](), self._call_soon
        until_s = math.inf if call_soon is None else time.perf_counter() + MOVE_SLICE_S
        try:
            while self._to_move and moved.total() < MAX_MOVES and time.perf_counter() < until_s:
                attempts = self._to_move.popleft()
                node = attempts.waits_on(leaving) if attempts in self.waiting else None
                if node is not None:
                    try:
                        moved[node] += attempts.leave(node, leaving[node], now_s)
                    except Exception as error:  # ends this request, and no other
                        attempts.driver.internal_error(error)
        finally:
            self._moving = False
        if not self._to_move:
            leaving.clear()
        elif call_soon is not None and not self._continues:
            self._continues = True
            call_soon(self._continue_moving)
        for node, count in moved.items():
            if count:
                log.info("requests_moved", "They had no response yet.", node=node.name, requests=count)

    def _continue_moving(self) -> None:
        self._continues = False
        if self._to_move:
            self._move(self.now())

    # Periodic work.

    def tick(self, now_s: float) -> None:
        """Move and hedge requests. Call this every hedging.CHECK_S."""
        if self._to_move and self._call_soon is None:
            self._move(now_s)
        for attempts in list(self.splits):
            split = attempts.split
            if split is not None:
                try:
                    split.check(now_s)
                except Exception as error:  # ends this request, and no other
                    attempts.driver.internal_error(error)
        hedging = self.hedging
        hedging.refill(self.sent)
        if not self.waiting or not hedging.config.max_ratio:
            return
        oldest_s = now_s - hedging.config.min_delay_s
        old = list(takewhile(lambda attempts: attempts.ticket.opened_s <= oldest_s, self.waiting))
        start = self._hedge_start if self._hedge_start < len(old) else 0
        self._hedge_start = failed = 0
        for position in chain(range(start, len(old)), range(start)):
            if hedging.budget < 1.0:
                break
            if failed == MAX_FAILED_HEDGES:
                self._hedge_start = position
                break
            attempts = old[position]
            if (
                attempts.hedge is not None
                or attempts.done
                or attempts in self.splits
                or not hedging.is_overdue(attempts, now_s)
            ):
                continue
            try:
                if send_hedge(attempts, self, now_s):
                    hedging.budget -= 1.0
                    self.counters.hedges += 1
                else:
                    failed += 1
            except Exception as error:  # ends this request, and no other
                attempts.driver.internal_error(error)
