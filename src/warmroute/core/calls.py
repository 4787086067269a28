"""Calls and their tries: all state of a request from its arrival to its end, and the only code that changes it. No I/O.

A call is one request of a client. A try is one sending of it to one node; its ticket is open as long as it is.

    call   READING      its tenant was charged one request; the edge reads the prompt
           WAITING      it waits in the admission queue for room, or for a first node
           TRYING       at least one try is open; the client has received nothing
           ANSWERING    the main try's response goes to the client; every other try is closed
           DONE         every ticket is closed, the charge is settled, the record is complete

    try    RESERVED     a decode node's ticket is open; nothing was sent to it
           SENT         the edge connects, writes and waits for the first byte
           LEAVING      the edge was asked to give it up; nothing else is sent for this call until it answers
           STARTED      the client has a byte of its response; no token was seen
           STREAMING    the first token was seen
           CLOSED

What each message does in each state stands in CALL_ROWS and TRY_ROWS, and nowhere else. A message without a row comes
too late and changes nothing: the ticket it names is closed.

Rules:
1. Of the tries of a call, `main` is the one that would answer. Beside it there is at most one hedge (the whole request
   on a second node) or one prefill try (which computes the KV cache that `main` will decode from).
2. A try that fails while the client has nothing leads to the next node (core/failover.py): until no eligible node is
   left, `max_attempts` nodes were tried, a deadline has passed, or the node may have begun a request that must not be
   executed twice.
3. From the first byte of the response on there is no retry: a failure then ends the call as broken. Speed is learned
   from the first token, which may come later.
4. Who waits for a node gets its turn once an event has been handled, so its own call has its next node first.
5. A try leaves a node that goes down, that is removed, or that hangs: the edge is asked (Withdraw), and what then
   happens is the try's plan.
6. A call that Envoy has cannot be taken back: it gets no second try from here, whatever happens to its node.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import quote

from warmroute._kernel import FIRST_TOKEN_STEPS
from warmroute.config.routing import LOW
from warmroute.core.admission import Admitter
from warmroute.core.decision import Decision
from warmroute.core.decision_record import KEEP_ALL_UP_TO, DecisionRecord
from warmroute.core.failed_tries import DECODE, HEDGE, MAX_TRIES, PREFILL, WHOLE, FailedTry, FailedTryLog
from warmroute.core.failover import SERVES_S, Failover, is_late
from warmroute.core.fleet import Fleet
from warmroute.core.health import HealthState
from warmroute.core.messages import (
    BEFORE_THE_REQUEST,
    NOT_ASKED,
    REFUSED,
    UNKNOWN,
    AnswerNow,
    Arrive,
    CallHistory,
    Cancel,
    Charge,
    ClosedTry,
    Command,
    Cut,
    Ended,
    Event,
    Failed,
    FirstToken,
    Left,
    Lookup,
    NodeError,
    OpenTry,
    Outcome,
    Prefilled,
    Reader,
    Reject,
    Resume,
    Role,
    RoutingRequest,
    Send,
    Started,
    Usage,
    Verdict,
    Withdraw,
    Withdrawn,
    outcome_of,
)
from warmroute.core.node import Node, Ticket
from warmroute.core.overdue import Deadlines, OverdueRule, decode_ms_of, prefill_ms_of
from warmroute.core.pairs import Pair
from warmroute.core.queue_order import QueuedRequest
from warmroute.core.rate_limits import RateLimits, RequestCharge
from warmroute.core.rejections import (
    AllNodesBusy,
    DeadlinePassed,
    NotAdmitted,
    RateLimited,
    RoutingError,
    internal_error,
    rejection,
)
from warmroute.core.router import Router
from warmroute.core.speeds import transfer_ms
from warmroute.core.tickets import DecodeTicket, PrefillTicket, PromptTicket
from warmroute.event_log import EventLog, where_it_failed

if TYPE_CHECKING:
    from warmroute.core.last_decisions import LastDecisions
    from warmroute.core.traffic import Counters, Traffic

log = EventLog("warmroute.routing")

# The states of a call.
READING: Final = 0
WAITING: Final = 1
TRYING: Final = 2
ANSWERING: Final = 3
DONE: Final = 4

# The states of a try.
RESERVED: Final = 0
SENT: Final = 1
LEAVING: Final = 2
STARTED: Final = 3
STREAMING: Final = 4
CLOSED: Final = 5
STATES: Final = 6
"""More than either has."""

CALL_ROWS: Final[dict[tuple[type[Event], int], str]] = {
    (Arrive, READING): "arrive",
    (AnswerNow, WAITING): "answer_now",
    (Cancel, READING): "cancel_waiting",
    (Cancel, WAITING): "cancel_waiting",
    (Cancel, TRYING): "cancel_sent",
    (Cancel, ANSWERING): "cancel_sent",
}
"""What a message does to a call, by the call's state. Charge and Arrive also open a call."""

TRY_ROWS: Final[dict[tuple[type[Event], int], str]] = {
    (Started, SENT): "started",
    (Started, LEAVING): "started",
    (FirstToken, SENT): "first_token",
    (FirstToken, LEAVING): "first_token",
    (FirstToken, STARTED): "first_token",
    (Ended, SENT): "ended",
    (Ended, LEAVING): "ended",
    (Ended, STARTED): "ended",
    (Ended, STREAMING): "ended",
    (Prefilled, SENT): "prefilled",
    (Failed, SENT): "failed",
    (Failed, LEAVING): "gone",
    (Failed, STARTED): "broke",
    (Failed, STREAMING): "broke",
    (Withdrawn, LEAVING): "gone",
}
"""What a message does to a try, by the try's state."""

# How a pair stands.
PREFILLING: Final = 0
"""The prefill node has the request, with one output token."""
TRANSFERRING: Final = 1
"""Its answer has come; the decode node fetches the KV cache and begins to answer."""
OVER: Final = 2
"""The response goes to the client, or the decode node has the request alone."""

# How the prefill on another node ended, in the metrics.
TRANSFERRED: Final = "transferred"
PREFILL_FAILED: Final = "prefill_failed"
PREFILL_SLOW: Final = "prefill_slow"
NOT_SUPPORTED: Final = "not_supported"
TRANSFER_FAILED: Final = "transfer_failed"
DECODE_FAILED: Final = "decode_failed"
OUTCOMES: Final = (TRANSFERRED, PREFILL_FAILED, PREFILL_SLOW, NOT_SUPPORTED, TRANSFER_FAILED, DECODE_FAILED)

# What happens once a try has left its node.
GO: Final = 0
"""Another open try takes its place, or the next node is asked."""
MOVE: Final = 1
"""The node that was chosen for it gets the call."""
FALL_BACK: Final = 2
"""The decode node gets the whole request, without a KV cache from elsewhere."""

UNSUPPORTED_S: Final = 60.0
"""A node whose answer had no KV transfer parameters prefills for no other node for this time."""
NO_MODEL: Final = "(other)"
"""The model of calls whose model is not known, in figures of traffic."""
ANOTHER_ISLAND: Final = "moves to another island"
_REASONS: Final = {status: f"HTTP status {status}" for status in range(400, 600)}
"""Strings that many decisions keep."""
_ROLE_NAMES: Final = {
    Role.FIRST: WHOLE, Role.MOVE: WHOLE, Role.HEDGE: HEDGE, Role.PREFILL: PREFILL, Role.DECODE: DECODE,
}  # fmt: skip
_NAME_CHARACTERS: Final = " !#$&'()*+,/:;<=>?@[]^`{|}"
"""Characters of a node's name that need no escape in a header, beside letters and digits."""
_OK: Final = Outcome.OK
_FAILED: Final = Outcome.FAILED
_BUSY: Final = Outcome.BUSY
_CANCELLED: Final = Outcome.CANCELLED
_FIRST: Final = Role.FIRST
_MOVE: Final = Role.MOVE
_HEDGE: Final = Role.HEDGE
_PREFILL: Final = Role.PREFILL
_DECODE: Final = Role.DECODE
_ANSWER: Final = Verdict.ANSWER
"""Looking up a member of an enumeration takes three times as long as a global name."""

End = tuple[Outcome, Node, int, int, float, float]
"""The outcome, the node tried last, the number of nodes tried, the status, and the times of the first token (0.0
without one) and of the end."""


class Plan:
    """What happens when a try has left its node."""

    kind: int
    outcome: Outcome
    """That of the try."""
    reason: str
    other: Node | None
    """The node that gets the call, if that is decided."""
    split_outcome: str
    """Of a try of a pair: how the split ends, in the metrics."""
    status: int
    error: NodeError | None
    """What the pair's prefill node answered, if it failed."""

    def __init__(
        self, kind: int, outcome: Outcome, reason: str, other: Node | None = None, split_outcome: str = "",
        status: int = 0, error: NodeError | None = None,
    ) -> None:  # fmt: skip
        self.kind = kind
        self.outcome = outcome
        self.reason = reason
        self.other = other
        self.split_outcome = split_outcome
        self.status = status
        self.error = error


class Try:
    """One sending of a call to one node."""

    number: int
    role: Role
    ticket: Ticket
    node: Node
    state: int
    plan: Plan | None = None
    """Set while it is LEAVING."""

    def __init__(self, number: int, role: Role, ticket: Ticket, state: int = SENT) -> None:
        self.number = number
        self.role = role
        self.ticket = ticket
        self.node = ticket.node
        self.state = state


class Split:
    """A call that one node prefills and another one decodes, until its response begins."""

    decision: Decision
    pair: Pair
    prefill: Try
    failed_prefill: tuple[Node, ...]
    """Prefill nodes that failed at this call."""
    phase: int = PREFILLING
    kv_from: int = 0
    """The prefill try whose KV cache can be fetched; 0: none."""
    decode_sent: bool = False
    """Whether a decode node may have fetched the KV cache. The engine may release it then."""
    sent_s: float = 0.0
    """When the decode request was sent."""
    cached_tokens: int | None = None
    """Prompt tokens that the prefill node reported as cached."""

    def __init__(self, decision: Decision, pair: Pair, prefill: Try, failed_prefill: tuple[Node, ...]) -> None:
        self.decision = decision
        self.pair = pair
        self.prefill = prefill
        self.failed_prefill = failed_prefill


class Call:
    """One request of a client: everything that the router knows of it."""

    # what arrived
    id: int
    request: RoutingRequest
    request_id: bytes = b""
    lookup: Lookup | None = None
    repeatable: bool = True
    """Whether the request may be sent to a second node while the first one may still execute it."""
    envoy: bool = False
    """Whether Envoy sends the request, and sends it again if a node fails."""
    names_node: bool = False
    """Whether the response's head names the node."""
    kept: Any = None
    """What others want back when the call has ended."""
    charge: RequestCharge | None = None
    """What the call took of its tenant's rate limit."""
    # where it stands
    state: int = READING
    at_envoy: bool = False
    """Whether Envoy has the request: it cannot be taken back."""
    main: Try | None = None
    """The try that would answer."""
    hedge: Try | None = None
    """A try on a second node that has the request, too."""
    split: Split | None = None
    """Set if another node prefilled the prompt for this one, or tried to."""
    numbers: int = 0
    """The number of the last try."""
    tried: int = 0
    """Nodes that the call was sent to."""
    decision: Decision | None = None
    failover: Failover | None = None
    """Set once a try has failed."""
    overdue_s: float = 0.0
    """When a hedge may be sent; 0.0: not computed yet."""
    deadline_slot: int = 0
    """When its deadlines are looked at next (core/overdue.py); 0: they end nothing."""
    # what is remembered of it
    entered_s: float = 0.0
    """When it asked for a node."""
    admitted_s: float = 0.0
    """When it was sent to its first node; 0.0: never."""
    ended_s: float = 0.0
    record: DecisionRecord | None = None
    """The decision by which it got its first node, if decisions are remembered."""
    status: int = 0
    """What the client got; 0: nothing."""
    code: str = ""
    """Of the error that the router ended it with."""
    usage: Usage | None = None
    """What its response reported."""
    outcome: Outcome | None = None
    """How it ended; None while it runs, and if no node got it."""
    left: Left | None = None
    """Why the edge ended it, if it did."""
    end: End | None = None
    failed_tries: tuple[FailedTry, ...] = ()
    """The first MAX_TRIES of them, and an error that went to the client."""
    poison: bool = False
    """Whether nodes that serve other requests failed at this one (core/failover.py)."""
    history: CallHistory | None = None

    def __init__(self, id: int, request: RoutingRequest) -> None:
        self.id = id
        self.request = request

    @property
    def queued_ms(self) -> float:
        """How long it waited for its first node."""
        return (self.admitted_s - self.entered_s) * 1000.0

    @property
    def answering(self) -> bool:
        return self.state == ANSWERING

    @property
    def is_leaving(self) -> bool:
        """Whether the edge was asked to give up one of its tries."""
        main, hedge = self.main, self.hedge
        return (main is not None and main.state == LEAVING) or (hedge is not None and hedge.state == LEAVING)

    def forget(self) -> None:
        """The app has read the ended call: drop what the client wrote."""
        self.request.forget_text()
        self.kept = self.history = None

    def find(self, number: int) -> Try | None:
        """Return an open try by its number."""
        main, hedge, split = self.main, self.hedge, self.split
        if main is not None and main.number == number:
            return main
        if hedge is not None and hedge.number == number:
            return hedge
        if split is not None and split.phase == PREFILLING and split.prefill.number == number:
            return split.prefill
        return None

    def open_tries(self) -> list[Try]:
        """Return the tries that the edge has been told of."""
        split = self.split
        prefill = split.prefill if split is not None and split.phase == PREFILLING else None
        return [
            one for one in (self.main, self.hedge, prefill) if one is not None and one.state not in (RESERVED, CLOSED)
        ]

    def nodes(self) -> tuple[Node, ...]:
        """Return the nodes that the call waits for."""
        found: tuple[Node, ...] = (self.main.node,) if self.main is not None else ()
        if self.hedge is not None:
            found = (*found, self.hedge.node)
        if self.split is not None and self.split.phase != OVER:
            found = (*found, self.split.pair.prefill_node)
        return found


class TicketEvent(NamedTuple):
    call: Call
    ticket: Ticket
    opened: bool
    """Else it was closed."""


class Calls:
    """All open calls, and what each event does to them. The Brain (core/brain.py) says when."""

    def __init__(
        self, fleet: Fleet, router: Router, admission: Admitter, counters: Counters, overdue: OverdueRule,
        max_attempts: int, traffic: Traffic | None, journal: LastDecisions | None, keeps_tickets: bool,
        rate_limits: RateLimits | None = None,
    ) -> None:  # fmt: skip
        self.fleet = fleet
        self.router = router
        self.admission = admission
        self.counters = counters
        self.overdue = overdue
        self.rate_limits = rate_limits
        self.max_attempts = max_attempts
        """Nodes that a call may be sent to; 0: all of them."""
        self.traffic = traffic
        self.journal = journal
        self.deadlines = Deadlines()
        self.open: dict[int, Call] = {}
        """Calls that have not ended, by number."""
        self.ended_calls: list[Call] = []
        """Those of the ended ones that somebody wants back, until he has fetched them."""
        self.waiting: dict[Call, None] = {}
        """Calls that were sent to a node and have no byte of a response, in the order in which they were sent."""
        self.checked: dict[Call, None] = {}
        """The calls in `waiting` that `check` looks at every CHECK_S: another node prefills for the one that will
        answer, or has prefilled for it."""
        self.freed: dict[Node, None] = {}
        """Nodes that may have room for queued calls."""
        self.on_freed: Callable[[], object] | None = None
        """Called when a node may have room because of a call of this process, if the process has peers."""
        self.commands: list[Command] = []
        self.sent = 0
        """Calls that were sent to a first node."""
        self.decisions: dict[tuple[str, str], int] = {}
        """The same by policy and reason of their decision."""
        self.failed_tries = FailedTryLog()
        self.ticket_log: list[TicketEvent] | None = [] if keeps_tickets else None
        """Tickets that were opened and closed, for policies that follow them; None without such a policy."""
        self.last_error: BaseException | None = None
        """What failed in the core, if anything did."""

    # Arrival.

    def charge(self, event: Charge, now_s: float) -> None:
        """A tenant with limits: take one request from them before its prompt is read."""
        call = self.open[event.id] = Call(event.id, event.request)
        try:
            limits = self.rate_limits.of(event.request.tenant) if self.rate_limits is not None else None
            if limits is not None:
                call.charge = limits.begin(now_s, event.body_bytes, event.has_output)
        except RateLimited as why:
            self._reject_unsent(call, why, now_s)

    def arrive(self, call: Call, event: Arrive, now_s: float) -> None:
        """The prompt is read: take the tenant's tokens, and ask for a node."""
        request, admission = event.request, self.admission
        call.request = request  # what Charge had may lack what the prompt says
        call.request_id = event.request_id
        call.lookup = event.prompt
        call.entered_s = now_s
        call.state = WAITING
        if not event.repeatable:
            call.repeatable = False
        if event.envoy:
            call.envoy = True
        if event.names_node:
            call.names_node = True
        if event.kept is not None:
            call.kept = event.kept
            call.history = CallHistory(now_s, admission.queue.waiting, tries=[])
        try:
            if call.charge is not None:
                call.charge.take_tokens(event.prompt_tokens, self.expected_output(request), now_s)
            placed = admission.place(call, now_s)
            while isinstance(placed, QueuedRequest):  # it goes first
                if admission.rejected:
                    self.reject_those_that_lost(now_s)
                self.admit(placed.call, placed.decision, now_s)
                placed = admission.place(call, now_s, again=True)
        except RoutingError as why:
            self._reject_unsent(call, why, now_s)
            return
        finally:
            if admission.rejected:
                self.reject_those_that_lost(now_s)
        if placed is not None:
            self.admit(call, placed, now_s)
        elif call.history is not None:
            call.history.queued = True

    def resume(self, event: Resume, now_s: float) -> None:
        """An edge had this call before this core knew it: take it over as it stands. What nodes did for it before is
        not learned from."""
        arrive = event.arrive
        call = self.open[arrive.id] = Call(arrive.id, arrive.request)
        limits = self.rate_limits.of(arrive.request.tenant) if self.rate_limits is not None else None
        if event.body_bytes >= 0 and limits is not None:
            call.charge = limits.taken_before(event.body_bytes, event.has_output)
        call.numbers = max([one.try_ for one in event.tries], default=0)
        found = [(one, node) for one in event.tries if (node := self.fleet.find(one.node)) is not None]
        whole = [(one, node) for one, node in found if one.role is not _PREFILL]
        answering = [one for one in whole if one[0].status]
        if not answering and any(one.role is _PREFILL for one in event.tries):
            whole = []  # a pair that has not answered starts again
        for one in event.tries:
            if not one.status and not any(one is kept for kept, _ in answering or whole):
                self.commands.append(Withdraw(call.id, one.try_))
        if not whole:
            if any(one.status for one in event.tries):  # its node is unknown here: the edge ends it alone
                self._forget(call, now_s)
                return
            self.arrive(call, arrive, now_s)
            return
        call.request_id, call.lookup, call.entered_s = arrive.request_id, arrive.prompt, arrive.request.arrived_s
        call.repeatable, call.envoy, call.names_node = arrive.repeatable, arrive.envoy, arrive.names_node
        call.state, call.at_envoy = TRYING, arrive.envoy
        if arrive.kept is not None:
            call.kept = arrive.kept
            call.history = CallHistory(call.entered_s, 0, tries=[])
        for one, node in (answering or whole)[:2]:
            self._resume_try(call, one, node, now_s)
        if call.main is not None and not call.envoy and call.state == TRYING:
            self.waiting[call] = None
        if call.request.ends_late and not call.envoy:
            self.deadlines.watch(call, now_s)

    def _resume_try(self, call: Call, one: OpenTry, node: Node, now_s: float) -> None:
        opened_s = min(one.opened_s or now_s, now_s)
        try:
            query = self.router.decide(call.request, now_s, call.lookup).query
            decision = self.router.decide_among((node,), query) if query is not None else None
        except RoutingError:
            decision = None
        decision = decision or Decision(node, "resumed", "the edge had sent it there")
        ticket = self.router.open_ticket(decision, node, opened_s)
        ticket.has_hidden_hits = True  # what was cached when it was sent is not known
        try_ = Try(one.try_, _FIRST if call.main is None else _HEDGE, ticket)
        if self.ticket_log is not None:
            self.ticket_log.append(TicketEvent(call, ticket, True))
        call.tried += 1
        if call.main is None:
            call.main, call.decision, call.admitted_s = try_, decision, opened_s
            journal = self.journal
            if journal is not None and journal.on:
                call.record = decision.record()
                journal.add(call)
            elif call.kept is not None:
                call.record = decision.record()
        else:
            call.hedge = try_
        if one.status:
            call.state, call.status, try_.state = ANSWERING, one.status, STARTED
        if one.first_token_s:
            try_.state = STREAMING
            ticket.first_token(min(one.first_token_s, now_s), False)

    def reject_those_that_lost(self, now_s: float) -> None:
        """Reject the calls that admission took out of its queue."""
        rejected, self.admission.rejected = self.admission.rejected, []
        for call, why in rejected:
            if call.state != WAITING:
                continue
            try:
                if not isinstance(why, RoutingError):
                    raise why
                self._reject_unsent(call, why, now_s)
            except Exception as error:
                self.fail_internally(call, error, now_s)

    def answer_now(self, call: Call, _event: AnswerNow, now_s: float) -> None:
        """Envoy will not wait longer: the call goes to its best node, although that has no room, or is shed."""
        admission = self.admission
        if call.request.priority == LOW:
            self._reject_unsent(call, admission.held_too_long(call, now_s), now_s)
            return
        admission.queue.cancel(call)
        try:
            decision = self.router.decide(call.request, now_s, call.lookup)
            if decision.is_full:
                decision = admission.below_limits(call.request, decision, now_s)
            if decision.is_full:
                raise admission.nodes_full(decision)
        except RoutingError as why:
            self._reject_unsent(call, why, now_s)
        else:
            self.admit(call, decision, now_s)

    def admit(self, call: Call, decision: Decision, now_s: float) -> None:
        """Send a call to its first node. An error ends this call, and no other."""
        call.decision = decision
        call.admitted_s = now_s
        call.state = TRYING
        try:
            journal = self.journal
            if journal is not None and journal.on:
                call.record = decision.record()
                journal.add(call)
            elif call.kept is not None:
                call.record = decision.record()
            if call.history is not None:
                call.history.decided_s = decision.query.now_s if decision.query is not None else call.entered_s
            self.sent += 1
            query, decisions = decision.query, self.decisions
            # The reason of a move names islands and times.
            reason = decision.reason if query is None or not query.move_reason else ANOTHER_ISLAND
            key = (decision.policy, reason)
            decisions[key] = decisions.get(key, 0) + 1
            if query is None or query.group.has_roles:
                if not self._try(call, decision, decision.node, _FIRST, now_s):
                    self._next(call, _BUSY, decision.node, now_s)
            else:
                call.tried = 1
                self._send_whole(call, decision, decision.node, _FIRST, now_s)
            if call.request.ends_late and not call.envoy and call.state != DONE:
                self.deadlines.watch(call, now_s)
        except Exception as error:
            self.fail_internally(call, error, now_s)

    def fill(self, now_s: float) -> None:
        """Send queued calls to nodes that became free."""
        admission = self.admission
        freed, self.freed = self.freed, {}
        if not admission.queue.waiting:
            return
        admission.changed()
        while True:
            try:
                queued = admission.next_for(freed, now_s)
            except RoutingError as error:
                self.note_failure(error, None)
                break
            if admission.rejected:
                self.reject_those_that_lost(now_s)
            if queued is None:
                break
            self.admit(queued.call, queued.decision, now_s)

    # Sending.

    def _try(self, call: Call, decision: Decision, node: Node, role: Role, now_s: float) -> bool:
        """Send the call to a node, or to two. Return False if the node needs another one to prefill, and none does."""
        query, needs_partner = decision.query, node.needs_partner
        may_split = call.split is not None or query is None or query.group.has_roles
        may_split = may_split and (decision.pair is not None or call.split is not None or needs_partner)
        if may_split and self._find_pair(call, decision, node, now_s):
            return True
        if needs_partner:
            self._note_missing_partner(call, node, now_s)
            return False
        call.tried += 1
        self._send_whole(call, decision, node, role, now_s)
        return True

    def _send_whole(self, call: Call, decision: Decision, node: Node, role: Role, now_s: float) -> None:
        call.numbers = number = call.numbers + 1
        ticket = self.router.open_ticket(decision, node, now_s)
        call.main = try_ = Try(number, role, ticket)
        call.overdue_s = 0.0
        if self.ticket_log is not None:
            self.ticket_log.append(TicketEvent(call, ticket, True))
        send = Send(call.id, number, node.number, role, ticket.rank, True)
        self.commands.append(send)
        if call.charge is not None or call.names_node:
            self._add_lines(call, try_, send, now_s)
        if call.envoy:
            call.at_envoy = True
            send.fallbacks = self._fallbacks(call, decision, node)
        else:
            self.waiting[call] = None

    def _open(
        self, call: Call, role: Role, decision: Decision, node: Node, now_s: float,
        kind: type[PromptTicket] = PromptTicket, counted: bool = False,
    ) -> Try:  # fmt: skip
        """Open the ticket of a try that is not sent yet. `counted`: as for Router.open_ticket."""
        call.numbers += 1
        try_ = Try(call.numbers, role, self.router.open_ticket(decision, node, now_s, kind, counted), RESERVED)
        if self.ticket_log is not None:
            self.ticket_log.append(TicketEvent(call, try_.ticket, True))
        return try_

    def _add_lines(self, call: Call, try_: Try, send: Send, now_s: float) -> None:
        """Add the headers of the response that say what is left of the tenant's limits, and that name the node."""
        if call.charge is not None:
            send.limit_lines = call.charge.headers(now_s)
        if call.names_node:
            send.node_lines = self._node_lines(call, try_)

    def _send_decode_request(self, call: Call, split: Split, main: Try, now_s: float) -> None:
        """Send a decode node its request, which names the KV cache that it fetches."""
        main.state = SENT
        rank = main.ticket.rank
        send = Send(call.id, main.number, main.node.number, main.role, rank, True, split.prefill.number)
        send.prefill_node = split.pair.prefill_node.number
        send.needs_partner = main.node.needs_partner
        self._add_lines(call, main, send, now_s)
        self.commands.append(send)

    def _fallbacks(self, call: Call, decision: Decision, node: Node) -> tuple[int, ...]:
        """Return the nodes that Envoy may try after this one."""
        subset = call.request.subset
        return tuple(
            other.number for other in (decision.node, *decision.fallbacks())
            if not (
                other is node or other.needs_partner or other.role == "prefill" or other.is_full_for(call.request)
                or (subset is not None and other.name not in subset)
            )
        )  # fmt: skip

    def _node_lines(self, call: Call, try_: Try) -> tuple[tuple[bytes, bytes], ...]:
        """Return headers that name the node, the prefill node and the predicted cache hit."""
        ticket, split = try_.ticket, call.split
        found: tuple[tuple[bytes, bytes], ...] = ((b"X-Warmroute-Node", _header_name(try_.node)),)
        if not isinstance(ticket, PromptTicket):
            return found
        cached = ticket.cached
        if split is not None and isinstance(ticket, DecodeTicket):
            found = (*found, (b"X-Warmroute-Prefill-Node", _header_name(split.pair.prefill_node)))
            if isinstance(split.prefill.ticket, PromptTicket):
                cached = split.prefill.ticket.cached
        return (*found, (b"X-Warmroute-Hit", b"%d/%d" % (cached, ticket.tokens)))

    def send_hedge(self, call: Call, now_s: float) -> bool:
        """Send a call to a second node as well. Return False if none is up and has room."""
        main, has_room = call.main, self.admission.has_room
        assert main is not None
        node = main.node
        other = self.other_node(
            call, now_s, lambda other: other is not node and not other.needs_partner and has_room(other, now_s)
        )
        if other is None or call.failover is None:
            return False
        call.tried += 1
        call.hedge = try_ = self._open(call, _HEDGE, call.failover.decision, other, now_s)
        try_.state = SENT
        send = Send(call.id, try_.number, other.number, _HEDGE, try_.ticket.rank, True)
        self._add_lines(call, try_, send, now_s)
        self.commands.append(send)
        self.counters.hedges += 1
        return True

    def may_try_another(self, call: Call) -> bool:
        return not call.at_envoy and (not self.max_attempts or call.tried < self.max_attempts)

    def other_node(self, call: Call, now_s: float, accepts: Callable[[Node], bool]) -> Node | None:
        """Return a node that is up, by a new decision; None if there is none or the call may not be sent again."""
        if not self.may_try_another(call):
            return None
        return self._failover_of(call).other_node(self.router, call.request, call.lookup, now_s, accepts)

    def _failover_of(self, call: Call) -> Failover:
        failover = call.failover
        if failover is None:
            assert call.decision is not None
            failover = call.failover = Failover(call.decision)
        return failover

    def expected_output(self, request: RoutingRequest) -> float:
        """Return the output tokens that are expected of a request."""
        return self.router.output_lengths.expected(request.model, request.tenant, request.max_output_tokens)

    # Pairs: one node prefills, another one decodes.

    def _find_pair(self, call: Call, decision: Decision, node: Node, now_s: float) -> bool:
        """Send a call to `node` and to a prefill node. Return False if there is none: then `node` gets the request
        alone, or not at all if it needs a partner."""
        if not call.request.may_split:
            return False
        split, pair = call.split, decision.pair
        failed: tuple[Node, ...] = split.failed_prefill if split is not None else ()
        if split is not None and node is split.pair.prefill_node:  # a mixed node: it has the prompt already
            split.failed_prefill = (*failed, node)
            self._abandon_pair(call, split, now_s)
            return False
        same_engine = split is not None and node.engine == split.pair.prefill_node.engine
        if split is not None and not failed and node.transfers_kv and same_engine:
            if split.phase == PREFILLING and not node.needs_partner:  # only the decode node has failed
                self._reserve(call, split, node, now_s)
                return True
            if split.kv_from and not split.decode_sent:
                self._reserve(call, split, node, now_s)
                self._send_decode(call, split, now_s)
                return True
            pair = Pair(split.pair.prefill_node, 0.0)
        elif node is not decision.node:
            pair = None
        if pair is None or pair.prefill_node in failed or not _is_usable(pair.prefill_node, call.request):
            partner = self.router.partner(decision, node, failed) if node.needs_partner else None
            if partner is None:
                if split is not None:
                    self._abandon_pair(call, split, now_s)
                return False
            pair = Pair(partner, 0.0)
        if split is not None:
            self._abandon_pair(call, split, now_s)
        self._begin_pair(call, decision, pair, failed, node, now_s)
        return True

    def _begin_pair(
        self, call: Call, decision: Decision, pair: Pair, failed: tuple[Node, ...], node: Node, now_s: float
    ) -> None:
        """Send the request to the prefill node; `node` will decode."""
        prefill_node = pair.prefill_node
        prefill_node.transfer_tokens += pair.transfer_tokens
        prefill = self._open(call, _PREFILL, decision, prefill_node, now_s, PrefillTicket)
        prefill.state = SENT
        call.split = split = Split(decision, pair, prefill, failed)
        self._reserve(call, split, node, now_s)
        send = Send(call.id, prefill.number, prefill_node.number, _PREFILL, prefill.ticket.rank)
        send.kv_from, send.needs_partner = node.number, node.needs_partner
        self.commands.append(send)
        if node.needs_partner:  # it gets its request at the same time
            main = call.main
            assert main is not None
            split.decode_sent = True
            split.sent_s = now_s
            self._send_decode_request(call, split, main, now_s)

    def _reserve(self, call: Call, split: Split, node: Node, now_s: float) -> None:
        """Open the ticket on the node that will decode."""
        is_first = not call.tried
        call.main = main = self._open(call, _DECODE, split.decision, node, now_s, DecodeTicket)
        ticket = main.ticket
        call.overdue_s = 0.0
        call.tried += 1
        self._wait_again(call)
        self.checked[call] = None
        if isinstance(ticket, DecodeTicket):
            if is_first and self._may_choose_again(call, split):
                ticket.hold()
            if node is not split.decision.node:
                self._expect_transfer(split, ticket, now_s)

    def _wait_again(self, call: Call) -> None:
        """Put the call behind those that were sent before its ticket was opened."""
        self.waiting.pop(call, None)
        self.waiting[call] = None

    @staticmethod
    def _expect_transfer(split: Split, ticket: DecodeTicket, now_s: float) -> None:
        """Expect the transfer to another decode node than that of the decision, which lacks other tokens."""
        query, pair, tokens = split.decision.query, split.pair, float(ticket.missing_tokens)
        if query is None or split.phase == OVER:
            return
        speed = query.group.transfer_speeds.between(pair.prefill_node.island, ticket.node.island)
        pair.prefill_node.transfer_tokens += tokens - pair.transfer_tokens
        ms = transfer_ms(speed.ms_per_token(now_s), tokens)
        split.pair = Pair(pair.prefill_node, tokens, pair.price, ms, pair.alone_ms)

    @staticmethod
    def _may_choose_again(call: Call, split: Split) -> bool:
        """Whether the decode node is chosen a second time when the prompt is prefilled."""
        main = call.main
        assert main is not None
        return split.pair.price is not None and call.tried == 1 and not main.node.needs_partner

    def _choose_decode_node(self, call: Call, split: Split, now_s: float) -> None:
        """The prompt is prefilled. Move the ticket if another decode node is cheaper by now."""
        before = call.main
        assert before is not None
        if not self._may_choose_again(call, split):
            return
        node = self.router.decode_node(split.decision, split.pair, before.node, now_s)
        if node is before.node:
            return
        call.main = main = self._open(call, _DECODE, split.decision, node, now_s, DecodeTicket, counted=True)
        moved = main.ticket
        self._wait_again(call)
        self.close(call, before, _CANCELLED, now_s, sent=False)
        if isinstance(moved, DecodeTicket):
            self._expect_transfer(split, moved, now_s)
            if isinstance(before.ticket, DecodeTicket):
                moved.take_counts(before.ticket)

    @staticmethod
    def _begin_decode(call: Call, split: Split) -> None:
        split.phase = TRANSFERRING
        query, main = split.decision.query, call.main
        if main is not None and query is not None and isinstance(main.ticket, DecodeTicket):
            main.ticket.begin_decode(query.lookup.cache_group if query.lookup is not None else "")

    def _send_decode(self, call: Call, split: Split, now_s: float) -> None:
        main = call.main
        assert main is not None
        self._begin_decode(call, split)
        split.sent_s = now_s
        split.decode_sent = True
        self._send_decode_request(call, split, main, now_s)

    def prefilled(self, call: Call, try_: Try, event: Prefilled, now_s: float) -> None:
        """The prefill node has answered."""
        split, main = call.split, call.main
        if split is None or main is None or split.prefill is not try_:
            return
        node, concurrent = try_.node, main.node.needs_partner
        node.last_served_s = now_s
        if not event.has_transfer and not concurrent:
            try_.ticket.first_token(now_s)
            if event.is_unfinished:
                _ban(node, now_s)
            plan = Plan(FALL_BACK, Outcome.OK, "no KV transfer parameters", None, NOT_SUPPORTED)
            self._fall_back(call, split, plan, now_s)
            return
        try_.ticket.first_token(now_s)
        usage = event.usage
        if usage is not None:
            usage = node.reported.usage(*usage)
            split.cached_tokens = usage[1]
            if isinstance(try_.ticket, PromptTicket):
                try_.ticket.record_usage(usage[0], usage[1], None, now_s)
        node.last_progress_s = now_s
        split.kv_from = try_.number
        if concurrent:
            self._begin_decode(call, split)
        else:
            self._choose_decode_node(call, split, now_s)
        self.close(call, try_, Outcome.OK, now_s)
        if not concurrent:
            self._send_decode(call, split, now_s)

    def _give_pair_up(self, call: Call, split: Split, plan: Plan) -> None:
        self._is_over(call, split)
        self.counters.split_requests[plan.split_outcome] += 1
        split.kv_from = 0
        split.failed_prefill = (*split.failed_prefill, split.pair.prefill_node)

    def _fall_back(self, call: Call, split: Split, plan: Plan, now_s: float) -> None:
        """Let the decode node serve the request alone. The plan's outcome is that of the prefill node, if it has not
        answered."""
        main, reason = call.main, plan.reason
        assert main is not None
        node, prefilling = main.node, split.phase == PREFILLING
        self._give_pair_up(call, split, plan)
        failed = split.failed_prefill
        self.waiting.pop(call, None)
        if prefilling and plan.split_outcome != TRANSFER_FAILED:
            self.close(call, main, _CANCELLED, now_s)
            self._close_prefill(call, split, plan, now_s)
        else:
            self.close(call, main, _CANCELLED, now_s, reason, status=plan.status, error=plan.error)
            if prefilling and split.prefill.state != CLOSED:  # the decode node failed, not this one
                self.close(call, split.prefill, _CANCELLED, now_s)
        log.debug("split_request_fell_back", node=node.name, reason=reason)
        poison = self._failover_of(call).is_poison
        if node.needs_partner:
            if not poison and not self.may_try_another(call):
                self._end_pair(call, split, now_s)
                return
            usable = not (poison or node.draining or node.health.confirmed_down)
            partner = self.router.partner(split.decision, node, failed) if usable else None
            if partner is not None:
                self._begin_pair(call, split.decision, Pair(partner, 0.0), failed, node, now_s)
            else:
                self._note_missing_partner(call, node, now_s)
                self._next(call, _BUSY, node, now_s)
        elif is_late(call.request, now_s) and not poison:
            self._end_pair(call, split, now_s)
        elif poison or node.draining or node.health.confirmed_down:  # since the edge was asked
            self._note_missing_partner(call, node, now_s)
            self._next(call, _BUSY, node, now_s)
        else:
            self._send_whole(call, split.decision, node, _MOVE, now_s)

    def _end_pair(self, call: Call, split: Split, now_s: float) -> None:
        """End a call whose prefill failed, and that must not be sent again."""
        call.main = None
        node = split.pair.prefill_node
        self._failover_of(call).add(node, _CANCELLED)  # its failure is counted already
        self._fail(call, _FAILED, None, now_s, node=node)

    def _note_missing_partner(self, call: Call, node: Node, now_s: float) -> None:
        """A decode node cannot serve the call, since no node prefills for it."""
        call.main = None
        failover = self._failover_of(call)
        failover.add(node, _BUSY)
        failover.answered(node, _BUSY, 0, None, now_s)

    def _leave_prefill_node(self, call: Call, split: Split, why: str, reason: str, now_s: float) -> None:
        """The prefill node is down, was removed, or hangs."""
        if split.phase == PREFILLING:
            self.commands.append(Withdraw(call.id, split.prefill.number))
            self._leave_pair(call, split, Plan(FALL_BACK, _FAILED, reason, None, why), now_s)
        else:
            reason = f"its prefill node {split.pair.prefill_node.name} failed: {reason}"
            self._leave_pair(call, split, Plan(FALL_BACK, _CANCELLED, reason, None, why), now_s)

    def _leave_pair(self, call: Call, split: Split, plan: Plan, now_s: float) -> None:
        """Fall back, once the decode node has given up its part, if it has one."""
        main = call.main
        if main is not None and main.state == LEAVING:  # it goes elsewhere anyway, with another prefill node
            self._close_prefill(call, split, plan, now_s)
            self._give_pair_up(call, split, plan)
            return
        if main is None or main.state != SENT:
            self._fall_back(call, split, plan, now_s)
            return
        if split.phase == PREFILLING:
            self._close_prefill(call, split, plan, now_s)
        main.state = LEAVING
        main.plan = plan
        self.commands.append(Withdraw(call.id, main.number))

    def _close_prefill(self, call: Call, split: Split, plan: Plan, now_s: float) -> None:
        if split.prefill.state != CLOSED:
            reason = "" if plan.outcome is Outcome.OK else plan.reason
            self.close(call, split.prefill, plan.outcome, now_s, reason, status=plan.status, error=plan.error)

    def check(self, call: Call, now_s: float) -> None:
        """Look at a call in `checked`: leave a prefill node that looks as if it hangs."""
        split, main = call.split, call.main
        if split is None or main is None or main.state == LEAVING:
            return
        if split.phase == PREFILLING:
            ticket = split.prefill.ticket
            if self.overdue.hangs(ticket.node, ticket.opened_s, prefill_ms_of(split.pair, ticket), now_s):
                reason = f"no answer of the prefill node after {now_s - ticket.opened_s:.1f} s"
                self._leave_prefill_node(call, split, PREFILL_SLOW, reason, now_s)
        elif split.phase == TRANSFERRING:
            output = self.expected_output(call.request)
            expected_ms = decode_ms_of(split.decision, split.pair, main.node, call, output)
            if self.overdue.hangs(split.pair.prefill_node, split.sent_s, expected_ms, now_s):
                reason = f"no answer {now_s - split.sent_s:.1f} s after the prefill"
                self._leave_pair(call, split, Plan(FALL_BACK, _CANCELLED, reason, None, TRANSFER_FAILED), now_s)

    def _abandon_pair(self, call: Call, split: Split, now_s: float) -> None:
        """The call ends, or leaves both nodes: free the prefill node. The caller closes the decode node's ticket."""
        if split.phase == PREFILLING and split.prefill.state != CLOSED:
            self.commands.append(Withdraw(call.id, split.prefill.number))
            self.close(call, split.prefill, _CANCELLED, now_s)
        split.kv_from = 0
        if split.phase != OVER:
            self.counters.split_requests[DECODE_FAILED] += 1
        self._is_over(call, split)

    def _is_over(self, call: Call, split: Split) -> None:
        if split.phase != OVER:
            split.phase = OVER
            split.pair.prefill_node.transfer_tokens -= split.pair.transfer_tokens
            self.checked.pop(call, None)

    def _pair_started(self, call: Call, split: Split, status: int, now_s: float) -> None:
        """The decode node's response has begun. The edge has withdrawn a prefill that was still under way."""
        if split.phase == OVER:
            return
        if status >= 400:  # nothing was prefilled: it says nothing about speed
            if split.phase == PREFILLING and split.prefill.state != CLOSED:
                self.close(call, split.prefill, _CANCELLED, now_s)
            self._is_over(call, split)
            return
        if (
            split.phase == PREFILLING and split.prefill.state != CLOSED
        ):  # it has the KV cache before the answer has come
            split.prefill.ticket.first_token(now_s)
            self._begin_decode(call, split)
            self.close(call, split.prefill, Outcome.OK, now_s)
        self._is_over(call, split)
        self.counters.split_requests[TRANSFERRED] += 1

    @staticmethod
    def _learn_transfer(call: Call, split: Split, ticket: Ticket, now_s: float) -> None:
        """The response's first token arrived: learn how long the transfer took, if the response is streamed."""
        query, node = split.decision.query, ticket.node
        if not call.request.streams or not isinstance(ticket, DecodeTicket):
            return
        if query is None or not split.sent_s or node.needs_partner or ticket.has_hidden_hits:
            return
        group = query.group
        steps_ms = FIRST_TOKEN_STEPS * group.decode_speed.token_ms(node.context_tokens) * node.speed.factor
        took_ms = (now_s - split.sent_s) * 1000.0 - node.round_trip_ms - steps_ms
        speed = group.transfer_speeds.between(split.pair.prefill_node.island, node.island)
        speed.learn(split.pair.transfer_tokens, took_ms, now_s)

    # The response.

    def started(self, call: Call, try_: Try, event: Started | FirstToken | Ended, now_s: float) -> None:
        """The client has the first byte of this try's response. The edge has withdrawn the call's other tries."""
        status = event.status
        if call.envoy:
            if type(event) is Started and not self._envoy_answers(call, try_, event, now_s):
                return
            assert call.main is not None
            try_ = call.main
        elif try_.role is _PREFILL:
            return
        else:
            self.waiting.pop(call, None)
        if call.hedge is not None:
            self._one_of_two_started(call, try_, status, now_s)
        failover = call.failover
        if failover is not None and failover.server_errors:
            self._judge(failover, now_s)
        if call.split is not None:
            self._pair_started(call, call.split, status, now_s)
        if try_.plan is not None:  # it answered before the edge could withdraw it
            try_.plan = None
            if call.request.ends_late and not call.deadline_slot and not call.envoy:
                self.deadlines.watch_again(call, now_s)
        try_.state = STARTED
        call.state = ANSWERING
        call.status = status

    def _one_of_two_started(self, call: Call, try_: Try, status: int, now_s: float) -> None:
        """Close the other one of two tries that both had the whole request."""
        main, hedge, call.hedge = call.main, call.hedge, None
        assert main is not None and hedge is not None
        if try_ is main:
            self.close(call, hedge, _CANCELLED, now_s)
            return
        call.main = try_
        # The end of a response that is not streamed says little about its node, and an error comes sooner.
        failed = status < 400 and (call.request.streams or bool(main.ticket.expected_ttft_ms))
        outcome = _FAILED if failed else _CANCELLED
        self._failover_of(call).add(main.node, outcome)
        reason = f"no first byte after {now_s - main.ticket.opened_s:.1f} s; another node answered"
        self.close(call, main, outcome, now_s, reason if status < 400 else "")
        if status < 400:
            self.counters.hedges_won += 1

    def _envoy_answers(self, call: Call, try_: Try, event: Started, now_s: float) -> bool:
        """Return whether the response is an answer. Else Envoy has tried all that it may, and the call has ended."""
        status = event.status
        if event.served and event.served != try_.node.number:
            self._served_by(call, try_, event.served, now_s)
            assert call.main is not None
            try_ = call.main
        verdict, outcome = outcome_of(status, Reader.ENVOY_ITSELF if event.by_envoy else Reader.ENVOY)
        if verdict is _ANSWER:
            return True
        call.status = status
        reason = f"Envoy answered {status}" if event.by_envoy else _REASONS.get(status, f"HTTP status {status}")
        # Envoy's own status says nothing about what the node answered.
        node_status = 0 if event.by_envoy else status
        self._give_up(call, try_, outcome, reason, now_s, node_status, event.retry_after_s, event.error)
        call.main = None
        self._fail(call, outcome, try_, now_s, tells=False)
        return False

    def _served_by(self, call: Call, try_: Try, served: int, now_s: float) -> None:
        """Envoy could not use the call's node, and another one answers. The ticket moves there, as old as it was."""
        node = self.fleet.numbered(served)
        if node is None:
            return
        opened_s = try_.ticket.opened_s
        self._give_up(call, try_, _FAILED, "Envoy used a fallback", now_s, answered=True)
        self.counters.retries += 1
        call.tried += 1
        call.request.streams = False  # its time includes that of the failed try: an upper bound of its prefill
        failover = self._failover_of(call)
        call.main = Try(try_.number, _MOVE, self.router.open_ticket(failover.decision, node, opened_s))

    def first_token(self, call: Call, try_: Try, event: FirstToken | Ended, now_s: float) -> None:
        """The response's first token arrived, or as much of the response as the router can see of it."""
        if try_.state < STARTED:
            self.started(call, try_, event, now_s)
            if call.state != ANSWERING:
                return
        ticket, node, served = try_.ticket, try_.node, call.status < 400
        try_.state = STREAMING
        ticket.first_token(now_s, served)
        node.last_progress_s = now_s
        if served:
            node.last_served_s = now_s
            if call.split is not None:
                self._learn_transfer(call, call.split, ticket, now_s)
            demand_meter = self.router.demand_meter
            if demand_meter is not None and (call.request.streams or not isinstance(ticket, PromptTicket)):
                demand_meter.record_ttft((now_s - call.request.arrived_s) * 1000.0)
        self.freed[node] = None
        if self.on_freed is not None:
            self.on_freed()

    def ended(self, call: Call, try_: Try, event: Ended, now_s: float) -> None:
        """The client has the whole response."""
        if try_.state != STREAMING:
            self.first_token(call, try_, event, event.first_s or now_s)
            if call.state != ANSWERING:
                return
            assert call.main is not None
            try_ = call.main
        charge, ticket, node, request, status = call.charge, try_.ticket, try_.node, call.request, call.status
        demand_meter, usage = self.router.demand_meter, event.usage
        if usage is not None:
            usage = node.reported.usage(*usage)
            if call.split is not None and isinstance(ticket, DecodeTicket):
                # A decode node reports what it had cached before the transfer.
                usage = (usage[0], call.split.cached_tokens, usage[2])
            call.usage = usage
            prompt_tokens, cached_tokens, output_tokens = usage
            if charge is not None:
                charge.settle(prompt_tokens, output_tokens)
            if isinstance(ticket, PromptTicket):
                ticket.record_usage(prompt_tokens, cached_tokens, output_tokens, now_s)
                if demand_meter is not None and output_tokens is not None:
                    demand_meter.record_output(ticket.tokens, output_tokens)
                    if request.streams and output_tokens > 1:
                        demand_meter.record_inter_token((now_s - ticket.first_token_s) * 1000.0 / (output_tokens - 1))
        outcome, reason = Outcome.OK, ""
        if status >= 400:
            outcome, reason = Outcome.REJECTED, _REASONS.get(status, "")
            if charge is not None:
                charge.settle(0, 0)  # the request counts, but it used no tokens
        else:
            node.last_served_s = now_s
            if demand_meter is not None:
                demand_meter.record_latency((now_s - request.arrived_s) * 1000.0)
        node.last_progress_s = now_s
        self.close(call, try_, outcome, now_s, reason, status=status, error=event.error)
        self.counters.responses[status] += 1
        if self.traffic is not None and outcome is Outcome.OK:
            self.traffic.record(call, ticket, now_s)
        self._end(call, outcome, try_, now_s)

    def broke(self, call: Call, try_: Try, event: Failed, now_s: float) -> None:
        """The node failed after the client received a part of the response."""
        self.close(call, try_, Outcome.BROKEN, now_s, event.reason, status=call.status)
        self.counters.interrupted += 1
        self._end(call, Outcome.BROKEN, try_, now_s)

    # A try that failed.

    def failed(self, call: Call, try_: Try, event: Failed, now_s: float) -> None:
        """The try failed before the client received anything."""
        role, status, reason = try_.role, event.status, event.reason
        split = call.split
        in_pair = split is not None and split.phase != OVER
        if role is _PREFILL:
            outcome = outcome_of(status, Reader.PREFILL)[1]
            if split is not None:
                plan = Plan(FALL_BACK, outcome, reason, None, PREFILL_FAILED, max(0, status), event.error)
                self._leave_pair(call, split, plan, now_s)
            self._confirm(try_.node, status, reason, now_s)
            return
        if in_pair and role is _DECODE:
            reader = Reader.DECODE_ONLY if try_.node.needs_partner else Reader.DECODE
            verdict, outcome = outcome_of(status, reader)
            if status in BEFORE_THE_REQUEST and split is not None:
                split.decode_sent = False
            if verdict is Verdict.ALONE and split is not None:
                if split.phase == PREFILLING:
                    self.commands.append(Withdraw(call.id, split.prefill.number))
                plan = Plan(FALL_BACK, _CANCELLED, reason, None, TRANSFER_FAILED, max(0, status), event.error)
                self._fall_back(call, split, plan, now_s)
                return
        else:
            outcome = outcome_of(status, Reader.WHOLE)[1]
        retry_after_s = event.retry_after_s
        self._give_up(call, try_, outcome, reason, now_s, status, retry_after_s, event.error)
        if status in NOT_ASKED:
            call.tried -= 1
            call.at_envoy = False
        self._confirm(try_.node, status, reason, now_s)
        if try_ is call.hedge:
            call.hedge = None
        elif call.hedge is not None:
            self._promote_hedge(call)
        elif call.repeatable or status in BEFORE_THE_REQUEST or status in (429, 503):
            self._next(call, outcome, try_.node, now_s, try_)
        else:
            self._fail(call, outcome, try_, now_s)

    def _confirm(self, node: Node, status: int, reason: str, now_s: float) -> None:
        """No process listens at the node's address: it is down, and this is known."""
        if status == REFUSED:
            self.fleet.check_failed(node, now_s, reason)

    def _give_up(
        self, call: Call, try_: Try, outcome: Outcome, reason: str, now_s: float, status: int = 0,
        retry_after_s: int | None = None, error: NodeError | None = None, answered: bool = False,
    ) -> None:  # fmt: skip
        """Close a try that failed. `answered`: it may have answered with 5xx, although its `status` is not known."""
        if try_ is not call.hedge:
            self.waiting.pop(call, None)
        self.close(
            call, try_, outcome, now_s, reason, status=status if status > 0 else 0, error=error, answered=answered,
            sent=status not in NOT_ASKED,
        )  # fmt: skip
        failover = self._failover_of(call)
        failover.add(try_.node, outcome)
        failover.answered(try_.node, outcome, status, retry_after_s, now_s)

    def _promote_hedge(self, call: Call) -> None:
        """The hedge takes the place of the try that has failed or was withdrawn."""
        call.main, call.hedge, call.overdue_s = call.hedge, None, 0.0
        self.waiting[call] = None

    def _next(self, call: Call, outcome: Outcome, node: Node, now_s: float, last: Try | None = None) -> None:
        """Try the next node, or reject the call."""
        failover = self._failover_of(call)
        poison = call.poison = failover.is_poison
        while not poison and self.may_try_another(call):
            next_node = failover.next_node(self.router, call.request, call.lookup, now_s)
            if next_node is None:
                break
            if self._try(call, failover.decision, next_node, _MOVE, now_s):
                self.counters.retries += 1
                return
        self._fail(call, outcome, last, now_s, node=node)

    def _fail(
        self, call: Call, outcome: Outcome, last: Try | None, now_s: float, node: Node | None = None, tells: bool = True
    ) -> None:
        """End a call that no node serves. `tells`: the client has no answer yet."""
        failover = self._failover_of(call)
        poison = call.poison = failover.is_poison
        if call.split is not None:
            self._abandon_pair(call, call.split, now_s)
        if call.charge is not None:
            call.charge.cancel()
        if not poison:
            self._judge(failover, now_s)
        if len(failover.at_fault) > 1:  # then the request may be at fault
            known = {error.node for error in failover.server_errors} if poison else ()
            for failed in failover.at_fault:
                failed.excused_failures += failed not in known
        why = failover.error()
        demand_meter = self.router.demand_meter
        if demand_meter is not None and isinstance(why, AllNodesBusy):
            demand_meter.shed += 1
        if tells:
            self._reject(call, why)
        self._end(call, outcome, last, now_s, node)

    def _judge(self, failover: Failover, now_s: float) -> None:
        """The nodes that answered with 5xx are at fault, since another one has answered or no node is left."""
        errors, failover.server_errors = failover.server_errors, []
        for error in errors:
            self.fleet.count_failure(error.node, error.failed_s, now_s, error.reason)

    # Leaving a node.

    def leave(self, call: Call, node: Node, reason: str, now_s: float) -> bool:
        """Leave a node that is down or was removed. Return False if the call stays: no other node is up; or the node
        may still execute the request, which must not be executed twice."""
        main, split = call.main, call.split
        if main is None or main.state == LEAVING or call.envoy:
            return False
        if not call.repeatable and not node.health.confirmed_down:
            return False
        if split is not None and split.phase != OVER and node is split.pair.prefill_node and node is not main.node:
            why = PREFILL_FAILED if split.phase == PREFILLING else TRANSFER_FAILED
            self._leave_prefill_node(call, split, why, reason, now_s)
            return True
        hedge = call.hedge
        if hedge is not None:
            self.ask_to_leave(call, hedge if hedge.node is node else main, Plan(GO, _FAILED, reason), now_s)
            return True
        other = self.other_node(call, now_s, lambda other: other is not node)
        if other is not None:
            outcome = _FAILED if main.state != RESERVED else _CANCELLED
            self.ask_to_leave(call, main, Plan(MOVE, outcome, reason, other), now_s)
            return True
        if node.health.confirmed_down and (not self.may_try_another(call) or is_late(call.request, now_s)):
            self.ask_to_leave(call, main, Plan(GO, _FAILED, reason), now_s)
            return True
        return False

    def ask_to_leave(self, call: Call, try_: Try, plan: Plan, now_s: float) -> None:
        """Ask the edge to give a try up. One that was not sent leaves at once."""
        try_.plan = plan
        if try_.state == RESERVED:
            self._carry_out(call, try_, plan, now_s)
        else:
            try_.state = LEAVING
            self.commands.append(Withdraw(call.id, try_.number))

    def gone(self, call: Call, try_: Try, _event: Withdrawn | Failed, now_s: float) -> None:
        """The try has left its node: what was planned happens."""
        plan = try_.plan
        assert plan is not None
        self._carry_out(call, try_, plan, now_s)

    def _carry_out(self, call: Call, try_: Try, plan: Plan, now_s: float) -> None:
        outcome, reason, split = plan.outcome, plan.reason, call.split
        try_.plan = None
        if plan.kind == FALL_BACK and split is not None:
            self._fall_back(call, split, plan, now_s)
            return
        is_hedge = try_ is call.hedge
        if try_.state == RESERVED:
            call.tried -= 1
            self._give_up(call, try_, outcome, "", now_s, UNKNOWN)
        else:
            self._give_up(call, try_, outcome, reason, now_s)
        if is_hedge:
            call.hedge = None
        elif call.hedge is not None:
            self._promote_hedge(call)
        elif plan.other is None or not _may_still_serve(plan.other, call.request):
            self._next(call, outcome, try_.node, now_s, try_)
        elif self._try(call, self._failover_of(call).decision, plan.other, _MOVE, now_s):
            self.counters.retries += 1
        else:
            self._next(call, outcome, try_.node, now_s, try_)
        if call.request.ends_late and not call.deadline_slot and call.state == TRYING:
            self.deadlines.watch_again(call, now_s)

    # The end.

    def end_late(self, call: Call, why: DeadlinePassed, now_s: float) -> None:
        """A deadline of the call has passed. The tenant is charged for the work of the nodes. A node has failed only if
        it looks as if it hangs."""
        main = call.main
        assert main is not None
        if call.state == ANSWERING:
            self.commands.append(Cut(call.id, self._rejection(call, why)))
            return
        outcome = _CANCELLED
        # With deadlines, no call waits for a timeout.
        if self.overdue.is_overdue(call, main.ticket, self.expected_output(call.request), now_s):
            outcome = _FAILED
        self._close_others(call, now_s)
        self.close(call, main, outcome, now_s, "the deadline has passed")
        self._reject(call, why)
        self._end(call, outcome, main, now_s)

    def _close_others(self, call: Call, now_s: float) -> None:
        """Close every try but the main one."""
        self.waiting.pop(call, None)
        if call.hedge is not None:
            self.close(call, call.hedge, _CANCELLED, now_s)
            call.hedge = None
        split = call.split
        if split is not None:
            if split.phase == PREFILLING and split.prefill.state != CLOSED:
                self.close(call, split.prefill, _CANCELLED, now_s)
            self._is_over(call, split)

    def cancel_waiting(self, call: Call, event: Cancel, now_s: float) -> None:
        """The edge ends a call that no node has."""
        self.admission.queue.cancel(call)
        if call.charge is not None:
            call.charge.cancel()
        call.left = event.why
        if event.why is Left.LEFT:
            self.counters.disconnects += 1
            call.outcome = _CANCELLED
        self._forget(call, now_s)

    def cancel_sent(self, call: Call, event: Cancel, now_s: float) -> None:
        """The edge ends a call that nodes have. It has withdrawn its tries."""
        why, main, answering = event.why, call.main, call.state == ANSWERING
        call.left = why
        self._close_others(call, now_s)
        if main is not None:
            plan = main.plan
            if plan is not None and plan.kind != FALL_BACK:
                self.close(call, main, plan.outcome, now_s, plan.reason)
            else:
                reason = event.reason or ("the deadline has passed" if why is Left.CUT else "")
                self.close(call, main, _CANCELLED, now_s, reason)
        if why is Left.LEFT:
            self.counters.disconnects += 1
        elif why is Left.LOST:
            if call.charge is not None and not answering:
                call.charge.cancel()
        elif why is Left.STOPPING and call.envoy:  # Envoy goes on by itself
            self.counters.cut_off += 1
        elif answering:
            self.counters.interrupted += 1
        else:
            if call.charge is not None:
                call.charge.cancel()
            call.status = 503 if why is Left.STOPPING else 500
        self._end(call, _CANCELLED, main, now_s)

    def fail_internally(self, call: Call, error: Exception, now_s: float) -> None:
        """The router itself failed at this call: end it, and no other."""
        self.note_failure(error, call)
        if self.open.get(call.id) is not call:  # it has ended already
            return
        was, call.state = call.state, DONE
        try:
            self.admission.queue.cancel(call)
            self._close_others(call, now_s)
            if call.main is not None and call.main.state != CLOSED:
                self.close(call, call.main, _CANCELLED, now_s)
        except Exception as another:
            self.note_failure(another, call)
        if call.charge is not None and was != ANSWERING:
            call.charge.cancel()
        if was == ANSWERING:
            self.counters.interrupted += 1
        else:
            call.status = 500
        call.left = Left.INTERNAL
        reject = internal_error(call.id)
        call.code = reject.code
        self.commands.append(reject)
        try:
            if call.main is not None or call.record is not None:
                self._end(call, _CANCELLED, call.main, now_s)
            else:
                self._forget(call, now_s)
        except Exception as another:
            self.note_failure(another, call)
            self.open.pop(call.id, None)

    def note_failure(self, error: Exception, call: Call | None) -> None:
        self.last_error = error
        log.error(
            "request_failed_internally",
            "The client receives status 500, or its response breaks off.",
            request_id=call.request_id.decode("ascii", "replace") if call is not None else "",
            reason=where_it_failed(error),
        )
        if self.ticket_log is None:
            error.__traceback__ = error.__context__ = error.__cause__ = None  # their frames hold the request

    def _reject_unsent(self, call: Call, why: RoutingError, now_s: float) -> None:
        """Reject a call that no node got."""
        if call.charge is not None:
            call.charge.cancel()
        self._reject(call, why)
        self._forget(call, now_s)

    def _reject(self, call: Call, why: RoutingError) -> None:
        """Tell the client why its call ends."""
        why.__traceback__ = None  # its frames hold the call, and `why`
        reject = self._rejection(call, why)
        call.status, call.code = reject.status, reject.code
        self.commands.append(reject)

    def _rejection(self, call: Call, why: RoutingError) -> Reject:
        request = call.request
        if isinstance(why, NotAdmitted):
            self.counters.rejected[why.reason, request.priority] += 1
            self.counters.rejected_by_tenant[request.tenant, request.priority, why.reason] += 1
        return rejection(why, call.id, request)

    def _end(self, call: Call, outcome: Outcome, last: Try | None, now_s: float, node: Node | None = None) -> None:
        """Complete what is remembered of a call that got a node. `node`: the one tried last, if `last` is not known."""
        if call.numbers:  # else no node got it
            call.outcome = outcome
        first_token_s = 0.0
        if last is not None:
            node, first_token_s = last.node, last.ticket.first_token_s
        elif node is None:
            assert call.decision is not None
            node = call.decision.node
        call.end = (outcome, node, call.tried, call.status, first_token_s, now_s)
        if call.history is not None and last is not None:
            self._complete_history(call, call.history, last.ticket)
        journal, record = self.journal, call.record
        if record is not None and journal is not None and journal.on:
            ordinary = outcome is _OK and not journal.writes and record.considered <= KEEP_ALL_UP_TO
            if not ordinary:  # the ring has it already
                journal.complete(call)
        self._forget(call, now_s)

    def _complete_history(self, call: Call, history: CallHistory, ticket: Ticket) -> None:
        node, query = ticket.node, call.decision.query if call.decision is not None else None
        history.opened_s = ticket.opened_s
        if call.usage is None or call.usage[2] is None:
            history.expected_output = self.expected_output(call.request)
        if isinstance(ticket, PromptTicket):
            history.predicted = ticket.cached
        history.prompt_tokens = ticket.tokens
        history.model = query.group.model if query is not None else NO_MODEL
        history.ms_per_token = node.speed.long_ms_per_token * node.config.gpus
        history.step_ms = node.speed.step_ms * node.config.gpus

    def _forget(self, call: Call, now_s: float) -> None:
        """The call has ended. What others keep of it refers to nothing heavy, and to nothing that the client wrote."""
        call.state = DONE
        call.ended_s = now_s
        self.open.pop(call.id, None)
        self.waiting.pop(call, None)
        if call.deadline_slot:
            self.deadlines.forget(call)
        if call.kept is not None:
            self.ended_calls.append(call)
        elif call.record is not None:
            request = call.request  # as forget_text, without a call
            request.system = request.user = request.subset = None
            request.session = request.session_header = request.start = b""
        call.lookup = call.decision = call.failover = call.split = call.main = call.hedge = call.charge = None

    def close(
        self, call: Call, try_: Try, outcome: Outcome, now_s: float, reason: str = "", *,
        sent: bool = True, status: int = 0, error: NodeError | None = None, answered: bool = False,
    ) -> None:  # fmt: skip
        """Close a try's ticket. `sent`: whether the node got the request. If not, it is no try. `reason`: why it
        failed, if it did."""
        ticket, node = try_.ticket, try_.node
        try_.state = CLOSED
        if reason:
            failed = FailedTry(
                node.name, _ROLE_NAMES[try_.role], outcome, status, reason, ticket.opened_s, now_s, error
            )  # fmt: skip
            if len(call.failed_tries) < MAX_TRIES:
                call.failed_tries += (failed,)
            if outcome is not Outcome.REJECTED:  # which is the client's mistake
                node.last_failure = failed
                self.failed_tries.add(failed, call.request_id)
        if (
            outcome is _FAILED
            and (status >= 500 or answered)
            and now_s - node.last_served_s <= SERVES_S
            and self._failover_of(call).may_be_poison(node, now_s, reason)
        ):
            self.fleet.close_ticket(ticket, outcome, now_s, reason, judged=False)
        else:
            self.fleet.close_ticket(ticket, outcome, now_s, reason)
        if call.history is not None and sent:
            answers = call.state == ANSWERING and try_ is call.main
            call.history.tries.append(
                _closed_try(try_, outcome, reason, now_s, status or (call.status if answers else 0))
            )
        if self.ticket_log is not None:
            self.ticket_log.append(TicketEvent(call, ticket, False))
        self.freed[node] = None
        if self.on_freed is not None:
            self.on_freed()


def _closed_try(try_: Try, outcome: Outcome, reason: str, now_s: float, status: int) -> ClosedTry:
    ticket, node = try_.ticket, try_.node
    tokens = cached = 0
    if isinstance(ticket, PromptTicket):
        tokens, cached = ticket.tokens, ticket.cached
    rank = ticket.rank if ticket.rank >= 0 else None
    return ClosedTry(
        try_.number, try_.role, node.name, node.island, node.engine, node.host, node.port, ticket.opened_s,
        ticket.first_token_s, now_s, outcome, reason, tokens, cached, rank, ticket.expected_ttft_ms, status,
    )  # fmt: skip


def _is_usable(prefill_node: Node, request: RoutingRequest) -> bool:
    """Whether a prefill node may get a request, perhaps seconds after it was chosen."""
    return not (prefill_node.draining or prefill_node.health.confirmed_down or prefill_node.is_full_for(request))


def _may_still_serve(node: Node, request: RoutingRequest) -> bool:
    """Whether a node may get the call that was to move there when the edge was asked."""
    return not (node.draining or node.is_full_for(request)) and node.health.state is HealthState.UP


def _ban(node: Node, now_s: float) -> None:
    """Let a node prefill for no other one for a while."""
    if not node.no_transfer_until_s:
        log.warning(
            "kv_transfer_missing",
            "The node's answer has no KV transfer parameters. Check that its engine has a KV connector.",
            node=node.name,
        )
    node.no_transfer_until_s = now_s + UNSUPPORTED_S


def _header_name(node: Node) -> bytes:
    return quote(node.name, safe=_NAME_CHARACTERS).encode("ascii")
