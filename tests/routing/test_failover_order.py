"""Which node comes next when one fails, and what the client is told when none is left."""

from __future__ import annotations

from typing import Any

import pytest
from attempt_harness import AttemptHarness

from warmroute.core.calls import MAX_BUSY_ANSWERS
from warmroute.core.health import counts_of
from warmroute.core.messages import Outcome
from warmroute.core.rejections import AllNodesBusy, AllNodesFailed, AllNodesUnavailable


def test_every_node_is_tried_once() -> None:
    harness = AttemptHarness(6)
    attempts, driver = harness.start()
    for _ in range(6):
        assert driver.error is None
        harness.fail(attempts)
    assert sorted(driver.sent) == [f"n{number}" for number in range(6)]
    assert isinstance(driver.error, AllNodesFailed) and driver.error.tried == 6
    assert attempts.done
    harness.assert_all_counters_are_zero()


def test_max_attempts_limits_the_nodes_that_are_tried() -> None:
    harness = AttemptHarness(6, max_attempts=2)
    attempts, driver = harness.start()
    harness.fail(attempts)
    harness.fail(attempts)
    assert len(driver.sent) == 2 and isinstance(driver.error, AllNodesFailed)


def test_a_node_that_came_up_meanwhile_is_tried_and_a_draining_one_is_not() -> None:
    harness = AttemptHarness(3)
    attempts, driver = harness.start()
    leaving = next(node for node in harness.nodes if node.name not in driver.sent)
    harness.fleet.drain(leaving.name)
    harness.add("late")
    for _ in range(3):
        assert driver.error is None
        harness.fail(attempts)
    assert isinstance(driver.error, AllNodesFailed)
    assert driver.sent[-1] == "late" and leaving.name not in driver.sent


def test_suspected_nodes_come_last_and_dead_ones_never() -> None:
    harness = AttemptHarness(4)
    attempts, driver = harness.start()
    suspected, dead = [node for node in harness.nodes if node.name not in driver.sent][:2]
    for _ in range(harness.fleet._health.consecutive_failures):
        harness.fleet.close_ticket(harness.send(suspected), Outcome.FAILED, harness.now_s, "HTTP status 500")
    harness.fleet.check_failed(dead, harness.now_s, "connection refused")
    for _ in range(3):
        assert driver.error is None
        harness.fail(attempts)
    assert driver.error is not None
    assert driver.sent[-1] == suspected.name and dead.name not in driver.sent and len(driver.sent) == 3


@pytest.mark.parametrize("deadline", ["deadline_s", "total_deadline_s"])
def test_no_further_node_is_tried_after_the_deadline(deadline: str) -> None:
    harness = AttemptHarness(4)
    due: dict[str, Any] = {deadline: harness.now_s + 1.0}
    attempts, driver = harness.start(**due)
    harness.fail(attempts)
    assert len(driver.sent) == 2
    harness.advance(1.0)
    harness.fail(attempts)
    assert len(driver.sent) == 2 and isinstance(driver.error, AllNodesFailed)


def test_nodes_of_the_conversations_island_come_first() -> None:
    harness = AttemptHarness(0)
    for name, island in (("a0", "a"), ("b0", "b"), ("a1", "a"), ("b1", "b")):
        harness.add(name, island=island)
    attempts, driver = harness.start(session_header=b"one")
    home = driver.sent[0][0]
    attempts.response_started(200, None, harness.now_s)
    attempts.response_ended(None, harness.now_s)
    attempts, driver = harness.start(session_header=b"one")
    for _ in range(4):
        harness.fail(attempts)
    assert [name[0] == home for name in driver.sent] == [True, True, False, False]


def test_busy_nodes_are_busy_with_the_smallest_retry_after() -> None:
    harness = AttemptHarness(3)
    attempts, driver = harness.start()
    for retry_after_s in (9, 4, 6):
        harness.is_busy(attempts, retry_after_s, 503)
    assert isinstance(driver.error, AllNodesBusy) and driver.error.retry_after_s == 4


def test_one_503_without_retry_after_makes_the_fleet_unavailable() -> None:
    harness = AttemptHarness(2)
    attempts, driver = harness.start()
    harness.is_busy(attempts, None, 503)
    harness.is_busy(attempts, 4, 429)
    assert isinstance(driver.error, AllNodesUnavailable) and driver.error.retry_after_s == 4


def test_an_overloaded_fleet_does_not_get_each_request_once_for_each_node() -> None:
    harness = AttemptHarness(20)
    attempts, driver = harness.start()
    while driver.error is None:
        harness.is_busy(attempts)
    assert len(driver.sent) == 20, "nobody knew that the nodes are busy"
    attempts, driver = harness.start()
    while driver.error is None:
        harness.is_busy(attempts)
    assert isinstance(driver.error, AllNodesBusy) and len(driver.sent) == MAX_BUSY_ANSWERS
    harness.advance(1.1)
    attempts, driver = harness.start()
    harness.is_busy(attempts)
    attempts.response_started(200, None, harness.now_s)
    assert driver.error is None and len(driver.sent) == 2


def test_a_node_that_said_it_is_busy_comes_after_the_others() -> None:
    harness = AttemptHarness(4)
    attempts, driver = harness.start()
    other = next(node for node in harness.nodes if node.name not in driver.sent)
    other.busy_until_s = harness.now_s + 5.0
    for _ in range(4):
        harness.fail(attempts)
    assert driver.sent[-1] == other.name and len(driver.sent) == 4


def test_only_failures_are_excused_when_a_request_fails_on_every_node() -> None:
    harness = AttemptHarness(3)
    harness.warm_up()
    for _ in range(5):
        attempts, _driver = harness.start()
        for _node in harness.nodes:
            harness.is_busy(attempts)
        harness.advance(5.0)
    assert [(counts_of(node).failed, node.excused_failures) for node in harness.nodes] == [(0, 0)] * 3
    attempts, driver = harness.start()
    harness.fail(attempts)
    harness.is_busy(attempts)
    harness.is_busy(attempts)
    assert driver.error is not None and sum(counts_of(node).failed for node in harness.nodes) == 1
    attempts, _driver = harness.start()
    harness.fail(attempts)
    harness.fail(attempts)
    harness.is_busy(attempts)
    assert sum(counts_of(node).failed for node in harness.nodes) == 1, "the request may be at fault"
