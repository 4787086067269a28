"""Routes with `on_deadline = "end"`: what cannot meet its deadline is rejected, what is late ends or moves."""

from __future__ import annotations

from typing import Any

import pytest
from routing_harness import FakeRequest, RoutingHarness
from test_deadlines import set_known_speed

from warmroute.config import Admission as AdmissionConfig
from warmroute.config import Hedging
from warmroute.core.admission import TICK_S
from warmroute.core.decision import TRIAL_S
from warmroute.core.messages import Outcome


class Harness(RoutingHarness):
    def __init__(self, count: int = 2, **more: Any) -> None:
        super().__init__(count, admission=AdmissionConfig(queue_at_router=False), **more)
        for node in self.nodes:
            set_known_speed(node)
            node.last_ticket_s = self.now_s  # it got a request lately

    def late(self, ttft_ms: float = 0.0, total_ms: float = 0.0, tokens: int = 1000, **fields: Any) -> FakeRequest:
        """Send a request that its deadlines end."""
        return self.submit(
            tokens,
            deadline_s=self.now_s + ttft_ms / 1000.0 if ttft_ms else 0.0,
            total_deadline_s=self.now_s + total_ms / 1000.0 if total_ms else 0.0,
            ends_late=True, **fields,
        )  # fmt: skip

    def run(self, seconds: float) -> None:
        for _ in range(round(seconds / TICK_S)):
            self.advance(TICK_S)
            self.tick()

    @property
    def watched(self) -> int:
        assert bool(self.brain.deadlines.watched) == bool(self.brain.deadlines._slots)
        return self.brain.deadlines.watched


def names_first_token(request: FakeRequest) -> bool:
    """Whether its error names the deadline of the first token."""
    return "first token" in request.message


# Rejected at once.


def test_an_idle_node_whose_estimate_is_too_long_gets_nothing() -> None:
    harness = Harness(1)
    rejected = harness.late(ttft_ms=5, tokens=20_000)
    left_ms, expected_ms = rejected.milliseconds
    assert rejected.why == "deadline_ttft" and expected_ms > 900 and left_ms == 5
    assert harness.late(total_ms=5, tokens=20_000).why == "deadline_total"
    assert harness.late(ttft_ms=5000, tokens=20_000).sent == ["n0"]


def test_without_end_an_idle_node_may_be_tried() -> None:
    harness = Harness(1)
    request = harness.submit(20_000, deadline_s=harness.now_s + 0.005)
    harness.run(5.0)
    assert request.sent == ["n0"] and request.reject is None and not request.done and not harness.watched


def test_an_idle_node_is_tried_now_and_then_so_that_a_wrong_estimate_is_corrected() -> None:
    harness = Harness(1)
    assert harness.late(ttft_ms=200, tokens=20_000).why == "deadline_ttft"
    harness.advance(TRIAL_S)
    request = harness.late(ttft_ms=200, tokens=20_000)
    assert request.sent == ["n0"]
    harness.advance(0.1)
    request.answer()
    assert harness.late(ttft_ms=20, tokens=20_000).why == "deadline_ttft"
    harness.advance(TRIAL_S)
    assert harness.late(ttft_ms=0.5, tokens=20_000).why == "deadline_ttft", "no estimate is so wrong"
    assert not harness.watched


def test_a_node_of_unknown_speed_may_be_tried() -> None:
    harness = Harness(1)
    harness.nodes[0].speed.answers = 0
    assert harness.late(ttft_ms=5, tokens=20_000).sent == ["n0"]


# In flight.


def test_a_request_without_a_first_byte_ends_when_its_deadline_has_passed() -> None:
    harness = Harness(1)
    request = harness.late(ttft_ms=700, tokens=4000)
    harness.run(0.65)
    assert request.reject is None and harness.watched == 1
    harness.run(0.1)
    assert request.why == "deadline_exceeded" and request.milliseconds == [700]
    assert request.done and names_first_token(request)
    assert not harness.watched and not harness.nodes[0].outcomes[Outcome.FAILED]
    harness.assert_all_counters_are_zero()


@pytest.mark.parametrize("hangs", [True, False])
def test_a_node_that_hangs_until_the_deadline_has_failed(hangs: bool) -> None:
    """No request waits for a timeout, so the deadline is the only sign. A node that answers others is not at fault."""
    harness = Harness(1, hedging=Hedging(min_delay_s=2.0, factor=5.0))
    node = harness.nodes[0]
    request = harness.late(ttft_ms=4000, tokens=200)
    harness.run(3.5)
    if not hangs:
        node.waiting, node.last_progress_s = 3, harness.now_s
    harness.run(0.7)
    assert request.done and request.why == "deadline_exceeded"
    assert node.outcomes[Outcome.FAILED] == hangs and node.outcomes[Outcome.CANCELLED] == (not hangs)


def test_a_hedge_ends_with_its_request() -> None:
    harness = Harness(2, hedging=Hedging(max_ratio=1.0))
    request = harness.late(total_ms=15_000)
    request.node.speed.answers = 0  # no estimate: it does not move
    harness.advance(10.0)
    harness.fleet.check_timed_out(request.node, harness.now_s)
    harness.look()
    assert request.call.hedge is not None
    harness.run(5.1)
    assert request.why == "deadline_exceeded" and not names_first_token(request)
    harness.assert_all_counters_are_zero()


def test_an_overdue_request_moves_to_a_node_that_meets_the_deadline() -> None:
    harness = Harness(2)
    request = harness.late(ttft_ms=3000, tokens=4000)
    first = request.node
    harness.run(0.8)
    assert len(request.sent) == 2 and request.sent[1] != first.name and request.events == ["withdraw"]
    assert request.call.tried == 2 and harness.counters.retries == 1 and harness.watched == 1
    assert first.inflight == 0 and not first.outcomes[Outcome.FAILED], "a slow node has not failed"
    request.answer()
    assert request.reject is None and not harness.watched
    harness.assert_all_counters_are_zero()


@pytest.mark.parametrize(
    "why", ["no other node", "the other is late", "the other is busy", "not repeatable", "attempts"]
)
def test_a_request_stays_where_moving_does_not_help(why: str) -> None:
    harness = Harness(1 if why == "no other node" else 2, max_attempts=1 if why == "attempts" else 0)
    request = harness.late(ttft_ms=1000, tokens=4000, repeatable=why != "not repeatable")
    other = next((node for node in harness.nodes if node is not request.node), None)
    if why == "the other is late":
        assert other is not None
        other.speed.guess(5.0)
    elif why == "the other is busy":
        assert other is not None
        harness.busy(other, 40_000)
    harness.run(0.95)
    assert len(request.sent) == 1 and request.events == [] and request.reject is None
    harness.run(0.1)
    assert request.why == "deadline_exceeded"


def test_a_request_moves_once_to_each_node_at_most() -> None:
    harness = Harness(3)
    request = harness.late(ttft_ms=20_000, tokens=4000)
    harness.run(19.9)
    assert sorted(request.sent) == ["n0", "n1", "n2"] and request.call.tried == 3
    harness.run(0.2)
    assert request.why == "deadline_exceeded"
    harness.assert_all_counters_are_zero()


def test_a_response_that_has_begun_ends_only_with_the_deadline_of_the_whole() -> None:
    harness = Harness(1)
    request = harness.late(ttft_ms=500, total_ms=8000)
    other = harness.late(ttft_ms=500)
    for one in (request, other):
        one.first_token()
    harness.run(7.9)
    assert request.cut is None
    harness.run(0.2)
    assert request.cut is not None and request.cut.code == "deadline_exceeded" and "whole" in request.cut.message
    assert request.done and harness.counters.interrupted == 1
    assert other.cut is None and not harness.watched
    other.answer()
    harness.assert_all_counters_are_zero()


def test_an_ended_request_is_not_watched_any_more() -> None:
    harness = Harness(1)
    for number in range(100):
        request = harness.late(ttft_ms=1000 + number)
        assert harness.watched == 1
        if number % 3 == 0:
            request.answer()
        elif number % 3 == 1:
            request.cancel()
        else:
            request.fail()
            assert request.done
        assert not harness.watched
    harness.assert_all_counters_are_zero()


def test_a_failure_after_the_deadline_ends_the_request() -> None:
    harness = Harness(2)
    request = harness.late(ttft_ms=500)
    harness.advance(0.6)
    request.fail()
    assert request.why == "upstream_failed" and not harness.watched


def test_absurd_deadlines_cost_nothing() -> None:
    harness = Harness(1)
    errors: list[str] = []
    for ms in (1e-300, 1e-9, 0.001, 1e12, 1e300):
        harness.nodes[0].speed.answers = 0
        request = harness.late(ttft_ms=ms)
        harness.run(0.1)
        errors.append(request.why)
        if not request.why:
            request.answer()
    assert errors == ["deadline_ttft", "deadline_exceeded", "deadline_exceeded", "", ""]
    harness.advance(1e6)  # the process was stopped
    harness.tick()
    assert not harness.watched


def test_many_late_requests_end_in_one_check() -> None:
    harness = Harness(1)
    harness.nodes[0].speed.answers = 0
    sent = [harness.late(ttft_ms=10 + number) for number in range(1000)]
    assert harness.watched == 1000
    harness.run(1.2)
    assert all(request.why == "deadline_exceeded" for request in sent) and not harness.watched
    harness.assert_all_counters_are_zero()
