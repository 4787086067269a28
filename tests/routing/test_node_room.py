"""A node has room before it has finished its last prompt: when, and which requests get it."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from routing_harness import FakeRequest, RoutingHarness, one_busy_node, prompt

from warmroute.config import Admission as AdmissionConfig
from warmroute.config import RouteConfig
from warmroute.config.routing import HIGH, LOW, NORMAL
from warmroute.core.cluster.cluster_turns import ClusterTurns
from warmroute.core.decision import Decision
from warmroute.core.node import Node, Ticket
from warmroute.core.queue import Key
from warmroute.core.routing_context import Query


def test_a_node_gets_its_next_prompt_before_it_has_finished_the_last_one() -> None:
    harness, running = one_busy_node()  # 460 ms, 250 of which may be left
    request = harness.submit()
    harness.advance(0.15)
    harness.tick()
    assert request.queued
    harness.advance(0.1)
    harness.tick()
    assert request.node is harness.nodes[0] and running._is_open


def test_a_node_whose_first_token_is_very_late_gets_no_more_prompts() -> None:
    harness, _ = one_busy_node()
    harness.advance(0.95)
    assert harness.submit().queued, "its prompt should have taken 460 ms"
    harness.tick()
    assert harness.admission.queue.waiting == 1


def test_a_new_request_does_not_take_the_room_that_another_one_waits_for() -> None:
    harness, _ = one_busy_node()
    first = harness.submit()
    harness.advance(0.25)
    second = harness.submit()
    assert first.admitted and second.queued


def test_a_new_request_takes_room_before_those_that_come_after_it() -> None:
    """Less work of its tenant, or a higher priority."""
    for fields in ({"tokens": 6000}, {"priority": HIGH}):
        harness, _ = one_busy_node()
        waiting = harness.submit()
        harness.advance(0.25)
        assert harness.submit(**fields).admitted and waiting.queued


def test_of_those_that_wait_only_the_ones_before_a_new_request_go_first() -> None:
    """A node has room for two: that of the second one is not for a request of low priority."""
    harness, running = one_busy_node()
    urgent, patient = harness.submit(1000, priority=HIGH), harness.submit(1000, priority=LOW)
    harness.advance(0.3)
    normal = harness.submit(1000)
    assert urgent.admitted and normal.admitted and patient.queued and running._is_open


def test_a_new_request_takes_room_in_the_order_of_the_tenants_admitted_work() -> None:
    harness, running = one_busy_node()
    busy = [harness.submit(6000, tenant="busy") for _ in range(3)]
    harness.free(running)
    harness.advance(0.25)
    first = harness.submit(8000, tenant="new")
    assert first.admitted and busy[1].queued
    harness.close(busy[0].ticket)
    harness.advance(0.3)
    second = harness.submit(6000, tenant="new")
    assert busy[1].admitted and second.queued, "its tenant had more than the other one by now"


def test_a_new_request_decides_again_after_those_that_go_first() -> None:
    """Its node has room, which a waiting request gets. The other node is then cheaper, and has room."""
    harness = RoutingHarness(2)
    warm, cold = harness.nodes
    mine = prompt(12_000, 1)
    harness.warm(warm, mine)
    harness.warm(warm, prompt(20_000, 2))
    running, blocking = harness.busy(warm), harness.busy(cold, 60_000)
    waiting = harness.submit(prompt(28_000, 2), priority=HIGH)
    assert waiting.queued
    harness.close(blocking)
    harness.advance(0.25)
    assert harness.decide(mine).node is warm
    hurried = harness.submit(mine, may_queue=False)
    assert (waiting.node, hurried.node) == (warm, cold) and running._is_open


def test_a_request_of_another_tenant_that_ends_does_not_hide_that_a_node_hangs() -> None:
    """Its first prompt should have taken 460 ms. Clients of others give up meanwhile."""
    harness, first = one_busy_node()
    for ticket in [harness.busy(harness.nodes[0], 100) for _ in range(4)]:
        harness.advance(0.3)
        harness.close(ticket)
    harness.advance(0.3)
    request = harness.submit()
    harness.tick()
    assert request.queued and first._is_open


@pytest.mark.interpreted
def test_arrivals_make_no_decisions_for_requests_that_wait_for_other_nodes() -> None:
    """100 requests wait for a node that is much cheaper for them. New ones find room on the other node."""
    harness = RoutingHarness(2)
    wanted, other = harness.nodes
    running = harness.busy(wanted, 60_000)
    harness.warm(wanted, prompt(100_000, 1))
    waiting = [harness.submit(prompt(100_000 + at, 1)) for at in range(100)]
    assert all(one.queued and harness.admission.queue.waiting_for == {wanted: {(NORMAL, ""): 100}} for one in waiting)
    decisions = count_decisions_again(harness)
    for _ in range(50):
        harness.advance(0.01)
        request = harness.submit(50)
        assert request.node is other
        harness.close(request.ticket)
    assert not decisions and running._is_open


@pytest.mark.interpreted
def test_an_arrival_that_comes_first_makes_no_decisions_for_those_that_wait() -> None:
    harness, running = one_busy_node()
    waiting = [harness.submit() for _ in range(20)]
    harness.advance(0.25)
    decisions = count_decisions_again(harness)
    assert harness.submit(priority=HIGH).admitted
    assert not decisions and all(one.queued for one in waiting) and running._is_open


@pytest.mark.interpreted
def test_arrivals_of_another_route_make_no_decisions_for_those_over_their_queue_threshold() -> None:
    harness, running = one_busy_node()
    harness.admission.reconfigure(AdmissionConfig(), (RouteConfig(name="batch", queue_threshold=2),))
    waiting = [harness.submit(2000, tenant=f"t{at % 8}", route="batch") for at in range(64)]
    harness.nodes[0].waiting = 5
    harness.advance(0.25)
    decisions = count_decisions_again(harness)
    for _ in range(5):
        harness.advance(0.001)
        request = harness.submit(4000, tenant="other")
        assert request.admitted
        harness.close(request.ticket)
    assert not decisions and all(one.queued for one in waiting) and running._is_open


def count_decisions_again(harness: RoutingHarness) -> list[Query]:
    decisions: list[Query] = []
    decide_again = harness.router.decide_again

    def counted(query: Query, now_s: float) -> Decision:
        decisions.append(query)
        return decide_again(query, now_s)

    harness.router.decide_again = counted  # type: ignore[method-assign]
    return decisions


def test_the_dry_run_of_a_request_that_comes_after_others_says_that_it_would_wait() -> None:
    harness, running = one_busy_node()
    harness.submit()
    harness.advance(0.25)
    second, urgent = FakeRequest(harness, prompt(8000)), FakeRequest(harness, prompt(8000), priority=HIGH)
    would_wait = [harness.admission.dry_run(one.request, one.lookup, harness.now_s)[1] for one in (second, urgent)]
    assert would_wait == [True, False] and running._is_open


@pytest.mark.parametrize(("tokens", "after_s"), [(1000, 0.3), (8000, 0.25)])
@pytest.mark.parametrize("tenant", ["", "other"])
def test_a_dry_run_says_what_then_happens_to_a_request_after_others(tokens: int, after_s: float, tenant: str) -> None:
    """The node has room for two short prompts, or for a long one."""
    harness, running = one_busy_node()
    first = harness.submit(tokens, tenant=tenant)
    harness.advance(after_s)
    second = FakeRequest(harness, prompt(tokens))
    decision, would_wait = harness.admission.dry_run(second.request, second.lookup, harness.now_s)
    assert first.queued and decision.node is harness.nodes[0]
    second.submit()
    assert first.admitted and second.queued is would_wait is (tokens == 8000) and running._is_open


def test_a_dry_run_does_not_count_those_that_are_over_their_queue_threshold() -> None:
    harness, running = one_busy_node()
    harness.admission.reconfigure(AdmissionConfig(), (RouteConfig(name="batch", queue_threshold=2),))
    waiting = [harness.submit(tenant="batch", route="batch") for _ in range(3)]
    harness.nodes[0].waiting = 5
    harness.advance(0.25)
    request = FakeRequest(harness, prompt(8000))
    assert not harness.admission.dry_run(request.request, request.lookup, harness.now_s)[1]
    request.submit()
    assert request.admitted and all(one.queued for one in waiting) and running._is_open


def test_a_dry_run_counts_an_overdue_request_of_a_lower_priority() -> None:
    harness, running = one_busy_node()
    overdue = harness.submit(priority=LOW)
    harness.advance(11.0)
    assert harness.admission.queue.guarantee.find_overdue(harness.now_s)
    harness.close(running)
    running = harness.busy(harness.nodes[0])
    harness.advance(0.3)
    urgent = FakeRequest(harness, prompt(8000), priority=HIGH)
    would_wait = harness.admission.dry_run(urgent.request, urgent.lookup, harness.now_s)[1]
    urgent.submit()
    assert (overdue.queued, urgent.queued, would_wait) == (False, True, True) and running._is_open


def test_a_node_that_only_decodes_a_request_has_no_prompt_of_it_to_prefill() -> None:
    """The prompt was prefilled elsewhere. The next one begins at once, whenever the first token of that one comes."""
    harness = RoutingHarness(1)
    node = harness.nodes[0]
    decoded = Ticket.__new__(Ticket)
    decoded.open(node, harness.now_s, harness.group.decode_speed, True, 8000, 0, 0.0)
    running = harness.busy(node)
    harness.advance(0.25)
    assert node.remaining_work(harness.now_s) == pytest.approx(running._pending_work - 5000)


def test_the_queue_knows_how_many_requests_wait_for_each_node() -> None:
    harness, random = RoutingHarness(3), Random(5)
    running: list[FakeRequest] = []
    requests: list[FakeRequest] = []
    for _ in range(300):
        harness.advance(random.uniform(0.0, 0.1))
        action = random.random()
        if action < 0.5:
            lookup, tenant = prompt(random.randrange(100, 20_000), random.randrange(5)), random.choice("ab")
            requests.append(harness.submit(lookup, tenant=tenant, priority=random.choice((HIGH, LOW))))
        elif action < 0.6 and (waiting := [one for one in requests if one.queued]):
            random.choice(waiting).cancel()
        elif action < 0.8 and (running := [one for one in requests if one.is_open]):
            random.choice(running).finish()
        else:
            harness.tick()
        queue = harness.admission.queue
        expected: dict[Node, Counter[Key]] = {}
        for key, queued in queue.all_queued():
            expected.setdefault(queued.decision.entry_node, Counter())[key] += 1
        assert queue.waiting_for == expected, "a node without waiting requests is forgotten"
    assert len(requests) > 100 and running


def test_among_processes_requests_over_their_threshold_do_not_hold_up_others() -> None:
    harness = RoutingHarness(1)
    node = harness.nodes[0]
    harness.admission.reconfigure(AdmissionConfig(), (RouteConfig(name="careful", queue_threshold=2),))
    harness.admission.turns = ClusterTurns({}, lambda: None)
    running = harness.busy(node)
    waiting = [harness.submit(500, route="careful") for _ in range(3)]
    assert all(one.queued for one in waiting)
    running.first_token(harness.now_s, False)
    harness.busy(node, 10)
    node.waiting = 5
    assert harness.submit(4000).admitted
