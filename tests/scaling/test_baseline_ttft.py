"""The baseline of the TTFT: a fading mean, in which searches that measure the same requests count as one."""

from __future__ import annotations

import pytest

from warmroute.scaling.replay_planner import ASSUMED_SHARE_OF_LIMIT, BaselineTtft

LIMIT_MS = 2000.0
WINDOW_S = 1800.0
MEASURED_S = 1080.0


def floors(*found: tuple[float, float]) -> BaselineTtft:
    usual = BaselineTtft.assumed(LIMIT_MS, WINDOW_S)
    for at_s, floor_ms in found:
        usual.record(floor_ms, at_s, MEASURED_S, WINDOW_S)
    return usual


def test_the_first_minutes_say_little_about_what_is_usual() -> None:
    assert floors().ttft_ms == ASSUMED_SHARE_OF_LIMIT * LIMIT_MS == 1500.0
    usual = BaselineTtft.assumed(LIMIT_MS, WINDOW_S)
    usual.record(1900.0, 400.0, 240.0, WINDOW_S)
    assert 1500.0 < usual.ttft_ms < 1570.0


def test_searches_that_follow_each_other_soon_count_for_the_time_between() -> None:
    often = floors((0.0, 500.0), *((60.0 * at, 900.0) for at in range(1, 19)))
    once = floors((0.0, 500.0), (1080.0, 900.0))
    assert often.ttft_ms == pytest.approx(once.ttft_ms, rel=0.03)


def test_it_follows_a_lasting_change_within_hours() -> None:
    usual = floors(*((1080.0 * at, 400.0) for at in range(20)))
    assert usual.ttft_ms == pytest.approx(430.0, abs=40.0)
    for at in range(20, 48):  # eight hours
        usual.record(800.0, 1080.0 * at, MEASURED_S, WINDOW_S)
    assert usual.ttft_ms == pytest.approx(800.0, abs=20.0)


def test_after_a_long_time_without_searches_the_next_one_decides() -> None:
    usual = floors((0.0, 400.0), (1e9, 900.0))
    assert usual.ttft_ms == pytest.approx(900.0)


def test_a_clock_that_stands_still_changes_nothing() -> None:
    assert floors((100.0, 500.0), (100.0, 900.0)).ttft_ms == floors((100.0, 500.0)).ttft_ms
