"""The one door of the core: `handle` takes an event, and returns the commands that follow from it. No I/O.

    1  the event's own call changes its state (core/calls.py); a call that failed has its next node then
    2  calls leave nodes that went down or were removed, one after the other, at most MAX_MOVES at a time
    3  nodes that became free get calls from the queue, in the queue's order

Nothing is called back: a node that goes down while an event is handled, or a call that admission rejects, is noted,
and looked at in its step. An error in one call's turn ends that call and no other.

A call leaves its node only when the edge has answered its Withdraw. Until then, at most ANSWER_S, no other call is
moved and none leaves the queue, so that each decision sees the one before it. In one process the answer comes before
anything else happens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import chain, takewhile
from math import inf
from typing import TYPE_CHECKING, Any, Final

from warmroute.config import Hedging as HedgingConfig
from warmroute.core.admission import TICK_S, Admitter
from warmroute.core.calls import CALL_ROWS, DONE, SENT, STATES, TRY_ROWS, Call, Calls, Plan, TicketEvent
from warmroute.core.calls import MOVE as MOVE_TO
from warmroute.core.decision import check_deadlines
from warmroute.core.fleet import Fleet
from warmroute.core.health import HealthState
from warmroute.core.messages import (
    ALL,
    OVERDUE,
    QUEUE,
    Arrive,
    Cancel,
    Charge,
    Command,
    Due,
    Event,
    Failed,
    FirstToken,
    Outcome,
    Resume,
    Started,
    Withdraw,
    Withdrawn,
)
from warmroute.core.node import Node
from warmroute.core.overdue import CHECK_S, OverdueRule, deadline_passed, may_miss_deadline
from warmroute.core.rate_limits import RateLimits
from warmroute.core.router import Router
from warmroute.core.traffic import Counters, Traffic
from warmroute.event_log import EventLog

if TYPE_CHECKING:
    from warmroute.core.last_decisions import LastDecisions

log = EventLog("warmroute.routing")

MAX_MOVES: Final = 64
"""Calls that leave their nodes between one Due and the next. A move includes a decision for a new node."""
MAX_DEADLINE_MOVES: Final = 32
"""Calls for which one look at the deadlines searches another node."""
MAX_FAILED_HEDGES: Final = 32
"""Overdue calls for which one search finds no second node. The next one goes on behind them."""
ANSWER_S: Final = 0.25
"""An edge answers a Withdraw within a round trip. One that does not must not hold up the calls of other edges."""
LOG_INTERVAL_S: Final = 60.0
"""Between two lines about messages that have no row in the tables."""

# What is left to do for a call.
_CHECK: Final = 0
_CHECK_DEADLINE: Final = 1

_NOTHING: Final[tuple[Command, ...]] = ()


def _by_kind(calls: Calls, table: dict[tuple[type[Event], int], str]) -> dict[Any, list[Any]]:
    """Return the rows of each kind of message: a method of `calls` for each state, or None."""
    found: dict[Any, list[Any]] = {kind: [None] * STATES for kind, _ in table}
    for (kind, state), name in table.items():
        found[kind][state] = getattr(calls, name)
    return found


class Brain:
    def __init__(
        self,
        fleet: Fleet,
        router: Router,
        admission: Admitter,
        counters: Counters,
        *,
        traffic: Traffic | None = None,
        journal: LastDecisions | None = None,
        max_attempts: int = 0,
        hedging: HedgingConfig | None = None,
        ticks_always: bool = False,
        keeps_tickets: bool = False,
        rate_limits: RateLimits | None = None,
    ) -> None:
        """`ticks_always`: the queue is looked at all the time, as nodes report; else only while a call needs it.
        `keeps_tickets`: `ticket_log` says which tickets were opened and closed."""
        self.fleet = fleet
        self.router = router
        self.admission = admission
        self.counters = counters
        self.traffic = traffic
        self.journal = journal
        self.overdue = OverdueRule(hedging or HedgingConfig())
        self.calls = calls = Calls(
            fleet,
            router,
            admission,
            counters,
            self.overdue,
            max_attempts,
            traffic,
            journal,
            keeps_tickets,
            rate_limits,
        )
        self.open = calls.open
        self.waiting = calls.waiting
        self.deadlines = calls.deadlines
        self.failed_tries = calls.failed_tries
        self.decisions = calls.decisions
        self._call_rows = _by_kind(calls, CALL_ROWS)
        self._try_rows = _by_kind(calls, TRY_ROWS)
        self._ticks_always = ticks_always
        self.queue_due_s = self.overdue_due_s = 0.0 if ticks_always else inf
        """When the queue and the deadlines, and when the calls without a first byte, are looked at next."""
        self._leaving: deque[Call] = deque()
        """Calls that may have to leave their nodes."""
        self._moves = 0
        """How many of them may do so before the next Due."""
        self._work: deque[tuple[int, Call]] = deque()
        """What else is left to do, and for which call."""
        self._asked: Call | None = None
        """The call that leaves its node now."""
        self._asked_until_s = 0.0
        """When the others go on, although its edge has not answered."""
        self._deadline_moves = 0
        self._wants_hedges = False
        self._hedge_start = 0
        """Position in `waiting` at which the search for overdue calls continues."""
        self._moved: dict[Node, int] = {}
        self._crossed = 0
        self._crossed_logged_s = -inf

    def reconfigure(self, max_attempts: int, hedging: HedgingConfig) -> None:
        self.calls.max_attempts = max_attempts
        self.overdue.config = hedging

    # What the shell asks.

    @property
    def due_now(self) -> bool:
        """Whether `Due` should follow as soon as the shell has done other work."""
        return bool(self._asked is None and (self._work or self._leaving or self.fleet.changed or self.calls.freed))

    @property
    def next_due_s(self) -> float:
        """When `Due` should follow at the latest."""
        return min(self.queue_due_s, self.overdue_due_s)

    @property
    def last_error(self) -> BaseException | None:
        """What failed in the core, if anything did."""
        return self.calls.last_error

    @property
    def ended(self) -> list[Call]:
        """Ended calls that capture, traces, prompt doctor or request log read. The reader clears the list."""
        return self.calls.ended_calls

    @property
    def ticket_log(self) -> list[TicketEvent] | None:
        """Tickets that were opened and closed, in order. The reader clears the list."""
        return self.calls.ticket_log

    @property
    def sent(self) -> int:
        """Calls that were sent to a first node."""
        return self.calls.sent

    def node_freed(self, node: Node) -> None:
        """A node may have more room than before, by a report or a peer's message."""
        self.calls.freed[node] = None

    # The door.

    def handle(self, event: Any, now_s: float) -> Sequence[Command]:
        """Change the state of the calls by one Event. Return what edges have to do now, in this order."""
        calls = self.calls
        commands: list[Command] = []
        calls.commands = commands
        kind = type(event)
        if kind is Due:
            self._due(event.parts, now_s)
        else:
            call: Call | None = calls.open.get(event.id)
            try:
                if call is not None and (rows := self._try_rows.get(kind)) is not None:
                    try_ = call.main
                    if try_ is None or try_.number != event.try_:
                        try_ = call.find(event.try_)
                    row = rows[try_.state] if try_ is not None else None
                    if row is not None:
                        row(call, try_, event, now_s)
                    else:  # it comes too late
                        self._crosses(event, now_s)
                elif call is not None:
                    rows = self._call_rows.get(kind)
                    row = rows[call.state] if rows is not None else None
                    if row is not None:
                        row(call, event, now_s)
                elif kind is Arrive:
                    call = calls.open[event.id] = Call(event.id, event.request)
                    calls.arrive(call, event, now_s)
                elif kind is Charge:
                    calls.charge(event, now_s)
                elif kind is Resume:
                    calls.resume(event, now_s)
                else:
                    self._crosses(event, now_s)
            except Exception as error:
                call = calls.open.get(event.id)
                if call is None:
                    calls.note_failure(error, call)
                else:
                    calls.fail_internally(call, error, now_s)
            if (kind is Arrive or kind is Resume) and (self.queue_due_s == inf or self.overdue_due_s == inf):
                self._start_looking(call, now_s)
        if self._work or self._leaving or self.fleet.changed or self._asked is not None or self._wants_hedges:
            self._follow_up(now_s)
        elif calls.freed:
            if self.admission.queue.waiting:
                self._follow_up(now_s)
            else:
                calls.freed = {}
        return commands or _NOTHING

    def _crosses(self, event: Event, now_s: float) -> None:
        """An event came for a call or a try that has ended: it crossed the message that ended it."""
        if isinstance(event, (Withdrawn, Failed, Cancel)):
            return
        if isinstance(event, (Started, FirstToken)):  # no response may run without a ticket
            self.calls.commands.append(Withdraw(event.id, event.try_))
        self.counters.protocol_errors += 1
        self._crossed += 1
        if now_s >= self._crossed_logged_s + LOG_INTERVAL_S:
            log.debug("messages_crossed", "Messages came for calls that had ended.", messages=self._crossed)
            self._crossed, self._crossed_logged_s = 0, now_s

    # Time.

    def _start_looking(self, call: Call | None, now_s: float) -> None:
        """A call has come: look at what may wait from now on, unless the call was rejected at once."""
        if call is None or (call.state == DONE and call.outcome is None):
            return
        if self.queue_due_s == inf and (self.admission.queue.waiting or self.deadlines.watched):
            self.queue_due_s = now_s + TICK_S
        if self.overdue_due_s == inf:
            self.overdue_due_s = now_s + CHECK_S

    def _due(self, parts: int, now_s: float) -> None:
        if parts != QUEUE:
            self._moves = MAX_MOVES
        if parts == OVERDUE or (parts == ALL and now_s >= self.overdue_due_s):
            self._look_at_waiting(now_s)
        if parts == QUEUE or (parts == ALL and now_s >= self.queue_due_s):
            self._look_at_queue(now_s)

    def _look_at_queue(self, now_s: float) -> None:
        """Look at the queue and the deadlines."""
        calls, admission = self.calls, self.admission
        needed = admission.queue.waiting or self.fleet.islands.has_queues or self.deadlines.watched
        if not (needed or self._ticks_always):
            self.queue_due_s = inf
            return
        self.queue_due_s = now_s + TICK_S
        try:
            for call, decision in admission.tick(dict.fromkeys(self.fleet), now_s):
                if admission.rejected:
                    calls.reject_those_that_lost(now_s)
                calls.admit(call, decision, now_s)
        except Exception as error:
            calls.note_failure(error, None)
        if admission.rejected:
            calls.reject_those_that_lost(now_s)
        self._deadline_moves = MAX_DEADLINE_MOVES
        self._work.extend([(_CHECK_DEADLINE, call) for call in self.deadlines.due(now_s)])

    def _look_at_waiting(self, now_s: float) -> None:
        """Look at the calls that have no byte of a response."""
        if not (self.waiting or self._ticks_always):
            self.overdue_due_s = inf
            return
        self.overdue_due_s = now_s + CHECK_S
        self._work.extend([(_CHECK, call) for call in self.calls.checked])
        self.overdue.refill(self.calls.sent)
        self._wants_hedges = bool(self.waiting and self.overdue.config.max_ratio)

    # What follows from an event.

    def _follow_up(self, now_s: float) -> None:
        try:
            self._settle(now_s)
        except Exception as error:  # it concerns no call of its own: the next event goes on
            self.calls.note_failure(error, None)

    def _settle(self, now_s: float) -> None:
        calls, fleet = self.calls, self.fleet
        while True:
            if self._asked is not None:
                if self._asked.is_leaving and now_s < self._asked_until_s:
                    break
                self._asked = None
            if fleet.changed:
                self._note_changes()
            if self._leaving and self._moves:
                call = self._leaving.popleft()
                if call in calls.waiting:
                    self._moves -= 1
                    self._fenced(self._leave, call, now_s)
            elif self._work:
                what, call = self._work.popleft()
                if call.state != DONE:
                    self._fenced(calls.check if what == _CHECK else self._check_deadline, call, now_s)
            elif self._wants_hedges:
                self._wants_hedges = False
                self._send_hedges(now_s)
            elif calls.freed:
                calls.fill(now_s)
            else:
                break
        if self._moved and self._asked is None:
            for node, count in self._moved.items():
                log.info("requests_moved", "They had no response yet.", node=node.name, requests=count)
            self._moved.clear()

    def _note_changes(self) -> None:
        """Nodes have changed: find the calls that may have to leave theirs."""
        changed, self.fleet.changed = self.fleet.changed, {}
        if not self.waiting:
            return
        left: dict[Node, None] = {}
        for node in changed:
            state = node.health.state
            if state is HealthState.DOWN or self._is_gone(node):
                left[node] = None
            elif state is HealthState.UP and not node.draining:
                # Calls may wait on nodes that went down, or away, while there was no other one.
                for call in self.waiting:
                    for waited_on in call.nodes():
                        if self._is_gone(waited_on) or (
                            waited_on.health.state is HealthState.DOWN
                            and not set(waited_on.groups).isdisjoint(node.groups)
                        ):
                            left[waited_on] = None
        if left:
            left.update(dict.fromkeys(node for call in self._leaving for node in call.nodes()))
            self._leaving = deque([call for call in self.waiting if any(node in left for node in call.nodes())])
            self._moves = MAX_MOVES

    def _is_gone(self, node: Node) -> bool:
        return self.fleet.find(node.name) is not node

    def _fenced(self, act: Callable[[Call, float], None], call: Call, now_s: float) -> None:
        """Do something for a call. An error ends this call, and no other."""
        try:
            act(call, now_s)
        except Exception as error:
            self.calls.fail_internally(call, error, now_s)
        if call.is_leaving:
            self._asked = call
            self._asked_until_s = now_s + ANSWER_S

    def _leave(self, call: Call, now_s: float) -> None:
        """Let a call leave a node that is down or was removed."""
        for node in call.nodes():
            gone = self._is_gone(node)
            if gone or node.health.state is HealthState.DOWN:
                reason = "the node was removed" if gone else f"the node is down: {node.health.reason}"
                if self.calls.leave(call, node, reason, now_s):
                    self._moved[node] = self._moved.get(node, 0) + 1
                    return

    def _check_deadline(self, call: Call, now_s: float) -> None:
        """End or move a call whose time has come."""
        if not call.deadline_slot:  # it ended meanwhile
            return
        self.deadlines.forget(call)
        why = deadline_passed(call, now_s)
        if why is not None:
            self.calls.end_late(call, why, now_s)
        elif self._deadline_moves and may_miss_deadline(call, now_s):
            self._deadline_moves -= 1
            self._move_in_time(call, now_s)
        if call.state != DONE and not call.is_leaving and not call.deadline_slot:
            self.deadlines.watch_again(call, now_s)

    def _move_in_time(self, call: Call, now_s: float) -> None:
        """Send a call whose first token is overdue to another node, if it is expected in time there."""
        main, has_room = call.main, self.admission.has_room
        if main is None or main.state != SENT:
            return
        node = main.node
        other = self.calls.other_node(
            call, now_s, lambda other: other is not node and not other.needs_partner and has_room(other, now_s)
        )
        if other is None or call.failover is None:
            return
        decision = call.failover.decision
        if decision.node is not other:
            if decision.query is None:
                return
            decision = self.router.decide_among((other,), decision.query)
        if check_deadlines(call.request, decision, now_s) is None:
            waited_s = now_s - main.ticket.opened_s
            reason = f"no first token after {waited_s:.1f} s; another node may meet the deadline"
            self.calls.ask_to_leave(call, main, Plan(MOVE_TO, Outcome.CANCELLED, reason, other), now_s)

    def _send_hedges(self, now_s: float) -> None:
        """Send overdue calls to a second node as well."""
        calls, overdue = self.calls, self.overdue
        oldest_s = now_s - overdue.config.min_delay_s
        old = list(takewhile(lambda call: call.main is None or call.main.ticket.opened_s <= oldest_s, self.waiting))
        start = self._hedge_start if self._hedge_start < len(old) else 0
        self._hedge_start = failed = 0
        for position in chain(range(start, len(old)), range(start)):
            if overdue.budget < 1.0:
                break
            if failed == MAX_FAILED_HEDGES:
                self._hedge_start = position
                break
            call = old[position]
            main = call.main
            if main is None or call.hedge is not None or call.state == DONE or call.is_leaving or call in calls.checked:
                continue
            try:
                if not overdue.is_overdue(call, main.ticket, calls.expected_output(call.request), now_s):
                    continue
                if calls.send_hedge(call, now_s):
                    overdue.budget -= 1.0
                else:
                    failed += 1
            except Exception as error:  # ends this call, and no other
                calls.fail_internally(call, error, now_s)
