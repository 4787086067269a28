"""Pending requests that call back into admission, and any sequence of events."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from routing_harness import FakeRequest, RoutingHarness, one_busy_node, prompt

from warmroute.config import Admission as AdmissionConfig
from warmroute.config.routing import HIGH, LOW, NORMAL
from warmroute.core.decision import Decision
from warmroute.core.rejections import QueueFull, RoutingError


class FinishesAtOnce(FakeRequest):
    """Ends as soon as it is admitted."""

    def on_admitted(self, decision: Decision) -> None:
        super().on_admitted(decision)
        self.finish()


def test_requests_that_free_their_node_at_once_are_admitted_one_after_the_other() -> None:
    harness, running = one_busy_node()
    requests = [FinishesAtOnce(harness, prompt(300)) for _ in range(500)]
    for request in requests:
        request.submit()
    assert harness.admission.queue.waiting == 500
    harness.free(running)
    assert all(request.events == ["admitted"] for request in requests)
    harness.assert_all_counters_are_zero()


def test_a_request_cancelled_while_another_is_admitted_is_not_admitted() -> None:
    harness, running = one_busy_node()

    class CancelsOther(FakeRequest):
        def on_admitted(self, decision: Decision) -> None:
            super().on_admitted(decision)
            other.cancel()
            self.finish()

        def on_rejected(self, error: RoutingError) -> None:
            super().on_rejected(error)
            other.cancel()

    first = CancelsOther(harness, prompt(6000))
    first.submit()
    other = harness.submit(7000)
    harness.free(running)
    assert first.events == ["admitted"] and other.events == ["cancelled"]
    harness.assert_all_counters_are_zero()

    for by_tick in (True, False):
        harness, running = one_busy_node()
        first = CancelsOther(harness, prompt(6000))
        first.submit()
        other = harness.submit()
        harness.fleet.check_failed(harness.nodes[0], harness.now_s, "gone")
        if by_tick:
            harness.tick()
        else:
            harness.free(running)
        assert first.events == ["rejected"] and other.events == ["cancelled"]
        assert harness.admission.queue.waiting == 0


def test_a_request_submitted_while_another_is_admitted_waits_its_turn() -> None:
    harness, running = one_busy_node()
    submitted: list[FakeRequest] = []

    class SubmitsAnother(FakeRequest):
        def on_admitted(self, decision: Decision) -> None:
            super().on_admitted(decision)
            submitted.append(harness.submit())

    SubmitsAnother(harness, prompt(8000)).submit()
    harness.free(running)
    assert [request.queued for request in submitted] == [True] and harness.admission.queue.waiting == 1


def test_a_displaced_request_may_submit_another_at_once() -> None:
    harness, _ = one_busy_node(max_waiting=2)
    again: list[FakeRequest] = []

    class SubmitsAgain(FakeRequest):
        def on_rejected(self, error: RoutingError) -> None:
            super().on_rejected(error)
            with pytest.raises(QueueFull):
                again.append(harness.submit(priority=LOW))

    first = SubmitsAgain(harness, prompt(8000), priority=LOW)
    first.submit()
    harness.submit()
    harness.submit()
    assert first.events == ["rejected"] and not again and harness.admission.queue.waiting == 2


EVENTS = st.one_of(
    st.tuples(
        st.just("arrive"), st.sampled_from(["a", "b", "c"]), st.sampled_from([HIGH, NORMAL, LOW]), st.integers(1, 30)
    ),
    st.tuples(st.sampled_from(["finish", "cancel", "first byte"]), st.integers(0, 30)),
    st.tuples(st.just("tick"), st.floats(0.0, 3.0)),
    st.tuples(st.sampled_from(["down", "up"]), st.integers(0, 2)),
)


@settings(max_examples=60)
@given(st.lists(EVENTS, max_size=50))
def test_every_request_is_admitted_rejected_or_cancelled_exactly_once(events: list[tuple[object, ...]]) -> None:
    harness = RoutingHarness(3, admission=AdmissionConfig(max_waiting=8, max_wait_s=6.0, queue_threshold=6))
    requests: list[FakeRequest] = []
    open_: list[FakeRequest] = []
    for event in events:
        match event:
            case ("arrive", str(tenant), int(priority), int(thousands)):
                request = FakeRequest(
                    harness,
                    prompt(thousands * 1000),
                    tenant=tenant,
                    priority=priority,
                    may_queue=thousands % 7 != 0,
                    deadline_s=harness.now_s + 2.0 if thousands % 3 == 0 else 0.0,
                    total_deadline_s=harness.now_s + 4.0 if thousands % 5 == 0 else 0.0,
                )
                requests.append(request)
                try:
                    request.submit()
                except RoutingError as error:
                    request.on_rejected(error)
            case ("finish", int(at)) if open_:
                open_.pop(at % len(open_)).finish()
            case ("first byte", int(at)) if open_:
                ticket = open_[at % len(open_)].ticket
                if not ticket.first_token_s:
                    ticket.first_token(harness.now_s)
                    harness.admission.node_freed(ticket.node, harness.now_s)
            case ("cancel", int(at)) if waiting := [request for request in requests if request.queued]:
                waiting[at % len(waiting)].cancel()
            case ("tick", float(seconds)):
                harness.advance(seconds)
                harness.tick()
            case ("down", int(at)):
                harness.fleet.check_failed(harness.nodes[at], harness.now_s, "gone")
            case ("up", int(at)):
                harness.fleet.check_passed(harness.nodes[at], harness.now_s)
        known = {id(request) for request in open_}
        open_ += [
            request
            for request in requests
            if request.events == ["admitted"] and request.ticket._is_open and id(request) not in known
        ]
        assert harness.admission.queue.waiting == harness.group.waiting == sum(request.queued for request in requests)
    for node in harness.nodes:
        harness.fleet.check_passed(node, harness.now_s)
    for _ in range(len(requests) + 1):
        for request in requests:
            if request.events == ["admitted"] and request.ticket._is_open:
                request.finish()
        harness.tick()
    assert all(len(request.events) == 1 for request in requests)
    harness.assert_all_counters_are_zero()
