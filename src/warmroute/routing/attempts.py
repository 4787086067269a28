"""One request's attempts on nodes, from admission to its end: order, retries, ticket, usage, journal. No I/O.

    queued      admission holds the request; it has no node
    trying      it was sent to a node; the client has received nothing
    answering   the node's response goes to the client
    done        the ticket is closed, the rate limit is settled, the journal has the outcome

Rules:
1. A node that fails while the request is `trying` leads to the next node (routing/failover.py), until no eligible node
   is left or `max_attempts` nodes were tried.
2. From the first byte of the response on there is no retry: a failure then ends the request as broken.
   The first token may come later: an engine may send a role or a comment first. Speed is learned from the first token.
3. A ticket is open exactly while a node has the request. Whatever ends the request closes it.

An `AttemptDriver` does the I/O: the HTTP edge over sockets, replay in virtual time. It calls the methods below when
something happens, and the state machine calls the driver's `send` and `reject`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from warmroute.fleet.fleet import Fleet
from warmroute.fleet.node import Node, Outcome
from warmroute.fleet.ticket import Ticket
from warmroute.index.lookup import Lookup
from warmroute.prompt.routing_request import RoutingRequest
from warmroute.routing.admission import Admission
from warmroute.routing.decision import Decision
from warmroute.routing.dispatch import Dispatch
from warmroute.routing.failover import Failover
from warmroute.routing.rate_limits import Charge
from warmroute.routing.router import Router
from warmroute.routing.routing_errors import AllNodesBusy, RoutingError

Usage = tuple[int | None, int | None, int | None]
"""Prompt tokens, cached prompt tokens and output tokens that a response reports; None where it does not."""


class AttemptDriver(Protocol):
    def send(self, node: Node) -> None:
        """Send the request to this node. The ticket is open."""

    def reject(self, why: RoutingError) -> int:
        """End the request with this error: the client has received nothing. Return the HTTP status."""

    def internal_error(self, error: Exception) -> None:
        """The router itself failed while it let the request out of the queue."""


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


class Dispatcher(msgspec.Struct, eq=False):
    """What the attempts of all requests share."""

    fleet: Fleet
    router: Router
    admission: Admission
    counters: AttemptCounters
    journal: AttemptJournal | None
    max_attempts: int
    """Nodes that a request may be sent to; 0: all of them."""
    now: Callable[[], float]
    node_freed: Callable[[Node, float], object]
    """Called when a node may have room for a queued request."""
    ticket_closed: Callable[[Attempts, float], object] | None = None
    """Called before `node_freed` where a ticket was closed."""

    def close_ticket(self, attempts: Attempts, outcome: Outcome, now_s: float, reason: str = "") -> None:
        ticket = attempts.ticket
        self.fleet.close_ticket(ticket, outcome, now_s, reason)
        if self.ticket_closed is not None:
            self.ticket_closed(attempts, now_s)
        self.node_freed(ticket.node, now_s)


@dataclass(slots=True, eq=False)
class Attempts:
    """The state machine of one request. Admission sees it as a PendingRequest."""

    # for its whole life
    _dispatcher: Dispatcher
    driver: AttemptDriver
    request: RoutingRequest
    request_id: bytes
    entered_s: float = field(init=False)
    lookup: Lookup | None = None
    charge: Charge | None = None
    """What the request took of its tenant's rate limit."""
    decision: Decision = field(init=False)
    tried: int = 0
    """Number of nodes that the request was sent to. Also identifies the current attempt."""
    done: bool = False
    reported: Usage | None = None
    _queued: bool = False
    _entry: Any = None
    _failover: Failover | None = None
    """Set once a node has failed."""
    # at the current node
    ticket: Ticket = field(init=False)
    answering: bool = False
    status: int = 0

    # Admission.

    def enter(self, lookup: Lookup | None, prompt_tokens: int | None, now_s: float) -> None:
        """Charge the tenant's token limit and ask for a node. Raises RoutingError if the request is rejected at once.

        `prompt_tokens` is None where the prompt was not read.
        """
        self.lookup = lookup
        self.entered_s = now_s
        dispatcher, charge = self._dispatcher, self.charge
        try:
            if charge is not None:
                request = self.request
                output = dispatcher.router.output_lengths.expected(
                    request.model, request.tenant, request.max_output_tokens
                )
                charge.take_tokens(prompt_tokens, output, now_s)
            dispatcher.admission.submit(self, now_s)
        except RoutingError:
            self.done = True
            if charge is not None:
                charge.cancel()
            raise
        self._queued = True

    def on_admitted(self, decision: Decision) -> None:
        """Admission sends the request to the decision's node."""
        self.decision = decision
        dispatcher = self._dispatcher
        now_s = dispatcher.now()
        try:
            journal = dispatcher.journal
            if journal is not None and journal.on:
                self._entry = journal.begin(self, (now_s - self.entered_s) * 1000.0)
            self._try(decision, decision.node, now_s)
        except Exception as error:
            if not self._queued:  # the caller of `enter` handles it
                raise
            self.driver.internal_error(error)

    def on_rejected(self, error: RoutingError) -> None:
        """Admission rejects the request after it was queued."""
        if not self.done:
            self.done = True
            if self.charge is not None:
                self.charge.cancel()
            try:
                self.driver.reject(error)
            except Exception as failure:
                self.driver.internal_error(failure)

    # One node after another.

    def _try(self, decision: Decision, node: Node, now_s: float) -> None:
        self.ticket = self._dispatcher.router.dispatch(decision, node, now_s)
        self.tried += 1
        self.driver.send(node)

    def connection_refused(self, reason: str, now_s: float) -> None:
        """No process listens at the node's address."""
        self._dispatcher.fleet.check_failed(self.ticket.node, now_s, reason)
        self.node_failed(Outcome.FAILED, reason, now_s)

    def node_failed(
        self, outcome: Outcome, reason: str, now_s: float, *, status: int = 0, retry_after_s: int | None = None
    ) -> None:
        """The node failed before the client received anything: try the next one, or reject the request.

        `status`: that of a busy node, if it answered.
        """
        dispatcher, node = self._dispatcher, self.ticket.node
        dispatcher.close_ticket(self, outcome, now_s, reason)
        failover = self._failover
        if failover is None:
            failover = self._failover = Failover(self.decision)
        failover.failed.append(node)
        if outcome is Outcome.BUSY:
            failover.busy(node, status, retry_after_s, now_s)
        if self.tried < dispatcher.max_attempts or not dispatcher.max_attempts:
            next_node = failover.next_node(dispatcher.router, self.request, self.lookup, now_s)
            if next_node is not None:
                dispatcher.counters.retries += 1
                self._try(failover.decision, next_node, now_s)
                return
        self.done = True
        if self.charge is not None:
            self.charge.cancel()
        if len(failover.failed) > 1:  # then the request may be at fault
            for failed in failover.failed:
                failed.excused_failures += 1
        error = failover.error()
        demand_meter = dispatcher.router.demand_meter
        if demand_meter is not None and isinstance(error, AllNodesBusy):
            demand_meter.shed += 1
        self.status = self.driver.reject(error)
        self._complete_entry(outcome, now_s)

    # The response.

    def response_started(self, status: int, retry_after_s: int | None, now_s: float) -> bool:
        """The node's first byte arrived. Return whether its response goes to the client; else the request moved on."""
        if status >= 500 or status == 429:
            if status in (429, 503):
                reason = f"HTTP status {status}: the node is busy"
                self.node_failed(Outcome.BUSY, reason, now_s, status=status, retry_after_s=retry_after_s)
            else:
                self.node_failed(Outcome.FAILED, f"HTTP status {status}", now_s)
            return False
        self.answering = True
        self.status = status
        return True

    def first_token(self, now_s: float) -> None:
        """The response's first token arrived, or as much of the response as the router can see of it: its first byte,
        or the end of a response without tokens."""
        ticket, served = self.ticket, self.status < 400
        ticket.first_token(now_s, served)
        demand_meter = self._dispatcher.router.demand_meter
        if demand_meter is not None and served and (self.request.streams or not isinstance(ticket, Dispatch)):
            demand_meter.record_ttft((now_s - self.request.arrived_s) * 1000.0)
        self._dispatcher.node_freed(ticket.node, now_s)

    @property
    def wants_usage(self) -> bool:
        """Whether somebody uses the token counts that the response reports."""
        charge = self.charge
        return self.status < 400 and (isinstance(self.ticket, Dispatch) or (charge is not None and charge.wants_usage))

    def response_ended(self, usage: Usage | None, now_s: float) -> None:
        """The client has the whole response."""
        if not self.ticket.first_token_s:
            self.first_token(now_s)
        self.done = True
        charge, ticket, dispatcher = self.charge, self.ticket, self._dispatcher
        demand_meter = dispatcher.router.demand_meter
        if usage is not None:
            self.reported = usage
            prompt_tokens, cached_tokens, output_tokens = usage
            if charge is not None:
                charge.settle(prompt_tokens, output_tokens)
            if isinstance(ticket, Dispatch):
                ticket.record_usage(prompt_tokens, cached_tokens, output_tokens, now_s)
                if demand_meter is not None and output_tokens is not None:
                    demand_meter.record_output(ticket.tokens, output_tokens)
        outcome, status = Outcome.OK, self.status
        if status >= 400:
            outcome = Outcome.REJECTED
            if charge is not None:
                charge.settle(0, 0)  # the request counts, but it used no tokens
        elif demand_meter is not None:
            demand_meter.record_latency((now_s - self.request.arrived_s) * 1000.0)
        dispatcher.close_ticket(self, outcome, now_s)
        self._complete_entry(outcome, now_s)
        dispatcher.counters.responses[status] += 1

    def response_broke(self, reason: str, now_s: float) -> None:
        """The node failed after the client received a part of the response."""
        self.done = True
        dispatcher = self._dispatcher
        dispatcher.close_ticket(self, Outcome.BROKEN, now_s, reason)
        self._complete_entry(Outcome.BROKEN, now_s)
        dispatcher.counters.interrupted += 1

    def client_left(self, now_s: float) -> None:
        self.abandon(now_s)
        self._dispatcher.counters.disconnects += 1

    def abandon(self, now_s: float) -> None:
        """Release what the request holds, in whatever state it is."""
        self.done = True
        dispatcher = self._dispatcher
        if not self.tried:
            dispatcher.admission.queue.cancel(self)
            if self.charge is not None:
                self.charge.cancel()
            return
        dispatcher.close_ticket(self, Outcome.CANCELED, now_s)
        self._complete_entry(Outcome.CANCELED, now_s)

    def _complete_entry(self, outcome: Outcome, now_s: float) -> None:
        if self._entry is not None:
            journal = self._dispatcher.journal
            assert journal is not None
            journal.complete(self._entry, self, outcome, now_s)
