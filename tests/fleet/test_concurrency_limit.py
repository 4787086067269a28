"""The learned limit of concurrent requests: what moves it, and that no report is a gate."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from warmroute.config import Health, NodeConfig
from warmroute.core.messages import Outcome
from warmroute.core.node import UNUSED_REPORTS, ConcurrencyLimit, Node, Ticket
from warmroute.core.speeds import DecodeSpeed


def test_waiting_requests_lower_the_limit_by_one_step_at_a_time() -> None:
    limit = ConcurrencyLimit()
    found = []
    for _ in range(12):
        limit.reported(running=8, waiting=72, expected_waiting=0, inflight=80)
        found.append(limit.most)
    assert found == [60, 45, 34, 26, 20, 15, 12, 9, 8, 8, 8, 8], "down to what the engine runs"


def test_requests_that_the_router_expects_to_wait_move_nothing() -> None:
    limit = ConcurrencyLimit()
    limit.reported(running=1, waiting=3, expected_waiting=3, inflight=4)
    assert limit.most == 0


def test_a_limit_that_was_hit_rises_while_nobody_waits_and_one_that_was_not_ends() -> None:
    limit = ConcurrencyLimit()
    limit.reported(running=8, waiting=2, expected_waiting=0, inflight=10)
    assert limit.most == 8
    for expected in (9, 10, 11):
        limit.was_hit = True
        limit.reported(running=8, waiting=0, expected_waiting=0, inflight=8)
        assert limit.most == expected
    for _ in range(UNUSED_REPORTS):
        assert limit.most == 11
        limit.reported(running=2, waiting=0, expected_waiting=0, inflight=2)
    assert limit.most == 0


numbers = st.integers(0, 20) | st.integers(0, 1_000_000)


@given(st.lists(st.tuples(numbers, numbers, numbers, numbers), min_size=1, max_size=50))
def test_an_idle_node_always_has_a_place_and_no_report_makes_the_limit_grow_without_need(
    reports: list[tuple[int, int, int, int]],
) -> None:
    limit, most = ConcurrencyLimit(), max(inflight for *_, inflight in reports)
    for running, waiting, expected, inflight in reports:
        limit.was_hit = 0 < limit.most <= inflight
        before = limit.most
        limit.reported(running, waiting, expected, inflight)
        assert 0 <= limit.most <= max(1, most + most // 8 + 1)
        assert not before or limit.most >= 1 or not limit.was_hit
        if waiting and before:
            assert limit.most <= before, "nothing rises while requests wait"


def test_only_requests_without_streaming_are_limited_and_old_reports_end_the_limit() -> None:
    node = Node(NodeConfig(url="http://n:1"), Health())
    tickets = [Ticket.__new__(Ticket) for _ in range(4)]
    for ticket in tickets:
        ticket.open(node, 1.0, DecodeSpeed(), True, 10, 10, 10.0)
    node.update_load(1, 3, 0.5, 2.0)
    assert not node.at_concurrency_limit, "the router sees their first tokens"
    unstreamed = [Ticket.__new__(Ticket) for _ in range(4)]
    for ticket in unstreamed:
        ticket.open(node, 2.0, DecodeSpeed(), False, 10, 10, 10.0)
    node.update_load(4, 8, 0.5, 10.0)
    assert (node.unstreamed, node.concurrency.most, node.at_concurrency_limit) == (4, 6, True)
    node.drop_stale_load(5.0, 16.0)
    assert (node.concurrency.most, node.at_concurrency_limit) == (0, False), "the report is too old"
    node.update_load(4, 8, 0.5, 17.0)
    for ticket in unstreamed:
        ticket.release(Outcome.CANCELLED, 18.0)
    assert (node.unstreamed, node.at_concurrency_limit) == (0, False)
