"""What the router makes of an engine's own counters, whatever they do."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from warmroute.core.node import MAX_QUEUE_MS, EngineCounters, EngineRates

POLL_S = 1.0


def run(*steps: dict[str, Any], waiting: int = 4) -> EngineRates:
    """Return the rates after polls of these counters, one a second."""
    rates = EngineRates()
    for number, step in enumerate(steps):
        rates.update(EngineCounters(**step), waiting, 1000.0 + POLL_S * number)
    return rates


def growing(polls: int = 20, **per_poll: float) -> list[dict[str, float]]:
    return [{name: 100.0 + value * number for name, value in per_poll.items()} for number in range(polls)]


def test_an_engine_that_reports_nothing_has_no_rates() -> None:
    rates = run({}, {}, {})
    assert rates.hit_share is None and rates.queue_time_ms is None and rates.predicted_share is None
    assert (rates.kv_pressure, rates.preemptions_per_s, rates.expected_queue_ms(9)) == (0.0, 0.0, 0.0)


def test_the_totals_of_before_do_not_count() -> None:
    rates = run({"queried_tokens": 1e9, "hit_tokens": 9e8, "preemptions": 500.0, "queue_time_s": 1e5, "queue_times": 9})
    assert rates.hit_share is None and rates.kv_pressure == 0.0 and rates.queue_time_ms is None


def test_rates_are_those_of_the_last_half_minute() -> None:
    rates = run(*growing(queried_tokens=1000.0, hit_tokens=700.0, queue_times=2.0, queue_time_s=3.0, preemptions=1.0))
    assert rates.hit_share == pytest.approx(0.7) and rates.queue_time_ms == pytest.approx(1500.0)
    assert rates.preemptions_per_s == pytest.approx(0.9, rel=0.1) and 0.6 < rates.kv_pressure < 0.9
    rates = run(*growing(60, queried_tokens=1000.0, hit_tokens=700.0))
    rates.update(EngineCounters(queried_tokens=259_100.0, hit_tokens=41_400.0), 0, 1120.0)  # 200,000 more, no hit
    assert rates.hit_share is not None and rates.hit_share < 0.05, "what is older fades"


def test_pressure_lasts_as_long_as_the_preemptions() -> None:
    rates = run(*growing(preemptions=2.0))
    before = rates.kv_pressure
    for second in range(60):
        rates.update(EngineCounters(preemptions=138.0), 0, 1020.0 + second)
    assert before > 0.7 and rates.kv_pressure == 0.0


def test_a_restart_and_an_absurd_jump_count_for_nothing() -> None:
    steps = growing(queried_tokens=1000.0, hit_tokens=500.0, preemptions=0.0, queue_times=1.0, queue_time_s=0.2)
    usual = run(*steps)
    fallen = dict.fromkeys(steps[0], 3.0)
    absurd = dict.fromkeys(steps[0], 1e18)
    for odd in (fallen, absurd):
        rates = run(*steps, odd)
        assert rates.hit_share == pytest.approx(0.5) and rates.queue_time_ms == pytest.approx(usual.queue_time_ms)
        assert rates.kv_pressure == 0.0


def test_queue_time_counts_while_there_is_a_queue() -> None:
    rates = run(*growing(queue_times=2.0, queue_time_s=3.0), waiting=4)
    assert rates.expected_queue_ms(0) == 0.0
    assert rates.expected_queue_ms(4) == rates.expected_queue_ms(400) == pytest.approx(1500.0)
    assert rates.expected_queue_ms(1) == pytest.approx(375.0), "a quarter of the usual queue"
    short = run(*growing(queue_times=100.0, queue_time_s=2.0))
    assert short.queue_time_ms == pytest.approx(20.0) and short.expected_queue_ms(4) == 0.0, "the step of the batch"
    endless = run(*growing(queue_times=1.0, queue_time_s=1e5))
    assert endless.expected_queue_ms(4) == MAX_QUEUE_MS


def test_a_gauge_replaces_missing_counters() -> None:
    assert run({"hit_share": 0.4}, {"hit_share": 0.6}).hit_share == 0.6
    for wrong in (-1.0, 1.5, math.nan):
        assert run({"hit_share": 0.4}, {"hit_share": wrong}).hit_share is None


def test_predictions_are_compared_over_the_same_time() -> None:
    rates = run(*growing(queried_tokens=1000.0, hit_tokens=700.0))
    for prompts, routed, predicted in ((5, 5000, 4000), (7, 9000, 7000), (7, 9000, 7000)):
        rates.update_predictions(prompts, routed, predicted)
    assert (rates.routed_prompts, rates.routed_tokens, rates.predicted_share) == (2, 4000, 0.75)
    rates.update_predictions(0, 0, 0)  # the node's cache was forgotten
    assert rates.predicted_share == 0.75
    rates.forget()
    assert rates.predicted_share is None and rates.hit_share is None


values = st.floats(allow_nan=True, allow_infinity=True) | st.integers(-5, 10**20)
counters = st.builds(
    EngineCounters, queried_tokens=values, hit_tokens=values, preemptions=values, queue_time_s=values,
    queue_times=values, hit_share=values,
)  # fmt: skip


@given(st.lists(st.tuples(counters, st.integers(0, 10**6), st.floats(-10.0, 1e6)), max_size=8))
def test_no_counters_give_impossible_rates(steps: list[tuple[EngineCounters, int, float]]) -> None:
    rates, now_s = EngineRates(), 0.0
    for step, waiting, pause_s in steps:
        now_s += pause_s
        rates.update(step, waiting, now_s)
        assert 0.0 <= rates.kv_pressure <= 1.0
        assert 0.0 <= rates.expected_queue_ms(waiting) <= MAX_QUEUE_MS
        assert rates.hit_share is None or 0.0 <= rates.hit_share <= 1.0
        assert math.isfinite(rates.preemptions_per_s)


def test_prefill_times_of_the_engine_count_once_where_prefills_overlap() -> None:
    rates = EngineRates()
    rates.update(EngineCounters(prefill_time_s=5.0, prefills=10, prefilled_tokens=9_000), 0, 100.0)
    assert rates.mean_prefill is None, "the totals of before do not count"
    rates.update(EngineCounters(prefill_time_s=5.5, prefills=12, prefilled_tokens=11_000), 0, 110.0)
    assert rates.mean_prefill == (pytest.approx(1000.0), pytest.approx(250.0)) and rates.new_prefills == 2
    rates.update(EngineCounters(prefill_time_s=25.5, prefills=32, prefilled_tokens=31_000), 0, 111.0)
    tokens, took_ms = rates.mean_prefill or (0.0, 0.0)
    assert tokens == pytest.approx(1000.0) and took_ms < 550.0, "20 prefills cannot take 20 s of one second"
    rates.update(EngineCounters(prefill_time_s=1.0, prefills=1, prefilled_tokens=100), 0, 112.0)
    assert rates.new_prefills == 0, "a restart"
    rates.forget()
    assert rates.mean_prefill is None
