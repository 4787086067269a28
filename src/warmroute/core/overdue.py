"""When a try is late, hangs, or may miss a deadline, and what may be done about it. No I/O.

A hedge (a second node gets the request as well) is sent if all of these hold:
1. The client has received nothing, and sending the request twice changes nothing.
2. Its first token is overdue: it takes longer than `min_delay_s` and than `factor` times what the router expected.
   There is an estimate if the policy reads prompts and the node has answered before. For a response that is not
   streamed, it includes the output.
3. Its node looks as if it hangs. One of:
     - its last health check timed out, and it made no progress for `min_delay_s`;
     - it is not busy: the engine reports no queue, and a KV cache that is half empty. Without streaming, it also made
       no progress for as long as the request is expected to take;
     - it is busy, or there is no estimate, but it made no progress for HANGS_S.
   Progress is the beginning or the end of any response, and a change of its KV usage. A busy node may just be slow, and
   hedges would make a saturated fleet slower still.
4. Another node is up and has room.
5. The call has no hedge yet, and the budget allows one: `max_ratio` of all calls, and MAX_BURST at once.

The response that begins first goes to the client, and the other try is cancelled. If the hedge wins, the other node has
failed at this call: a node that loses `Health.consecutive_failures` times in a row is down.

With `on_deadline = "end"`, `Deadlines` watches what was sent. Before the first byte of its response, a call whose first
token is overdue by the router's estimate goes to another node that has room and is expected to meet the deadline. When
the deadline has passed, the call ends. A response that has begun ends when the deadline of the whole response passes.
"""

from __future__ import annotations

from math import ceil, floor, inf
from typing import TYPE_CHECKING, Final

from warmroute._kernel import FIRST_TOKEN_STEPS
from warmroute.config import Hedging as HedgingConfig
from warmroute.core.decision import Decision
from warmroute.core.node import Node, Ticket
from warmroute.core.pairs import Pair
from warmroute.core.rejections import DeadlinePassed

if TYPE_CHECKING:
    from warmroute.core.calls import Call

MAX_BURST: Final = 10.0
"""Hedges that may be sent at once: enough to notice that a node hangs."""
CHECK_S: Final = 0.2
"""Time between two searches for overdue calls."""
HALF_EMPTY: Final = 0.5
"""KV usage up to which a node is not busy."""
HANGS_S: Final = 30.0
"""A busy node that makes no progress for so long hangs."""
LONG_OUTPUT: Final = 4.0
"""A response without `max_tokens` may be this many times as long as expected."""
OVERDUE: Final = 1.5
"""With a deadline, a first token is overdue after this many times the time that the router expected: estimates of a
healthy node are rarely more wrong."""
MIN_OVERDUE_S: Final = 0.1
SLOT_S: Final = 0.05
"""Time between two looks at the deadlines."""


class OverdueRule:
    def __init__(self, config: HedgingConfig) -> None:
        self.config = config
        self.budget = MAX_BURST
        self._sent = 0

    def refill(self, sent: int) -> None:
        """`sent`: calls that the router has sent since its start."""
        self.budget = min(MAX_BURST, self.budget + self.config.max_ratio * (sent - self._sent))
        self._sent = sent

    def is_overdue(self, call: Call, ticket: Ticket, expected_output: float, now_s: float) -> bool:
        """Return whether a call's node looks as if it hangs at it. `expected_output`: tokens of its answer."""
        min_delay_s = self.config.min_delay_s
        opened_s, node = ticket.opened_s, ticket.node
        if not call.repeatable or now_s < opened_s + min_delay_s:
            return False
        if not call.overdue_s:
            call.overdue_s = opened_s + self.config.factor * _expected_ms(call, ticket, expected_output) / 1000.0
        if now_s < call.overdue_s:
            return False
        silent_s = now_s - max(opened_s, node.last_progress_s)
        if node.health.check_has_timed_out:
            return silent_s >= min_delay_s
        if node.waiting or node.kv_usage > HALF_EMPTY or call.overdue_s == opened_s:
            return silent_s >= HANGS_S
        return call.request.streams or silent_s >= call.overdue_s - opened_s

    def hangs(self, prefill_node: Node, since_s: float, expected_ms: float, now_s: float) -> bool:
        """Return whether a step of a pair is overdue, and its prefill node shows no sign of life."""
        config = self.config
        if now_s < since_s + max(config.min_delay_s, config.factor * expected_ms / 1000.0):
            return False
        silent_s = now_s - max(since_s, prefill_node.last_progress_s)
        if prefill_node.health.check_has_timed_out:
            return silent_s >= config.min_delay_s
        busy = prefill_node.waiting or prefill_node.kv_usage > HALF_EMPTY or not prefill_node.speed.answers
        return silent_s >= (HANGS_S if busy else config.min_delay_s)


def _expected_ms(call: Call, ticket: Ticket, expected_output: float) -> float:
    """Return when the router expected the first byte, after the ticket was opened; 0.0 without an estimate."""
    request, decision = call.request, call.decision
    node, expected_ms = ticket.node, ticket.expected_ttft_ms
    if not expected_ms or not node.speed.answers or decision is None:
        return 0.0
    if decision.node is node and decision.price is not None:
        expected_ms = max(expected_ms, decision.price.own)
    if not request.streams and (query := decision.query) is not None:
        output = request.max_output_tokens or LONG_OUTPUT * expected_output
        expected_ms += output * query.group.decode_speed.token_ms(node.context_tokens) * node.speed.factor
    return expected_ms


def prefill_ms_of(pair: Pair, ticket: Ticket) -> float:
    """Return how long a pair's prefill is expected to take."""
    price = pair.price
    return max(ticket.expected_ttft_ms, price.wait + price.prefill if price is not None else 0.0)


def decode_ms_of(decision: Decision, pair: Pair, node: Node, call: Call, expected_output: float) -> float:
    """Return how long a pair's decode node is expected to take until its first byte, from the end of the prefill on."""
    query, request = decision.query, call.request
    expected_ms = pair.transfer_ms + (pair.price.room if pair.price is not None else 0.0)
    if query is not None:
        steps = float(FIRST_TOKEN_STEPS)
        if not request.streams:
            steps += request.max_output_tokens or LONG_OUTPUT * expected_output
        expected_ms += steps * query.group.decode_speed.token_ms(node.context_tokens) * node.speed.factor
    return expected_ms


class Deadlines:
    """The calls that a node has and that their deadlines end, by when to look at them."""

    def __init__(self) -> None:
        self._slots: dict[int, dict[Call, None]] = {}
        """By time, in units of SLOT_S."""
        self._checked = 0
        """The last slot that was checked."""
        self.watched = 0

    def watch(self, call: Call, now_s: float) -> None:
        """A node has the call."""
        if not self._checked:
            self._checked = floor(now_s / SLOT_S)
        self.watch_again(call, now_s)

    def watch_again(self, call: Call, now_s: float) -> None:
        at_s = _next_look_s(call, now_s)
        if at_s == inf:
            return
        slot = max(self._checked + 1, ceil(at_s / SLOT_S))
        call.deadline_slot = slot
        self._slots.setdefault(slot, {})[call] = None
        self.watched += 1

    def forget(self, call: Call) -> None:
        """The call has ended, or is looked at."""
        slot = self._slots.get(call.deadline_slot)
        if slot is not None and call in slot:
            del slot[call]
            self.watched -= 1
            if not slot:
                del self._slots[call.deadline_slot]
        call.deadline_slot = 0

    def due(self, now_s: float) -> list[Call]:
        """Return the calls whose time has come. Ask every SLOT_S."""
        now = floor(now_s / SLOT_S)
        found: list[Call] = []
        if self.watched:
            if now - self._checked < len(self._slots):
                for number in range(self._checked + 1, now + 1):
                    found += self._slots.get(number, ())
            else:
                for number in sorted(number for number in self._slots if number <= now):
                    found += self._slots[number]
        self._checked = now
        return found


def deadline_passed(call: Call, now_s: float) -> DeadlinePassed | None:
    """Return which deadline has passed; that of the first token only while no byte of the response has come."""
    request = call.request
    if request.deadline_s and now_s >= request.deadline_s and not call.answering:
        return DeadlinePassed(True, (request.deadline_s - request.arrived_s) * 1000.0)
    if request.total_deadline_s and now_s >= request.total_deadline_s:
        return DeadlinePassed(False, (request.total_deadline_s - request.arrived_s) * 1000.0)
    return None


def may_miss_deadline(call: Call, now_s: float) -> bool:
    """Return whether the first token is overdue, so that another node may be faster."""
    overdue_s = _overdue_s(call) if not call.answering else 0.0
    return bool(overdue_s) and now_s >= overdue_s


def _next_look_s(call: Call, now_s: float) -> float:
    """Return when the call has to be looked at: when a deadline passes, or earlier if it may have to move."""
    request = call.request
    due_s = request.total_deadline_s or inf
    if call.answering:
        return due_s
    due_s = min(due_s, request.deadline_s or inf)
    overdue_s = _overdue_s(call)
    return min(due_s, max(overdue_s, now_s + MIN_OVERDUE_S)) if overdue_s else due_s


def _overdue_s(call: Call) -> float:
    """Return when the first token is overdue; 0.0 without an estimate, or if the call cannot go to another node."""
    main, decision = call.main, call.decision
    if main is None or decision is None or call.hedge is not None or call.split is not None or not call.repeatable:
        return 0.0
    ticket = main.ticket
    expected_ms = ticket.expected_ttft_ms
    if not expected_ms or not ticket.node.speed.answers or not call.request.streams:
        return 0.0
    if decision.node is ticket.node and decision.price is not None:
        expected_ms = max(expected_ms, decision.price.own)
    return ticket.opened_s + max(MIN_OVERDUE_S, OVERDUE * expected_ms / 1000.0)
