"""A decision: which node serves, the prices of all candidates, fallbacks, and deadlines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil, floor, inf
from typing import TYPE_CHECKING, Final

from warmroute._kernel import Prices
from warmroute.core.decision_record import DecisionRecord, Price
from warmroute.core.messages import RoutingRequest
from warmroute.core.node import Node
from warmroute.core.rejections import DeadlinePassed, DeadlineUnreachable
from warmroute.core.routing_context import Query

if TYPE_CHECKING:
    from warmroute.core.brain import Dispatcher
    from warmroute.core.calls import Attempts
    from warmroute.core.pairs import Pair


# A decision: the chosen node, the fallbacks in order, and the reason.


class Decision:
    """The price and the order of the fallbacks are computed when first needed."""

    node: Node
    policy: str
    reason: str
    order: Callable[[], Sequence[Node]] | None
    """Returns all nodes, the best first; None: they are ordered by price."""
    prices: Prices | None
    """One for each of the `candidates`; None if the policy has no prices."""
    candidates: tuple[Node, ...]
    index: int
    """The chosen node's index in `candidates`; -1 if it was not chosen by price."""
    cache_counts: bool
    """Whether cached prefixes lowered the prices."""
    query: Query | None = None
    """What the decision is based on."""
    pair: Pair | None
    """Set if another node prefills the prompt, and `node` decodes."""
    _price: Price | None = None

    def __init__(
        self,
        node: Node,
        policy: str,
        reason: str,
        order: Callable[[], Sequence[Node]] | None = None,
        prices: Prices | None = None,
        candidates: tuple[Node, ...] = (),
        index: int = -1,
        cache_counts: bool = True,
        pair: Pair | None = None,
    ) -> None:
        self.node = node
        self.policy = policy
        self.reason = reason
        self.order = order
        self.prices = prices
        self.candidates = candidates
        self.index = index
        self.cache_counts = cache_counts
        self.pair = pair

    @property
    def price(self) -> Price | None:
        """The chosen node's price; None if it was not chosen by price."""
        if self._price is None and self.index >= 0:
            if self.pair is not None and self.pair.price is not None:
                return self.pair.price
            assert self.prices is not None
            self._price = tuple.__new__(Price, self.prices[self.index])
        return self._price

    @property
    def entry_node(self) -> Node:
        """The node that gets the request first: its queue is the one to wait for."""
        return self.node if self.pair is None else self.pair.prefill_node

    @property
    def is_full(self) -> bool:
        """Whether a node that the request would be sent to has as many requests as it may have."""
        return self.is_limited and (self.node.is_full or self.entry_node.is_full)

    @property
    def is_limited(self) -> bool:
        """Whether a node that the request would be sent to has a limit of its requests."""
        return self.node.is_limited or (self.pair is not None and self.pair.prefill_node.is_limited)

    def fallbacks(self) -> list[Node]:
        """Return the other candidates, the best first."""
        order = self.order() if self.order is not None else self._by_price()
        return [node for node in order if node is not self.node]

    def _by_price(self) -> list[Node]:
        prices, nodes = self.prices, self.candidates
        assert prices is not None
        return [nodes[index] for index in sorted(range(len(nodes)), key=prices.__getitem__)]

    def with_fallbacks(self, nodes: Sequence[Node]) -> Decision:
        """Return the same decision with `nodes` as further fallbacks, behind its own."""

        def order() -> list[Node]:
            ranked = self.fallbacks()
            return [*ranked, *(node for node in nodes if node not in ranked)]

        return Decision(
            self.node, self.policy, self.reason, order, self.prices, self.candidates, self.index, self.cache_counts,
            pair=self.pair,
        )  # fmt: skip

    def record(self) -> DecisionRecord:
        """Return what the journal keeps."""
        node, query = self.node, self.query
        candidates, reason = self.candidates, self.reason
        tokens, expected_cached = 0, 0.0
        if query is not None:
            if not candidates:
                candidates = query.candidates.nodes
            elif query.conversation is not None and reason == "cheapest" and len(candidates) < len(query.candidates):
                reason = f"stays on {node.island}, its conversation's island"
            lookup = query.lookup
            if lookup is not None:
                tokens = lookup.token_count if lookup.special is None else lookup.special.total_tokens
                if self.index < 0 and (hit := query.hits().get(node.name)) is not None:
                    expected_cached = hit.expected
        record = DecisionRecord(
            node, self.policy, reason, tokens, expected_cached, self.index, (self.prices, candidates), len(candidates),
            self.entry_node.speed.ms_per_token, self.cache_counts, pair=self.pair,
        )  # fmt: skip
        if tokens and query is not None and query.cache_view.stores and query.lookup is not None:
            name = self.entry_node.name
            found = query.cache_view.from_store(query.group.model, query.lookup, name, query.hits().get(name))
            record.store, record.store_tokens = found
        return record


# Whether a request can meet its deadlines on the node chosen for it, and what ends when one has passed. No I/O.
#
#     first token      price.own                                  ≤ time left until it is due        [ms]
#     whole response   price.own + output · token_ms of the node  ≤ time left until it is due        [ms]
#
# For a queued request, the work of the requests ahead of it counts, too. On a node without a measured speed the
# estimate does not count. On an idle node it counts only with `on_deadline = "end"`: any other request may try, which
# corrects a wrong estimate. With `end`, a node that got no request for TRIAL_S may be tried as well, unless the
# estimate is more than HOPELESS times the time left: no estimate is so wrong.
#
# With `end`, `Deadlines` watches what was sent. Before the first byte of its response, a request whose first token is
# overdue by the router's estimate goes to another node that has room and is expected to meet the deadline. When the
# deadline has passed, the request ends. A response that has begun ends when the deadline of the whole response passes.

TRIAL_S: Final = 10.0
HOPELESS: Final = 20.0
OVERDUE: Final = 1.5
"""A first token is overdue after this many times the time that the router expected: estimates of a healthy node are
rarely more wrong."""
MIN_OVERDUE_S: Final = 0.1
CHECK_S: Final = 0.05
"""Time between two calls of `Deadlines.check`."""
MAX_MOVES: Final = 32
"""Requests for which one check looks for another node."""


def check_deadlines(
    request: RoutingRequest, decision: Decision, now_s: float, margin_s: float = 0.0, queue_ms: float = 0.0
) -> DeadlineUnreachable | None:
    """Return the error if the request would miss a deadline, else None.

    `margin_s`: how much earlier than the deadline it has to be. `queue_ms`: work of the queued requests ahead of it.
    """
    price, node = decision.price, decision.node
    expected_ms = decode_ms = 0.0
    counts = bool(node.load) or (request.ends_late and not _may_try(decision, now_s))
    if price is not None and node.speed.answers and counts:
        expected_ms = price.own + queue_ms
        if request.total_deadline_s:
            decode_ms = _decode_ms(decision)
    if request.deadline_s:
        left_ms = (request.deadline_s - now_s - margin_s) * 1000.0
        if expected_ms > left_ms or left_ms <= 0.0:
            return DeadlineUnreachable(True, expected_ms, left_ms)
    if request.total_deadline_s:
        left_ms = (request.total_deadline_s - now_s - margin_s) * 1000.0
        if expected_ms + decode_ms > left_ms or left_ms <= 0.0:
            return DeadlineUnreachable(False, expected_ms + decode_ms, left_ms)
    return None


def missed(request: RoutingRequest, now_s: float) -> DeadlineUnreachable:
    """Return the error of a request that has no node when its deadline passes."""
    first_token = 0.0 < request.deadline_s <= (request.total_deadline_s or inf)
    due_s = request.deadline_s if first_token else request.total_deadline_s
    return DeadlineUnreachable(first_token, 0.0, (due_s - now_s) * 1000.0)


def _may_try(decision: Decision, now_s: float) -> bool:
    """Return whether an idle node may be tried although its estimate is too long."""
    price, node, query = decision.price, decision.node, decision.query
    if price is None or query is None or now_s - node.last_ticket_s < TRIAL_S:
        return False
    return price.own <= HOPELESS * max_ttft_ms(query.request, decision, now_s)


def max_ttft_ms(request: RoutingRequest, decision: Decision, now_s: float) -> float:
    """Return the longest time to first token that meets the request's deadlines on the decision's node."""
    left_s = request.deadline_s - now_s if request.deadline_s else inf
    if request.total_deadline_s:
        left_s = min(left_s, request.total_deadline_s - now_s - _decode_ms(decision) / 1000.0)
    return left_s * 1000.0


def _decode_ms(decision: Decision) -> float:
    """Return how long decoding the expected output takes on the node; 0.0 before the first measurement."""
    price, node, query = decision.price, decision.node, decision.query
    if price is None or query is None or not query.group.decode_speed.answers:
        return 0.0
    return price.output * query.group.decode_speed.token_ms(node.context_tokens) * node.speed.factor


class Deadlines:
    """The requests that a node has and that their deadlines end, by when to look at them."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._slots: dict[int, dict[Attempts, None]] = {}
        """By time, in units of CHECK_S."""
        self._checked = 0
        """The last slot that was checked."""
        self.watched = 0

    def watch(self, attempts: Attempts, now_s: float) -> None:
        """A node has got the request."""
        if not self._checked:
            self._checked = floor(now_s / CHECK_S)
        self._put(attempts, _next_check_s(attempts, now_s))

    def _put(self, attempts: Attempts, at_s: float) -> None:
        if at_s == inf:
            return
        slot = max(self._checked + 1, ceil(at_s / CHECK_S))
        attempts.deadline_slot = slot
        self._slots.setdefault(slot, {})[attempts] = None
        self.watched += 1

    def forget(self, attempts: Attempts) -> None:
        """The request has ended."""
        slot = self._slots.get(attempts.deadline_slot)
        if slot is not None and attempts in slot:
            del slot[attempts]
            self.watched -= 1
            if not slot:
                del self._slots[attempts.deadline_slot]
        attempts.deadline_slot = 0

    def check(self, now_s: float) -> None:
        """End or move the requests whose time has come. Call this every CHECK_S."""
        now = floor(now_s / CHECK_S)
        if not self.watched:
            self._checked = now
            return
        due: list[Attempts] = []
        if now - self._checked < len(self._slots):
            for number in range(self._checked + 1, now + 1):
                due += self._slots.get(number, ())
        else:
            for number in sorted(number for number in self._slots if number <= now):
                due += self._slots[number]
        self._checked = now
        moves = MAX_MOVES
        for attempts in due:
            if not attempts.deadline_slot:  # it ended meanwhile
                continue
            self.forget(attempts)
            try:
                error = _passed(attempts, now_s)
                if error is not None:
                    attempts.end_late(error, now_s)
                elif moves and _is_overdue(attempts, now_s):
                    moves -= 1
                    _move(attempts, self._dispatcher, now_s)
            except Exception as failure:  # ends this request, and no other
                attempts.driver.internal_error(failure)
            if not attempts.done:
                self._put(attempts, _next_check_s(attempts, now_s))


def _passed(attempts: Attempts, now_s: float) -> DeadlinePassed | None:
    """Return which deadline has passed; that of the first token only while no byte of the response has come."""
    request = attempts.request
    if request.deadline_s and now_s >= request.deadline_s and not attempts.answering:
        return DeadlinePassed(True, (request.deadline_s - request.arrived_s) * 1000.0)
    if request.total_deadline_s and now_s >= request.total_deadline_s:
        return DeadlinePassed(False, (request.total_deadline_s - request.arrived_s) * 1000.0)
    return None


def _next_check_s(attempts: Attempts, now_s: float) -> float:
    """Return when the request has to be looked at: when a deadline passes, or earlier if it may have to move."""
    request = attempts.request
    due_s = request.total_deadline_s or inf
    if attempts.answering:
        return due_s
    due_s = min(due_s, request.deadline_s or inf)
    overdue_s = _overdue_s(attempts)
    return min(due_s, max(overdue_s, now_s + MIN_OVERDUE_S)) if overdue_s else due_s


def _overdue_s(attempts: Attempts) -> float:
    """Return when the first token is overdue; 0.0 without an estimate, or if the request cannot go to another node."""
    ticket, decision = attempts.ticket, attempts.decision
    if attempts.hedge is not None or attempts.split is not None or not attempts.repeatable:
        return 0.0
    expected_ms = ticket.expected_ttft_ms
    if not expected_ms or not ticket.node.speed.answers or not attempts.request.streams:
        return 0.0
    if decision.node is ticket.node and decision.price is not None:
        expected_ms = max(expected_ms, decision.price.own)
    return ticket.opened_s + max(MIN_OVERDUE_S, OVERDUE * expected_ms / 1000.0)


def _is_overdue(attempts: Attempts, now_s: float) -> bool:
    overdue_s = _overdue_s(attempts) if not attempts.answering else 0.0
    return bool(overdue_s) and now_s >= overdue_s


def _move(attempts: Attempts, dispatcher: Dispatcher, now_s: float) -> None:
    """Send a request whose first token is overdue to another node, if it is expected in time there."""
    node, request, has_room = attempts.ticket.node, attempts.request, dispatcher.admission.has_room
    other = attempts.other_node(now_s, lambda o: o is not node and not o.needs_partner and has_room(o, now_s))
    if other is None:
        return
    decision = attempts.get_failover().decision
    if decision.node is not other:
        if decision.query is None:
            return
        decision = dispatcher.router.decide_among((other,), decision.query)
    if check_deadlines(request, decision, now_s) is None:
        waited_s = now_s - attempts.ticket.opened_s
        attempts.move_to(other, f"no first token after {waited_s:.1f} s; another node may meet the deadline", now_s)
