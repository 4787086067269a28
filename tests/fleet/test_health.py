"""The health state machine, row by row."""

from __future__ import annotations

import pytest

from warmroute.config import Health
from warmroute.core.health import HealthState, NodeHealth

CONFIG = Health(
    timeout_s=2,
    consecutive_timeouts=3,
    consecutive_failures=5,
    breaker_open_s=0.5,
    breaker_open_max_s=15,
    slow_start_s=10,
)
UNKNOWN, UP, DOWN, HALF_OPEN = HealthState.UNKNOWN, HealthState.UP, HealthState.DOWN, HealthState.HALF_OPEN


def health_in(state: HealthState, now_s: float = 100.0, confirmed: bool = False) -> NodeHealth:
    """Return a node in this state, reached by events."""
    health = NodeHealth(CONFIG)
    if state is UNKNOWN:
        return health
    health.check_passed(now_s)
    if state is UP:
        return health
    if confirmed:
        health.check_failed(now_s, "refused")
    else:
        for _ in range(CONFIG.consecutive_failures):
            health.request_failed(now_s, "failed")
    if state is HALF_OPEN:
        health.check_passed(now_s + 1)
        assert not confirmed
    return health


# state before, event, times, seconds after it reached the state, state after
TABLE = [
    (UNKNOWN, "check_passed", 1, 0, UP),
    (UNKNOWN, "check_timed_out", 2, 10, UNKNOWN),
    (UNKNOWN, "check_timed_out", 3, 10, DOWN),
    (UNKNOWN, "check_failed", 1, 0, DOWN),
    (UNKNOWN, "request_passed", 1, 0, UNKNOWN),
    (UNKNOWN, "request_failed", 50, 0, UNKNOWN),
    (UP, "check_passed", 9, 0, UP),
    (UP, "check_timed_out", 2, 10, UP),
    (UP, "check_timed_out", 3, 10, DOWN),
    (UP, "check_timed_out", 9, 1, UP),  # it answered a moment ago
    (UP, "check_failed", 1, 0, DOWN),
    (UP, "request_passed", 9, 0, UP),
    (UP, "request_failed", 4, 0, UP),
    (UP, "request_failed", 5, 0, DOWN),
    (DOWN, "check_passed", 9, 0.4, DOWN),
    (DOWN, "check_passed", 1, 0.5, HALF_OPEN),
    (DOWN, "check_timed_out", 9, 60, DOWN),
    (DOWN, "check_failed", 1, 1, DOWN),
    (DOWN, "request_passed", 9, 60, DOWN),  # only a check leaves DOWN
    (DOWN, "request_failed", 9, 60, DOWN),
    (HALF_OPEN, "check_passed", 9, 1, HALF_OPEN),  # only a request leaves HALF_OPEN
    (HALF_OPEN, "check_timed_out", 3, 60, DOWN),
    (HALF_OPEN, "check_failed", 1, 1, DOWN),
    (HALF_OPEN, "request_passed", 1, 1, UP),
    (HALF_OPEN, "request_failed", 1, 1, DOWN),
]


@pytest.mark.parametrize(("before", "event", "times", "after_s", "after"), TABLE)
def test_the_transition_table(before: HealthState, event: str, times: int, after_s: float, after: HealthState) -> None:
    health = health_in(before)
    assert health.state is before
    for _ in range(times):
        reason = ("why",) if event in ("check_failed", "request_failed") else ()
        getattr(health, event)(100.0 + after_s, *reason)
    assert health.state is after


def test_only_consecutive_failures_count() -> None:
    health = health_in(UP)
    for _ in range(10):
        for _ in range(CONFIG.consecutive_failures - 1):
            health.request_failed(100, "x")
        health.request_passed(100)
    assert health.state is UP


def test_only_consecutive_timeouts_count() -> None:
    health = health_in(UP)
    now_s = 100.0
    for _ in range(10):
        for _ in range(CONFIG.consecutive_timeouts - 1):
            now_s += 10
            health.check_timed_out(now_s)
        health.check_passed(now_s)
    assert health.state is UP


def test_a_timeout_does_not_count_while_requests_succeed() -> None:
    health = health_in(UP)
    for second in range(100, 500, 2):
        health.request_passed(second)
        health.check_timed_out(second + 1)
    assert health.state is UP


def test_a_timeout_does_not_count_while_a_response_is_running() -> None:
    health = health_in(UP)
    for second in range(100, 500, 2):
        health.check_timed_out(second, second - 1)
    assert health.state is UP


def test_a_suspected_node_is_a_last_resort_and_a_confirmed_dead_one_is_not() -> None:
    assert health_in(DOWN).usable_as_last_resort
    assert health_in(HALF_OPEN).usable_as_last_resort
    assert not health_in(DOWN, confirmed=True).usable_as_last_resort
    assert health_in(DOWN, confirmed=True).confirmed_down


def test_a_refused_connection_confirms_a_suspicion() -> None:
    health = health_in(DOWN)
    health.check_failed(101, "refused")
    assert health.confirmed_down and health.reason == "refused"


def test_the_breaker_stays_open_twice_as_long_each_time() -> None:
    health = health_in(UP)
    now_s, times = 100.0, []
    for _ in range(9):
        for _ in range(CONFIG.consecutive_failures):
            health.request_failed(now_s, "x")
        times.append(health.breaker_open_until_s - now_s)
        now_s = health.breaker_open_until_s
        health.check_passed(now_s)
        assert health.state is HALF_OPEN
    assert times == [0.5, 1, 2, 4, 8, 15, 15, 15, 15]


def test_a_successful_trial_resets_the_breaker() -> None:
    health = health_in(UP)
    now_s = 100.0
    for _ in range(4):
        for _ in range(CONFIG.consecutive_failures):
            health.request_failed(now_s, "x")
        now_s = health.breaker_open_until_s
        health.check_passed(now_s)
        health.request_passed(now_s)
        assert health.state is UP
        assert health.breaker_open_until_s - 0.5 <= now_s


def test_a_confirmed_dead_node_is_up_with_the_first_passing_check() -> None:
    health = health_in(UP)
    for second in range(100, 200):
        health.check_failed(second, "refused")
        assert health.confirmed_down
    health.check_passed(200)
    assert health.state is UP and not health.confirmed
    assert health.traffic_share(200) == pytest.approx(0.1), "with slow start"


def test_a_node_that_was_never_up_needs_no_trial() -> None:
    """A booting machine drops packets, and no request is sent there that could be the trial."""
    health = health_in(UNKNOWN)
    for second in range(100, 110):
        health.check_timed_out(second)
    assert health.state is DOWN and health.usable_as_last_resort
    health.check_passed(111)
    assert health.state is UP
    for second in range(200, 210):
        health.check_timed_out(second)
    health.check_passed(300)
    assert health.state is HALF_OPEN, "a node that was up needs a trial"


def test_a_recovered_node_gets_more_traffic_over_time() -> None:
    health = health_in(HALF_OPEN)
    health.request_passed(200)
    shares = [health.traffic_share(second) for second in (200, 201, 205, 209.9, 210, 1000)]
    assert shares == pytest.approx([0.1, 0.1, 0.5, 0.99, 1, 1])


def test_a_new_node_gets_its_full_share_at_once() -> None:
    assert health_in(UP).traffic_share(100) == 1.0


def test_without_slow_start_a_recovered_node_gets_its_full_share() -> None:
    health = NodeHealth(Health(slow_start_s=0))
    health.check_passed(0)
    health.check_failed(1, "x")
    health.check_passed(50)
    assert health.state is UP and health.traffic_share(50) == 1.0


def test_a_reload_changes_the_limits() -> None:
    health = health_in(UP)
    health.config = Health(consecutive_failures=1)
    health.request_failed(100, "x")
    assert health.state is DOWN
