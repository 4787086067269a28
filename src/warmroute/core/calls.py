"""A request's tries, from admission to its end: the next node after a failure, and pairs of a prefill and a decode
node.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from warmroute._kernel import FIRST_TOKEN_STEPS
from warmroute.core.brain import Dispatcher
from warmroute.core.decision import Decision
from warmroute.core.failed_tries import DECODE, HEDGE, PREFILL, FailedTry, NodeError, ServerError
from warmroute.core.health import HealthState
from warmroute.core.messages import Lookup, Outcome, RoutingRequest
from warmroute.core.node import Node, Ticket
from warmroute.core.overdue import HALF_EMPTY, HANGS_S, LONG_OUTPUT
from warmroute.core.pairs import Pair
from warmroute.core.rate_limits import Charge
from warmroute.core.rejections import (
    AllNodesBusy,
    AllNodesFailed,
    AllNodesUnavailable,
    DeadlinePassed,
    FailedOnEveryNode,
    NotAdmitted,
    RoutingError,
)
from warmroute.core.router import Router
from warmroute.core.speeds import transfer_ms
from warmroute.core.tickets import AttemptHistory, DecodeDispatch, Dispatch, PrefillDispatch
from warmroute.event_log import EventLog

# Which node a request is sent to after one has failed, and which error its client gets if all have. No I/O.
#
#     order   the decision's fallbacks; then nodes that came up meanwhile; then those that are only suspected to be down
#     never   draining nodes, nodes that are confirmed down, nodes that failed at this request before, and nodes that
#             need a prefill node if the request may not be split, and nodes with `max_inflight` requests: the client
#             then
#             gets 429 if no other node is left
#
# A node that is busy (429, or 503 with `Retry-After`) is asked last for as long as its `Retry-After` says. After
# MAX_BUSY_ANSWERS such answers to one request it is not asked at all, so that an overloaded fleet does not also get
# every request once for each node.
#
# A request is poison if two nodes answered it with 5xx that serve other requests: then it is at fault itself. It is
# sent to no further node, and its failures count for no node's health. So a failure of a node that serves other
# requests is judged only once the request has been answered elsewhere, or has failed.

MAX_BUSY_ANSWERS: Final = 3
"""After this many busy answers, a request skips nodes that recently answered another request as busy."""


@dataclass(slots=True, eq=False)
class Failover:
    """Created when the first node of a request fails."""

    decision: Decision
    """The one that the next node is taken from."""
    failed: list[Node] = field(default_factory=list)
    """Nodes that the request was sent to in vain, busy ones included."""
    at_fault: list[Node] = field(default_factory=list)
    """Those of them for whose health the attempt counts as a failure."""
    server_errors: list[ServerError] = field(default_factory=list)
    """Those that are not judged."""
    _fallbacks: list[Node] | None = None
    """The best one last."""
    _busy: int = 0
    _unavailable: int = 0
    _retry_after_s: int | None = None
    _skipped_full: bool = False
    """Whether a node that was not tried has as many requests as it may have."""

    # What the nodes answered.

    def add(self, node: Node, outcome: Outcome) -> None:
        """The request's attempt on this node ended without a response."""
        self.failed.append(node)
        if outcome is Outcome.FAILED:
            self.at_fault.append(node)

    def busy(self, node: Node, status: int, retry_after_s: int | None, now_s: float) -> None:
        """The node answered 429 or 503; status 0: the router itself lacks files, ports or memory to connect to it."""
        if status != 429 and retry_after_s is None:
            self._unavailable += 1
            return
        self._busy += 1
        if retry_after_s is not None:
            retry_after_s = max(1, retry_after_s)
            self._retry_after_s = min(self._retry_after_s or retry_after_s, retry_after_s)
        node.busy_until_s = now_s + (retry_after_s or 1)

    def may_be_poison(self, node: Node, failed_s: float, reason: str) -> bool:
        """A node that serves other requests answered with 5xx: the request may be at fault. Return False if the node
        did that before."""
        errors = self.server_errors
        if any(error.node is node for error in errors):
            return False
        errors.append(ServerError(node, failed_s, reason))
        return True

    @property
    def is_poison(self) -> bool:
        return len(self.server_errors) > 1

    def error(self) -> RoutingError:
        """Return why the request gets no node."""
        if self.is_poison:
            return FailedOnEveryNode(len({error.node for error in self.server_errors} | set(self.failed)))
        retry_after_s = self._retry_after_s
        if self._busy == len(self.failed) or self._skipped_full:
            return AllNodesBusy(retry_after_s or 1)
        if self._busy + self._unavailable == len(self.failed):
            return AllNodesUnavailable(retry_after_s or 1)
        return AllNodesFailed(len(self.failed), retry_after_s or 1 if self._busy else None)

    # The next node.

    def next_node(self, router: Router, request: RoutingRequest, lookup: Lookup | None, now_s: float) -> Node | None:
        """Return None if no eligible node is left, or if the request's deadline has passed."""
        self._skipped_full = False  # `other_node` may have met a node that was full then
        if self._is_late(request, now_s):
            return None
        fallbacks = self._fallbacks
        if fallbacks is None:
            fallbacks = self._fallbacks = self.decision.fallbacks()
            fallbacks.sort(key=lambda node: node.busy_until_s > now_s)
            fallbacks.reverse()
        while fallbacks:
            node = fallbacks.pop()
            if node.health.state is HealthState.UP and self._may_try(node, request, now_s):
                return node
        return self._from_new_decision(router, request, lookup, now_s)

    def _from_new_decision(
        self, router: Router, request: RoutingRequest, lookup: Lookup | None, now_s: float
    ) -> Node | None:
        last = [node for node in router.usable_nodes(request) if self._may_try(node, request, now_s)]
        if not last:
            return None
        try:
            decision = self.decision = router.decide(request, now_s, lookup)
        except RoutingError:
            return None
        ranked = (node for node in (decision.node, *decision.fallbacks()) if self._may_try(node, request, now_s))
        return next(ranked, last[0])

    def other_node(
        self,
        router: Router,
        request: RoutingRequest,
        lookup: Lookup | None,
        now_s: float,
        accepts: Callable[[Node], bool],
    ) -> Node | None:
        """Return a node that is up and that the request was not sent to, by a new decision; None if there is none."""

        def may_try(node: Node) -> bool:
            return node.health.state is HealthState.UP and self._may_try(node, request, now_s) and accepts(node)

        if self._is_late(request, now_s) or not any(map(may_try, router.usable_nodes(request))):
            return None
        try:
            decision = router.decide(request, now_s, lookup)
        except RoutingError:
            return None
        node = next(filter(may_try, (decision.node, *decision.fallbacks())), None)
        if node is not None:
            self.decision, self._fallbacks = decision, None
        return node

    def _may_try(self, node: Node, request: RoutingRequest, now_s: float) -> bool:
        return (
            not node.draining
            and not node.health.confirmed_down
            and node not in self.failed
            and not self._is_full(node)
            and (request.may_split or not node.needs_partner)
            and (self._busy < MAX_BUSY_ANSWERS or node.busy_until_s <= now_s)
        )

    def _is_full(self, node: Node) -> bool:
        if node.is_full:
            self._skipped_full = True
        return node.is_full

    @staticmethod
    def _is_late(request: RoutingRequest, now_s: float) -> bool:
        return bool(request.deadline_s and now_s >= request.deadline_s) or bool(
            request.total_deadline_s and now_s >= request.total_deadline_s
        )


# A request that one node prefills and another one decodes, until its response begins. No I/O.
#
#     prefilling      the prefill node has the request, with one output token
#     transferring    its answer has come; the decode node fetches the KV cache and begins to answer
#     over            the response goes to the client, or the decode node has the request alone
#
# Rules:
# 1. If the prefill node fails, goes down, or looks as if it hangs, the decode node prefills the prompt itself, at once.
#    The prefill node's failure counts for its own health.
# 2. If the transfer fails (the decode node answers with an error, or its prefill node goes down), the decode node gets
#    the request again, alone. That is not the decode node's failure: the next one would be.
# 3. If the decode node fails, the request goes to another decode node: with the same KV cache as long as no decode
#    request was sent, since the engine may release it once it was fetched; else the prefill node gets the request
#    again,
#    and has the prompt cached.
# 4. A ticket is open on each node that has the request, and on the decode node from the beginning: its memory is taken.
# 5. When the prompt is prefilled, another decode node may have become cheaper: then the ticket moves there.
#
# A decode node that cannot prefill (Node.needs_partner) gets its request at the same time as the prefill node. Where
# that fails, both get it again, with another prefill node.

log = EventLog("warmroute.routing")

TRANSFERRED: Final = "transferred"
PREFILL_FAILED: Final = "prefill_failed"
PREFILL_SLOW: Final = "prefill_slow"
NOT_SUPPORTED: Final = "not_supported"
TRANSFER_FAILED: Final = "transfer_failed"
OUTCOMES: Final = (TRANSFERRED, PREFILL_FAILED, PREFILL_SLOW, NOT_SUPPORTED, TRANSFER_FAILED)
"""How the prefill on another node ended, in the metrics."""


UNSUPPORTED_S: Final = 60.0
"""A node whose answer had no KV transfer parameters prefills for no other node for this time."""
UNFINISHED: Final = (None, "length", "not_finished")
"""How an answer ends that another node could continue. Else it ended with its first token: nothing is to transfer."""


class Phase(enum.Enum):
    PREFILLING = "prefilling"
    TRANSFERRING = "transferring"
    OVER = "over"


class SplitRequest:
    __slots__ = (
        "_attempts", "_decision", "_dispatcher", "cached_tokens", "decode_sent", "failed_prefill", "pair", "phase",
        "prefill_ticket", "sent_s", "transfer",
    )  # fmt: skip

    def __init__(
        self, attempts: Attempts, dispatcher: Dispatcher, decision: Decision, pair: Pair,
        failed_prefill: tuple[Node, ...] = (),
    ) -> None:  # fmt: skip
        self._attempts = attempts
        self._dispatcher = dispatcher
        self._decision = decision
        self.pair = pair
        self.failed_prefill = failed_prefill
        """Prefill nodes that failed at this request."""
        self.phase = Phase.OVER
        self.prefill_ticket: Ticket
        self.transfer: Any = None
        """What the prefill node's response says about its KV cache, for the driver."""
        self.decode_sent = False
        """Whether a decode node may have fetched the KV cache."""
        self.sent_s = 0.0
        """When the decode request was sent."""
        self.cached_tokens: int | None = None
        """Prompt tokens that the prefill node reported as cached."""

    # Sending.

    def begin(self, node: Node, now_s: float) -> None:
        """Send the request to the prefill node; `node` will decode."""
        attempts, dispatcher = self._attempts, self._dispatcher
        attempts.split = self
        self.phase = Phase.PREFILLING
        self.pair.prefill_node.transfer_tokens += self.pair.transfer_tokens
        self.prefill_ticket = dispatcher.router.dispatch(self._decision, self.pair.prefill_node, now_s, PrefillDispatch)
        self.reserve(node, now_s)
        attempts.driver.send_prefill(self.pair.prefill_node, node)
        if node.needs_partner and self.phase is Phase.PREFILLING:
            self.decode_sent = True
            self.sent_s = now_s
            attempts.driver.send(node)

    def reserve(self, node: Node, now_s: float) -> None:
        """Open the ticket on the node that will decode."""
        attempts, dispatcher = self._attempts, self._dispatcher
        is_first = not attempts.tried
        ticket = attempts.ticket = dispatcher.router.dispatch(self._decision, node, now_s, DecodeDispatch)
        attempts.overdue_s = 0.0
        attempts.tried += 1
        self._wait()
        dispatcher.splits[attempts] = None
        if isinstance(ticket, DecodeDispatch):
            if is_first and self._may_move:
                ticket.hold()
            elif node is not self._decision.node:
                self._expect_transfer(ticket, now_s)

    def _wait(self) -> None:
        """Put the request behind those that were sent before its ticket was opened."""
        waiting = self._dispatcher.waiting
        waiting.pop(self._attempts, None)
        waiting[self._attempts] = None

    def _expect_transfer(self, ticket: DecodeDispatch, now_s: float) -> None:
        """Expect the transfer to another decode node than that of the decision, which lacks other tokens."""
        query, pair, tokens = self._decision.query, self.pair, float(ticket.missing_tokens)
        if query is None or self.phase is Phase.OVER:
            return
        speed = query.group.transfer_speeds.between(pair.prefill_node.island, ticket.node.island)
        pair.prefill_node.transfer_tokens += tokens - pair.transfer_tokens
        ms = transfer_ms(speed.ms_per_token(now_s), tokens)
        self.pair = Pair(pair.prefill_node, tokens, pair.price, ms, pair.alone_ms)

    @property
    def _may_move(self) -> bool:
        """Whether the decode node is chosen a second time."""
        attempts = self._attempts
        return self.pair.price is not None and attempts.tried == 1 and not attempts.ticket.node.needs_partner

    def _choose_decode_node(self, now_s: float) -> None:
        """The prompt is prefilled. Move the ticket if another decode node is cheaper by now."""
        attempts, dispatcher = self._attempts, self._dispatcher
        ticket = attempts.ticket
        if not self._may_move:
            return
        node = dispatcher.router.decode_node(self._decision, self.pair, ticket.node, now_s)
        if node is ticket.node:
            return
        moved = attempts.ticket = dispatcher.router.dispatch(self._decision, node, now_s, DecodeDispatch, counted=True)
        self._wait()
        if isinstance(moved, DecodeDispatch):
            self._expect_transfer(moved, now_s)
            if isinstance(ticket, DecodeDispatch):
                moved.take_counts(ticket)
        dispatcher.close_ticket(attempts, ticket, Outcome.CANCELLED, now_s, sent=False)

    def _begin_decode(self) -> None:
        self.phase = Phase.TRANSFERRING
        query = self._decision.query
        if isinstance(ticket := self._attempts.ticket, DecodeDispatch) and query is not None:
            ticket.begin_decode(query.lookup.cache_group if query.lookup is not None else "")

    def send_decode(self, now_s: float) -> None:
        self._begin_decode()
        self.sent_s = now_s
        self.decode_sent = True  # the driver clears it if it could not connect
        self._attempts.driver.send(self._attempts.ticket.node)

    @property
    def is_current(self) -> bool:
        """Whether the request is still split this way. What the driver says about an earlier pair is ignored."""
        return self._attempts.split is self

    # From the driver.

    def prefill_ended(
        self, transfer: Any, usage: Usage | None, now_s: float, finish_reason: str | None = None
    ) -> None:  # fmt: skip
        """The prefill node has answered. `transfer`: None if its answer does not say where its KV cache is.
        `finish_reason`: that of an answer without `transfer`."""
        if self.phase is not Phase.PREFILLING or not self.is_current:
            return
        ticket, concurrent = self.prefill_ticket, self._attempts.ticket.node.needs_partner
        ticket.node.last_served_s = now_s
        if transfer is None and not concurrent:
            ticket.first_token(now_s)
            if finish_reason in UNFINISHED:
                self._ban(ticket.node, now_s)
            self._fall_back(NOT_SUPPORTED, Outcome.OK, "no KV transfer parameters", now_s)
            return
        ticket.first_token(now_s)
        if usage is not None:
            self.cached_tokens = usage[1]
            if isinstance(ticket, Dispatch):
                ticket.record_usage(usage[0], usage[1], None, now_s)
        ticket.node.last_progress_s = now_s
        self.transfer = transfer
        if concurrent:
            self._begin_decode()
        else:
            self._choose_decode_node(now_s)
        self._close_prefill(Outcome.OK, now_s)
        if not concurrent:
            self.send_decode(now_s)

    @staticmethod
    def _ban(node: Node, now_s: float) -> None:
        """Let a node prefill for no other one for a while."""
        if not node.no_transfer_until_s:
            log.warning(
                "kv_transfer_missing",
                "The node's answer has no KV transfer parameters. Check that its engine has a KV connector.",
                node=node.name,
            )
        node.no_transfer_until_s = now_s + UNSUPPORTED_S

    def prefill_refused(self, reason: str, now_s: float) -> None:
        """No process listens at the prefill node's address."""
        if not self.is_current:
            return
        node = self.prefill_ticket.node
        self._dispatcher.fleet.check_failed(node, now_s, reason)
        if self.phase is Phase.PREFILLING and self.prefill_ticket.node is node:  # else it has left with the others
            self.prefill_failed(Outcome.FAILED, reason, now_s)

    def prefill_failed(
        self, outcome: Outcome, reason: str, now_s: float, status: int = 0, error: NodeError | None = None
    ) -> None:
        if self.phase is Phase.PREFILLING and self.is_current:
            self._fall_back(PREFILL_FAILED, outcome, reason, now_s, status, error)

    def transfer_failed(self, reason: str, now_s: float, status: int = 0, error: NodeError | None = None) -> None:
        """The decode node answered with an error, or the KV cache is gone. The client has received nothing."""
        if self.phase is not Phase.OVER and self.is_current:
            self._fall_back(TRANSFER_FAILED, Outcome.CANCELLED, reason, now_s, status, error)

    # Nodes that go down, and nodes that hang.

    @property
    def prefill_node(self) -> Node | None:
        """The node that the response still depends on, besides the decode node."""
        return self.pair.prefill_node if self.phase is not Phase.OVER else None

    def leave(self, reason: str, now_s: float) -> None:
        """The prefill node is down or was removed."""
        if self.phase is Phase.PREFILLING:
            self._fall_back(PREFILL_FAILED, Outcome.FAILED, reason, now_s)
        elif self.phase is Phase.TRANSFERRING:
            name = self.pair.prefill_node.name
            self._fall_back(TRANSFER_FAILED, Outcome.CANCELLED, f"its prefill node {name} failed: {reason}", now_s)

    def check(self, now_s: float) -> None:
        """Leave a prefill node that looks as if it hangs. Called every hedging.CHECK_S."""
        if self.phase is Phase.PREFILLING:
            ticket = self.prefill_ticket
            price = self.pair.price
            expected_ms = max(ticket.expected_ttft_ms, price.wait + price.prefill if price is not None else 0.0)
            if self._hangs(ticket.node, ticket.opened_s, expected_ms, now_s):
                reason = f"no answer of the prefill node after {now_s - ticket.opened_s:.1f} s"
                self._fall_back(PREFILL_SLOW, Outcome.FAILED, reason, now_s)
        elif self.phase is Phase.TRANSFERRING and self._hangs(
            self.pair.prefill_node, self.sent_s, self._expected_decode_ms(), now_s
        ):
            self._fall_back(
                TRANSFER_FAILED, Outcome.CANCELLED, f"no answer {now_s - self.sent_s:.1f} s after the prefill", now_s
            )

    def _expected_decode_ms(self) -> float:
        attempts, pair = self._attempts, self.pair
        node, query = attempts.ticket.node, self._decision.query
        room_ms = pair.price.room if pair.price is not None else 0.0
        expected_ms = pair.transfer_ms + room_ms
        if query is not None:
            steps = FIRST_TOKEN_STEPS
            if not attempts.request.streams:
                steps += attempts.request.max_output_tokens or LONG_OUTPUT * attempts.expected_output
            expected_ms += steps * query.group.decode_speed.token_ms(node.context_tokens) * node.speed.factor
        return expected_ms

    def _hangs(self, prefill_node: Node, since_s: float, expected_ms: float, now_s: float) -> bool:
        """Return whether a step of the request is overdue, and its prefill node shows no sign of life."""
        config = self._dispatcher.hedging.config
        if now_s < since_s + max(config.min_delay_s, config.factor * expected_ms / 1000.0):
            return False
        silent_s = now_s - max(since_s, prefill_node.last_progress_s)
        if prefill_node.health.check_has_timed_out:
            return silent_s >= config.min_delay_s
        busy = prefill_node.waiting or prefill_node.kv_usage > HALF_EMPTY or not prefill_node.speed.answers
        return silent_s >= (HANGS_S if busy else config.min_delay_s)

    # The end.

    def response_started(self, status: int, now_s: float) -> None:
        if self.phase is Phase.OVER:
            return
        if status >= 400 and self.phase is Phase.PREFILLING:  # nothing was prefilled: it says nothing about speed
            self.abandon(now_s)
            return
        if self.phase is Phase.PREFILLING:  # the decode node has the KV cache before the prefill node has answered
            self._attempts.driver.withdraw_prefill()
            self.prefill_ticket.first_token(now_s)
            self._begin_decode()
            self._close_prefill(Outcome.OK, now_s)
        self._end(TRANSFERRED)

    def first_token(self, now_s: float) -> None:
        """The response's first token arrived: learn how long the transfer took, if the response is streamed."""
        attempts = self._attempts
        query, node = self._decision.query, attempts.ticket.node
        if not attempts.request.streams or not isinstance(attempts.ticket, DecodeDispatch):
            return
        if query is None or not self.sent_s or node.needs_partner or attempts.ticket.has_hidden_hits:
            return
        group = query.group
        steps_ms = FIRST_TOKEN_STEPS * group.decode_speed.token_ms(node.context_tokens) * node.speed.factor
        took_ms = (now_s - self.sent_s) * 1000.0 - node.round_trip_ms - steps_ms
        speed = group.transfer_speeds.between(self.pair.prefill_node.island, node.island)
        speed.learn(self.pair.transfer_tokens, took_ms, now_s)

    def usage(self, reported: Usage) -> Usage:
        """Return the tokens that count for a response. A decode node reports what it had cached before the transfer."""
        if not isinstance(self._attempts.ticket, DecodeDispatch):
            return reported
        return reported[0], self.cached_tokens, reported[2]

    def abandon(self, now_s: float, frees: bool = True) -> None:
        """The request ends, or leaves both nodes: free the prefill node. The caller closes the decode node's ticket."""
        if self.phase is Phase.PREFILLING:
            self._attempts.driver.withdraw_prefill()
            self._close_prefill(Outcome.CANCELLED, now_s, frees=frees)
        self.transfer = None
        self._is_over()

    def _is_over(self) -> None:
        if self.phase is not Phase.OVER:
            self.phase = Phase.OVER
            self.pair.prefill_node.transfer_tokens -= self.pair.transfer_tokens
            self._dispatcher.splits.pop(self._attempts, None)

    def _end(self, outcome: str) -> None:
        self._is_over()
        self._dispatcher.counters.split_requests[outcome] += 1

    def _close_prefill(
        self, outcome: Outcome, now_s: float, reason: str = "", status: int = 0, error: NodeError | None = None,
        frees: bool = True,
    ) -> None:  # fmt: skip
        self._dispatcher.close_ticket(
            self._attempts, self.prefill_ticket, outcome, now_s, reason,
            frees=frees, role=PREFILL, status=status, error=error,
        )  # fmt: skip

    def _fall_back(
        self, why: str, outcome: Outcome, reason: str, now_s: float, status: int = 0, error: NodeError | None = None
    ) -> None:
        """Let the decode node serve the request alone. `outcome`: that of the prefill node, if it has not answered."""
        attempts, dispatcher, prefilling = self._attempts, self._dispatcher, self.phase is Phase.PREFILLING
        ticket = attempts.ticket
        node = ticket.node
        self._end(why)
        if prefilling:
            attempts.driver.withdraw_prefill()
        attempts.driver.withdraw()
        self.transfer = None
        failed = (*self.failed_prefill, self.pair.prefill_node)
        self.failed_prefill = failed
        dispatcher.waiting.pop(attempts, None)
        # Its place on the node stays its own: another request may not take it meanwhile.
        if prefilling:
            dispatcher.close_ticket(attempts, attempts.ticket, Outcome.CANCELLED, now_s, frees=False)
            self._close_prefill(outcome, now_s, "" if outcome is Outcome.OK else reason, status, error, frees=False)
        else:
            dispatcher.close_ticket(
                attempts, attempts.ticket, Outcome.CANCELLED, now_s, reason,
                frees=False, role=DECODE, status=status, error=error,
            )  # fmt: skip
        # Closing a ticket can take a node down: then the request has ended with it, or was sent elsewhere.
        if not attempts.done and self.is_current and attempts.ticket is ticket:
            log.debug("split_request_fell_back", node=node.name, reason=reason)
            self._send_to_decode_node(node, failed, now_s)
        dispatcher.node_freed(node, now_s)
        if prefilling:
            dispatcher.node_freed(self.pair.prefill_node, now_s)

    def _send_to_decode_node(self, node: Node, failed: tuple[Node, ...], now_s: float) -> None:
        attempts, dispatcher = self._attempts, self._dispatcher
        poison = attempts.get_failover().is_poison
        partner = dispatcher.router.partner(self._decision, node, failed) if node.needs_partner and not poison else None
        if partner is not None:
            SplitRequest(attempts, dispatcher, self._decision, Pair(partner, 0.0), failed).begin(node, now_s)
            return
        if poison:
            attempts.node_failed(Outcome.BUSY, "the request fails on every prefill node", now_s)
        elif node.needs_partner:
            attempts.node_failed(Outcome.BUSY, "no prefill node is available", now_s)
        else:
            attempts.send_alone(self._decision, node, now_s)


def try_pair(attempts: Attempts, dispatcher: Dispatcher, decision: Decision, node: Node, now_s: float) -> bool:
    """Send a request to two nodes if the decision says so, or if `node` needs another one. Return False if `node`
    serves it alone."""
    needs_partner = node.needs_partner
    splits = decision.pair is not None or attempts.split is not None or needs_partner
    if splits and _find_pair(attempts, dispatcher, decision, node, now_s):
        return True
    if needs_partner:
        attempts.ticket = dispatcher.router.dispatch(decision, node, now_s, DecodeDispatch)
        attempts.tried += 1
        attempts.node_failed(Outcome.BUSY, "no prefill node is available", now_s)
    return needs_partner


def _find_pair(attempts: Attempts, dispatcher: Dispatcher, decision: Decision, node: Node, now_s: float) -> bool:
    """Send a request to `node` and to a prefill node. Return False if there is none: then `node` gets the request
    alone, or not at all if it needs a partner."""
    if not attempts.request.may_split:
        return False
    split, pair = attempts.split, decision.pair
    failed: tuple[Node, ...] = split.failed_prefill if split is not None else ()
    if split is not None and node is split.pair.prefill_node:  # a mixed node: it has the prompt, and needs no transfer
        split.failed_prefill = (*failed, node)
        split.abandon(now_s)
        return False
    same_engine = split is not None and node.engine == split.pair.prefill_node.engine
    if split is not None and not failed and node.transfers_kv and same_engine:
        if split.phase is Phase.PREFILLING and not node.needs_partner:  # only the decode node has failed
            split.reserve(node, now_s)
            return True
        if split.transfer is not None and not split.decode_sent:
            split.reserve(node, now_s)
            split.send_decode(now_s)
            return True
        pair = Pair(split.pair.prefill_node, 0.0)
    elif node is not decision.node:
        pair = None
    if pair is None or pair.prefill_node in failed or not _is_usable(pair.prefill_node):
        partner = dispatcher.router.partner(decision, node, failed) if node.needs_partner else None
        if partner is None:
            if split is not None:
                split.abandon(now_s)
            return False
        pair = Pair(partner, 0.0)
    if split is not None:
        split.abandon(now_s, frees=False)
    SplitRequest(attempts, dispatcher, decision, pair, failed).begin(node, now_s)
    if split is not None:
        dispatcher.node_freed(split.pair.prefill_node, now_s)
    return True


def _is_usable(prefill_node: Node) -> bool:
    """Whether a prefill node may get a request, perhaps seconds after it was chosen."""
    return not (prefill_node.draining or prefill_node.health.confirmed_down or prefill_node.is_full)


# What the prompt doctor learns of a request that it sampled.


class SampledPrompt(Protocol):
    """A request whose prompt the prompt doctor compares with others."""

    def completed(
        self, attempts: Attempts, key: tuple[str, str], prompt_tokens: int, cached_tokens: int | None,
        ms_per_token: float, step_ms: float,
    ) -> None:  # fmt: skip
        """The response is complete. `key`: the model and route that its tokens count for. `cached_tokens`: None if
        neither the node nor the router knows them. A prefill takes `ms_per_token`, and at least `step_ms`."""


# What does the I/O of a request's attempts: the HTTP edge over sockets, replay in virtual time.


class AttemptDriver(Protocol):
    def send(self, node: Node) -> None:
        """Send the request to this node. The ticket is open."""

    def withdraw(self) -> None:
        """Give up the attempt that `send` began: the node must stop, and nothing that it sends counts."""

    def send_prefill(self, prefill_node: Node, node: Node) -> None:
        """Let `prefill_node` prefill the prompt for `node`. `send` follows; its request names the KV cache then."""

    def withdraw_prefill(self) -> None: ...

    def send_hedge(self, node: Node) -> None:
        """Send the request to this node, too."""

    def withdraw_hedge(self) -> None: ...

    def promote_hedge(self) -> None:
        """The hedge takes the place of the attempt that `send` began, which has failed or was withdrawn."""

    def reject(self, why: RoutingError) -> int:
        """End the request with this error: the client has received nothing. Return the HTTP status."""

    def cut(self, why: RoutingError) -> bool:
        """End the request with this error: the client has received a part of the response. Return False, and end
        nothing, if only the end of the connection is missing."""

    def internal_error(self, error: Exception) -> None:
        """The router itself failed while it let the request out of the queue."""


# One request's attempts on nodes, from admission to its end: order, retries, ticket, usage, journal. No I/O.
#
#     queued      admission holds the request; it has no node
#     trying      it was sent to a node; the client has received nothing
#     answering   the node's response goes to the client
#     done        the ticket is closed, the rate limit is settled, the journal has the outcome
#
# Rules:
# 1. A node that fails while the request is `trying` leads to the next node (`Failover`), until no eligible node
#    is left or `max_attempts` nodes were tried.
# 2. While the request is `trying`, it leaves a node that goes down, and it may be sent to a second node as well
#    (core/overdue.py). The response that begins first counts.
# 3. From the first byte of the response on there is no retry: a failure then ends the request as broken.
#    The first token may come later: an engine may send a role or a comment first. Speed is learned from the first
#    token.
#    A deadline may end or move the request (core/decision.py).
# 4. A ticket is open exactly while a node has the request. Whatever ends the request closes it.
#
# An `AttemptDriver` does the I/O: the HTTP edge over sockets, replay in virtual time. It calls the methods below when
# something happens, and the state machine calls the driver's `send` and `reject`.

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
    """Whether Envoy has the request and sends it to the next node itself (core/held_requests.py)."""
    poison: bool = False
    """Whether nodes that serve other requests failed at this one (`Failover`)."""
    repeatable: bool = True
    """Whether the request may be sent to a second node while the first one may still execute it."""
    history: AttemptHistory | None = None
    """Set if the request is traced."""
    sample: SampledPrompt | None
    """Set if the prompt doctor compares the prompt with others."""
    deadline_slot: int = 0
    """When its deadlines are looked at next (core/decision.py); 0: they end nothing."""
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
