"""Limits of admission: a full queue, displaced requests, nodes' own queues, requests that must not queue."""

from __future__ import annotations

from collections import deque

import pytest
from routing_harness import FakeRequest, RoutingHarness, one_busy_node, prompt

from warmroute.config import Admission as AdmissionConfig
from warmroute.config import NodeConfig, Pricing, Routing
from warmroute.config.routing import HIGH, LOW, NORMAL
from warmroute.core.rejections import Displaced, NodeQueuesFull, QueueFull, WouldQueue


def test_a_full_queue_rejects_low_priority_first_and_high_priority_never() -> None:
    harness, running = one_busy_node(max_waiting=4)
    for _ in range(2):
        harness.submit()
    with pytest.raises(QueueFull):
        harness.submit(priority=LOW)
    for _ in range(2):
        harness.submit()
    with pytest.raises(QueueFull) as rejected:
        harness.submit()
    assert rejected.value.retry_after_s == 5, "no queued request was admitted yet"
    assert harness.submit(priority=HIGH).queued
    assert harness.admission.queue.waiting == harness.admission.queue.queued_total == 5
    harness.free(running)
    with pytest.raises(QueueFull):
        harness.submit()
    assert harness.admission.queue.waiting == 4


def test_retry_after_follows_from_the_rate_of_admission() -> None:
    harness, running = one_busy_node(max_waiting=40)
    waiting = deque(harness.submit() for _ in range(40))
    harness.free(running)
    for _ in range(60):  # two a second, for half a minute
        harness.advance(0.5)
        admitted = next(request for request in waiting if not request.queued)
        waiting.remove(admitted)
        waiting.append(harness.submit())
        admitted.finish()
    waiting.append(harness.submit())
    with pytest.raises(QueueFull) as rejected:
        harness.submit()
    assert 15 <= rejected.value.retry_after_s <= 25, "40 wait, and 2 are admitted per second"


def test_a_full_queue_displaces_low_priority_requests() -> None:
    harness, _ = one_busy_node(max_waiting=4)
    low = [harness.submit(priority=LOW, tenant=tenant) for tenant in "ab"]
    for _ in range(2):
        harness.submit()
    normal = harness.submit()
    assert normal.queued and harness.admission.queue.waiting == harness.group.waiting == 4
    assert [request.events for request in low] == [[], ["rejected"]] and isinstance(low[1].error, Displaced)
    high = harness.submit(priority=HIGH)
    assert high.queued and low[0].events == ["rejected"] and harness.admission.queue.waiting == 4
    with pytest.raises(QueueFull):
        harness.submit()
    assert harness.submit(priority=HIGH).queued and harness.admission.queue.waiting == 5, "high priority has no limit"


def test_the_newest_request_of_the_tenant_with_the_most_is_displaced_first() -> None:
    harness, _ = one_busy_node(max_waiting=6)
    low = [harness.submit(priority=LOW, tenant=tenant) for tenant in ("many", "few", "many")]
    for _ in range(3):
        harness.submit()
    harness.submit()
    assert [request.events for request in low] == [[], [], ["rejected"]]


def test_a_full_queue_displaces_the_newest_request_of_the_largest_tenant() -> None:
    harness, _ = one_busy_node(max_waiting=4)
    many = [harness.submit(tenant="many") for _ in range(3)]
    few = [harness.submit(tenant="few") for _ in range(2)]  # the second one makes it 2 and 2
    assert all(request.queued for request in few)
    assert [request.events for request in many] == [[], [], ["rejected"]] and isinstance(many[2].error, Displaced)
    with pytest.raises(QueueFull):
        harness.submit(tenant="few")  # as many as the other tenant
    with pytest.raises(QueueFull):
        harness.submit(tenant="many")
    others = [harness.submit(tenant=tenant) for tenant in ("third", "fourth")]
    assert all(request.queued for request in others) and not many[1].queued and not few[1].queued
    with pytest.raises(QueueFull):
        harness.submit(tenant="fifth")  # four tenants have one each
    assert harness.admission.queue.waiting == harness.group.waiting == 4


def test_a_tenant_never_displaces_its_own_requests_or_those_of_a_higher_priority() -> None:
    harness, _ = one_busy_node(max_waiting=4)
    high = [harness.submit(tenant="many", priority=HIGH) for _ in range(4)]
    for tenant in ("many", "few"):
        with pytest.raises(QueueFull):
            harness.submit(tenant=tenant)
    assert all(request.queued for request in high)


def test_low_priority_tenants_share_their_half_of_the_queue() -> None:
    harness, _ = one_busy_node(max_waiting=8)
    many = [harness.submit(tenant="many", priority=LOW) for _ in range(4)]
    assert harness.submit(tenant="few", priority=LOW).queued and many[3].events == ["rejected"]
    assert harness.submit(tenant="normal").queued, "a request with a higher priority still finds room"
    with pytest.raises(QueueFull):
        harness.submit(tenant="many", priority=LOW)


def test_tenants_share_the_places_for_requests_that_wait_for_a_first_node() -> None:
    harness = RoutingHarness(0, admission=AdmissionConfig(max_waiting=4))
    harness.admission.without_node.first_node_wait_s = 60.0
    many = [harness.submit(tenant="many") for _ in range(4)]
    few = harness.submit(tenant="few")
    assert few.queued and [request.queued for request in many] == [True, True, True, False]
    harness.admission.queue.cancel(few)
    for request in many[:3]:
        harness.admission.queue.cancel(request)
    assert harness.admission.queue.waiting == 0


def test_with_a_half_full_queue_low_priority_does_not_overtake_others() -> None:
    harness = RoutingHarness(2, admission=AdmissionConfig(max_waiting=4))
    full, other = harness.nodes
    mine = prompt(60_000, 1)
    harness.warm(full, mine)
    harness.busy(full, 40_000)
    elsewhere = harness.busy(other, 40_000)
    for _ in range(2):
        FakeRequest(harness, mine).submit()
    assert harness.admission.queue.waiting == 2
    harness.close(elsewhere)
    with pytest.raises(QueueFull):
        harness.submit(300, priority=LOW)
    assert harness.submit(300).node is other


def test_a_low_priority_request_whose_turn_would_not_come_is_rejected() -> None:
    harness, _ = one_busy_node(max_waiting=4)
    low = harness.submit(priority=LOW)
    for _ in range(2):
        harness.submit()
    harness.advance(9.0)
    harness.tick()
    assert low.queued
    harness.advance(2.0)
    harness.tick()
    assert low.events == ["rejected"] and isinstance(low.error, Displaced) and harness.admission.queue.waiting == 2


def test_low_priority_requests_are_admitted_if_no_others_wait() -> None:
    harness, running = one_busy_node(max_waiting=2)
    low = harness.submit(priority=LOW)
    harness.free(running)
    assert low.events == ["admitted"]
    high = [harness.submit(priority=HIGH) for _ in range(3)]
    assert all(request.queued for request in high)
    low.finish()
    assert [request.events for request in high] == [["admitted"], [], []]


def test_a_full_queue_for_one_model_rejects_no_low_priority_request_for_another() -> None:
    harness, _ = one_busy_node(max_waiting=2)
    for _ in range(2):
        harness.submit()
    harness.fleet.add(NodeConfig(url="http://b:1", name="b", models=("other",)))
    harness.fleet.check_passed(harness.fleet.node("b"), 0.0)
    assert harness.submit(300, priority=LOW, model="other").node.name == "b"


# The nodes' own queues.


def set_engine_queues(harness: RoutingHarness, *waiting: int) -> None:
    for node, count in zip(harness.nodes, waiting, strict=True):
        node.update_load(4, count, 0.1, harness.now_s)


@pytest.mark.parametrize("policy", ["price", "round_robin", "least_loaded", "power_of_two", "random", "latency"])
def test_with_all_nodes_over_the_threshold_only_high_priority_is_admitted(policy: str) -> None:
    harness = RoutingHarness(2, admission=AdmissionConfig(queue_threshold=8))
    harness.router.reconfigure(Routing(policy=policy, seed=3), Pricing())  # type: ignore[arg-type]
    set_engine_queues(harness, 8, 9)
    for priority in (NORMAL, LOW):
        with pytest.raises(NodeQueuesFull):
            harness.submit(300, priority=priority)
    harness.submit(300, priority=HIGH).cancel()
    set_engine_queues(harness, 4, 5)
    with pytest.raises(NodeQueuesFull):
        harness.submit(300, priority=LOW)
    harness.submit(300).cancel()
    set_engine_queues(harness, 3, 5)
    assert harness.submit(300, priority=LOW).node is harness.nodes[0]


@pytest.mark.parametrize("policy", ["price", "round_robin", "random"])
def test_nodes_over_the_threshold_are_skipped(policy: str) -> None:
    harness = RoutingHarness(3, admission=AdmissionConfig(queue_threshold=8))
    harness.router.reconfigure(Routing(policy=policy, seed=3), Pricing())  # type: ignore[arg-type]
    set_engine_queues(harness, 20, 7, 20)
    request = harness.submit(300)
    assert request.node is harness.nodes[1]
    assert {node.name for node in request.decision.fallbacks()} == {"n0", "n2"}, "they stay fallbacks"


def test_requests_sent_since_the_last_poll_count_until_their_first_token() -> None:
    harness = RoutingHarness(1, admission=AdmissionConfig(queue_threshold=2))
    harness.router.reconfigure(Routing(policy="round_robin"), Pricing())
    set_engine_queues(harness, 0)
    first, second = harness.submit(300), harness.submit(300)
    assert harness.nodes[0].queued == 2
    with pytest.raises(NodeQueuesFull):
        harness.submit(300)
    first.ticket.first_token(harness.now_s)
    assert harness.nodes[0].queued == 1
    third = harness.submit(300)
    second.finish()
    set_engine_queues(harness, 1)
    assert harness.nodes[0].queued == 1, "the poll already counts those sent before it"
    third.finish()
    assert harness.nodes[0].queued == 1
    set_engine_queues(harness, 0)
    first.finish()
    assert harness.nodes[0].queued == 0
    harness.assert_all_counters_are_zero()


def test_without_a_threshold_the_nodes_queues_do_not_matter() -> None:
    harness = RoutingHarness(1)
    harness.router.reconfigure(Routing(policy="round_robin"), Pricing())
    set_engine_queues(harness, 1000)
    assert harness.submit(300, priority=LOW).events == ["admitted"]


def test_a_queued_request_does_not_go_to_a_node_over_the_threshold() -> None:
    harness = RoutingHarness(2, admission=AdmissionConfig(queue_threshold=4))
    one, two = harness.nodes
    tickets = [harness.busy(node, 16_000) for node in (one, two)]
    requests = [harness.submit(), harness.submit(priority=HIGH)]
    assert all(request.queued for request in requests)
    one.update_load(8, 6, 0.1, harness.now_s)
    two.update_load(8, 6, 0.1, harness.now_s)
    for ticket in tickets:
        harness.free(ticket)
    harness.tick()
    assert requests[0].queued and requests[1].events == ["admitted"], "high priority has no limit"
    requests[1].finish()
    two.update_load(8, 0, 0.1, harness.now_s)
    harness.tick()
    assert requests[0].node is two
    requests[0].finish()
    harness.assert_all_counters_are_zero()


# Requests that must not queue.


def test_a_request_that_must_not_queue_is_rejected_at_once() -> None:
    harness, running = one_busy_node()
    request = FakeRequest(harness, prompt(8000), may_queue=False)
    with pytest.raises(WouldQueue):
        request.submit()
    harness.close(running)
    request.submit()
    assert request.events == ["admitted"]
    request.finish()
    harness.assert_all_counters_are_zero()


def test_a_request_that_must_not_queue_does_not_queue_in_an_engine_either() -> None:
    harness = RoutingHarness(2)
    harness.router.reconfigure(Routing(policy="round_robin"), Pricing())
    set_engine_queues(harness, 1, 0)
    for _ in range(4):
        assert harness.submit(300, may_queue=False).node is harness.nodes[1]
    set_engine_queues(harness, 1, 2)
    with pytest.raises(WouldQueue):
        harness.submit(300, may_queue=False)
