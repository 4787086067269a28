"""One request's attempts on nodes, from admission to its end: order, retries, ticket, usage, journal. No I/O.

    queued      admission holds the request; it has no node
    trying      it was sent to a node; the client has received nothing
    answering   the node's response goes to the client
    done        the ticket is closed, the rate limit is settled, the journal has the outcome

Rules:
1. A node that fails while the request is `trying` leads to the next node (routing/failover.py), until no eligible node
   is left or `max_attempts` nodes were tried.
2. While the request is `trying`, it leaves a node that goes down, and it may be sent to a second node as well
   (routing/hedging.py). The response that begins first counts.
3. From the first byte of the response on there is no retry: a failure then ends the request as broken.
   The first token may come later: an engine may send a role or a comment first. Speed is learned from the first token.
   A deadline may end or move the request (routing/deadline_check.py).
4. A ticket is open exactly while a node has the request. Whatever ends the request closes it.

An `AttemptDriver` does the I/O: the HTTP edge over sockets, replay in virtual time. It calls the methods below when
something happens, and the state machine calls the driver's `send` and `reject`.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any, Final

from warmroute.fleet.failed_tries import HEDGE, FailedTry, NodeError
from warmroute.fleet.node import Node, Outcome
from warmroute.fleet.ticket import Ticket
from warmroute.index.lookup import Lookup
from warmroute.prompt.routing_request import RoutingRequest
from warmroute.routing.attempt_driver import AttemptDriver
from warmroute.routing.attempt_history import AttemptHistory
from warmroute.routing.decision import Decision
from warmroute.routing.dispatch import Dispatch
from warmroute.routing.dispatcher import Dispatcher
from warmroute.routing.failover import Failover
from warmroute.routing.rate_limits import Charge
from warmroute.routing.routing_errors import AllNodesBusy, DeadlinePassed, NotAdmitted, RoutingError
from warmroute.routing.sampled_prompt import SampledPrompt
from warmroute.routing.split_request import SplitRequest, try_pair

Usage = tuple[int | None, int | None, int | None]
"""Prompt tokens, cached prompt tokens and output tokens that a response reports; None where it does not."""

_FAILED: Final = Outcome.FAILED
_BUSY: Final = Outcome.BUSY
"""Looking up a member of an enumeration takes three times as long as a global name."""
_REASONS: Final = {status: f"HTTP status {status}" for status in range(500, 600)}
"""Strings that many decisions keep."""


class Attempts:
    """The state machine of one request. Admission sees it as a PendingRequest."""

    # for its whole life
    _dispatcher: Dispatcher
    driver: AttemptDriver
    request: RoutingRequest
    request_id: bytes
    entered_s: float = 0.0
    admitted_s: float = 0.0
    """When admission sent it to its first node."""
    lookup: Lookup | None = None
    charge: Charge | None = None
    """What the request took of its tenant's rate limit."""
    captured: Any = None
    """What the capture of traffic keeps of the request; None: the request is not captured."""
    decision: Decision
    tried: int = 0
    """Number of nodes that the request was sent to. Also identifies the current attempt."""
    done: bool = False
    reported: Usage | None = None
    _error: NodeError | None = None
    """What the body of an error says that went to the client."""
    failed_tries: tuple[FailedTry, ...] = ()
    """The first MAX_TRIES of them, and an error that went to the client."""
    _queued: bool = False
    _entry: Any = None
    _failover: Failover | None = None
    """Set once a node has failed."""
    envoy_retries: bool = False
    """Whether Envoy has the request and sends it to the next node itself (routing/held_requests.py)."""
    poison: bool = False
    """Whether nodes that serve other requests failed at this one (routing/failover.py)."""
    repeatable: bool = True
    """Whether the request may be sent to a second node while the first one may still execute it."""
    history: AttemptHistory | None = None
    """Set if the request is traced."""
    sample: SampledPrompt | None
    """Set if the prompt doctor compares the prompt with others."""
    deadline_slot: int = 0
    """When its deadlines are looked at next (routing/deadline_check.py); 0: they end nothing."""
    # at the current node
    ticket: Ticket
    hedge: Ticket | None = None
    """The ticket on a second node that has the request, too."""
    overdue_s: float = 0.0
    """When a hedge may be sent; 0.0: not computed yet."""
    answering: bool = False
    status: int = 0
    split: SplitRequest | None = None
    """Set if another node prefilled the prompt for this one, or tried to."""

    def __init__(
        self, dispatcher: Dispatcher, driver: AttemptDriver, request: RoutingRequest, request_id: bytes
    ) -> None:
        self._dispatcher = dispatcher
        self.driver = driver
        self.request = request
        self.request_id = request_id
        self.sample = None

    # Admission.

    def enter(self, lookup: Lookup | None, prompt_tokens: int | None, now_s: float) -> None:
        """Charge the tenant's token limit and ask for a node. Raises RoutingError if the request is rejected at once.

        `prompt_tokens` is None where the prompt was not read.
        """
        self.lookup = lookup
        self.entered_s = now_s
        dispatcher, charge = self._dispatcher, self.charge
        if self.history is not None:
            self.history.queue_length = dispatcher.admission.queue.waiting
        try:
            if charge is not None:
                charge.take_tokens(prompt_tokens, self.expected_output, now_s)
            dispatcher.admission.submit(self, now_s)
        except RoutingError as error:
            self.done = True
            if charge is not None:
                charge.cancel()
            if isinstance(error, NotAdmitted):
                self._capture(None, now_s)
            raise
        self._queued = True
        if self.history is not None:
            self.history.queued = not self.tried

    def on_admitted(self, decision: Decision) -> None:
        """Admission sends the request to the decision's node."""
        self.decision = decision
        dispatcher = self._dispatcher
        now_s = self.admitted_s = dispatcher.now()
        try:
            journal = dispatcher.journal
            if journal is not None and journal.on:
                self._entry = journal.begin(self, (now_s - self.entered_s) * 1000.0)
            dispatcher.sent += 1
            dispatcher.count_decision(decision)
            self._try(decision, decision.node, now_s)
            if self.request.ends_late and not self.envoy_retries and not self.done:
                dispatcher.deadlines.watch(self, now_s)
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
            self._capture(None, self._dispatcher.now())
            try:
                self.driver.reject(error)
            except Exception as failure:
                self.driver.internal_error(failure)

    # One node after another.

    def _try(self, decision: Decision, node: Node, now_s: float) -> None:
        query = decision.query
        may_split = self.split is not None or query is None or query.group.has_roles
        if may_split and try_pair(self, self._dispatcher, decision, node, now_s):
            return
        self.ticket = self._dispatcher.router.dispatch(decision, node, now_s)
        self.tried += 1
        self._send(node)

    def send_alone(self, decision: Decision, node: Node, now_s: float) -> None:
        """Send the request to a node that was tried as part of a pair."""
        self.ticket = self._dispatcher.router.dispatch(decision, node, now_s)
        self._send(node)

    def _send(self, node: Node) -> None:
        self.overdue_s = 0.0
        self._dispatcher.waiting[self] = None
        self.driver.send(node)

    def connection_refused(self, reason: str, now_s: float) -> None:
        """No process listens at the node's address."""
        node = self.ticket.node
        self._dispatcher.fleet.check_failed(node, now_s, reason)
        if self.ticket.node is node:  # else the request has left the node with the others
            self.node_failed(Outcome.FAILED, reason, now_s)

    def node_failed(
        self, outcome: Outcome, reason: str, now_s: float, *,
        status: int = 0, retry_after_s: int | None = None, error: NodeError | None = None,
    ) -> None:  # fmt: skip
        """The node failed before the client received anything: try the next one, or reject the request.
        `status`: that of its response; 0 without one. `error`: what its body says."""
        failover = self.give_up(outcome, reason, now_s, status, error)
        if outcome is _BUSY:
            failover.busy(failover.failed[-1], status, retry_after_s, now_s)
        if self.hedge is not None:
            self._promote_hedge()
            return
        self._try_next(outcome, now_s)

    def _try_next(self, outcome: Outcome, now_s: float) -> None:
        """Try the next node, or reject the request."""
        dispatcher, failover = self._dispatcher, self.get_failover()
        poison = self.poison = failover.is_poison
        if not poison and dispatcher.may_try_another(self):
            next_node = failover.next_node(dispatcher.router, self.request, self.lookup, now_s)
            if next_node is not None:
                dispatcher.counters.retries += 1
                self._try(failover.decision, next_node, now_s)
                return
        self.done = True
        if self.split is not None:
            self.split.abandon(now_s)
        if self.charge is not None:
            self.charge.cancel()
        if not poison:
            self._judge(failover)
        if len(failover.at_fault) > 1:  # then the request may be at fault
            known = {error.node for error in failover.server_errors} if poison else ()
            for failed in failover.at_fault:
                failed.excused_failures += failed not in known
        why = failover.error()
        demand_meter = dispatcher.router.demand_meter
        if demand_meter is not None and isinstance(why, AllNodesBusy):
            demand_meter.shed += 1
        self.status = self.driver.reject(why)
        self._complete_entry(outcome, now_s)

    def give_up(
        self, outcome: Outcome, reason: str, now_s: float, status: int = 0, error: NodeError | None = None,
        answered: bool = False,
    ) -> Failover:  # fmt: skip
        """Close the ticket on a node that failed. `answered`: as for `Dispatcher.close_ticket`."""
        dispatcher, ticket = self._dispatcher, self.ticket
        dispatcher.waiting.pop(self, None)
        dispatcher.close_ticket(self, ticket, outcome, now_s, reason, status=status, error=error, answered=answered)
        failover = self.get_failover()
        failover.add(ticket.node, outcome)
        return failover

    def _judge(self, failover: Failover) -> None:
        """The nodes that answered with 5xx are at fault, since another one has answered or no node is left."""
        errors, failover.server_errors = failover.server_errors, []
        for error in errors:
            self._dispatcher.fleet.count_failure(error.node, error.failed_s, self._dispatcher.now(), error.reason)

    def get_failover(self) -> Failover:
        if self._failover is None:
            self._failover = Failover(self.decision)
        return self._failover

    # A node that goes down while the request waits, and a second node.

    def waits_on(self, nodes: Container[Node]) -> Node | None:
        """Return which of these nodes has the request."""
        if self.ticket.node in nodes:
            return self.ticket.node
        if self.split is not None and (prefill_node := self.split.prefill_node) is not None and prefill_node in nodes:
            return prefill_node
        return self.hedge.node if self.hedge is not None and self.hedge.node in nodes else None

    def leave(self, node: Node, reason: str, now_s: float) -> bool:
        """Leave a node that is down or was removed. Return False if the request stays: no other node is up; or the node
        may still execute the request, which must not be executed twice."""
        if not self.repeatable and not node.health.confirmed_down:
            return False
        if self.split is not None and node is self.split.prefill_node and node is not self.ticket.node:
            self.split.leave(reason, now_s)
            return True
        if self.hedge is not None:
            if self.hedge.node is node:
                self.driver.withdraw_hedge()
                self.hedge_failed(Outcome.FAILED, reason, now_s)
            else:
                self.driver.withdraw()
                self.node_failed(Outcome.FAILED, reason, now_s)
            return True
        other = self.other_node(now_s, lambda other: other is not node)
        if other is None:
            return False
        self.move_to(other, reason, now_s, Outcome.FAILED)
        return True

    def move_to(self, other: Node, reason: str, now_s: float, outcome: Outcome = Outcome.CANCELLED) -> None:
        """Leave the current node for this one. `outcome`: that of the current node."""
        self.driver.withdraw()
        failover = self.give_up(outcome, reason, now_s)
        if other.is_full:  # a queued request got its last place when this one left its node
            self._try_next(outcome, now_s)
            return
        self._dispatcher.counters.retries += 1
        self._try(failover.decision, other, now_s)

    def other_node(self, now_s: float, accepts: Callable[[Node], bool]) -> Node | None:
        """Return a node that is up, by a new decision; None if there is none or the request may not be sent again."""
        dispatcher = self._dispatcher
        if not dispatcher.may_try_another(self):
            return None
        return self.get_failover().other_node(dispatcher.router, self.request, self.lookup, now_s, accepts)

    def hedge_failed(
        self, outcome: Outcome, reason: str, now_s: float, *,
        status: int = 0, retry_after_s: int | None = None, error: NodeError | None = None,
    ) -> None:  # fmt: skip
        """The second node failed. The first one still has the request. `status`, `error`: as for `node_failed`."""
        hedge, self.hedge = self.hedge, None
        assert hedge is not None
        failover = self.get_failover()
        failover.add(hedge.node, outcome)
        if outcome is Outcome.BUSY:
            failover.busy(hedge.node, status, retry_after_s, now_s)
        self._dispatcher.close_ticket(
            self, hedge, outcome, now_s, reason, role=HEDGE, status=status, error=error
        )  # fmt: skip

    def hedge_refused(self, reason: str, now_s: float) -> None:
        """No process listens at the second node's address."""
        assert self.hedge is not None
        node = self.hedge.node
        self.hedge_failed(Outcome.FAILED, reason, now_s)
        self._dispatcher.fleet.check_failed(node, now_s, reason)

    def hedge_started(
        self, status: int, retry_after_s: int | None, now_s: float, error: NodeError | None = None
    ) -> bool:
        """The second node's first byte arrived before that of the first one. Return whether its response counts."""
        if status >= 500 or status == 429:
            outcome, reason = Outcome.BUSY if status in (429, 503) else Outcome.FAILED, f"HTTP status {status}"
            self.hedge_failed(outcome, reason, now_s, status=status, retry_after_s=retry_after_s, error=error)
            return False
        slow = self.ticket
        # The end of a response that is not streamed says little about its node.
        outcome = Outcome.FAILED if self.request.streams or slow.expected_ttft_ms else Outcome.CANCELLED
        reason = f"no first byte after {now_s - slow.opened_s:.1f} s; another node answered"
        self.driver.withdraw()
        self.give_up(outcome, reason, now_s)
        self._promote_hedge()
        self._dispatcher.counters.hedges_won += 1
        return self.response_started(status, None, now_s, error)

    def _promote_hedge(self) -> None:
        assert self.hedge is not None
        self.ticket, self.hedge, self.overdue_s = self.hedge, None, 0.0
        self._dispatcher.waiting[self] = None
        self.driver.promote_hedge()

    def _withdraw_hedge(self, now_s: float) -> None:
        hedge, self.hedge = self.hedge, None
        assert hedge is not None
        self.driver.withdraw_hedge()
        self._dispatcher.close_ticket(self, hedge, Outcome.CANCELLED, now_s)

    @property
    def expected_output(self) -> float:
        """Expected output tokens."""
        request = self.request
        lengths = self._dispatcher.router.output_lengths
        return lengths.expected(request.model, request.tenant, request.max_output_tokens)

    # The response.

    def response_started(
        self, status: int, retry_after_s: int | None, now_s: float, error: NodeError | None = None
    ) -> bool:
        """The node's first byte arrived. Return whether its response goes to the client; else the request moved on.
        `error`: what the body of an error response says."""
        if status >= 500 or status == 429:
            outcome, reason = _FAILED, _REASONS.get(status) or f"HTTP status {status}"
            if status in (429, 503):
                outcome, reason = _BUSY, f"HTTP status {status}: the node is busy"
            self.node_failed(outcome, reason, now_s, status=status, retry_after_s=retry_after_s, error=error)
            return False
        self._dispatcher.waiting.pop(self, None)
        if self.hedge is not None:
            self._withdraw_hedge(now_s)
        if self._failover is not None:
            self._judge(self._failover)
        if self.split is not None:
            self.split.response_started(status, now_s)
        self.answering = True
        self.status = status
        if status >= 400:
            self._error = error
        return True

    def first_token(self, now_s: float) -> None:
        """The response's first token arrived, or as much of the response as the router can see of it: its first byte,
        or the end of a response without tokens."""
        ticket, served = self.ticket, self.status < 400
        ticket.first_token(now_s, served)
        ticket.node.last_progress_s = now_s
        if served:
            ticket.node.last_served_s = now_s
        if self.split is not None and served:
            self.split.first_token(now_s)
        demand_meter = self._dispatcher.router.demand_meter
        if demand_meter is not None and served and (self.request.streams or not isinstance(ticket, Dispatch)):
            demand_meter.record_ttft((now_s - self.request.arrived_s) * 1000.0)
        self._dispatcher.node_freed(ticket.node, now_s)

    @property
    def wants_usage(self) -> bool:
        """Whether somebody uses the token counts that the response reports."""
        if self.status >= 400:
            return False
        charge = self.charge
        return (
            self._dispatcher.request_completed is not None
            or isinstance(self.ticket, Dispatch)
            or self.captured is not None
            or self.history is not None
            or (charge is not None and charge.wants_usage)
        )

    def response_ended(self, usage: Usage | None, now_s: float) -> None:
        """The client has the whole response."""
        if not self.ticket.first_token_s:
            self.first_token(now_s)
        self.done = True
        charge, ticket, dispatcher = self.charge, self.ticket, self._dispatcher
        demand_meter = dispatcher.router.demand_meter
        if usage is not None:
            if self.split is not None:
                usage = self.split.usage(usage)
            self.reported = usage
            prompt_tokens, cached_tokens, output_tokens = usage
            if charge is not None:
                charge.settle(prompt_tokens, output_tokens)
            if isinstance(ticket, Dispatch):
                ticket.record_usage(prompt_tokens, cached_tokens, output_tokens, now_s)
                if demand_meter is not None and output_tokens is not None:
                    demand_meter.record_output(ticket.tokens, output_tokens)
                    if self.request.streams and output_tokens > 1:
                        demand_meter.record_inter_token((now_s - ticket.first_token_s) * 1000.0 / (output_tokens - 1))
        outcome, status, reason = Outcome.OK, self.status, ""
        if status >= 400:
            outcome, reason = Outcome.REJECTED, f"HTTP status {status}"
            if charge is not None:
                charge.settle(0, 0)  # the request counts, but it used no tokens
        else:
            ticket.node.last_served_s = now_s
            if demand_meter is not None:
                demand_meter.record_latency((now_s - self.request.arrived_s) * 1000.0)
        ticket.node.last_progress_s = now_s
        dispatcher.close_ticket(self, ticket, outcome, now_s, reason, status=status, error=self._error)
        self._complete_entry(outcome, now_s)
        dispatcher.counters.responses[status] += 1
        if dispatcher.request_completed is not None and outcome is Outcome.OK:
            dispatcher.request_completed(self, now_s)

    def response_broke(self, reason: str, now_s: float) -> None:
        """The node failed after the client received a part of the response."""
        self.done = True
        dispatcher = self._dispatcher
        dispatcher.close_ticket(self, self.ticket, Outcome.BROKEN, now_s, reason, status=self.status)
        self._complete_entry(Outcome.BROKEN, now_s)
        dispatcher.counters.interrupted += 1

    def end_late(self, error: DeadlinePassed, now_s: float) -> None:
        """A deadline of the request has passed. The tenant is charged for the work of the nodes. A node has failed only
        if it looks as if it hangs."""
        driver, dispatcher = self.driver, self._dispatcher
        if self.answering:
            self.done = True  # before the client's connection is closed
            if driver.cut(error):
                dispatcher.counters.interrupted += 1
                self.abandon(now_s, "the deadline has passed")
            else:
                self.done = False
            return
        self.done = True
        driver.withdraw()
        dispatcher.waiting.pop(self, None)
        if self.hedge is not None:
            self._withdraw_hedge(now_s)
        if self.split is not None:
            self.split.abandon(now_s)
        ticket = self.ticket
        # If the node looks as if it hangs, this counts as its failure: with deadlines, no request waits for a timeout.
        outcome = _FAILED if dispatcher.hedging.is_overdue(self, now_s) else Outcome.CANCELLED
        dispatcher.close_ticket(self, ticket, outcome, now_s, "the deadline has passed")
        self.status = driver.reject(error)
        self._complete_entry(outcome, now_s)

    def client_left(self, now_s: float) -> None:
        self.abandon(now_s)
        self._dispatcher.counters.disconnects += 1

    def abandon(self, now_s: float, reason: str = "") -> None:
        """Release what the request holds, in whatever state it is."""
        self.done = True
        dispatcher = self._dispatcher
        if not self.tried:
            dispatcher.admission.queue.cancel(self)
            if self.charge is not None:
                self.charge.cancel()
            self._capture(Outcome.CANCELLED, now_s)
            return
        dispatcher.waiting.pop(self, None)
        if self.hedge is not None:
            self._withdraw_hedge(now_s)
        if self.split is not None:
            self.split.abandon(now_s)
        dispatcher.close_ticket(self, self.ticket, Outcome.CANCELLED, now_s, reason)
        self._complete_entry(Outcome.CANCELLED, now_s)

    def _complete_entry(self, outcome: Outcome, now_s: float) -> None:
        if self.deadline_slot:
            self._dispatcher.deadlines.forget(self)
        if self._entry is not None:
            journal = self._dispatcher.journal
            assert journal is not None
            journal.complete(self._entry, self, outcome, now_s)
        if self.captured is not None:
            self._capture(outcome, now_s)

    def _capture(self, outcome: Outcome | None, now_s: float) -> None:
        """The request has ended: hand it to the capture of traffic. `outcome`: None if no node got it."""
        captured, self.captured = self.captured, None
        capture = self._dispatcher.capture
        if captured is not None and capture is not None:
            capture(self, captured, outcome, now_s)
