"""Poison requests: nodes that serve others fail at them with 5xx. No breaker opens, and no further node is tried."""

from __future__ import annotations

import pytest
from routing_harness import RoutingHarness
from split_harness import SplitHarness

from warmroute.config import Hedging
from warmroute.core.calls import PREFILLING
from warmroute.core.failover import SERVES_S
from warmroute.core.health import HealthState, counts_of
from warmroute.core.messages import CLOSED
from warmroute.core.node import Node


def serve(harness: RoutingHarness, *nodes: Node) -> None:
    """These nodes serve a request each."""
    for node in nodes:
        harness.submit_to(node).answer()


def healthy(harness: RoutingHarness) -> None:
    for node in harness.nodes:
        assert node.health.state is HealthState.UP
        assert (node.health._consecutive_failures, counts_of(node).failed) == (0, 0), node.name
    harness.assert_all_counters_are_zero()


@pytest.mark.parametrize("status", [500, 502, 504, 599])
def test_a_poison_request_gets_two_nodes_and_opens_no_breaker(status: int) -> None:
    harness = RoutingHarness(4)
    serve(harness, *harness.nodes)
    for _ in range(30):
        request = harness.submit(1000)
        for _node in range(2):
            request.fail(status)
        assert request.why == "failed_on_every_node" and "tried 2 nodes" in request.message
        assert len(request.sent) == 2 and request.call.poison
    healthy(harness)


def test_thirty_poison_requests_at_once_move_no_request_of_others() -> None:
    harness = RoutingHarness(4)
    serve(harness, *harness.nodes)
    others = [harness.submit(1000) for _ in range(4)]
    poison = [harness.submit(1000) for _ in range(30)]
    while any(not request.done for request in poison):
        for request in poison:  # others wait in the queue
            if request.is_open:
                request.fail()
    assert all(request.why == "failed_on_every_node" for request in poison)
    for request in others:
        assert len(request.sent) == 1 and not request.events, "its prefill goes on"
        request.answer()
    assert sum(len(request.sent) for request in poison) == 60
    healthy(harness)


def test_a_node_that_is_at_fault_is_down_once_others_have_answered() -> None:
    """It served others before, so it is judged when another node has answered."""
    harness = RoutingHarness(2)
    serve(harness, *harness.nodes)
    bad, threshold = harness.nodes[0], harness.nodes[0].health.config.consecutive_failures
    for number in range(threshold):
        request = harness.submit_to(bad)
        request.fail()
        assert request.sent == ["n0", "n1"] and bad.health._consecutive_failures == number
        assert counts_of(bad).failed == number
        request.answer()
        assert counts_of(bad).failed == number + 1
    assert bad.health.state is HealthState.DOWN
    harness.assert_all_counters_are_zero()


def test_a_failure_before_a_later_success_opens_nothing_when_it_is_judged() -> None:
    harness = RoutingHarness(2)
    serve(harness, *harness.nodes)
    harness.fleet.drain("n1")
    failed = [harness.submit(100) for _ in range(9)]
    harness.fleet.drain("n1", False)
    for request in failed:
        request.fail()
    harness.advance(1.0)
    serve(harness, harness.nodes[0])
    for request in failed:
        request.answer()
    assert harness.nodes[0].health.state is HealthState.UP
    assert counts_of(harness.nodes[0]).failed == 9, "outlier detection counts them all the same"


def test_a_node_that_served_nothing_for_long_counts_at_once() -> None:
    harness = RoutingHarness(2)
    serve(harness, *harness.nodes)
    harness.advance(SERVES_S + 0.1)
    request = harness.submit(1000)
    first = harness.fleet.node(request.sent[0])
    request.fail()
    assert first.health._consecutive_failures == 1
    request.fail()
    assert request.why == "upstream_failed" and not request.call.poison
    assert [node.health._consecutive_failures for node in harness.nodes] == [1, 1]


def test_with_one_node_the_breaker_works_as_without_the_rule() -> None:
    harness = RoutingHarness(1)
    serve(harness, *harness.nodes)
    [node] = harness.nodes
    for _ in range(node.health.config.consecutive_failures):
        request = harness.submit(1000)
        request.fail()
        assert request.why == "upstream_failed" and not request.call.poison
    assert node.health.state is HealthState.DOWN


@pytest.mark.parametrize("status", [CLOSED, 503, 429])
def test_failures_that_are_no_5xx_make_no_poison(status: int) -> None:
    harness = RoutingHarness(3)
    serve(harness, *harness.nodes)
    request = harness.submit(1000)
    request.fail()
    request.fail(status)
    assert len(request.sent) == 3, "the third node is tried"
    request.answer()
    assert harness.fleet.node(request.sent[0]).health._consecutive_failures == 1
    harness.assert_all_counters_are_zero()


def test_a_request_that_leaves_before_it_is_judged_counts_for_nobody() -> None:
    harness = RoutingHarness(2)
    serve(harness, *harness.nodes)
    for _ in range(20):
        request = harness.submit(1000)
        request.fail()
        request.cancel()
    healthy(harness)


def test_a_hedge_counts_as_the_second_node() -> None:
    harness = RoutingHarness(3, hedging=Hedging(max_ratio=1.0))
    harness.warm_up()
    request = harness.submit(1000)
    harness.advance(10.0)
    harness.look()
    serve(harness, *harness.nodes)
    request.fail(try_=request.call.hedge)
    request.fail()
    assert request.why == "failed_on_every_node" and "tried 2 nodes" in request.message
    healthy(harness)


def test_poison_requests_eject_no_node() -> None:
    """Also while they wait for their second node, and with few other requests."""
    harness = RoutingHarness(4)
    config = harness.fleet.outlier_detection.config
    for _ in range(20):
        harness.advance(config.interval_s / 8)
        serve(harness, *harness.nodes)
        pending = [harness.submit(100) for _ in range(4 * config.min_requests)]
        for request in pending:
            request.fail()
        assert [harness.fleet.outlier_detection.find(node, harness.now_s) for node in harness.nodes] == [None] * 4
        for request in pending:
            request.fail()
        assert [harness.fleet.outlier_detection.find(node, harness.now_s) for node in harness.nodes] == [None] * 4
    healthy(harness)


def test_poison_requests_open_no_breaker_of_a_prefill_node() -> None:
    harness = SplitHarness(prefill=3, decode=2, engine="sglang")
    prefill_nodes = [node for node in harness.nodes if node.role == "prefill"]
    for node in prefill_nodes:  # each prefills for a request
        for other in prefill_nodes:
            harness.fleet.drain(other.name, other is not node)
        request = harness.submit_split()
        request.prefilled()
        harness.finish(request)
    for node in prefill_nodes:
        harness.fleet.drain(node.name, False)
    for _ in range(12):
        request = harness.submit(2000, may_split=True)
        while not request.done and request.call.split is not None and request.split.phase == PREFILLING:
            request.prefill_fails()
        if not request.done:
            request.answer()
    assert all(node.health.state is HealthState.UP for node in prefill_nodes)
