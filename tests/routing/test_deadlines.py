"""Deadlines: a request that would be late is rejected early; where the speed is unknown, it may try."""

from __future__ import annotations

from typing import Any

import pytest
from accounting_reference import record_token_ms
from routing_harness import FakeRequest, RoutingHarness, prompt

from warmroute.config import Admission as AdmissionConfig
from warmroute.config import Pricing, Routing
from warmroute.config.routing import HIGH, LOW
from warmroute.core.group import Group
from warmroute.core.node import Node
from warmroute.core.rejections import DeadlineUnreachable


def set_known_speed(node: Node, ms_per_token: float = 0.05, token_ms: float = 20.0) -> None:
    """The router has learned the node's speed from many responses."""
    node.speed.guess(ms_per_token)
    node.speed.answers = 10
    for _ in range(50):
        record_token_ms(node.groups[0].decode_speed, token_ms, 0.0)


def known_fleet(count: int = 1, **admission: Any) -> RoutingHarness:
    harness = RoutingHarness(count, admission=AdmissionConfig(**admission))
    for node in harness.nodes:
        set_known_speed(node)
    return harness


def request(
    harness: RoutingHarness, tokens: int = 8000, ttft_ms: float = 0.0, total_ms: float = 0.0, **fields: Any
) -> FakeRequest:
    return FakeRequest(
        harness,
        prompt(tokens),
        deadline_s=harness.now_s + ttft_ms / 1000.0 if ttft_ms else 0.0,
        total_deadline_s=harness.now_s + total_ms / 1000.0 if total_ms else 0.0,
        **fields,
    )


def submit(harness: RoutingHarness, tokens: int = 8000, **fields: Any) -> FakeRequest:
    pending = request(harness, tokens, **fields)
    pending.submit()
    return pending


def test_a_request_that_meets_its_deadline_is_admitted() -> None:
    harness = known_fleet()
    harness.busy(harness.nodes[0], 2000)
    assert submit(harness, ttft_ms=1500).admitted


def test_a_request_that_would_be_late_is_rejected_with_the_expected_time() -> None:
    harness = known_fleet()
    harness.busy(harness.nodes[0], 2000)
    rejected = submit(harness, 40_000, ttft_ms=1500)
    left_ms, expected_ms = rejected.milliseconds
    assert rejected.why == "deadline_ttft" and left_ms == 1500
    assert 3000 < expected_ms < 5000 and 2 <= rejected.retry_after_s <= 4
    assert harness.admission.queue.waiting == 0 and harness.nodes[0].inflight == 1


def test_the_whole_response_has_its_own_deadline() -> None:
    """256 tokens at 20 ms are some 5 s."""
    harness = known_fleet()
    harness.busy(harness.nodes[0], 300)
    rejected = submit(harness, 300, total_ms=3000)
    assert rejected.why == "deadline_total" and rejected.milliseconds[1] > 5000
    short = submit(harness, 300, total_ms=3000, max_output_tokens=50)
    assert short.admitted, "the request's limit of output tokens counts"
    assert submit(harness, 300, ttft_ms=2000, total_ms=60_000).admitted


def test_an_idle_node_may_try() -> None:
    harness = known_fleet()
    assert submit(harness, 200_000, ttft_ms=100, total_ms=200).admitted


def test_a_node_that_never_had_a_request_may_try_when_the_clock_has_just_begun() -> None:
    harness = known_fleet()
    harness.now_s = 0.25
    assert submit(harness, 2000, ttft_ms=50, ends_late=True).admitted
    assert submit(harness, 2000, ttft_ms=50, ends_late=True).why == "deadline_ttft"


def test_a_node_of_unknown_speed_may_try() -> None:
    harness = RoutingHarness(1, admission=AdmissionConfig(queue_at_router=False))
    harness.busy(harness.nodes[0], 4000)
    assert submit(harness, 200_000, ttft_ms=100, total_ms=200).admitted


def test_a_policy_without_prices_rejects_only_after_the_deadline() -> None:
    harness = known_fleet()
    harness.router.reconfigure(Routing(policy="round_robin"), Pricing())
    harness.busy(harness.nodes[0], 60_000)
    assert submit(harness, 60_000, ttft_ms=100).admitted
    late = request(harness, 300, ttft_ms=100)
    harness.advance(0.2)
    late.submit()
    assert late.why == "deadline_ttft"


def test_half_a_millisecond_before_its_deadline_a_request_may_still_try() -> None:
    harness = known_fleet()
    harness.router.reconfigure(Routing(policy="round_robin"), Pricing())
    for wish in ("ttft_ms", "total_ms"):
        last = request(harness, 300, **{wish: 100.5})
        harness.advance(0.1)
        last.submit()
        assert last.admitted


# Queued requests.


def test_a_queued_request_is_rejected_as_soon_as_it_would_be_late() -> None:
    harness = known_fleet()
    running = [harness.busy(harness.nodes[0], 8000) for _ in range(2)]
    hurried, patient = submit(harness, 8000, ttft_ms=2000), submit(harness, 8000, ttft_ms=60_000)
    assert hurried.queued and patient.queued
    for _ in range(100):
        harness.advance(0.05)
        harness.tick()
        if not hurried.queued:
            break
    assert hurried.why == "deadline_ttft"
    waited_ms = (harness.now_s - hurried.request.arrived_s) * 1000.0
    assert 400 < waited_ms < 1000, "its own prefill and the two ahead of it take a second and a half"
    assert patient.queued and harness.admission.queue.waiting == harness.group.waiting == 1
    for ticket in running:
        harness.free(ticket)
    assert patient.admitted


def test_a_request_queued_for_a_node_of_unknown_speed_is_rejected_just_before_its_deadline() -> None:
    harness = RoutingHarness(1)
    harness.busy(harness.nodes[0], 8000)
    pending = submit(harness, 8000, ttft_ms=2000)
    while pending.queued:
        harness.advance(0.05)
        harness.tick()
    waited_s = harness.now_s - pending.request.arrived_s
    assert 1.9 <= waited_s < 2.0 and pending.why == "deadline_ttft"


def test_a_queued_request_that_would_be_late_does_not_take_a_turn() -> None:
    harness = known_fleet()
    running = harness.busy(harness.nodes[0], 8000)
    hurried, other = submit(harness, 6000, ttft_ms=1200), submit(harness, 8000)
    harness.advance(1.1)
    busy = harness.busy(harness.nodes[0], 300)  # so that the node is not idle
    harness.free(running)
    assert hurried.why == "deadline_ttft" and other.admitted
    harness.close(busy)
    other.finish()
    harness.assert_all_counters_are_zero()


def test_a_queued_request_is_rejected_if_its_whole_response_would_be_late() -> None:
    harness = known_fleet()
    harness.busy(harness.nodes[0], 8000)
    pending = submit(harness, 8000, total_ms=8000)
    assert pending.queued
    while pending.queued:
        harness.advance(0.05)
        harness.tick()
    assert pending.why == "deadline_total"
    assert harness.now_s - pending.request.arrived_s < 4.0, "decoding alone takes 5 s"


def test_admitted_requests_meet_their_deadlines() -> None:
    """A node serves one after the other. Requests with a deadline of 3 s get their first token within it."""
    harness = known_fleet()
    requests = [request(harness, 6000, ttft_ms=3000) for _ in range(30)]
    for pending in requests:
        pending.submit()  # some are rejected because of the requests ahead of them
    while any(pending.queued or pending.is_open for pending in requests):
        harness.advance(0.35)  # a prefill of 6,000 tokens
        harness.tick()
        for pending in requests:
            if pending.is_open:
                assert harness.now_s <= pending.request.deadline_s + 0.1
                pending.answer()
                break
    served = [pending for pending in requests if pending.admitted]
    assert 5 <= len(served) <= 10 and len(served) + sum(bool(pending.why) for pending in requests) == 30
    harness.assert_all_counters_are_zero()


# Requests ahead in the queue.


def fill_queue(harness: RoutingHarness, **fields: Any) -> list[FakeRequest]:
    """Queue 40 requests of 8,000 tokens."""
    queued = [harness.submit(**fields) for _ in range(40)]
    assert all(one.queued for one in queued)
    return queued


def test_a_request_that_would_be_late_because_of_the_queue_is_rejected_at_once() -> None:
    harness = known_fleet(2)
    for node in harness.nodes:
        harness.busy(node, 8000)
    first = submit(harness, ttft_ms=3000)
    assert first.queued, "no request is ahead of it"
    first.cancel()
    fill_queue(harness)
    rejected = submit(harness, ttft_ms=3000)
    assert rejected.why == "deadline_ttft" and 5 <= rejected.retry_after_s <= 10
    assert 8000 < rejected.milliseconds[1] < 13_000, "40 × 0.5 s on two nodes, and its own"
    assert harness.admission.queue.waiting == 40
    with pytest.raises(DeadlineUnreachable):
        harness.admission.dry_run(request(harness, ttft_ms=3000).request, prompt(8000), harness.now_s)


def test_queued_requests_behind_it_do_not_count() -> None:
    harness = known_fleet()
    harness.busy(harness.nodes[0], 8000)
    fill_queue(harness, tenant="a")
    for pending in (
        request(harness, ttft_ms=3000, tenant="b"),
        request(harness, ttft_ms=3000, tenant="a", priority=HIGH),
        request(harness, 2000, ttft_ms=3000, tenant="a"),
    ):
        pending.submit()
        assert pending.queued, "another tenant, a higher priority, less work: each is ahead of the others"
        pending.cancel()
    assert submit(harness, ttft_ms=3000, tenant="b", priority=LOW).why == "deadline_ttft"


def test_queued_requests_for_another_model_do_not_count() -> None:
    harness = known_fleet()
    harness.busy(harness.nodes[0], 8000)
    fill_queue(harness)
    for tenant in harness.admission.queue.tenants.values():
        for queued in tenant.waiting.values():
            queued.group = Group("other")
    assert submit(harness, ttft_ms=3000).queued


def test_behind_a_queue_for_a_node_of_unknown_speed_it_may_try() -> None:
    harness = RoutingHarness(1)
    harness.busy(harness.nodes[0], 8000)
    fill_queue(harness)
    assert submit(harness, ttft_ms=3000).queued
