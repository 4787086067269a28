"""Admission: which requests go to a node at once, which are queued, and what ends their wait."""

from __future__ import annotations

import pytest
from routing_harness import FakeRequest, RoutingHarness, one_busy_node, prompt

from warmroute.config import Admission as AdmissionConfig
from warmroute.config import NodeConfig, Pricing, Routing
from warmroute.core.admission import EXAMINED, EXAMINED_PER_TENANT
from warmroute.core.decision import Decision
from warmroute.core.demand import DemandMeter
from warmroute.core.messages import Outcome
from warmroute.core.rejections import NoNodeAvailable, QueueTimeout, UnknownModel
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


def test_a_request_is_queued_until_its_node_is_free() -> None:
    harness, running = one_busy_node()
    first, second = harness.submit(), harness.submit()
    assert first.queued and second.queued
    assert harness.admission.queue.waiting == harness.group.waiting == harness.admission.queue.queued_total == 2
    harness.tick()
    assert first.queued and second.queued
    harness.free(running)
    assert first.node is harness.nodes[0] and second.queued
    first.finish()
    assert second.node is harness.nodes[0]
    second.finish()
    harness.assert_all_counters_are_zero()
    assert harness.admission.queue.queued_total == 2, "the total does not go down"


def test_a_first_token_frees_the_node_for_the_next_prefill() -> None:
    harness, running = one_busy_node()
    request = harness.submit()
    harness.advance(0.4)
    running.first_token(harness.now_s)
    harness.admission.node_freed(harness.nodes[0], harness.now_s)
    assert request.node is harness.nodes[0] and harness.nodes[0].inflight == 2


def test_a_tick_finds_a_node_that_has_room_without_an_event() -> None:
    harness, running = one_busy_node()
    request = harness.submit()
    harness.close(running)
    assert request.queued
    harness.tick()
    assert request.events == ["admitted"]


def test_a_queued_request_takes_another_node_that_becomes_cheaper() -> None:
    harness = RoutingHarness(2)
    warm, cold = harness.nodes
    mine = prompt(8000, 1)
    harness.warm(warm, mine)
    harness.busy(warm, 30_000)
    elsewhere = harness.busy(cold, 60_000)
    request = FakeRequest(harness, mine)
    request.submit()
    assert request.queued and harness.decide(mine).node is warm
    harness.free(elsewhere)
    assert request.node is cold


def test_a_queued_request_waits_on_if_another_node_would_cost_more() -> None:
    harness = RoutingHarness(2)
    warm, cold = harness.nodes
    mine = prompt(60_000, 1)
    harness.warm(warm, mine)
    ahead, elsewhere = harness.busy(warm, 8000), harness.busy(cold, 8000)
    request = FakeRequest(harness, mine)
    request.submit()
    harness.free(elsewhere)
    assert request.queued, "6 s of prefill there against 0.5 s of waiting here"
    harness.free(ahead)
    assert request.node is warm


def test_without_queue_at_router_every_request_is_admitted_at_once() -> None:
    harness, _ = one_busy_node(queue_at_router=False)
    assert [harness.submit().events for _ in range(5)] == [["admitted"]] * 5


def test_with_a_policy_that_does_not_queue_every_request_is_admitted_at_once() -> None:
    harness, _ = one_busy_node()
    harness.router.reconfigure(Routing(policy="least_loaded"), Pricing())
    assert [harness.submit().events for _ in range(5)] == [["admitted"]] * 5


@pytest.mark.parametrize("change", ["queue_at_router", "policy", "max_node_backlog_ms"])
def test_a_reload_that_makes_room_admits_queued_requests(change: str) -> None:
    harness, _ = one_busy_node()
    request = harness.submit()
    if change == "policy":
        harness.router.reconfigure(Routing(policy="round_robin"), Pricing())
    else:
        harness.admission.reconfigure(
            AdmissionConfig(queue_at_router=False)
            if change == "queue_at_router"
            else AdmissionConfig(max_node_backlog_ms=1000.0)
        )
    harness.tick()
    assert request.events == ["admitted"] and harness.admission.queue.waiting == 0


# The end of waiting.


def test_a_cancelled_request_is_removed_from_the_queue() -> None:
    harness, running = one_busy_node()
    leaving, staying = harness.submit(tenant="a"), harness.submit(tenant="b")
    leaving.cancel()
    leaving.cancel()
    assert harness.admission.queue.waiting == harness.group.waiting == 1
    harness.free(running)
    assert leaving.events == ["cancelled", "cancelled"] and staying.events == ["admitted"]
    staying.finish()
    harness.assert_all_counters_are_zero()


def test_canceling_an_admitted_request_leaves_the_queue_alone() -> None:
    harness, running = one_busy_node()
    admitted, waiting = harness.submit(), harness.submit()
    harness.free(running)
    admitted.cancel()
    assert waiting.queued and harness.admission.queue.waiting == 1


def test_a_request_is_rejected_after_max_wait_s() -> None:
    harness, running = one_busy_node(max_wait_s=5.0)
    early = harness.submit()
    harness.advance(3.0)
    late = harness.submit()
    harness.advance(2.5)
    harness.tick()
    assert early.events == ["rejected"] and isinstance(early.error, QueueTimeout)
    assert late.queued and harness.admission.queue.waiting == 1
    harness.free(running)
    assert late.events == ["admitted"]


def test_without_max_wait_s_a_request_waits_as_long_as_it_takes() -> None:
    harness, _ = one_busy_node()
    request = harness.submit()
    harness.advance(100_000.0)
    harness.tick()
    assert request.queued


def test_a_request_that_is_rejected_at_once_leaves_no_trace() -> None:
    harness = RoutingHarness(0)
    with pytest.raises(NoNodeAvailable):
        harness.submit()
    harness.add("n0")
    with pytest.raises(UnknownModel):
        harness.submit(model="another")
    harness.assert_all_counters_are_zero()


# Nodes that leave and join.


@pytest.mark.parametrize("way", ["refuses", "removed", "drained"])
def test_a_request_queued_for_a_node_that_leaves_is_sent_to_another(way: str) -> None:
    harness = RoutingHarness(2)
    warm, other = harness.nodes
    mine = prompt(60_000, 1)
    harness.warm(warm, mine)
    harness.busy(warm)
    request = FakeRequest(harness, mine)
    request.submit()
    assert request.queued
    if way == "refuses":
        harness.fleet.check_failed(warm, harness.now_s, "gone")
    elif way == "removed":
        harness.fleet.remove(warm.name)
    else:
        harness.fleet.drain(warm.name)
    harness.tick()
    assert request.node is other


@pytest.mark.parametrize("way", ["refuses", "removed"])
def test_queued_requests_are_rejected_when_no_node_is_left(way: str) -> None:
    """Even while the running requests of the node have not ended."""
    harness, _ = one_busy_node()
    requests = [harness.submit(tenant=tenant) for tenant in "aab"]
    if way == "refuses":
        harness.fleet.check_failed(harness.nodes[0], harness.now_s, "gone")
    else:
        harness.fleet.remove("n0")
    harness.tick()
    assert [request.events for request in requests] == [["rejected"]] * 3
    assert all(isinstance(request.error, NoNodeAvailable) for request in requests)
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


def test_a_queued_request_becomes_the_trial_request_of_a_half_open_node() -> None:
    """Without new requests, a queued one has to be the trial."""
    harness = RoutingHarness(2)
    tickets = [harness.busy(node) for node in harness.nodes]
    requests = [harness.submit() for _ in range(3)]
    assert all(request.queued for request in requests)
    harness.close(tickets[0], Outcome.FAILED)
    make_half_open(harness)
    harness.tick()
    assert [request.node for request in requests if not request.queued] == [harness.nodes[0]]


def test_a_half_open_node_with_hanging_requests_does_not_stop_the_others() -> None:
    harness = RoutingHarness(2)
    for _ in range(3):
        harness.busy(harness.nodes[0], 60_000)
    make_half_open(harness)
    requests = [harness.submit() for _ in range(3)]
    assert [request.events for request in requests] == [["admitted"], ["admitted"], []]
    assert [request.node.name for request in requests[:2]] == ["n0", "n1"], (
        "one trial request, one for the node with room"
    )


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
    with pytest.raises(UnknownModel):
        harness.submit(100, model="none")
    assert demand_meter.arrived == 0
    harness.submit(100)
    assert demand_meter.arrived == 1


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
