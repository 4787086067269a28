"""Rate limits over several processes: slices, and the share of a process that is cut off."""

from __future__ import annotations

from test_cluster_state import Process, exchange

from warmroute.core.cluster.messages import FULL_S, PEER_TTL_S
from warmroute.core.cluster.shared_limits import LEFT_S
from warmroute.core.rejections import RateLimited

LIMIT = 600


def taken(process: Process, most: int = 10_000) -> int:
    """Send requests until one is rejected, and return how many passed."""
    limits = process.limits.of("acme")
    assert limits is not None
    for count in range(most):
        try:
            limits.begin(process.now_s, 0, True)
        except RateLimited:
            return count
    return most


def wait(seconds: float, *processes: Process) -> None:
    for process in processes:
        process.now_s += seconds


def test_a_burst_at_all_processes_at_once_does_not_exceed_the_limit() -> None:
    processes = [Process(name, requests_per_min=LIMIT) for name in "abc"]
    exchange(*processes)
    wait(FULL_S, *processes)
    exchange(*processes)
    assert [taken(process) for process in processes] == [200, 200, 200]
    wait(0.1, *processes)
    exchange(*processes)  # each hears now what the others took
    assert sum(taken(process) for process in processes) <= 3  # what was refilled in 0.1 s, by each


def test_one_process_can_use_the_whole_limit_slice_by_slice() -> None:
    a, b, c = (Process(name, requests_per_min=LIMIT) for name in "abc")
    exchange(a, b, c)
    passed = 0
    for _ in range(240):
        wait(FULL_S, a, b, c)
        exchange(a, b, c)
        passed += taken(a)
    assert 0.98 * 2 * LIMIT <= passed <= 1.02 * 2 * LIMIT  # a full bucket, and a minute's refill


def test_a_process_that_joins_is_neither_in_debt_nor_rich() -> None:
    a = Process("a", requests_per_min=LIMIT)
    for _ in range(60):
        wait(60.0, a)
        assert taken(a) == LIMIT  # alone, for an hour
        a.state.publish(a, a.now_s)
    a.sent.clear()
    b = Process("b", requests_per_min=LIMIT)
    b.now_s = a.now_s
    for _ in range(120):
        exchange(a, b)
        wait(FULL_S, a, b)
    exchange(a, b)
    assert 290 <= taken(a) + taken(b) <= 310


def test_a_process_that_is_cut_off_uses_its_share_and_then_all_share_again() -> None:
    processes = [Process(name, requests_per_min=LIMIT) for name in "abc"]
    exchange(*processes)
    wait(FULL_S, *processes)
    exchange(*processes)
    for process in processes:
        process.state.set_connected(False)
    wait(PEER_TTL_S + 0.1, *processes)
    for process in processes:
        process.state.publish(process, process.now_s)
        process.sent.clear()
    shared = processes[0].state.shared_limits
    assert shared is not None and shared.fraction == 1 / 3
    passed = sum(taken(process) for process in processes)
    assert passed <= 1.02 * LIMIT
    for _ in range(60):
        wait(1.0, *processes)
        passed += sum(taken(process) for process in processes)
    assert 0.98 * 2 * LIMIT <= passed <= 1.02 * 2 * LIMIT
    for process in processes:
        process.state.set_connected(True)
    for _ in range(60):
        wait(1.0, *processes)
        exchange(*processes)
        passed += sum(taken(process) for process in processes)
    assert shared.fraction == 1.0
    assert 0.98 * 3 * LIMIT <= passed <= 1.02 * 3 * LIMIT


def test_a_silent_peer_holds_nobody_up_for_longer_than_it_counts() -> None:
    a, b = (Process(name, requests_per_min=LIMIT) for name in "ab")
    exchange(a, b)
    wait(FULL_S, a, b)
    exchange(a, b)
    assert taken(a) == LIMIT / 2
    wait(PEER_TTL_S + 0.1, a)
    a.state.publish(a, a.now_s)  # b has ended
    assert taken(a) >= LIMIT / 2


def test_a_process_that_misses_its_peers_before_the_connection_uses_its_share() -> None:
    a, b = (Process(name, requests_per_min=LIMIT) for name in "ab")
    exchange(a, b)
    wait(PEER_TTL_S + 0.1, a)
    a.state.publish(a, a.now_s)  # b is silent, but the connection has not been missed yet
    shared = a.state.shared_limits
    assert shared is not None and shared.fraction == 1 / 2
    a.state.set_connected(False)
    wait(60.0, a)
    a.state.publish(a, a.now_s)
    assert shared.fraction == 1 / 2 and taken(a) <= LIMIT / 2 + 1


def test_a_process_that_has_ended_leaves_its_share_to_the_others() -> None:
    a, b = (Process(name, requests_per_min=LIMIT) for name in "ab")
    exchange(a, b)
    wait(PEER_TTL_S + 0.1, a)
    a.state.publish(a, a.now_s)
    shared = a.state.shared_limits
    assert shared is not None
    wait(LEFT_S + 0.1, a)
    a.state.publish(a, a.now_s)
    assert shared.fraction == 1.0
