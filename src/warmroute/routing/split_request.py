"""A request that one node prefills and another one decodes, until its response begins. No I/O.

    prefilling      the prefill node has the request, with one output token
    transferring    its answer has come; the decode node fetches the KV cache and begins to answer
    over            the response goes to the client, or the decode node has the request alone

Rules:
1. If the prefill node fails, goes down, or looks as if it hangs, the decode node prefills the prompt itself, at once.
   The prefill node's failure counts for its own health.
2. If the transfer fails (the decode node answers with an error, or its prefill node goes down), the decode node gets
   the request again, alone. That is not the decode node's failure: the next one would be.
3. If the decode node fails, the request goes to another decode node: with the same KV cache as long as no decode
   request was sent, since the engine may release it once it was fetched; else the prefill node gets the request again,
   and has the prompt cached.
4. A ticket is open on each node that has the request, and on the decode node from the beginning: its memory is taken.
5. When the prompt is prefilled, another decode node may have become cheaper: then the ticket moves there.

A decode node that cannot prefill (Node.needs_partner) gets its request at the same time as the prefill node. Where that
fails, both get it again, with another prefill node.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any, Final

from warmroute._kernel import FIRST_TOKEN_STEPS
from warmroute.event_log import EventLog
from warmroute.fleet.failed_tries import DECODE, PREFILL, NodeError
from warmroute.fleet.kv_transfer import transfer_ms
from warmroute.fleet.node import Node, Outcome
from warmroute.fleet.ticket import Ticket
from warmroute.routing.decision import Decision
from warmroute.routing.dispatch import Dispatch
from warmroute.routing.hedging import HALF_EMPTY, HANGS_S, LONG_OUTPUT
from warmroute.routing.pair_dispatch import DecodeDispatch, PrefillDispatch
from warmroute.routing.pairs import Pair

if TYPE_CHECKING:
    from warmroute.routing.attempts import Attempts, Usage
    from warmroute.routing.dispatcher import Dispatcher

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
