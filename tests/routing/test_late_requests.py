"""Routes with `on_deadline = "end"`: what cannot meet its deadline is rejected, what is late ends or moves."""

from __future__ import annotations

from typing import Any

import pytest
from attempt_harness import AttemptHarness, NotingDriver
from test_deadlines import set_known_speed

from warmroute.config import Admission as AdmissionConfig
from warmroute.config import Hedging
from warmroute.core.calls import Attempts
from warmroute.core.decision import CHECK_S, TRIAL_S
from warmroute.core.messages import Outcome
from warmroute.core.rejections import AllNodesFailed, DeadlinePassed, DeadlineUnreachable, RoutingError


class Harness(AttemptHarness):
    def __init__(self, count: int = 2, **more: Any) -> None:
        super().__init__(count, admission=AdmissionConfig(queue_at_router=False), **more)
        for node in self.nodes:
            set_known_speed(node)
            node.last_ticket_s = self.now_s  # it got a request lately

    def late(self, ttft_ms: float = 0.0, total_ms: float = 0.0, **fields: Any) -> tuple[Attempts, NotingDriver]:
        """Send a request that its deadlines end."""
        return self.start(
            deadline_s=self.now_s + ttft_ms / 1000.0 if ttft_ms else 0.0,
            total_deadline_s=self.now_s + total_ms / 1000.0 if total_ms else 0.0,
            ends_late=True, **fields,
        )  # fmt: skip

    def run(self, seconds: float) -> None:
        for _ in range(round(seconds / CHECK_S)):
            self.advance(CHECK_S)
            self.dispatcher.deadlines.check(self.now_s)

    @property
    def watched(self) -> int:
        assert bool(self.dispatcher.deadlines.watched) == bool(self.dispatcher.deadlines._slots)
        return self.dispatcher.deadlines.watched


# Rejected at once.


def test_an_idle_node_whose_estimate_is_too_long_gets_nothing() -> None:
    harness = Harness(1)
    with pytest.raises(DeadlineUnreachable) as rejected:
        harness.late(ttft_ms=5, tokens=20_000)
    assert rejected.value.expected_ms > 900 and rejected.value.left_ms == pytest.approx(5)
    with pytest.raises(DeadlineUnreachable):
        harness.late(total_ms=5, tokens=20_000)
    assert harness.late(ttft_ms=5000, tokens=20_000)[1].sent == ["n0"]


def test_without_end_an_idle_node_may_be_tried() -> None:
    harness = Harness(1)
    attempts, driver = harness.start(20_000, deadline_s=harness.now_s + 0.005)
    harness.run(5.0)
    assert driver.sent == ["n0"] and driver.error is None and not attempts.done and not harness.watched


def test_an_idle_node_is_tried_now_and_then_so_that_a_wrong_estimate_is_corrected() -> None:
    harness = Harness(1)
    with pytest.raises(DeadlineUnreachable):
        harness.late(ttft_ms=200, tokens=20_000)
    harness.advance(TRIAL_S)
    attempts, driver = harness.late(ttft_ms=200, tokens=20_000)
    assert driver.sent == ["n0"]
    harness.advance(0.1)
    harness.answer(attempts)
    with pytest.raises(DeadlineUnreachable):
        harness.late(ttft_ms=20, tokens=20_000)
    harness.advance(TRIAL_S)
    with pytest.raises(DeadlineUnreachable):
        harness.late(ttft_ms=0.5, tokens=20_000)  # no estimate is so wrong
    assert not harness.watched


def test_a_node_of_unknown_speed_may_be_tried() -> None:
    harness = Harness(1)
    harness.nodes[0].speed.answers = 0
    assert harness.late(ttft_ms=5, tokens=20_000)[1].sent == ["n0"]


# In flight.


def test_a_request_without_a_first_byte_ends_when_its_deadline_has_passed() -> None:
    harness = Harness(1)
    attempts, driver = harness.late(ttft_ms=700, tokens=4000)
    harness.run(0.65)
    assert driver.error is None and harness.watched == 1
    harness.run(0.1)
    assert isinstance(driver.error, DeadlinePassed) and driver.error.first_token
    assert driver.error.after_ms == pytest.approx(700)
    assert attempts.done and driver.events == ["withdraw"]
    assert not harness.watched and not harness.nodes[0].outcomes[Outcome.FAILED]
    harness.assert_all_counters_are_zero()


@pytest.mark.parametrize("hangs", [True, False])
def test_a_node_that_hangs_until_the_deadline_has_failed(hangs: bool) -> None:
    """No request waits for a timeout, so the deadline is the only sign. A node that answers others is not at fault."""
    harness = Harness(1, hedging=Hedging(min_delay_s=2.0, factor=5.0))
    node = harness.nodes[0]
    attempts, driver = harness.late(ttft_ms=4000, tokens=200)
    harness.run(3.5)
    if not hangs:
        node.waiting, node.last_progress_s = 3, harness.now_s
    harness.run(0.7)
    assert attempts.done and isinstance(driver.error, DeadlinePassed)
    assert node.outcomes[Outcome.FAILED] == hangs and node.outcomes[Outcome.CANCELLED] == (not hangs)


def test_a_hedge_ends_with_its_request() -> None:
    harness = Harness(2, hedging=Hedging(max_ratio=1.0))
    attempts, driver = harness.late(total_ms=15_000)
    attempts.ticket.node.speed.answers = 0  # no estimate: it does not move
    harness.advance(10.0)
    harness.fleet.check_timed_out(attempts.ticket.node, harness.now_s)
    harness.dispatcher.tick(harness.now_s)
    assert attempts.hedge is not None
    harness.run(5.1)
    assert isinstance(driver.error, DeadlinePassed) and not driver.error.first_token
    assert driver.events[-2:] == ["withdraw", "withdraw hedge"]
    harness.assert_all_counters_are_zero()


def test_an_overdue_request_moves_to_a_node_that_meets_the_deadline() -> None:
    harness = Harness(2)
    attempts, driver = harness.late(ttft_ms=3000, tokens=4000)
    first = attempts.ticket.node
    harness.run(0.8)
    assert len(driver.sent) == 2 and driver.sent[1] != first.name and driver.events == ["withdraw"]
    assert attempts.tried == 2 and harness.counters.retries == 1 and harness.watched == 1
    assert first.inflight == 0 and not first.outcomes[Outcome.FAILED], "a slow node has not failed"
    harness.answer(attempts)
    assert driver.error is None and not harness.watched
    harness.assert_all_counters_are_zero()


@pytest.mark.parametrize(
    "why", ["no other node", "the other is late", "the other is busy", "not repeatable", "attempts"]
)
def test_a_request_stays_where_moving_does_not_help(why: str) -> None:
    harness = Harness(1 if why == "no other node" else 2, max_attempts=1 if why == "attempts" else 0)
    attempts, driver = harness.late(ttft_ms=1000, tokens=4000)
    other = next((node for node in harness.nodes if node is not attempts.ticket.node), None)
    if why == "the other is late":
        assert other is not None
        other.speed.guess(5.0)
    elif why == "the other is busy":
        assert other is not None
        harness.busy(other, 40_000)
    attempts.repeatable = why != "not repeatable"
    harness.run(0.95)
    assert len(driver.sent) == 1 and driver.events == [] and driver.error is None
    harness.run(0.1)
    assert isinstance(driver.error, DeadlinePassed)


def test_a_request_moves_once_to_each_node_at_most() -> None:
    harness = Harness(3)
    attempts, driver = harness.late(ttft_ms=20_000, tokens=4000)
    harness.run(19.9)
    assert sorted(driver.sent) == ["n0", "n1", "n2"] and attempts.tried == 3
    harness.run(0.2)
    assert isinstance(driver.error, DeadlinePassed)
    harness.assert_all_counters_are_zero()


def test_a_response_that_has_begun_ends_only_with_the_deadline_of_the_whole() -> None:
    harness = Harness(1)
    attempts, driver = harness.late(ttft_ms=500, total_ms=8000)
    other, other_driver = harness.late(ttft_ms=500)
    for one in (attempts, other):
        assert one.response_started(200, None, harness.now_s)
        one.first_token(harness.now_s)
    harness.run(7.9)
    assert driver.error is other_driver.error is None
    harness.run(0.2)
    assert isinstance(driver.error, DeadlinePassed) and not driver.error.first_token
    assert driver.events == ["cut"] and attempts.done and harness.counters.interrupted == 1
    assert other_driver.error is None and not harness.watched
    other.response_ended(None, harness.now_s)
    harness.assert_all_counters_are_zero()


def test_an_ended_request_is_not_watched_any_more() -> None:
    harness = Harness(1)
    for number in range(100):
        attempts, _ = harness.late(ttft_ms=1000 + number)
        assert harness.watched == 1
        if number % 3 == 0:
            harness.answer(attempts)
        elif number % 3 == 1:
            attempts.client_left(harness.now_s)
        else:
            harness.fail(attempts)
            assert attempts.done
        assert not harness.watched
    harness.assert_all_counters_are_zero()


def test_a_failure_after_the_deadline_ends_the_request() -> None:
    harness = Harness(2)
    attempts, driver = harness.late(ttft_ms=500)
    harness.advance(0.6)
    harness.fail(attempts)
    assert isinstance(driver.error, AllNodesFailed) and not harness.watched


def test_absurd_deadlines_cost_nothing() -> None:
    harness = Harness(1)
    errors: list[RoutingError] = []
    for ms in (1e-300, 1e-9, 0.001, 1e12, 1e300):
        harness.nodes[0].speed.answers = 0
        try:
            attempts, driver = harness.late(ttft_ms=ms)
        except DeadlineUnreachable as error:
            errors.append(error)
            continue
        harness.run(0.1)
        if driver.error is not None:
            errors.append(driver.error)
        else:
            harness.answer(attempts)
    assert [type(error) for error in errors] == [DeadlineUnreachable, DeadlinePassed, DeadlinePassed]
    harness.advance(1e6)  # the process was stopped
    harness.dispatcher.deadlines.check(harness.now_s)
    assert not harness.watched


def test_many_late_requests_end_in_one_check() -> None:
    harness = Harness(1)
    harness.nodes[0].speed.answers = 0
    sent = [harness.late(ttft_ms=10 + number) for number in range(1000)]
    assert harness.watched == 1000
    harness.run(1.2)
    assert all(isinstance(driver.error, DeadlinePassed) for _, driver in sent) and not harness.watched
    harness.assert_all_counters_are_zero()
