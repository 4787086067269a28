"""Requests that wait for a first node of an autoscaled fleet: they behave like those that wait for room on a node."""

from __future__ import annotations

from typing import Any

from routing_harness import MODEL, RoutingHarness, one_busy_node

from warmroute.config import Admission as AdmissionConfig
from warmroute.config import NodeConfig
from warmroute.config.routing import HIGH, LOW
from warmroute.core.admission import FIRST_CHECK_WAIT_S


def empty_fleet(**admission: Any) -> RoutingHarness:
    harness = RoutingHarness(0, admission=AdmissionConfig(**admission))
    harness.admission.without_node.first_node_wait_s = 60.0
    return harness


def test_a_request_that_has_queued_for_long_waits_when_all_nodes_are_replaced() -> None:
    harness, ticket = one_busy_node()
    queued = harness.submit()
    assert queued.queued
    harness.advance(60.0)
    harness.fleet.remove(ticket.node.name)
    node = harness.fleet.add(NodeConfig(url="http://127.0.0.1:1", name="new"))
    harness.tick()
    harness.advance(FIRST_CHECK_WAIT_S - 0.1)
    harness.tick()
    assert queued.queued
    harness.fleet.update_models(node, [MODEL], [])
    harness.fleet.check_passed(node, harness.now_s)
    harness.tick()
    assert queued.node is node


def test_a_draining_node_or_one_whose_check_timed_out_is_not_waited_for() -> None:
    for drains in (True, False):
        harness = empty_fleet()
        harness.admission.without_node.first_node_wait_s = 0.0
        node = harness.fleet.add(NodeConfig(url="http://127.0.0.1:1", name="new"))
        if drains:
            harness.fleet.drain("new")
        else:
            harness.fleet.check_timed_out(node, harness.now_s)
        assert harness.submit().why == "no_node_available"


def test_a_request_that_must_not_queue_is_rejected() -> None:
    harness = empty_fleet()
    assert harness.submit(may_queue=False).why == "no_node_available"
    assert harness.admission.queue.waiting == 0


def test_a_cancelled_request_is_removed() -> None:
    harness = empty_fleet()
    request = harness.submit()
    request.cancel()
    assert harness.admission.queue.waiting == 0
    harness.add("n0")
    harness.tick()
    assert not request.admitted


def test_a_request_without_a_node_is_rejected_when_its_deadline_passes() -> None:
    harness = empty_fleet()
    late = harness.submit(deadline_s=harness.now_s + 5.0, total_deadline_s=harness.now_s + 500.0)
    whole = harness.submit(total_deadline_s=harness.now_s + 5.0)
    harness.advance(4.9)
    harness.tick()
    assert late.queued and whole.queued
    harness.advance(0.1)
    harness.tick()
    assert late.why == "deadline_ttft" and whole.why == "deadline_total"


def test_a_low_priority_request_is_displaced() -> None:
    harness = empty_fleet(max_waiting=2)
    low, normal, another = harness.submit(priority=LOW), harness.submit(), harness.submit()
    assert low.why == "displaced", "no request is rejected in favour of a low-priority one"
    assert normal.queued and another.queued and harness.admission.queue.waiting == 2
    assert harness.submit().why == "queue_full"
    assert harness.submit(priority=HIGH).queued, "high priority has no limit"


def test_a_queued_request_counts_for_the_current_group_of_its_model() -> None:
    harness = RoutingHarness(1)
    harness.busy(harness.nodes[0], 16_000)
    request = harness.submit()
    before = harness.group
    harness.fleet.remove("n0")
    node = harness.add("n1")  # before the next tick
    harness.busy(node, 16_000)
    harness.tick()
    group = harness.fleet.group(MODEL)
    assert request.queued and group is not None and group is not before
    assert (before.waiting, group.waiting) == (0, 1)
    request.cancel()
    assert (before.waiting, group.waiting, harness.admission.queue.waiting) == (0, 0, 0)
