"""Limits of admission: a full queue, displaced requests, nodes' own queues, requests that must not queue."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from routing_harness import FakeRequest, RoutingHarness, one_busy_node, prompt

from warmroute.config import Admission as AdmissionConfig
from warmroute.config import NodeConfig, Pricing, Routing
from warmroute.config.routing import HIGH, LOW, NORMAL


def test_a_full_queue_displaces_low_priority_requests() -> None:
    harness, _ = one_busy_node(max_waiting=4)
    low = [harness.submit(priority=LOW, tenant=tenant) for tenant in "ab"]
    for _ in range(2):
        harness.submit()
    normal = harness.submit()
    assert normal.queued and harness.admission.queue.waiting == harness.group.waiting == 4
    assert [request.why for request in low] == ["", "displaced"]
    high = harness.submit(priority=HIGH)
    assert high.queued and low[0].why == "displaced" and harness.admission.queue.waiting == 4
    assert harness.submit().why == "queue_full"
    assert harness.submit(priority=HIGH).queued and harness.admission.queue.waiting == 5, "high priority has no limit"


def test_the_newest_request_of_the_tenant_with_the_most_is_displaced_first() -> None:
    harness, _ = one_busy_node(max_waiting=6)
    low = [harness.submit(priority=LOW, tenant=tenant) for tenant in ("many", "few", "many")]
    for _ in range(3):
        harness.submit()
    harness.submit()
    assert [request.why for request in low] == ["", "", "displaced"]


def test_a_full_queue_displaces_the_newest_request_of_the_largest_tenant() -> None:
    harness, _ = one_busy_node(max_waiting=4)
    many = [harness.submit(tenant="many") for _ in range(3)]
    few = [harness.submit(tenant="few") for _ in range(2)]  # the second one makes it 2 and 2
    assert all(request.queued for request in few)
    assert [request.why for request in many] == ["", "", "displaced"]
    assert harness.submit(tenant="few").why == "queue_full", "as many as the other tenant"
    assert harness.submit(tenant="many").why == "queue_full"
    others = [harness.submit(tenant=tenant) for tenant in ("third", "fourth")]
    assert all(request.queued for request in others) and not many[1].queued and not few[1].queued
    assert harness.submit(tenant="fifth").why == "queue_full", "four tenants have one each"
    assert harness.admission.queue.waiting == harness.group.waiting == 4


def test_a_tenant_never_displaces_its_own_requests_or_those_of_a_higher_priority() -> None:
    harness, _ = one_busy_node(max_waiting=4)
    high = [harness.submit(tenant="many", priority=HIGH) for _ in range(4)]
    for tenant in ("many", "few"):
        assert harness.submit(tenant=tenant).why == "queue_full"
    assert all(request.queued for request in high)


def test_low_priority_tenants_share_their_half_of_the_queue() -> None:
    harness, _ = one_busy_node(max_waiting=8)
    many = [harness.submit(tenant="many", priority=LOW) for _ in range(4)]
    assert harness.submit(tenant="few", priority=LOW).queued and many[3].why
    assert harness.submit(tenant="normal").queued, "a request with a higher priority still finds room"
    assert harness.submit(tenant="many", priority=LOW).why == "queue_full"


def test_tenants_share_the_places_for_requests_that_wait_for_a_first_node() -> None:
    harness = RoutingHarness(0, admission=AdmissionConfig(max_waiting=4))
    harness.admission.without_node.first_node_wait_s = 60.0
    many = [harness.submit(tenant="many") for _ in range(4)]
    few = harness.submit(tenant="few")
    assert few.queued and [request.queued for request in many] == [True, True, True, False]
    for request in (few, *many[:3]):
        request.cancel()
    assert harness.admission.queue.waiting == 0


def test_with_a_half_full_queue_low_priority_does_not_overtake_others() -> None:
    harness = RoutingHarness(2, admission=AdmissionConfig(max_waiting=4))
    full, other = harness.nodes
    mine = prompt(60_000, 1)
    harness.warm(full, mine)
    harness.busy(full, 40_000)
    elsewhere = harness.busy(other, 40_000)
    for _ in range(2):
        harness.submit(mine)
    assert harness.admission.queue.waiting == 2
    harness.close(elsewhere)
    assert harness.submit(300, priority=LOW).why == "queue_full"
    assert harness.submit(300).node is other


def test_low_priority_requests_are_admitted_if_no_others_wait() -> None:
    harness, running = one_busy_node(max_waiting=2)
    low = harness.submit(priority=LOW)
    harness.free(running)
    assert low.admitted
    high = [harness.submit(priority=HIGH) for _ in range(3)]
    assert all(request.queued for request in high)
    low.finish()
    assert [request.admitted for request in high] == [True, False, False]


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
        assert harness.submit(300, priority=priority).why == "queue_threshold"
    harness.submit(300, priority=HIGH).cancel()
    set_engine_queues(harness, 4, 5)
    assert harness.submit(300, priority=LOW).why == "queue_threshold"
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
    assert harness.submit(300).why == "queue_threshold"
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
    assert harness.submit(300, priority=LOW).admitted


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
    assert requests[0].queued and requests[1].admitted, "high priority has no limit"
    requests[1].finish()
    two.update_load(8, 0, 0.1, harness.now_s)
    harness.tick()
    assert requests[0].node is two
    requests[0].finish()
    harness.assert_all_counters_are_zero()


# Requests that must not queue.


def test_a_request_that_must_not_queue_does_not_queue_in_an_engine_either() -> None:
    harness = RoutingHarness(2)
    harness.router.reconfigure(Routing(policy="round_robin"), Pricing())
    set_engine_queues(harness, 1, 0)
    for _ in range(4):
        assert harness.submit(300, may_queue=False).node is harness.nodes[1]
    set_engine_queues(harness, 1, 2)
    assert harness.submit(300, may_queue=False).why == "would_queue"


# Any sequence of events.


EVENTS = st.one_of(
    st.tuples(
        st.just("arrive"), st.sampled_from(["a", "b", "c"]), st.sampled_from([HIGH, NORMAL, LOW]), st.integers(1, 30)
    ),
    st.tuples(st.sampled_from(["finish", "cancel", "first token"]), st.integers(0, 30)),
    st.tuples(st.just("tick"), st.floats(0.0, 3.0)),
    st.tuples(st.sampled_from(["down", "up"]), st.integers(0, 2)),
)


@settings(max_examples=60)
@given(st.lists(EVENTS, max_size=50))
def test_every_request_is_admitted_rejected_or_cancelled_exactly_once(events: list[tuple[object, ...]]) -> None:
    harness = RoutingHarness(3, admission=AdmissionConfig(max_waiting=8, max_wait_s=6.0, queue_threshold=6))
    requests: list[FakeRequest] = []
    for event in events:
        open_, waiting = [one for one in requests if one.is_open], [one for one in requests if one.queued]
        match event:
            case ("arrive", str(tenant), int(priority), int(thousands)):
                fields = {
                    "deadline_s": harness.now_s + 2.0 if thousands % 3 == 0 else 0.0,
                    "total_deadline_s": harness.now_s + 4.0 if thousands % 5 == 0 else 0.0,
                    "may_queue": thousands % 7 != 0,
                }
                requests.append(harness.submit(thousands * 1000, tenant=tenant, priority=priority, **fields))
            case ("finish", int(at)) if open_:
                open_[at % len(open_)].finish()
            case ("first token", int(at)) if silent := [one for one in open_ if not one.ticket.first_token_s]:
                silent[at % len(silent)].first_token()
            case ("cancel", int(at)) if waiting:
                waiting[at % len(waiting)].cancel()
            case ("tick", float(seconds)):
                harness.advance(seconds)
                harness.tick()
            case ("down", int(at)):
                harness.fleet.check_failed(harness.nodes[at], harness.now_s, "gone")
                harness.settle()
            case ("up", int(at)):
                harness.fleet.check_passed(harness.nodes[at], harness.now_s)
                harness.settle()
        assert harness.admission.queue.waiting == harness.group.waiting == sum(request.queued for request in requests)
    for node in harness.nodes:
        harness.fleet.check_passed(node, harness.now_s)
    for _ in range(len(requests) + 1):
        for request in requests:
            if request.is_open:
                request.finish()
        harness.tick()
    assert all(request.done for request in requests)
    harness.assert_all_counters_are_zero()
