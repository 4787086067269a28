"""Requests that wait for their first byte leave nodes that go down, and are hedged when they are overdue."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from attempt_harness import AttemptHarness, NotingDriver

from warmroute.config import Admission, Hedging, NodeConfig
from warmroute.core.brain import MAX_FAILED_HEDGES, MAX_MOVES, MOVE_SLICE_S
from warmroute.core.calls import Attempts
from warmroute.core.messages import Outcome
from warmroute.core.node import Node
from warmroute.core.overdue import HANGS_S, MAX_BURST
from warmroute.core.rejections import AllNodesBusy

ALWAYS = Hedging(max_ratio=1.0)
AT_ONCE = Admission(queue_at_router=False)


def node_of(attempts: Attempts) -> Node:
    return attempts.ticket.node


def hang(harness: AttemptHarness, node: Node) -> None:
    """Let the node's health checks time out until it is down."""
    for _ in range(3):
        harness.advance(3.0)
        harness.fleet.check_timed_out(node, harness.now_s)
    assert node.health.state.value == "down" and not node.health.confirmed


def take_away(harness: AttemptHarness, node: Node, how: str) -> None:
    if how == "hangs":
        hang(harness, node)
    elif how == "refuses":
        harness.fleet.check_failed(node, harness.now_s, "connection refused")
    else:
        harness.fleet.remove(node.name)
        harness.dispatcher.leave(node, "the node was removed")


def overdue(harness: AttemptHarness) -> tuple[Attempts, NotingDriver]:
    """Send a request whose node answers nothing."""
    attempts, driver = harness.start()
    harness.advance(10.0)
    harness.dispatcher.tick(harness.now_s)
    return attempts, driver


# Nodes that go down.


@pytest.mark.parametrize("how", ["hangs", "refuses", "is removed"])
def test_a_request_without_a_response_leaves_a_node_that_goes_down(how: str) -> None:
    harness = AttemptHarness(3)
    attempts, driver = harness.start()
    node = node_of(attempts)
    take_away(harness, node, how)
    assert driver.events == ["withdraw"] and len(driver.sent) == 2 and node_of(attempts) is not node
    assert node.inflight == 0 and node.outcomes[Outcome.FAILED] == 1
    harness.answer(attempts)
    harness.assert_all_counters_are_zero()


@pytest.mark.parametrize(("how", "moves"), [("hangs", False), ("refuses", True), ("is removed", False)])
def test_a_request_that_may_not_be_repeated_leaves_only_a_dead_node(how: str, moves: bool) -> None:
    harness = AttemptHarness(3)
    attempts, driver = harness.start()
    attempts.repeatable = False
    node = node_of(attempts)
    take_away(harness, node, how)
    assert len(driver.sent) == (2 if moves else 1) and (node_of(attempts) is not node) is moves
    harness.answer(attempts)
    harness.assert_all_counters_are_zero()


def test_a_request_that_has_begun_to_answer_stays() -> None:
    harness = AttemptHarness(3)
    attempts, driver = harness.start()
    assert attempts.response_started(200, None, harness.now_s)
    hang(harness, node_of(attempts))
    harness.dispatcher.tick(harness.now_s + 100.0)
    assert driver.events == [] and len(driver.sent) == 1


def test_a_request_stays_while_no_other_node_is_up_and_moves_when_one_comes_up() -> None:
    harness = AttemptHarness(2)
    attempts, driver = harness.start()
    first = node_of(attempts)
    other = next(node for node in harness.nodes if node is not first)
    harness.fleet.check_failed(other, harness.now_s, "connection refused")
    hang(harness, first)
    assert driver.events == [] and node_of(attempts) is first, "a suspected node may answer after all"
    harness.advance(1.0)
    harness.fleet.check_passed(other, harness.now_s)
    assert driver.events == ["withdraw"] and node_of(attempts) is other


def test_many_requests_leave_a_node_in_several_ticks() -> None:
    harness = AttemptHarness(2, admission=AT_ONCE)
    harness.fleet.drain("n1")
    started = [harness.start(tokens=100) for _ in range(MAX_MOVES + 10)]
    harness.fleet.drain("n1", False)
    hang(harness, harness.nodes[0])
    assert harness.nodes[1].inflight == MAX_MOVES
    harness.dispatcher.tick(harness.now_s)
    assert harness.nodes[1].inflight == MAX_MOVES + 10 and harness.nodes[0].inflight == 0
    for attempts, _driver in started:
        harness.answer(attempts)
    harness.assert_all_counters_are_zero()


def test_moves_that_take_long_leave_time_for_other_work(monkeypatch: pytest.MonkeyPatch) -> None:
    soon: list[Callable[[], None]] = []
    harness = AttemptHarness(2, admission=AT_ONCE, call_soon=soon.append)
    harness.fleet.drain("n1")
    started = [harness.start(tokens=100) for _ in range(20)]
    harness.fleet.drain("n1", False)
    monkeypatch.setattr(NotingDriver, "send", lambda _driver, _node: time.sleep(MOVE_SLICE_S))
    harness.fleet.check_failed(harness.nodes[0], harness.now_s, "connection refused")
    turns = 0
    while soon:
        assert harness.nodes[1].inflight == turns + 1, "one move fills a slice"
        soon.pop()()
        turns += 1
    assert turns == 19 and harness.nodes[0].inflight == 0
    for attempts, _driver in started:
        harness.answer(attempts)
    harness.assert_all_counters_are_zero()


def test_max_attempts_limits_moves_and_hedges() -> None:
    harness = AttemptHarness(3, max_attempts=1, hedging=ALWAYS)
    harness.warm_up()
    attempts, driver = overdue(harness)
    hang(harness, node_of(attempts))
    assert driver.events == [] and len(driver.sent) == 1


# Hedges.


def test_an_overdue_request_is_sent_to_a_second_node() -> None:
    harness = AttemptHarness(3, hedging=ALWAYS)
    harness.warm_up()
    attempts, driver = harness.start()
    harness.advance(1.9)
    harness.dispatcher.tick(harness.now_s)
    assert driver.events == [], "min_delay_s"
    harness.advance(0.2)
    harness.dispatcher.tick(harness.now_s)
    harness.advance(10.0)
    harness.dispatcher.tick(harness.now_s)
    assert attempts.hedge is not None and driver.events == [f"hedge {attempts.hedge.node.name}"], "one hedge, no more"
    assert attempts.hedge.node is not node_of(attempts) and attempts.tried == 2


def test_the_first_node_that_answers_wins_and_the_other_ticket_closes() -> None:
    harness = AttemptHarness(3, hedging=ALWAYS)
    harness.warm_up()
    for hedge_wins in (False, True):
        attempts, driver = overdue(harness)
        first, hedge = attempts.ticket, attempts.hedge
        assert hedge is not None
        if hedge_wins:
            assert attempts.hedge_started(200, None, harness.now_s)
            assert driver.events[1:] == ["withdraw", "promote"] and attempts.ticket is hedge
            assert first.node.outcomes[Outcome.FAILED] == 1
        else:
            assert attempts.response_started(200, None, harness.now_s)
            assert driver.events[1:] == ["withdraw hedge"] and attempts.ticket is first
            assert hedge.node.outcomes[Outcome.CANCELLED] == 1
        attempts.first_token(harness.now_s)
        attempts.response_ended((1000, 0, 10), harness.now_s)
        harness.assert_all_counters_are_zero()
    assert harness.counters.hedges == 2 and harness.counters.hedges_won == 1
    assert harness.counters.responses[200] == 3 + 2, "each request counts once"


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_hedge_that_fails_leaves_the_request_where_it_was(status: int) -> None:
    harness = AttemptHarness(3, hedging=ALWAYS)
    harness.warm_up()
    attempts, driver = overdue(harness)
    assert not attempts.hedge_started(status, None, harness.now_s)
    assert attempts.hedge is None and driver.error is None
    harness.answer(attempts)
    harness.assert_all_counters_are_zero()


def test_a_busy_hedge_and_a_busy_node_are_busy() -> None:
    harness = AttemptHarness(2, hedging=ALWAYS)
    harness.warm_up()
    attempts, driver = overdue(harness)
    assert attempts.hedge is not None
    node = attempts.hedge.node
    assert not attempts.hedge_started(429, 7, harness.now_s)
    assert node.busy_until_s == harness.now_s + 7
    harness.is_busy(attempts, retry_after_s=9)
    assert isinstance(driver.error, AllNodesBusy) and driver.error.retry_after_s == 7


def test_a_hedge_takes_over_when_the_first_node_fails() -> None:
    harness = AttemptHarness(3, hedging=ALWAYS)
    harness.warm_up()
    attempts, driver = overdue(harness)
    hedge = attempts.hedge
    harness.fail(attempts)
    assert driver.events[1:] == ["promote"] and attempts.ticket is hedge and len(driver.sent) == 1
    harness.answer(attempts)
    harness.assert_all_counters_are_zero()


@pytest.mark.parametrize("which", ["first", "hedge"])
def test_a_node_that_goes_down_leaves_the_other(which: str) -> None:
    harness = AttemptHarness(3, hedging=ALWAYS)
    harness.warm_up()
    attempts, driver = overdue(harness)
    first, hedge = attempts.ticket, attempts.hedge
    assert hedge is not None
    hang(harness, first.node if which == "first" else hedge.node)
    assert attempts.ticket is (hedge if which == "first" else first) and attempts.hedge is None
    assert driver.events[1:] == (["withdraw", "promote"] if which == "first" else ["withdraw hedge"])
    harness.answer(attempts)
    harness.assert_all_counters_are_zero()


def test_a_client_that_leaves_closes_both_tickets() -> None:
    harness = AttemptHarness(3, hedging=ALWAYS)
    harness.warm_up()
    attempts, _driver = overdue(harness)
    attempts.client_left(harness.now_s)
    harness.assert_all_counters_are_zero()


def test_the_estimate_counts() -> None:
    harness = AttemptHarness(2, hedging=ALWAYS)
    harness.warm_up()
    attempts, driver = harness.start(tokens=60_000)
    expected_s = attempts.ticket.expected_ttft_ms / 1000.0
    assert expected_s > 1.0
    harness.advance(expected_s * 4.5)
    harness.dispatcher.tick(harness.now_s)
    assert driver.events == []
    harness.advance(expected_s)
    harness.dispatcher.tick(harness.now_s)
    assert len(driver.events) == 1


def test_a_response_that_is_not_streamed_is_hedged_only_if_its_node_answers_nobody() -> None:
    harness = AttemptHarness(2, hedging=ALWAYS)
    harness.warm_up()
    attempts, driver = harness.start(streams=False, max_output_tokens=10)
    node_of(attempts).last_progress_s = harness.now_s + 9.0
    harness.advance(10.0)
    harness.dispatcher.tick(harness.now_s)
    assert driver.events == []
    harness.advance(10.0)
    harness.dispatcher.tick(harness.now_s)
    assert len(driver.events) == 1


@pytest.mark.parametrize("busy", ["queue", "KV cache"])
def test_a_busy_node_is_slow_and_not_hung_until_it_makes_no_progress_for_long(busy: str) -> None:
    harness = AttemptHarness(2, hedging=ALWAYS)
    harness.warm_up()
    attempts, driver = harness.start()
    node = node_of(attempts)
    for usage in (0.70, 0.71, 0.72):
        if busy == "queue":
            node.update_load(5, 2, usage / 10, harness.now_s)
        else:
            node.update_load(5, 0, usage, harness.now_s)
        harness.advance(HANGS_S - 1.0)
        harness.dispatcher.tick(harness.now_s)
        assert driver.events == []
    harness.advance(2.0)
    harness.dispatcher.tick(harness.now_s)
    assert len(driver.events) == 1


def test_without_an_estimate_a_timed_out_health_check_shows_that_a_node_hangs() -> None:
    harness = AttemptHarness(2, hedging=ALWAYS)
    attempts, driver = harness.start()
    harness.advance(5.0)
    harness.dispatcher.tick(harness.now_s)
    assert driver.events == [], "a cold node may take long"
    harness.fleet.check_timed_out(node_of(attempts), harness.now_s)
    harness.dispatcher.tick(harness.now_s)
    assert len(driver.events) == 1


@pytest.mark.parametrize("reason", ["not repeatable", "switched off", "other node has no room", "late"])
def test_no_hedge(reason: str) -> None:
    harness = AttemptHarness(2, hedging=Hedging(max_ratio=0.0) if reason == "switched off" else ALWAYS)
    harness.warm_up()
    attempts, driver = harness.start(deadline_s=harness.now_s + 5.0 if reason == "late" else 0.0)
    attempts.repeatable = reason != "not repeatable"
    if reason == "other node has no room":
        harness.busy(next(node for node in harness.nodes if node is not node_of(attempts)), tokens=50_000)
    harness.advance(100.0)
    harness.dispatcher.tick(harness.now_s)
    assert driver.events == []


def test_the_budget_bounds_hedges() -> None:
    harness = AttemptHarness(2, hedging=Hedging(max_ratio=0.1), admission=AT_ONCE)
    harness.warm_up()
    harness.fleet.drain("n1")
    drivers = [harness.start(tokens=300)[1] for _ in range(40)]
    harness.fleet.drain("n1", False)
    harness.advance(60.0)
    for _ in range(5):
        harness.dispatcher.tick(harness.now_s)
        harness.advance(1.0)
    assert sum(len(driver.events) for driver in drivers) == MAX_BURST
    for _ in range(40):  # each further request earns a tenth of a hedge
        harness.fleet.drain("n0")
        attempts, _driver = harness.start(tokens=300)
        harness.answer(attempts)
        harness.fleet.drain("n0", False)
    harness.dispatcher.tick(harness.now_s)
    assert sum(len(driver.events) for driver in drivers) == MAX_BURST + 4


def test_a_node_that_loses_every_race_is_down() -> None:
    harness = AttemptHarness(2, hedging=ALWAYS)
    harness.warm_up()
    harness.fleet.drain("n1")
    started = [harness.start(tokens=300) for _ in range(8)]
    harness.fleet.drain("n1", False)
    harness.advance(10.0)
    harness.dispatcher.tick(harness.now_s)
    hanging = harness.nodes[0]
    for attempts, _driver in started:
        if attempts.hedge is not None:
            assert attempts.hedge_started(200, None, harness.now_s)
    assert hanging.health.state.value == "down" and hanging.inflight == 0


def test_the_expected_time_to_first_token_includes_the_work_ahead() -> None:
    harness = AttemptHarness(1, admission=AT_ONCE)
    harness.warm_up()
    [node] = harness.nodes
    speed = node.speed.ms_per_token
    first = harness.start(tokens=4000)[0].ticket.expected_ttft_ms
    second = harness.start(tokens=4000)[0].ticket.expected_ttft_ms
    assert first >= 4000 * speed and second >= 2 * first * 0.99
    node.queue_ms = 5000.0
    assert harness.start(tokens=4000)[0].ticket.expected_ttft_ms >= 5000.0 + 4000 * speed


@pytest.mark.parametrize("count", [int(MAX_BURST), 3 * MAX_FAILED_HEDGES])
def test_requests_without_a_second_node_do_not_keep_others_from_a_hedge(count: int) -> None:
    harness = AttemptHarness(2, hedging=ALWAYS, admission=AT_ONCE)
    harness.warm_up()
    only = harness.fleet.add(NodeConfig(url="http://127.0.0.1:9", name="only", models=("other",)))
    harness.fleet.check_passed(only, harness.now_s)
    for _ in range(count):
        harness.start(tokens=100, model="other")
    attempts, driver = harness.start()
    harness.fleet.check_timed_out(only, harness.now_s)
    harness.advance(10.0)
    for _ in range(4):
        harness.dispatcher.tick(harness.now_s)
    assert attempts.hedge is not None and driver.events == [f"hedge {attempts.hedge.node.name}"]
    assert harness.counters.hedges == 1
