"""Queued requests are found by their work, and none waits longer than its guarantee."""

from __future__ import annotations

from collections import deque
from math import nan
from random import Random

import pytest
from routing_harness import FakeRequest, RoutingHarness, explained, one_busy_node, prompt

from warmroute.config.routing import HIGH, LOW, NORMAL
from warmroute.core.admission import FULL_CHECK_TICKS, OVERDUE
from warmroute.core.queue import KEY_TOLERANCE
from warmroute.core.queue_order import (
    CREDIT_S,
    DUE_PER_PREFILL,
    GRACE_S,
    OVERDUE_SHARE_OF_PREFILL,
    WAITING_CREDIT,
    QueuedRequest,
    SortedRequests,
)

# The order.


def all_queued(harness: RoutingHarness) -> list[QueuedRequest]:
    return [queued for _, queued in harness.admission.queue.all_queued()]


def arrived_s(queued: QueuedRequest) -> float:
    return queued.call.request.arrived_s


def assert_sorted_like_brute_force(harness: RoutingHarness) -> None:
    def is_new(queued: QueuedRequest) -> bool:
        return harness.now_s - arrived_s(queued) < CREDIT_S

    for tenant in harness.admission.queue.tenants.values():
        waiting = list(tenant.waiting.values())
        assert all(one.prefill_ms == pytest.approx(one.key, rel=KEY_TOLERANCE) for one in waiting)
        tenant.by_work.settle(harness.now_s)
        credit_ms = 1000.0 * WAITING_CREDIT
        for found, expected in (
            (tenant.by_work._gaining, {one: one.key + credit_ms * arrived_s(one) for one in waiting if is_new(one)}),
            (tenant.by_work._settled, {one: one.key for one in waiting if not is_new(one)}),
        ):
            in_order = sorted(expected, key=lambda one: (expected[one], one.number))
            assert list(found.all) == in_order
            for first in found.heads():
                assert first is next(one for one in in_order if one.decision.node is first.decision.node)
    overdue = [one for one in all_queued(harness) if one.is_overdue]
    assert list(harness.admission.queue.guarantee._overdue.all) == sorted(overdue, key=lambda one: one.number)


@pytest.mark.parametrize("seed", range(5))
def test_the_lists_are_sorted_like_brute_force_whatever_happens(seed: int) -> None:
    harness, random = RoutingHarness(3), Random(seed)
    tickets = [harness.busy(node, 20_000) for node in harness.nodes]
    requests: list[FakeRequest] = []
    for _ in range(250):
        harness.advance(random.random())
        what = random.random()
        if what < 0.6:
            shared = prompt(random.randrange(2000, 60_000), random.randrange(6))
            requests.append(harness.submit(shared, tenant=random.choice("ab")))
        elif what < 0.75 and requests:
            requests.pop(random.randrange(len(requests))).cancel()
        elif what < 0.9 and tickets:
            harness.free(tickets.pop(random.randrange(len(tickets))))
            admitted = [one for one in requests if one.admitted]
            tickets += [one.ticket for one in admitted]
            requests = [one for one in requests if one.queued]
        else:
            harness.tick()
        assert_sorted_like_brute_force(harness)
    for request in requests:
        if request.queued:
            request.cancel()
    assert_nothing_is_left(harness)


def assert_nothing_is_left(harness: RoutingHarness) -> None:
    queue = harness.admission.queue
    assert not queue.tenants and not queue.waiting and not queue.with_deadline and not harness.group.waiting
    assert not queue.guarantee._not_due and not queue.guarantee._overdue.all
    assert queue.guarantee._work == 0.0 and not queue.guarantee._credit_ms


def test_a_short_request_is_found_behind_hundreds_of_older_long_ones() -> None:
    harness, running = one_busy_node()
    long = [harness.submit(20_000) for _ in range(300)]
    short = harness.submit(6000)
    harness.free(running)
    assert short.admitted and all(request.queued for request in long)


@pytest.mark.parametrize("seed", range(3))
def test_the_request_with_the_least_work_goes_first(seed: int) -> None:
    (harness, running), random = one_busy_node(), Random(seed)
    requests: list[FakeRequest] = []
    for _ in range(200):
        harness.advance(0.03 * random.random())
        requests.append(harness.submit(random.randrange(6000, 60_000)))
    harness.free(running)
    for _ in range(60):
        [admitted] = [request for request in requests if not request.queued]
        requests.remove(admitted)
        now_s = harness.now_s
        first = min(all_queued(harness), key=lambda one: (one.ranked_ms(now_s), one.number))
        expected = harness.requests[first.call.id]
        admitted.finish()
        assert expected in requests and not expected.queued


def test_a_request_that_has_waited_goes_before_one_with_somewhat_less_work() -> None:
    harness, running = one_busy_node()
    old = harness.submit(16_000)
    harness.advance(2.0)
    new, short = harness.submit(13_000), harness.submit(6000)
    work_ms = {harness.requests[one.call.id]: one.prefill_ms for one in all_queued(harness)}
    credit_ms = 2000.0 * WAITING_CREDIT
    assert work_ms[short] < work_ms[old] - credit_ms < work_ms[new] < work_ms[old]
    harness.free(running)
    assert short.admitted and old.queued and new.queued
    short.finish()
    assert old.admitted and new.queued


def test_the_credit_for_waiting_ends_before_a_request_is_overdue() -> None:
    """In a long queue, requests with much less work still go first."""
    harness, running = one_busy_node()
    old = harness.submit(60_000)
    harness.advance(CREDIT_S + 1.0)
    new = harness.submit(20_000)
    work_ms = {harness.requests[one.call.id]: one.prefill_ms for one in all_queued(harness)}
    assert work_ms[new] < work_ms[old] - 1000.0 * WAITING_CREDIT * CREDIT_S
    harness.free(running)
    assert new.admitted and old.queued


def test_a_request_that_became_cheaper_is_found() -> None:
    """Its prefix was cached while it waited behind others with less work."""
    harness, running = one_busy_node()
    mine = prompt(60_000, 1)
    cheaper = harness.submit(mine)
    others = [harness.submit(20_000) for _ in range(200)]
    harness.warm(harness.nodes[0], mine)
    harness.advance(0.3)
    harness.free(running)
    for _ in range(40):
        if not cheaper.queued:
            break
        harness.advance(0.01)
        next(request for request in others if not request.queued).finish()
        others = [request for request in others if request.queued or request.is_open]
    assert cheaper.admitted


# The guarantee.


class OverloadedNodes:
    """Nodes that finish each prefill in the time the router expects, and a queue that never becomes empty."""

    def __init__(self, count: int) -> None:
        self.harness = harness = RoutingHarness(count)
        self.waiting: list[FakeRequest] = []
        self.longest_wait_s: dict[int, float] = {}
        self._ends: list[tuple[float, FakeRequest]] = []
        self._busy = [harness.busy(node, 4000) for node in harness.nodes]

    def submit(self, tokens: int, **fields: object) -> FakeRequest:
        request = self.harness.submit(tokens, **fields)
        self.waiting.append(request)
        self._note_admitted()
        return request

    def _note_admitted(self) -> None:
        harness = self.harness
        for request in [one for one in self.waiting if one.admitted]:
            self.waiting.remove(request)
            assert request.decision.price is not None
            node = request.node
            last_s = max([end_s for end_s, other in self._ends if other.node is node], default=harness.now_s)
            self._ends.append((last_s + request.decision.price.prefill / 1000.0, request))

    def run_until(self, now_s: float) -> None:
        harness = self.harness
        for ticket in self._busy:
            harness.free(ticket)
        self._busy = []
        self._note_admitted()
        while self._ends:
            end_s, request = min(self._ends, key=lambda one: one[0])
            if end_s > now_s:
                break
            harness.now_s = max(harness.now_s, end_s)
            self._ends.remove((end_s, request))
            request.finish()
            self._note_admitted()
        harness.now_s = now_s


def test_a_guarantee_counts_a_long_prompt_that_never_waited() -> None:
    harness = RoutingHarness(1)
    running = harness.busy(harness.nodes[0], 150_000)
    request = harness.submit(100)
    for _ in range(17):
        harness.advance(1.0)
        harness.tick()
    assert request.queued
    harness.free(running)
    guarantee = harness.admission.queue.guarantee
    assert request.admitted and guarantee.exceeded == 0 and 0.0 < guarantee.longest_wait_ratio < 1.0


def test_a_guarantee_counts_a_long_prompt_that_was_sent_while_it_waited() -> None:
    harness, running = one_busy_node()
    patient = harness.submit(8000)
    harness.advance(0.25)
    urgent = harness.submit(200_000, priority=HIGH)
    harness.close(running)
    assert urgent.admitted
    harness.advance(60.0)
    urgent.finish()
    assert patient.admitted and harness.admission.queue.guarantee.exceeded == 0


def guaranteed_s(work_s: float, ahead_s: float, longest_s: float, nodes: int) -> float:
    """The formula of docs/concepts/admission.md."""
    return GRACE_S + DUE_PER_PREFILL * work_s + (longest_s + ahead_s / nodes) / OVERDUE_SHARE_OF_PREFILL


@pytest.mark.parametrize("nodes", [1, 4])
def test_a_long_prompt_is_served_within_its_guarantee_though_short_ones_never_end(nodes: int) -> None:
    """The short ones alone are 1.5 times what the nodes can serve."""
    world = OverloadedNodes(nodes)
    harness = world.harness
    start_s = harness.now_s
    long = [world.submit(64_000) for _ in range(nodes + 2)]
    work_s = 0.001 * max(one.decision.price.prefill for one in all_queued(harness) if one.decision.price is not None)
    limit_s = guaranteed_s(work_s, (nodes + 1) * work_s, work_s, nodes)
    for step in range(int(limit_s / 0.3 * 1.5 * nodes)):
        world.submit(5500)
        world.run_until(start_s + step * 0.3 / 1.5 / nodes)
        if not any(request.queued for request in long):
            break
    assert not any(request.queued for request in long)
    guarantee = harness.admission.queue.guarantee
    assert guarantee.exceeded == 0 and 0.0 < guarantee.longest_wait_ratio <= 1.0
    assert harness.admission.queue.admitted_by_guarantee >= len(long)


@pytest.mark.parametrize("seed", range(4))
def test_no_request_waits_longer_than_its_guarantee(seed: int) -> None:
    """Random lengths, prefixes, tenants and priorities at about twice the load that the nodes can serve."""
    random, nodes = Random(seed), 1 + seed
    world = OverloadedNodes(nodes)
    start_s = at_s = world.harness.now_s
    for _ in range(500):
        at_s += random.expovariate(2.0 * nodes)
        world.run_until(at_s)
        tokens = round(min(100_000.0, random.lognormvariate(9.0, 1.0)))
        priority = random.choices((HIGH, NORMAL, LOW), (1, 6, 1))[0]
        world.submit(tokens, priority=priority, tenant=random.choice("abc"))
    while world.waiting:
        at_s += 1.0
        world.run_until(at_s)
    queue = world.harness.admission.queue
    assert queue.guarantee.exceeded == 0 and queue.admitted_by_guarantee > 5
    assert 0.0 < queue.guarantee.longest_wait_ratio <= 1.0
    assert at_s - start_s > 60.0, "the queue should be long"
    assert_nothing_is_left(world.harness)


def test_overdue_requests_get_at_least_their_share_and_the_others_the_rest() -> None:
    harness, running = one_busy_node()
    long = [harness.submit(40_000) for _ in range(20)]
    harness.advance(20.0)
    short = deque(harness.submit(6000) for _ in range(30))
    harness.free(running)
    work_ms = {"long": 0.0, "short": 0.0}
    for _ in range(150):
        [admitted] = [one for one in (*long, *short) if not one.queued and one.is_open]
        assert admitted.decision.price is not None
        work_ms["long" if admitted in long else "short"] += admitted.decision.price.prefill
        short.append(harness.submit(6000))
        admitted.finish()
        short = deque(one for one in short if one.queued or one.is_open)
    share = work_ms["long"] / sum(work_ms.values())
    assert OVERDUE_SHARE_OF_PREFILL <= share < OVERDUE_SHARE_OF_PREFILL + 0.12, (
        "one prefill of 4 s is a tenth of all here"
    )


def test_an_overdue_request_takes_any_node_when_the_credit_pays_for_its_prefill() -> None:
    """Its prefix is cached on a node that never has room."""
    harness = RoutingHarness(2)
    warm, cold = harness.nodes
    mine = prompt(40_000, 1)
    harness.warm(warm, mine)
    harness.busy(warm, 8000)
    running = harness.busy(cold, 60_000)
    request = harness.submit(mine)
    assert request.queued
    harness.advance(60.0)
    harness.warm(warm, mine)
    short = deque(harness.submit(8000) for _ in range(3))
    harness.free(running)
    work_ms = 0.0
    for _ in range(400):
        if not request.queued:
            break
        short.append(harness.submit(8000))
        harness.advance(0.46)
        admitted = next(one for one in short if not one.queued)
        short.remove(admitted)
        assert admitted.decision.price is not None and admitted.node is cold
        work_ms += admitted.decision.price.prefill
        admitted.finish()
    assert request.node is cold and request.decision.reason == OVERDUE
    assert request.decision.price is not None
    assert work_ms == pytest.approx(request.decision.price.prefill / OVERDUE_SHARE_OF_PREFILL, rel=0.3)


def test_of_overdue_requests_the_oldest_has_the_turn_of_the_shortest() -> None:
    harness, running = one_busy_node()
    old = harness.submit(60_000)
    harness.advance(1.0)
    short = harness.submit(24_000)
    harness.advance(30.0)
    fresh = harness.submit(40_000)
    harness.admission.queue.guarantee._credit_ms[harness.nodes[0]] = -100_000.0  # the share of overdue ones is spent
    harness.free(running)
    assert old.admitted and short.queued and fresh.queued
    shorter = harness.submit(6000)
    old.finish()
    assert shorter.admitted and short.queued, "a shorter one that is not overdue goes first"


def test_an_overdue_request_that_became_cheap_goes_at_once() -> None:
    """Its prefix was cached while it waited, by an earlier turn of its conversation."""
    harness, running = one_busy_node()
    old = harness.submit(30_000)
    mine = prompt(40_000, 1)
    cheap = harness.submit(mine)
    harness.advance(30.0)
    harness.warm(harness.nodes[0], mine)
    harness.admission.queue.guarantee._credit_ms[harness.nodes[0]] = -100_000.0
    harness.free(running)
    assert cheap.admitted
    assert old.queued or (old.decision.price is not None and old.decision.price.wait > 0.0), "behind the cheap one"


def test_the_explanation_names_the_guarantee() -> None:
    harness, running = one_busy_node()
    low = harness.submit(priority=LOW)
    harness.submit(priority=HIGH)
    harness.advance(20.0)
    harness.free(running)
    assert "its waiting guarantee came due" in explained(low.decision)
    queue = harness.admission.queue
    assert (queue.admitted_by_guarantee, queue.admitted_by_work) == (1, 0)
    assert "guarantee" not in explained(harness.submit(tenant="other").harness.decide(prompt(8000)))


def test_a_request_that_is_cancelled_or_rejected_leaves_no_trace() -> None:
    harness, running = one_busy_node()
    requests = [harness.submit(tokens, tenant=str(tokens % 3)) for tokens in range(6000, 40_000, 900)]
    harness.advance(13.0)
    harness.free(running)
    assert harness.admission.queue.guarantee._overdue.all and harness.admission.queue.guarantee._not_due
    for request in requests:
        if request.queued:
            request.cancel()
    assert_nothing_is_left(harness)


def test_credit_of_removed_nodes_is_forgotten() -> None:
    harness = RoutingHarness(3)
    for node in harness.nodes:
        harness.busy(node, 20_000)
    harness.submit(20_000)
    guarantee = harness.admission.queue.guarantee
    for node in harness.nodes:
        guarantee._credit_ms[node] = -5000.0
    harness.fleet.remove("n2")
    for _ in range(FULL_CHECK_TICKS):
        harness.tick()
    assert {node.name for node in guarantee._credit_ms} == {"n0", "n1"}


def test_a_key_that_is_no_number_loses_no_request() -> None:
    harness, _ = one_busy_node()
    for tokens in (9000, 7000, 20_000, 8000):
        harness.submit(tokens)
    waiting = SortedRequests()
    requests = all_queued(harness)
    keys = [3.0, nan, 1.0, 2.0]
    for key, queued in zip(keys, requests, strict=True):
        waiting.add(key, queued)
    for left, (key, queued) in zip((3, 2, 1, 0), zip(keys, requests, strict=True), strict=True):
        waiting.remove(key, queued)
        assert len(waiting) == left and queued not in list(waiting)
