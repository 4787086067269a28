"""The state machine of a node's health, row by row, on a virtual clock."""

from __future__ import annotations

import pytest

from warmroute.config import Health as HealthConfig
from warmroute.fleet.health import Health, Standing

CONFIG = HealthConfig(timeout_s=2, slow_checks=3, failures=5, open_s=0.5, open_limit_s=15, slow_start_s=10)
UNKNOWN, UP, OPEN, HALF_OPEN = Standing.UNKNOWN, Standing.UP, Standing.OPEN, Standing.HALF_OPEN


def health_in(standing: Standing, now_s: float = 100.0, certain: bool = False) -> Health:
    """A node that came to this standing the way a node does."""
    health = Health(CONFIG)
    if standing is UNKNOWN:
        return health
    health.check_passed(now_s)
    if standing is UP:
        return health
    if certain:
        health.check_refused(now_s, "refused")
    else:
        for _ in range(CONFIG.failures):
            health.request_failed(now_s, "failed")
    if standing is HALF_OPEN:
        health.check_passed(now_s + 1)
        assert not certain
    return health


# standing before, event, how often, seconds after it came there, standing after
TABLE = [
    (UNKNOWN, "check_passed", 1, 0, UP),
    (UNKNOWN, "check_slow", 2, 10, UNKNOWN),
    (UNKNOWN, "check_slow", 3, 10, OPEN),
    (UNKNOWN, "check_refused", 1, 0, OPEN),
    (UNKNOWN, "request_passed", 1, 0, UNKNOWN),
    (UNKNOWN, "request_failed", 50, 0, UNKNOWN),
    (UP, "check_passed", 9, 0, UP),
    (UP, "check_slow", 2, 10, UP),
    (UP, "check_slow", 3, 10, OPEN),
    (UP, "check_slow", 9, 1, UP),  # it was heard a moment ago
    (UP, "check_refused", 1, 0, OPEN),
    (UP, "request_passed", 9, 0, UP),
    (UP, "request_failed", 4, 0, UP),
    (UP, "request_failed", 5, 0, OPEN),
    (OPEN, "check_passed", 9, 0.4, OPEN),
    (OPEN, "check_passed", 1, 0.5, HALF_OPEN),
    (OPEN, "check_slow", 9, 60, OPEN),
    (OPEN, "check_refused", 1, 1, OPEN),
    (OPEN, "request_passed", 9, 60, OPEN),  # only a check ends it
    (OPEN, "request_failed", 9, 60, OPEN),
    (HALF_OPEN, "check_passed", 9, 1, HALF_OPEN),  # only a request is the trial
    (HALF_OPEN, "check_slow", 3, 60, OPEN),
    (HALF_OPEN, "check_refused", 1, 1, OPEN),
    (HALF_OPEN, "request_passed", 1, 1, UP),
    (HALF_OPEN, "request_failed", 1, 1, OPEN),
]


@pytest.mark.parametrize(("before", "event", "times", "after_s", "becomes"), TABLE)
def test_each_row_of_the_table(before: Standing, event: str, times: int, after_s: float, becomes: Standing) -> None:
    health = health_in(before)
    assert health.standing is before
    for _ in range(times):
        reason = ("why",) if event in ("check_refused", "request_failed") else ()
        getattr(health, event)(100.0 + after_s, *reason)
    assert health.standing is becomes


def test_failures_count_only_in_a_row() -> None:
    health = health_in(UP)
    for _ in range(10):
        for _ in range(CONFIG.failures - 1):
            health.request_failed(100, "x")
        health.request_passed(100)
    assert health.standing is UP


def test_slow_checks_count_only_in_a_row() -> None:
    health = health_in(UP)
    now_s = 100.0
    for _ in range(10):
        for _ in range(CONFIG.slow_checks - 1):
            now_s += 10
            health.check_slow(now_s)
        health.check_passed(now_s)
    assert health.standing is UP


def test_busy_is_not_dead_a_slow_check_says_nothing_of_a_node_that_answers() -> None:
    health = health_in(UP)
    for second in range(100, 500, 2):
        health.request_passed(second)
        health.check_slow(second + 1)
    assert health.standing is UP


def test_busy_is_not_dead_a_running_answer_counts_as_well() -> None:
    health = health_in(UP)
    for second in range(100, 500, 2):
        health.check_slow(second, second - 1)
    assert health.standing is UP


def test_a_suspected_node_is_used_at_need_and_a_certainly_dead_one_is_not() -> None:
    assert health_in(OPEN).usable_at_need
    assert health_in(HALF_OPEN).usable_at_need
    assert not health_in(OPEN, certain=True).usable_at_need
    assert health_in(OPEN, certain=True).certain_open


def test_a_suspicion_becomes_certain_when_nobody_listens() -> None:
    health = health_in(OPEN)
    health.check_refused(101, "refused")
    assert health.certain_open and health.reason == "refused"


def test_the_breaker_stays_open_twice_as_long_each_time_up_to_its_limit() -> None:
    health = health_in(UP)
    now_s, times = 100.0, []
    for _ in range(9):
        for _ in range(CONFIG.failures):
            health.request_failed(now_s, "x")
        times.append(health.open_until_s - now_s)
        now_s = health.open_until_s
        health.check_passed(now_s)
        assert health.standing is HALF_OPEN
    assert times == [0.5, 1, 2, 4, 8, 15, 15, 15, 15]


def test_a_passed_trial_makes_the_breaker_forget() -> None:
    health = health_in(UP)
    now_s = 100.0
    for _ in range(4):
        for _ in range(CONFIG.failures):
            health.request_failed(now_s, "x")
        now_s = health.open_until_s
        health.check_passed(now_s)
        health.request_passed(now_s)
        assert health.standing is UP
        assert health.open_until_s - 0.5 <= now_s


def test_a_node_that_certainly_was_away_is_back_with_the_first_check_that_passes() -> None:
    health = health_in(UP)
    for second in range(100, 200):
        health.check_refused(second, "refused")
        assert health.certain_open
    health.check_passed(200)
    assert health.standing is UP and not health.certain
    assert health.share(200) == pytest.approx(0.1), "and grows to its share"


def test_a_node_that_was_slow_before_it_was_ever_up_needs_no_trial() -> None:
    """A machine that boots drops packets, and no request goes there that could pass a trial."""
    health = health_in(UNKNOWN)
    for second in range(100, 110):
        health.check_slow(second)
    assert health.standing is OPEN and health.usable_at_need
    health.check_passed(111)
    assert health.standing is UP
    for second in range(200, 210):
        health.check_slow(second)
    health.check_passed(300)
    assert health.standing is HALF_OPEN, "one that was up needs it"


def test_a_node_that_comes_back_grows_to_its_full_share() -> None:
    health = health_in(HALF_OPEN)
    health.request_passed(200)
    shares = [health.share(second) for second in (200, 201, 205, 209.9, 210, 1000)]
    assert shares == pytest.approx([0.1, 0.1, 0.5, 0.99, 1, 1])


def test_a_node_that_was_never_away_has_its_full_share_at_once() -> None:
    assert health_in(UP).share(100) == 1.0


def test_without_slow_start_a_node_is_back_at_once() -> None:
    health = Health(HealthConfig(slow_start_s=0))
    health.check_passed(0)
    health.check_refused(1, "x")
    health.check_passed(50)
    assert health.standing is UP and health.share(50) == 1.0


def test_new_settings_count_from_now_on() -> None:
    health = health_in(UP)
    health.reconfigure(HealthConfig(failures=1))
    health.request_failed(100, "x")
    assert health.standing is OPEN
