"""How long a rejected request is told to wait, compared with when it would have got a node. In virtual time."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable

import pytest
from routing_harness import FakeRequest, RoutingHarness, one_busy_node

from warmroute.config import Admission as AdmissionConfig
from warmroute.config import NodeConfig
from warmroute.config.routing import LOW
from warmroute.core.demand import FORGET_S, UNMEASURED_S, ServiceRate

ONE_BY_ONE = 0.01
"""Backlog of a node in ms: it gets one request at a time."""


def rejected(request: FakeRequest) -> int:
    assert request.why == "queue_full"
    return request.retry_after_s


class Overload:
    """A full queue before one node that takes its requests one by one."""

    def __init__(self, places: int) -> None:
        self.harness, first = one_busy_node(max_waiting=places, max_node_backlog_ms=ONE_BY_ONE)
        self.waiting = deque(self.harness.submit() for _ in range(places))
        self._finish: Callable[[], None] = lambda: self.harness.free(first)
        self.admitted_s: dict[FakeRequest, float] = {}
        self.announced: list[tuple[float, int, FakeRequest]] = []
        """When a request was rejected, what it was told, and the last of those that waited then."""

    def serve(self, after_s: float, ask_at: float, refill: bool = True) -> None:
        """The node ends a request. Before that a new one is rejected."""
        self.harness.advance(after_s * ask_at)
        if refill:
            after = rejected(self.harness.submit())
            self.announced.append((self.harness.now_s, after, self.waiting[-1]))
        self.harness.advance(after_s * (1.0 - ask_at))
        self._finish()
        served = self.waiting.popleft()
        assert not served.queued
        self._finish = served.finish
        self.admitted_s[served] = self.harness.now_s
        if refill:
            self.waiting.append(self.harness.submit())

    def ratios(self) -> list[float]:
        return [
            after / min(60.0, self.admitted_s[last] - at_s)
            for at_s, after, last in self.announced
            if last in self.admitted_s
        ]


@pytest.mark.parametrize(
    ("places", "interval_s"), [(5, 0.7), (5, 5.0), (10, 5.0), (40, 0.1), (40, 0.7), (80, 0.7), (400, 0.02), (400, 0.1)]
)
def test_steady_service_is_announced_within_a_factor_of_two(places: int, interval_s: float) -> None:
    overload, chance = Overload(places), random.Random(places)
    for _ in range(4 * places):
        overload.serve(interval_s * chance.uniform(0.8, 1.2), chance.random())
    # Each request waits for as many others, so those rejected in the second round know the rate of the first.
    found = overload.ratios()[2 * places :]
    assert len(found) >= places
    assert min(found) >= 0.5 and max(found) <= 2.0, (min(found), max(found))


def test_a_new_queue_announces_its_rate_after_a_few_services() -> None:
    overload = Overload(40)
    assert rejected(overload.harness.submit()) == UNMEASURED_S, "nothing is measured"
    for _ in range(3):
        overload.serve(0.1, 0.5)
    assert 4 <= rejected(overload.harness.submit()) <= 6, "40 wait, and ten are served per second"


def test_a_queue_that_drained_is_remembered_without_the_time_between() -> None:
    overload = Overload(40)
    for number in range(40):
        overload.serve(0.1, 0.5, refill=number < 20)
    harness = overload.harness
    while overload.waiting:
        overload.serve(0.1, 0.5, refill=False)
    harness.advance(FORGET_S / 2)
    overload.waiting.extend(harness.submit() for _ in range(40))
    assert 4 <= rejected(harness.submit()) <= 6
    while overload.waiting:
        overload.serve(0.1, 0.5, refill=False)
    harness.advance(FORGET_S + 1.0)
    for _ in range(40):
        harness.submit()
    assert rejected(harness.submit()) == UNMEASURED_S, "that is too long ago"


def test_a_change_of_speed_is_followed_within_seconds() -> None:
    overload = Overload(40)
    for _ in range(200):
        overload.serve(0.1, 0.5)
    for _ in range(20):
        overload.serve(0.5, 0.5)
    assert 15 <= rejected(overload.harness.submit()) <= 22, "two are served per second now"
    for _ in range(80):
        overload.serve(0.1, 0.5)
    assert 4 <= rejected(overload.harness.submit()) <= 6


def test_a_node_that_hangs_is_announced_as_slow_and_never_above_a_minute() -> None:
    overload = Overload(40)
    for _ in range(100):
        overload.serve(0.1, 0.5)
    told = []
    for _ in range(8):
        overload.harness.advance(5.0)
        told.append(rejected(overload.harness.submit()))
    assert told == sorted(told) and 20 <= told[0] <= 30 and told[-1] == 60


def test_a_low_request_is_told_when_the_queue_is_half_empty() -> None:
    overload = Overload(40)
    for _ in range(100):
        overload.serve(0.1, 0.5)
    high = [overload.harness.submit(priority=0) for _ in range(40)]
    assert all(request.queued for request in high)
    told = rejected(overload.harness.submit(priority=LOW))
    assert 7 <= told <= 9, "80 wait, and ten are served per second"


def test_each_model_has_its_own_rate() -> None:
    harness = RoutingHarness(1, admission=AdmissionConfig(max_waiting=40, max_node_backlog_ms=ONE_BY_ONE))
    other = harness.fleet.add(NodeConfig(url="http://slow:1", name="slow", models=("slow",)))
    harness.fleet.check_passed(other, 0.0)
    harness.cache_view.add_node("slow", ["slow"]).set_size(16, 0)
    running = {model: harness.submit(model=model) for model in ("m", "slow")}
    waiting = {model: deque(harness.submit(model=model) for _ in range(20)) for model in ("m", "slow")}
    for number in range(1, 201):
        harness.advance(0.1)
        for model in ("m", "slow") if number % 10 == 0 else ("m",):
            running[model].finish()
            running[model] = waiting[model].popleft()
            assert not running[model].queued
            waiting[model].append(harness.submit(model=model))
    assert 2 <= rejected(harness.submit(model="m")) <= 4, "20 wait, and ten are served per second"
    assert 15 <= rejected(harness.submit(model="slow")) <= 25, "20 wait, and one is served per second"


def test_displaced_impatient_and_expired_requests_are_told_the_same() -> None:
    overload = Overload(40)
    harness = overload.harness
    for _ in range(100):
        overload.serve(0.1, 0.5)
    impatient = harness.submit(may_queue=False)
    assert impatient.why == "would_queue" and 4 <= impatient.retry_after_s <= 6
    newest = overload.waiting[-1]
    harness.submit(tenant="another")
    assert newest.why == "displaced" and 4 <= newest.retry_after_s <= 6
    harness.admission.reconfigure(AdmissionConfig(max_waiting=40, max_node_backlog_ms=ONE_BY_ONE, max_wait_s=0.1))
    harness.advance(0.2)
    harness.tick()
    told = [one.retry_after_s for one in overload.waiting if one.why == "queue_timeout"]
    assert max(told) <= 6 and told[0] >= 4 and told[-1] == 1, "fewer and fewer wait"


def test_a_rate_of_service_is_finite_at_equal_and_backward_times() -> None:
    rate = ServiceRate()
    assert rate.per_s(5.0) == 0.0 and rate.time_for(10, 5.0) == UNMEASURED_S
    rate.begin(5.0)
    for _ in range(1000):
        rate.record(5.0)
    assert rate.per_s(5.0) == 0.0, "all at once say nothing of a rate"
    rate.record(4.0)
    rate.record(6.0)
    assert 0.0 <= rate.per_s(6.0) < 1e4 and rate.per_s(5.5) >= 0.0
    rate.end()
    assert len(rate._batches) < 100


def test_the_memory_of_a_rate_is_bounded() -> None:
    for interval_s in (1e-5, 0.01, 0.24, 3.0):
        rate = ServiceRate()
        rate.begin(0.0)
        for number in range(20_000):
            rate.record(number * interval_s)
        assert len(rate._batches) <= 64
        assert rate.per_s(20_000 * interval_s) == pytest.approx(1.0 / interval_s, rel=0.15)
