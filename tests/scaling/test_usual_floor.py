"""The usual floor: a mean that fades, in which searches that measure the same requests count together as one."""

from __future__ import annotations

import pytest

from warmroute.scaling.usual_floor import UsualFloor

WINDOW_S = 1800.0
MEASURED_S = 1080.0


def floors(*found: tuple[float, float]) -> UsualFloor:
    usual = UsualFloor()
    for at_s, floor in found:
        usual.record(floor, at_s, MEASURED_S, WINDOW_S)
    return usual


def test_it_is_unknown_before_the_first_search() -> None:
    assert UsualFloor().ttft_ms is None
    assert floors((5000.0, 0.6)).ttft_ms == pytest.approx(0.6)


def test_searches_that_follow_each_other_soon_count_for_the_time_between() -> None:
    often = floors((0.0, 0.5), *((60.0 * at, 0.9) for at in range(1, 19)))
    once = floors((0.0, 0.5), (1080.0, 0.9))
    assert often.ttft_ms == pytest.approx(once.ttft_ms, rel=0.03)


def test_it_follows_a_lasting_change_within_hours() -> None:
    usual = floors(*((1080.0 * at, 0.4) for at in range(20)))
    for at in range(20, 48):  # eight hours
        usual.record(0.8, 1080.0 * at, MEASURED_S, WINDOW_S)
    assert usual.ttft_ms == pytest.approx(0.8, abs=0.02)


def test_a_short_recording_counts_less_than_a_long_one() -> None:
    """After a start, the first search has measured a few minutes, with caches that were empty."""
    usual = UsualFloor()
    usual.record(2.0, 300.0, 180.0, WINDOW_S)
    usual.record(0.5, 1800.0, MEASURED_S, WINDOW_S)
    assert usual.ttft_ms == pytest.approx(0.7, abs=0.03)


def test_a_clock_that_stands_still_changes_nothing() -> None:
    assert floors((100.0, 0.5), (100.0, 0.9)).ttft_ms == pytest.approx(0.5)
