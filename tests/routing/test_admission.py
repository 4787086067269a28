"""Admission: which requests go to a node at once, which are queued, and what ends their wait."""

from __future__ import annotations

import pytest
from routing_harness import RoutingHarness, one_busy_node

from warmroute.config import NodeConfig, Pricing, Routing
from warmroute.core.admission import EXAMINED, EXAMINED_PER_TENANT
from warmroute.core.decision import Decision
from warmroute.core.demand import DemandMeter
from warmroute.core.messages import Outcome
from warmroute.core.routing_context import Query


def test_a_request_whose_node_has_room_is_admitted_at_once() -> None:
    harness = RoutingHarness(2)
    requests = [harness.submit() for _ in range(2)]
    assert {request.node.name for request in requests} == {"n0", "n1"}
    assert harness.admission.queue.queued_total == harness.admission.queue.waiting == 0


def test_an_idle_node_takes_a_prompt_of_any_length() -> None:
    harness = RoutingHarness(1)
    assert harness.submit(200_000).node is harness.nodes[0]


def test_a_small_backlog_does_not_queue_a_request() -> None:
    harness = RoutingHarness(1)
    harness.busy(harness.nodes[0], 4000)  # 216 ms of 250
    assert harness.submit().node is harness.nodes[0]
    assert harness.submit().queued


def test_with_a_policy_that_does_not_queue_every_request_is_admitted_at_once() -> None:
    harness, _ = one_busy_node()
    harness.router.reconfigure(Routing(policy="least_loaded"), Pricing())
    assert all(harness.submit().admitted for _ in range(5))


def test_a_reload_of_the_policy_admits_queued_requests() -> None:
    harness, _ = one_busy_node()
    request = harness.submit()
    harness.router.reconfigure(Routing(policy="round_robin"), Pricing())
    harness.tick()
    assert request.admitted and harness.admission.queue.waiting == 0


# The end of waiting.


def test_without_max_wait_s_a_request_waits_as_long_as_it_takes() -> None:
    harness, _ = one_busy_node()
    request = harness.submit()
    harness.advance(100_000.0)
    harness.tick()
    assert request.queued


# Nodes that leave and join.


def test_queued_requests_are_rejected_when_the_last_node_is_removed() -> None:
    """Even while the running requests of the node have not ended."""
    harness, _ = one_busy_node()
    requests = [harness.submit(tenant=tenant) for tenant in "aab"]
    harness.fleet.remove("n0")
    harness.tick()
    assert [request.why for request in requests] == ["no_node_available"] * 3
    assert harness.admission.queue.waiting == harness.group.waiting == 0


def test_a_new_node_takes_queued_requests() -> None:
    harness, _ = one_busy_node()
    request = harness.submit()
    new = harness.add("n1")
    harness.tick()
    assert request.node is new


def test_slow_start_of_one_node_does_not_delay_requests_for_another() -> None:
    harness = RoutingHarness(2, slow_start_s=10.0)
    back, other = harness.nodes
    harness.fleet.check_failed(back, harness.now_s, "gone")
    running = harness.busy(other)
    requests = [harness.submit(6000) for _ in range(5)]
    assert all(request.queued for request in requests)
    harness.fleet.check_passed(back, harness.now_s)
    harness.busy(back)
    requests += [harness.submit(6000) for _ in range(5)]
    assert all(request.queued for request in requests)
    harness.free(running)
    assert [request.node for request in requests if not request.queued] == [other]


def make_half_open(harness: RoutingHarness) -> None:
    """The first node failed, its breaker's time is over, and a check passed."""
    node = harness.nodes[0]
    for _ in range(5):
        harness.close(harness.send(node), Outcome.FAILED)
    harness.advance(20.0)
    harness.fleet.check_passed(node, harness.now_s)
    harness.advance(0.1)
    assert node.health.state.value == "half_open"


def test_a_half_open_node_with_hanging_requests_does_not_stop_the_others() -> None:
    harness = RoutingHarness(2)
    for _ in range(3):
        harness.busy(harness.nodes[0], 60_000)
    make_half_open(harness)
    requests = [harness.submit() for _ in range(3)]
    assert requests[2].queued
    assert [request.node.name for request in requests[:2]] == ["n0", "n1"], "a trial request, and one for free room"


# Other models, and the cost of a free node.


def test_requests_for_another_model_hide_none_in_the_queue() -> None:
    harness = RoutingHarness(1)
    other = harness.fleet.add(NodeConfig(url="http://other:1", models=("other",)))
    harness.fleet.check_passed(other, 0.0)
    harness.cache_view.add_node(other.name, ["other"]).set_size(16, 0)
    first, running = harness.submit(), harness.submit(model="other")
    many = [harness.submit() for _ in range(4 * EXAMINED_PER_TENANT)]
    hidden = harness.submit(model="other")
    assert hidden.queued and all(request.queued for request in many)
    running.finish()
    assert not hidden.queued and hidden.decision.node is other
    assert not first.queued and all(request.queued for request in many)


def test_a_request_for_an_unknown_model_is_not_counted_as_demand() -> None:
    harness = RoutingHarness(1)
    harness.router.demand_meter = demand_meter = DemandMeter()
    assert harness.submit(100, model="none").why == "model_not_found"
    assert demand_meter.arrived == 0
    harness.submit(100)
    assert demand_meter.arrived == 1


def test_a_request_that_lets_another_one_go_first_counts_once_as_demand() -> None:
    """It is decided twice."""
    harness, _ = one_busy_node()
    harness.router.demand_meter = demand_meter = DemandMeter()
    first = harness.submit()
    harness.advance(0.25)
    second = harness.submit()
    assert first.admitted and second.queued and demand_meter.arrived == 2


def test_the_time_in_the_queue_is_known() -> None:
    harness, running = one_busy_node()
    waiting = harness.submit()
    harness.advance(2.0)
    harness.free(running)
    assert waiting.admitted and waiting.call.queued_ms == pytest.approx(2000.0)


def test_an_answer_is_decoded_behind_its_prompt_and_half_of_itself_on_average() -> None:
    harness = RoutingHarness(1)
    harness.router.demand_meter = demand_meter = DemandMeter()
    harness.submit(100).answer((100, 0, 10))
    assert demand_meter.responses == 1 and demand_meter.decode_context == 10 * (100 + 10 / 2)


def test_a_request_that_every_node_is_too_busy_for_counts_as_shed() -> None:
    harness = RoutingHarness(2)
    harness.router.demand_meter = demand_meter = DemandMeter()
    request = harness.submit(100)
    request.fail(429)
    assert demand_meter.shed == 0
    request.fail(429)
    assert request.reject is not None and request.reject.status == 429 and demand_meter.shed == 1
    failing = harness.submit(100)
    for _ in range(2):
        failing.fail(500)
    assert failing.reject is not None and failing.reject.status == 502 and demand_meter.shed == 1


@pytest.mark.interpreted
@pytest.mark.parametrize("tenants", [1, 3, 100])
def test_the_number_of_decisions_for_a_free_node_is_bounded(tenants: int) -> None:
    harness = RoutingHarness(2)
    wanted, slow = harness.nodes
    harness.busy(wanted, 16_000)
    running = harness.busy(slow, 16_000)
    slow.speed.ms_per_token = 50.0
    requests = [harness.submit(tenant=f"tenant {number % tenants}") for number in range(600)]
    before = harness.router.decide_again
    decisions = 0

    def counted(query: Query, now_s: float) -> Decision:
        nonlocal decisions
        decisions += 1
        return before(query, now_s)

    harness.router.decide_again = counted  # type: ignore[method-assign]
    harness.free(running)
    assert all(request.queued for request in requests), "no request prefers it"
    each = min(EXAMINED_PER_TENANT, max(1, EXAMINED // tenants))
    assert tenants <= decisions <= (2 * each + max(1, each // 2)) * tenants
