"""Poison requests: nodes that serve others fail at them with 5xx. No breaker opens, and no further node is tried."""

from __future__ import annotations

import pytest
from attempt_harness import AttemptHarness, NotingDriver
from split_harness import TRANSFER, SplitHarness

from warmroute.core.brain import SERVES_S
from warmroute.core.calls import Attempts, Phase
from warmroute.core.health import HealthState, counts_of
from warmroute.core.messages import Outcome
from warmroute.core.node import Node
from warmroute.core.overdue import send_hedge
from warmroute.core.rejections import AllNodesFailed, FailedOnEveryNode


def answers(harness: AttemptHarness, attempts: Attempts, status: int = 500) -> None:
    """Its current node answers with an error."""
    assert not attempts.response_started(status, None, harness.now_s)


def serve(harness: AttemptHarness, *nodes: Node) -> None:
    """These nodes serve a request each."""
    for node in nodes:
        for other in harness.nodes:
            harness.fleet.drain(other.name, other is not node)
        attempts, driver = harness.start()
        assert driver.sent == [node.name]
        harness.answer(attempts)
    for node in harness.nodes:
        harness.fleet.drain(node.name, False)


def healthy(harness: AttemptHarness) -> None:
    for node in harness.nodes:
        assert node.health.state is HealthState.UP
        assert (node.health._consecutive_failures, counts_of(node).failed) == (0, 0), node.name
    harness.assert_all_counters_are_zero()


@pytest.mark.parametrize("status", [500, 502, 504, 599])
def test_a_poison_request_gets_two_nodes_and_opens_no_breaker(status: int) -> None:
    harness = AttemptHarness(4)
    serve(harness, *harness.nodes)
    for _ in range(30):
        attempts, driver = harness.start()
        for _node in range(2):
            answers(harness, attempts, status)
        assert isinstance(driver.error, FailedOnEveryNode) and driver.error.tried == 2
        assert len(driver.sent) == 2 and attempts.poison
    healthy(harness)


def test_thirty_poison_requests_at_once_move_no_request_of_others() -> None:
    harness = AttemptHarness(4)
    serve(harness, *harness.nodes)
    others = [harness.start() for _ in range(4)]
    poison = [harness.start() for _ in range(30)]
    while any(not attempts.done for attempts, _ in poison):
        for attempts, _ in poison:  # others wait in the queue
            if attempts.tried and not attempts.done:
                answers(harness, attempts)
    assert all(isinstance(driver.error, FailedOnEveryNode) for _, driver in poison)
    for attempts, driver in others:
        assert len(driver.sent) == 1 and not driver.events, "its prefill goes on"
        harness.answer(attempts)
    assert sum(len(driver.sent) for _, driver in poison) == 60
    healthy(harness)


def test_a_node_that_is_at_fault_is_down_once_others_have_answered() -> None:
    """It served others before, so it is judged when another node has answered."""
    harness = AttemptHarness(2)
    serve(harness, *harness.nodes)
    bad, threshold = harness.nodes[0], harness.nodes[0].health.config.consecutive_failures
    for number in range(threshold):
        harness.fleet.drain("n1", True)
        attempts, driver = harness.start()
        harness.fleet.drain("n1", False)
        assert driver.sent == ["n0"]
        answers(harness, attempts)
        assert driver.sent == ["n0", "n1"] and bad.health._consecutive_failures == number
        assert counts_of(bad).failed == number
        harness.answer(attempts)
        assert counts_of(bad).failed == number + 1
    assert bad.health.state is HealthState.DOWN
    harness.assert_all_counters_are_zero()


def test_a_failure_before_a_later_success_opens_nothing_when_it_is_judged() -> None:
    harness = AttemptHarness(2)
    serve(harness, *harness.nodes)
    harness.fleet.drain("n1", True)
    failed = [harness.start()[0] for _ in range(9)]
    harness.fleet.drain("n1", False)
    for attempts in failed:
        answers(harness, attempts)
    harness.advance(1.0)
    serve(harness, harness.nodes[0])
    for attempts in failed:
        harness.answer(attempts)
    assert harness.nodes[0].health.state is HealthState.UP
    assert counts_of(harness.nodes[0]).failed == 9, "outlier detection counts them all the same"


def test_a_node_that_served_nothing_for_long_counts_at_once() -> None:
    harness = AttemptHarness(2)
    serve(harness, *harness.nodes)
    harness.advance(SERVES_S + 0.1)
    attempts, driver = harness.start()
    first = harness.fleet.node(driver.sent[0])
    answers(harness, attempts)
    assert first.health._consecutive_failures == 1
    answers(harness, attempts)
    assert isinstance(driver.error, AllNodesFailed) and not isinstance(driver.error, FailedOnEveryNode)
    assert not attempts.poison
    assert [node.health._consecutive_failures for node in harness.nodes] == [1, 1]


def test_with_one_node_the_breaker_works_as_without_the_rule() -> None:
    harness = AttemptHarness(1)
    serve(harness, *harness.nodes)
    [node] = harness.nodes
    for _ in range(node.health.config.consecutive_failures):
        attempts, driver = harness.start()
        answers(harness, attempts)
        assert type(driver.error) is AllNodesFailed and not attempts.poison
    assert node.health.state is HealthState.DOWN


@pytest.mark.parametrize("how", ["no connection", "503", "429"])
def test_failures_that_are_no_5xx_make_no_poison(how: str) -> None:
    harness = AttemptHarness(3)
    serve(harness, *harness.nodes)
    attempts, driver = harness.start()
    answers(harness, attempts)
    if how == "no connection":
        attempts.node_failed(Outcome.FAILED, "the node closed the connection", harness.now_s)
    else:
        answers(harness, attempts, int(how))
    assert len(driver.sent) == 3, "the third node is tried"
    harness.answer(attempts)
    assert harness.fleet.node(driver.sent[0]).health._consecutive_failures == 1
    harness.assert_all_counters_are_zero()


def test_a_request_that_leaves_before_it_is_judged_counts_for_nobody() -> None:
    harness = AttemptHarness(2)
    serve(harness, *harness.nodes)
    for _ in range(20):
        attempts, _driver = harness.start()
        answers(harness, attempts)
        attempts.client_left(harness.now_s)
    healthy(harness)


def test_a_hedge_counts_as_the_second_node() -> None:
    harness = AttemptHarness(3)
    serve(harness, *harness.nodes)
    attempts, driver = harness.start()
    assert send_hedge(attempts, harness.dispatcher, harness.now_s)
    assert not attempts.hedge_started(500, None, harness.now_s)
    answers(harness, attempts)
    assert isinstance(driver.error, FailedOnEveryNode) and driver.error.tried == 2
    healthy(harness)


def test_poison_requests_eject_no_node() -> None:
    """Also while they wait for their second node, and with few other requests."""
    harness = AttemptHarness(4)
    config = harness.fleet.outlier_detection.config
    pending: list[tuple[Attempts, NotingDriver]] = []
    for _ in range(20):
        harness.advance(config.interval_s / 8)
        serve(harness, *harness.nodes)
        pending = [harness.start() for _ in range(4 * config.min_requests)]
        for attempts, _ in pending:
            answers(harness, attempts)
        assert [harness.fleet.outlier_detection.find(node, harness.now_s) for node in harness.nodes] == [None] * 4
        for attempts, _ in pending:
            answers(harness, attempts)
        assert [harness.fleet.outlier_detection.find(node, harness.now_s) for node in harness.nodes] == [None] * 4
    healthy(harness)


def test_poison_requests_open_no_breaker_of_a_prefill_node() -> None:
    harness = SplitHarness(prefill=3, decode=2, engine="sglang")
    prefill_nodes = [node for node in harness.nodes if node.role == "prefill"]
    for node in prefill_nodes:  # each prefills for a request
        for other in prefill_nodes:
            harness.fleet.drain(other.name, other is not node)
        attempts, _, split = harness.split()
        split.prefill_ended(TRANSFER, None, harness.now_s)
        harness.finish(attempts)
    for node in prefill_nodes:
        harness.fleet.drain(node.name, False)
    for _ in range(12):
        attempts, _ = harness.start(2000, may_split=True)
        while not attempts.done and attempts.split is not None and attempts.split.phase is Phase.PREFILLING:
            attempts.split.prefill_failed(Outcome.FAILED, "HTTP status 500", harness.now_s, 500)
        if not attempts.done:
            harness.answer(attempts)
    assert all(node.health.state is HealthState.UP for node in prefill_nodes)
