"""The kernel's accounting equals the reference in Python, for any sequence of events."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
from accounting_reference import MAX_OUTCOMES, ReferenceNode, ReferenceTicket
from hypothesis import given
from hypothesis import strategies as st

from warmroute._kernel import DecodeSpeedState, NodeState, SpeedState, TicketState
from warmroute.config import Health, NodeConfig
from warmroute.core.messages import Outcome
from warmroute.core.node import Node, Ticket
from warmroute.core.speeds import DecodeSpeed

NODE_FIELDS = (
    "pending_work", "kv_delta", "context_tokens", "kv_new", "inflight", "unstarted", "unstreamed_prefills",
    "arrival_rate", "arrival_s", "last_ticket_s", "latency_ms", "outcomes", "ttft_counts", "ttft_sum_ms",
)  # fmt: skip
SPEED_FIELDS = (
    "ms_per_token", "factor", "answers", "_work", "_ms", "_at_s", "_last_first_token_s", "_uncharged_ms",
    "_carried_ms_per_token", "learned_ms_per_token", "lone_prefills", "lone_work", "lone_ms", "lone_xx", "lone_xy",
    "timed_answers", "early_share", "long_prefills", "long_work", "long_ms", "_step_ms",
)  # fmt: skip
DECODE_SPEED_FIELDS = ("least_ms", "mean_ms", "slope_ms", "mean_context", "answers", "_xx", "_xy")

times = st.sampled_from([0.0, 0.001, 0.05, 0.7, 20.0]) | st.floats(0.0, 5.0)
events = st.one_of(
    st.tuples(st.just("send"), st.booleans(), st.integers(0, 50_000), st.floats(0.0, 1.0)),
    st.tuples(st.just("unread")),
    st.tuples(st.just("first"), st.integers(0, 99), st.booleans()),
    st.tuples(st.just("answer"), st.integers(0, 99), st.none() | st.integers(0, 3000)),
    st.tuples(st.just("hide"), st.integers(0, 99)),
    st.tuples(st.just("reveal"), st.integers(0, 99), st.floats(0.0, 50_000.0)),
    st.tuples(st.just("release"), st.integers(0, 99), st.sampled_from(Outcome)),
    st.tuples(st.just("expect")),
    st.tuples(st.just("poll")),
    st.tuples(st.just("replace"), st.booleans()),
)


def make_node() -> Node:
    return Node(NodeConfig(url="http://n:1"), Health())


class Both:
    def __init__(self, round_trip_ms: float, other_load: int) -> None:
        self.node, self.reference = make_node(), ReferenceNode(round_trip_ms, other_load)
        self.node.round_trip_ms, self.node.other_load = round_trip_ms, other_load
        self.decode_speed, self.reference_decode_speed = DecodeSpeed(), DecodeSpeed()
        self.tickets: list[tuple[TicketState, ReferenceTicket]] = []
        self.now_s = 100.0

    def send(self, streams: bool, tokens: int, cached: float) -> None:
        new = tokens - int(tokens * cached)
        prompt = (streams, tokens, new, new * 1.25)
        ticket = TicketState()
        ticket.open(self.node, self.now_s, self.decode_speed, *prompt)
        self.tickets.append((ticket, ReferenceTicket(self.reference, self.now_s, self.reference_decode_speed, *prompt)))

    def unread(self) -> None:
        ticket = TicketState()
        ticket.open(self.node, self.now_s)
        self.tickets.append((ticket, ReferenceTicket(self.reference, self.now_s, None, True, 0, 0, 0.0)))

    def first(self, at: int, served: bool) -> None:
        for ticket, reference in self.tickets[at : at + 1]:
            ticket.first_token(self.now_s, served)
            reference.first_token(self.now_s, served)
            assert ticket.first_token_s == reference.first_token_s

    def answer(self, at: int, output: int | None) -> None:
        for ticket, reference in self.tickets[at : at + 1]:
            ticket.record_answer(output, self.now_s)
            reference.record_answer(output, self.now_s)

    def hide(self, at: int) -> None:
        for both in self.tickets[at : at + 1]:
            for ticket in both:
                ticket.has_hidden_hits = True

    def reveal(self, at: int, work: float) -> None:
        for ticket, reference in self.tickets[at : at + 1]:
            ticket.reveal_hits(work)
            reference.reveal_hits(work)

    def release(self, at: int, outcome: Outcome) -> None:
        for ticket, reference in self.tickets[at : at + 1]:
            assert ticket.release(outcome, self.now_s) == reference.release(outcome, self.now_s)

    def expect(self) -> None:
        self.node.assume_prefilled(self.now_s)
        self.reference.assume_prefilled(self.now_s)

    def replace(self, on: bool) -> None:
        for speed in (self.node.speed, self.reference.speed):
            if on:
                speed.replace(0.07)
            else:
                speed.restore()

    def poll(self) -> None:
        self.node.update_load(0, 0, 0.0, self.now_s)
        self.node.other_load = self.reference.other_load
        self.reference.polled(self.now_s)

    def assert_equal(self) -> None:
        for one, other, names in (
            (self.node, self.reference, NODE_FIELDS),
            (self.node.speed, self.reference.speed, SPEED_FIELDS),
            (self.decode_speed, self.reference_decode_speed, DECODE_SPEED_FIELDS),
        ):
            for name in names:
                assert getattr(one, name) == getattr(other, name), name
        for after_s in (0.0, 0.2, 3.0, 1000.0):
            now_s = self.now_s + after_s
            assert self.node.remaining_work(now_s) == self.reference.remaining_work(now_s)
        for ticket, reference in self.tickets:
            assert (ticket._is_open, ticket._pending_work, ticket.tokens) == (
                reference.open,
                reference.work,
                reference.tokens,
            )


@given(st.lists(st.tuples(times, events), max_size=60), st.sampled_from([0.0, 40.0]), st.integers(0, 2))
def test_the_kernel_equals_the_reference(
    steps: list[tuple[float, tuple[Any, ...]]], round_trip_ms: float, other_load: int
) -> None:
    both = Both(round_trip_ms, other_load)
    for after_s, (event, *details) in steps:
        both.now_s += after_s
        if details and event in ("first", "answer", "release", "hide", "reveal") and both.tickets:
            details[0] %= len(both.tickets)
        getattr(both, event)(*details)
        both.assert_equal()
    for at in range(len(both.tickets)):
        both.release(at, Outcome.CANCELLED)
    both.assert_equal()
    node = both.node
    assert node.inflight == node.unstreamed_prefills == node.context_tokens == node.kv_new == 0 == node.pending_work


def test_the_work_left_falls_while_the_first_prompt_is_prefilled() -> None:
    """At 0.05 ms per token, prompts of 4,000 and 2,000 tokens of work take 200 and 100 ms."""
    node, decode_speed = make_node(), DecodeSpeed()
    first, second = TicketState(), TicketState()
    first.open(node, 1.0, decode_speed, True, 4000, 4000, 4000.0)
    second.open(node, 1.0, decode_speed, True, 2000, 2000, 2000.0)
    left = [node.remaining_work(1.0 + at_ms / 1000.0) for at_ms in (0, 50, 100, 190, 390, 410)]
    assert left == pytest.approx([6000, 5000, 4000, 3000, 3000, 6000]), "a quarter is left until its first token"
    first.release(Outcome.CANCELLED, 1.2)
    assert node.remaining_work(1.25) == pytest.approx(1000), "the second one began when the first one ended"
    del second  # dropped without being closed
    gc.collect()
    assert node.remaining_work(1.25) == 2000


def test_the_end_of_another_prompt_is_not_the_turn_of_the_first_one() -> None:
    """The first prompt should take 200 ms. Others, behind it, end while its node hangs."""
    node, decode_speed = make_node(), DecodeSpeed()
    first, behind, last = TicketState(), TicketState(), TicketState()
    for ticket in (first, behind, last):
        ticket.open(node, 1.0, decode_speed, True, 4000, 4000, 4000.0)
    behind.release(Outcome.CANCELLED, 1.3)
    assert node.remaining_work(1.35) == pytest.approx(5000)
    last.release(Outcome.FAILED, 1.39)
    assert node.remaining_work(1.41) == 4000, "it is late"


def test_a_request_without_a_prefill_is_no_prompt_that_others_wait_for() -> None:
    node, decode_speed = make_node(), DecodeSpeed()
    decoded, prompt = TicketState(), TicketState()
    decoded.open(node, 1.0, decode_speed, True, 4000, 0, 0.0)
    prompt.open(node, 1.0, decode_speed, True, 4000, 4000, 4000.0)
    assert node.remaining_work(1.1) == pytest.approx(2000)
    decoded.first_token(1.15)
    assert node.remaining_work(1.18) == pytest.approx(1000), "its first token says nothing about the other prompt"


@pytest.mark.parametrize("first_streams", [False, True])
def test_an_unstreamed_prompt_is_due_after_what_is_left_of_those_before_it(first_streams: bool) -> None:
    """Prompts of 200 ms, each of which is sent when the last one is half done."""
    node, decode_speed = make_node(), DecodeSpeed()
    tickets = [TicketState() for _ in range(20)]
    for at, ticket in enumerate(tickets):
        now_s = 1.0 + 0.2 * at - 0.1 * bool(at)
        node.assume_prefilled(now_s)
        ticket.open(node, now_s, decode_speed, first_streams and at == 0, 4000, 4000, 4000.0)
    node.assume_prefilled(1.0 + 0.2 * 20 + 0.01)
    assert node.unstreamed_prefills == 0, "all of them are done as soon as the node could do it"


def test_unstreamed_prompts_are_due_earlier_once_work_ahead_ended_early() -> None:
    node, decode_speed = make_node(), DecodeSpeed()
    long, *others = [TicketState() for _ in range(4)]
    long.open(node, 1.0, decode_speed, False, 100_000, 100_000, 100_000.0)  # 5 s
    others[0].open(node, 1.1, decode_speed, False, 2000, 2000, 2000.0)
    long.release(Outcome.CANCELLED, 1.2)
    others[1].open(node, 1.3, decode_speed, False, 2000, 2000, 2000.0)
    others[2].open(node, 1.35, decode_speed, False, 2000, 2000, 2000.0)
    node.assume_prefilled(1.75)
    assert node.unstreamed_prefills == 0 and node.pending_work == 0


def test_a_prompt_is_alone_if_the_next_one_comes_in_the_second_half_of_its_time() -> None:
    node, decode_speed = make_node(), DecodeSpeed()
    for at in range(3):
        first, second = TicketState(), TicketState()
        first.open(node, 10.0 * at + 1.0, decode_speed, True, 4000, 4000, 4000.0)
        second.open(node, 10.0 * at + (1.15 if at < 2 else 1.05), decode_speed, True, 4000, 4000, 4000.0)
        first.first_token(10.0 * at + 1.2)
        assert node.speed.lone_prefills == min(at + 1, 2)
        for ticket in (first, second):
            ticket.release(Outcome.CANCELLED, 10.0 * at + 1.3)


def test_a_ticket_that_is_never_closed_is_no_leak() -> None:
    node, decode_speed = make_node(), DecodeSpeed()

    class UnstreamedTicket(Ticket):
        __slots__ = ("__weakref__",)

        def __init__(self, node: Node) -> None:
            self.open(node, 1.0, decode_speed, False, 100, 100, 100.0)

    ticket = weakref.ref(UnstreamedTicket(node))
    assert ticket() is not None and node.unstreamed_prefills == 1, "the node waits for its prefill"
    node.assume_prefilled(1e9)
    assert ticket() is None and node.unstreamed_prefills == 0
    ticket = weakref.ref(UnstreamedTicket(node))
    del node
    gc.collect()
    assert ticket() is None


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        (lambda ticket, node: ticket.open(None, 1.0), TypeError),
        (lambda ticket, node: ticket.open(node), TypeError),
        (lambda ticket, node: ticket.open(), TypeError),
        (lambda ticket, node: ticket.open(node, "1"), TypeError),
        (lambda ticket, node: ticket.open(node, 1.0, DecodeSpeed(), True, 1), TypeError),
        (lambda ticket, node: ticket.open(node, 1.0, SpeedState(), True, 1, 1, 1.0), TypeError),
        (lambda ticket, node: ticket.open(NodeState(), 1.0), ValueError),
        (lambda ticket, node: ticket.first_token(1.0), ValueError),
        (lambda ticket, node: ticket.record_answer(1, 1.0), ValueError),
        (lambda ticket, node: ticket.release(0, 1.0), ValueError),
    ],
)
def test_wrong_arguments_change_nothing(wrong: Callable[[Any, Any], object], error: type[Exception]) -> None:
    node = make_node()
    with pytest.raises(error):
        wrong(TicketState(), node)
    assert node.inflight == 0 and node.arrival_rate == 0.0


def test_a_ticket_is_opened_once_and_released_with_a_valid_outcome() -> None:
    node, ticket = make_node(), TicketState()
    ticket.open(node, 1.0)
    with pytest.raises(ValueError, match="open already"):
        ticket.open(node, 1.0)
    for outcome in (-1, len(node.outcomes)):
        with pytest.raises(ValueError, match="outcome"):
            ticket.release(outcome, 1.0)
    with pytest.raises(TypeError):
        ticket.first_token()  # type: ignore[call-arg]
    assert node.inflight == 1 and ticket.release(Outcome.OK, 2.0) and not ticket.release(Outcome.OK, 3.0)
    assert node.outcomes == [1] + [0] * (MAX_OUTCOMES - 1)
    assert isinstance(DecodeSpeed(), DecodeSpeedState)
