"""The order of the admission queue: priorities, fairness between tenants, and no starvation."""

from __future__ import annotations

from collections import defaultdict, deque
from random import Random

import pytest
from routing_harness import MODEL, FakeRequest, RoutingHarness, one_busy_node, prompt

from warmroute.config.routing import HIGH, LOW, NORMAL
from warmroute.core.messages import RoutingRequest
from warmroute.core.node import Ticket


def test_the_least_work_goes_first() -> None:
    harness, running = one_busy_node()
    large, small = harness.submit(40_000), harness.submit(6000)
    harness.free(running)
    assert large.queued and small.admitted


def test_a_long_prompt_does_not_starve() -> None:
    """64,000 tokens are 7 s of work, and the others always have less. It is due after 10 s + 2 × 7 s."""
    harness, running = one_busy_node()
    large = harness.submit(64_000)
    small = deque(harness.submit() for _ in range(3))
    harness.free(running)
    for _ in range(300):
        if not large.queued:
            break
        harness.advance(0.46)
        small.append(harness.submit())
        next(request for request in small if not request.queued).finish()
        small = deque(request for request in small if request.queued or request.is_open)
    assert large.admitted
    assert 22 < harness.now_s - large.request.arrived_s < 27


def admitted_work_by_tenant(
    harness: RoutingHarness, running: Ticket, requests: list[FakeRequest], rounds: int
) -> dict[str, float]:
    """Free the node and finish `rounds` requests. Return their prefill work by tenant."""
    harness.free(running)
    work_ms: defaultdict[str, float] = defaultdict(float)
    for _ in range(rounds):
        harness.advance(0.3)
        admitted = next(request for request in requests if not request.queued)
        requests.remove(admitted)
        assert admitted.decision.price is not None
        work_ms[admitted.request.tenant] += admitted.decision.price.prefill
        admitted.finish()
    return work_ms


def test_a_tenant_that_floods_gets_no_more_work_than_another() -> None:
    (harness, running), random = one_busy_node(), Random(2)
    requests = [harness.submit(random.randrange(6000, 20_000), tenant="flood") for _ in range(200)]
    requests += [harness.submit(random.randrange(6000, 20_000), tenant="calm") for _ in range(50)]
    work_ms = admitted_work_by_tenant(harness, running, requests, 90)
    assert {request.request.tenant for request in requests if request.queued} == {"flood", "calm"}
    assert work_ms["calm"] == pytest.approx(work_ms["flood"], rel=0.1)


def test_fairness_is_by_work_and_not_by_requests() -> None:
    harness, running = one_busy_node()
    requests = [harness.submit(30_000, tenant="long") for _ in range(30)]
    requests += [harness.submit(6000, tenant="short") for _ in range(300)]
    work_ms = admitted_work_by_tenant(harness, running, requests, 100)
    assert work_ms["long"] == pytest.approx(work_ms["short"], rel=0.1)


def test_a_tenant_with_one_request_at_a_time_is_not_always_first() -> None:
    """It sends each large request when the previous one was admitted, and has to wait its turn like the others."""
    harness, running = one_busy_node()
    requests = [harness.submit(6000, tenant="many") for _ in range(300)]
    single = harness.submit(40_000, tenant="single")
    harness.free(running)
    work_ms: defaultdict[str, float] = defaultdict(float)
    for _ in range(120):
        harness.advance(0.3)
        admitted = next(request for request in (single, *requests) if not request.queued)
        assert admitted.decision.price is not None
        work_ms[admitted.request.tenant] += admitted.decision.price.prefill
        if admitted is single:
            single = harness.submit(40_000, tenant="single")
        else:
            requests.remove(admitted)
        admitted.finish()
    assert work_ms["single"] == pytest.approx(work_ms["many"], rel=0.15)


def test_a_tenant_that_comes_later_does_not_catch_up() -> None:
    harness, running = one_busy_node()
    early = [harness.submit(tenant="early") for _ in range(60)]
    admitted_work_by_tenant(harness, running, early, 20)
    late = [harness.submit(tenant="late") for _ in range(60)]
    admitted = next(request for request in early if not request.queued)
    early.remove(admitted)
    work_ms = admitted_work_by_tenant(harness, admitted.ticket, early + late, 20)
    assert work_ms["late"] == pytest.approx(work_ms["early"], rel=0.1), "it gets neither all turns nor none"


def test_work_admitted_at_once_while_others_wait_is_charged_to_its_tenant() -> None:
    """A tenant whose requests find room on a node with their prefix pays for them in the queue's order."""
    harness = RoutingHarness(2)
    warm, cold = harness.nodes
    mine = prompt(60_000, 1)
    harness.warm(warm, mine)
    others = prompt(60_000, 2)
    harness.warm(cold, others)
    running = harness.busy(cold, 40_000)
    ahead = harness.busy(warm, 40_000)
    waiting = harness.submit(others, tenant="other")
    assert waiting.queued
    harness.close(ahead)
    request = harness.submit(mine, tenant="lucky")
    assert request.admitted and harness.admission.queue.past_work_ms[NORMAL, "lucky"] > 0
    waiting.cancel()
    assert not harness.admission.queue.past_work_ms
    harness.close(running)


def test_priority_and_then_the_admitted_work_of_tenants_decide_who_goes_first() -> None:
    harness, running = one_busy_node()
    first, second, last = (harness.submit(40_000, tenant=tenant) for tenant in ("heavy", "heavy", "light"))
    harness.free(running)
    assert first.admitted and second.queued and last.queued
    queue, decision = harness.admission.queue, harness.decide(prompt(40_000))
    by_tenant = {
        key[1]: (key, next(iter(tenant.by_work.all_for(harness.nodes[0])))) for key, tenant in queue.tenants.items()
    }
    for own, other, goes_before in (("light", "heavy", True), ("heavy", "light", False)):
        request = RoutingRequest(MODEL, tenant=own)
        assert queue.goes_before(request, decision, *by_tenant[other], False, harness.now_s) is goes_before
    for priority, goes_before in ((HIGH, True), (LOW, False)):
        request = RoutingRequest(MODEL, tenant="heavy", priority=priority)
        assert queue.goes_before(request, decision, *by_tenant["light"], False, harness.now_s) is goes_before


# No starvation behind a higher priority.


@pytest.mark.parametrize("flooding", [HIGH, NORMAL])
def test_a_low_priority_request_gets_its_turn_though_higher_ones_never_end(flooding: int) -> None:
    harness, running = one_busy_node()
    low = harness.submit(priority=LOW)
    others = deque(harness.submit(priority=flooding) for _ in range(3))
    harness.free(running)
    rounds = 0
    while low.queued and rounds < 200:
        harness.advance(0.46)
        others.append(harness.submit(priority=flooding))
        next(request for request in others if not request.queued).finish()
        rounds += 1
        others = deque(request for request in others if request.queued or request.is_open)
    assert low.admitted
    waited_s = harness.now_s - low.request.arrived_s
    assert 10.0 <= waited_s < 13.0, "10 s + 2 × its prefill of 0.46 s"


def test_before_a_long_wait_turns_are_by_priority_alone() -> None:
    harness, running = one_busy_node()
    low = harness.submit(priority=LOW)
    others = deque(harness.submit() for _ in range(3))
    harness.free(running)
    for _ in range(40):
        harness.advance(0.2)
        others.append(harness.submit())
        next(request for request in others if not request.queued).finish()
        others = deque(request for request in others if request.queued or request.is_open)
    assert low.queued
