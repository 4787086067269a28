"""Requests that wait for a first node of an autoscaled fleet: they behave like those that wait for room on a node."""

from __future__ import annotations

from typing import Any

import pytest
from routing_harness import MODEL, FakeRequest, RoutingHarness, one_busy_node, prompt

from warmroute.config import Admission as AdmissionConfig
from warmroute.config import NodeConfig
from warmroute.config.routing import HIGH, LOW
from warmroute.core.admission import FIRST_CHECK_WAIT_S
from warmroute.core.decision import Decision
from warmroute.core.demand import DemandMeter
from warmroute.core.rejections import DeadlineUnreachable, Displaced, NoNodeAvailable, QueueFull, QueueTimeout


def empty_fleet(**admission: Any) -> RoutingHarness:
    harness = RoutingHarness(0, admission=AdmissionConfig(**admission))
    harness.admission.without_node.first_node_wait_s = 60.0
    return harness


def test_the_first_request_is_admitted_when_a_node_joins_and_the_others_after_it() -> None:
    harness = empty_fleet()
    first, second = harness.submit(), harness.submit()
    harness.tick()
    assert first.queued and second.queued
    assert harness.admission.queue.waiting == harness.admission.queue.queued_total == 2
    node = harness.add("n0")
    harness.group = node.groups[0]
    harness.tick()
    assert first.node is node and second.queued
    assert harness.admission.queue.waiting == harness.group.waiting == 1 and harness.admission.queue.queued_total == 2
    first.finish()
    assert second.node is node
    second.finish()
    harness.assert_all_counters_are_zero()


def test_without_autoscaling_no_request_waits_for_a_node() -> None:
    harness = empty_fleet()
    harness.admission.without_node.first_node_wait_s = 0.0
    with pytest.raises(NoNodeAvailable):
        harness.submit()


def test_a_request_waits_for_the_first_check_of_a_new_node_but_not_for_one_that_fails_it() -> None:
    for passes in (True, False, None):
        harness = empty_fleet()
        harness.admission.without_node.first_node_wait_s = 0.0
        node = harness.fleet.add(NodeConfig(url="http://127.0.0.1:1", name="new"))
        first, other = harness.submit(), harness.submit()
        harness.tick()
        assert first.queued and other.queued and harness.admission.queue.waiting == 2
        with pytest.raises(NoNodeAvailable):
            harness.submit(may_queue=False)
        if passes is None:
            harness.advance(FIRST_CHECK_WAIT_S + 0.1)
            harness.tick()
            assert isinstance(first.error, QueueTimeout) and isinstance(other.error, QueueTimeout)
        elif passes:
            harness.fleet.update_models(node, [MODEL], [])
            harness.fleet.check_passed(node, harness.now_s)
            harness.tick()
            assert first.node is node and (other.queued or other.node is node)
        else:
            harness.fleet.check_failed(node, harness.now_s, "refused")
            harness.tick()
            assert isinstance(first.error, NoNodeAvailable) and isinstance(other.error, NoNodeAvailable)


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
        with pytest.raises(NoNodeAvailable):
            harness.submit()


def test_a_request_that_must_not_queue_is_rejected() -> None:
    harness = empty_fleet()
    with pytest.raises(NoNodeAvailable):
        harness.submit(may_queue=False)
    assert harness.admission.queue.waiting == 0


class NodeTaker(FakeRequest):
    """The last node leaves when it is sent there."""

    def on_admitted(self, decision: Decision) -> None:
        super().on_admitted(decision)
        self.harness.fleet.remove(decision.node.name)


def test_a_request_waits_if_the_last_node_leaves_while_another_one_goes_first() -> None:
    """It decides twice: its node has room, but one that waits goes there before it."""
    for may_queue in (True, False):
        harness, _ = one_busy_node()
        harness.admission.without_node.first_node_wait_s = 60.0
        demand = harness.router.demand_meter = DemandMeter()
        NodeTaker(harness, prompt(8000)).submit()
        harness.advance(0.25)
        assert demand.arrived == 1
        if may_queue:
            assert harness.submit().queued
            assert len(harness.admission.queue.waiting_for_first_node) == 1
        else:
            with pytest.raises(NoNodeAvailable):
                harness.submit(may_queue=False)
        assert demand.arrived == 2, "each request is counted once"


def test_a_cancelled_request_is_removed() -> None:
    harness = empty_fleet()
    request = harness.submit()
    request.cancel()
    assert harness.admission.queue.waiting == 0
    harness.add("n0")
    harness.tick()
    assert request.events == ["cancelled"]


def test_a_request_is_rejected_after_first_node_wait_s() -> None:
    harness = empty_fleet()
    request = harness.submit()
    harness.advance(harness.admission.without_node.first_node_wait_s + 1.0)
    harness.tick()
    assert isinstance(request.error, QueueTimeout) and harness.admission.queue.waiting == 0


def test_a_request_without_a_node_is_rejected_when_its_deadline_passes() -> None:
    harness = empty_fleet()
    late = harness.submit(deadline_s=harness.now_s + 5.0, total_deadline_s=harness.now_s + 500.0)
    whole = harness.submit(total_deadline_s=harness.now_s + 5.0)
    harness.advance(4.9)
    harness.tick()
    assert late.queued and whole.queued
    harness.advance(0.1)
    harness.tick()
    assert isinstance(late.error, DeadlineUnreachable) and late.error.reason == "deadline_ttft"
    assert isinstance(whole.error, DeadlineUnreachable) and whole.error.reason == "deadline_total"


def test_a_request_past_its_deadline_is_not_sent_to_the_new_node() -> None:
    harness = empty_fleet()
    late = harness.submit(deadline_s=harness.now_s + 5.0)
    early = harness.submit(total_deadline_s=harness.now_s + 500.0)
    harness.advance(5.5)
    harness.add("n0")
    harness.tick()
    assert late.events == ["rejected"] and isinstance(late.error, DeadlineUnreachable)
    assert early.events == ["admitted"] and harness.admission.queue.waiting == 0


def test_a_low_priority_request_is_displaced() -> None:
    harness = empty_fleet(max_waiting=2)
    low, normal, another = harness.submit(priority=LOW), harness.submit(), harness.submit()
    assert isinstance(low.error, Displaced), "no request is rejected in favour of a low-priority one"
    assert normal.queued and another.queued and harness.admission.queue.waiting == 2
    with pytest.raises(QueueFull):
        harness.submit()
    assert harness.submit(priority=HIGH).queued, "high priority has no limit"


def test_queued_requests_continue_to_wait_when_the_last_node_leaves() -> None:
    harness = RoutingHarness(1)
    harness.admission.without_node.first_node_wait_s = 60.0
    ticket = harness.busy(harness.nodes[0], 16_000)
    request = harness.submit()
    group = harness.group
    harness.fleet.remove("n0")
    harness.tick()
    harness.close(ticket)
    assert request.queued and harness.admission.queue.waiting == 1 and group.waiting == 0
    node = harness.add("n1")
    harness.tick()
    assert request.node is node and harness.fleet.group(MODEL) is not group
    request.finish()
    assert harness.admission.queue.waiting == 0 and harness.admission.queue.queued_total == 1


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
