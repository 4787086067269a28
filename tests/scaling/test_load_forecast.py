"""The load that scaling by replay expects when a node that is requested now would serve."""

from __future__ import annotations

import msgspec
import pytest
from recorded_loads import recorded

from warmroute.lab.planning.recorded_traffic import MAX_CHANCE, RecordedRequest, forecast, recorded_until

MINUTES = 30


def arrivals(*per_minute: int, turns: int = 1) -> list[RecordedRequest]:
    """Requests at equal distances within each minute, `turns` of each conversation one after the other."""
    prompt = recorded(6.0, 10.0)[0].prompt
    times_ms = [
        60_000.0 * (minute + (at + 0.5) / count) for minute, count in enumerate(per_minute) for at in range(count)
    ]
    return [RecordedRequest(prompt, at_ms, number // turns) for number, at_ms in enumerate(times_ms)]


def growth(requests: list[RecordedRequest], lead_s: float = 180.0) -> float:
    return forecast(requests, 60_000.0 * MINUTES, lead_s).growth


def test_a_steady_rise_is_expected_to_go_on() -> None:
    rising = arrivals(*range(20, 20 + 2 * MINUTES, 2))
    ahead = growth(rising, lead_s=600.0)
    assert ahead > growth(rising, lead_s=60.0) > 1.1
    assert ahead == pytest.approx((20 + 2 * 39.5) / (20 + 2 * 20.5), rel=0.05)


def test_growth_is_relative_to_the_part_that_is_measured() -> None:
    """A sample that has only the last minutes of the recorded time has more of the rise in it already."""
    rising, until_ms = arrivals(*range(20, 20 + 2 * MINUTES, 2)), 60_000.0 * MINUTES
    whole, last = (forecast(rising, until_ms, 600.0, 1.0, 60_000.0 * minute) for minute in (12, 24))
    assert whole.growth == pytest.approx(forecast(rising, until_ms, 600.0).growth, rel=0.01)
    whole_per_minute, last_per_minute = 20 + 2 * 20.5, 20 + 2 * 26.5
    assert whole.growth * whole_per_minute == pytest.approx(last.growth * last_per_minute, rel=0.03)
    steps = arrivals(*[30] * 20, *[60] * 10)
    assert forecast(steps, until_ms, 0.0, 1.0, 60_000.0 * 25).growth == pytest.approx(1.0, rel=0.15)
    assert forecast(steps, until_ms, 0.0).growth > 1.2


def test_even_load_stays() -> None:
    assert growth(arrivals(*[40] * MINUTES)) == pytest.approx(1.0, abs=0.01)


def test_a_rise_counts_although_a_line_cannot_tell_it_from_noise() -> None:
    uneven = [70 if minute % 6 < 3 else 20 for minute in range(20)]
    assert growth(arrivals(*uneven, *[60] * 10)) == pytest.approx(600 / 10 / (1_000 / 18), rel=0.1)
    assert growth(arrivals(*uneven, *[60] * 10)) > 1.05


def test_a_fall_counts_when_it_has_happened() -> None:
    """Nodes can be requested late, not early enough: a fall is not extrapolated."""
    falling = arrivals(*range(20 + 2 * MINUTES, 20, -2))
    recent = sum(one.at_ms >= 20 * 60_000.0 for one in falling) / 10
    measured = sum(one.at_ms >= 12 * 60_000.0 for one in falling) / 18
    assert growth(falling) == pytest.approx(recent / measured, rel=0.01)
    assert growth(falling) < 0.9


def test_what_was_a_peak_ten_minutes_ago_buys_nothing() -> None:
    assert growth(arrivals(*[40] * 12, *[90] * 8, *[40] * 10)) < 0.8


def test_few_conversations_vary_more_than_many() -> None:
    until_ms = 60_000.0 * MINUTES
    alone, chats = arrivals(*[40] * MINUTES), arrivals(*[40] * MINUTES, turns=4)
    expected = forecast(alone, until_ms, 180.0).chance
    assert expected == pytest.approx(400**-0.5, rel=0.05)
    assert forecast(chats, until_ms, 180.0).chance == pytest.approx(2.0 * expected, rel=0.05)
    assert forecast(chats, until_ms, 180.0, share=0.25).chance == pytest.approx(expected, rel=0.05)
    assert forecast(arrivals(*[4] * MINUTES, turns=60), until_ms, 180.0).chance == MAX_CHANCE


def test_a_change_that_chance_explains_is_none() -> None:
    """With forty conversations in ten minutes a sixth less is nothing; with 2,400 it is."""
    minutes = [40] * 20 + [34] * 10
    assert growth(arrivals(*minutes, turns=10)) == pytest.approx(1.0, abs=0.01)
    many = arrivals(*[6 * one for one in minutes])
    assert growth(many) == pytest.approx(34 / ((8 * 40 + 10 * 34) / 18), rel=0.01)
    few = forecast(arrivals(*[46] * 20, *[40] * 10, turns=10), 60_000.0 * MINUTES, 0.0)
    assert few.chance > 0.1, "nor is it a fall"


def test_prompts_of_very_different_lengths_make_the_load_less_even() -> None:
    requests = arrivals(*[40] * MINUTES)
    long = [
        RecordedRequest(msgspec.structs.replace(one.prompt, prompt_tokens=20_000), one.at_ms, one.conversation)
        if at % 20 == 0
        else one
        for at, one in enumerate(requests)
    ]
    until_ms = 60_000.0 * MINUTES
    assert forecast(long, until_ms, 0.0).chance > 3.0 * forecast(requests, until_ms, 0.0).chance


def test_only_what_is_new_in_a_turn_is_load() -> None:
    turns = [
        RecordedRequest(msgspec.structs.replace(one.prompt, prompt_tokens=1000 * (at % 4 + 1)), one.at_ms, at // 4)
        for at, one in enumerate(arrivals(*[40] * MINUTES))
    ]
    until_ms = 60_000.0 * MINUTES
    alone = forecast(arrivals(*[40] * MINUTES), until_ms, 0.0).chance
    assert forecast(turns, until_ms, 0.0).chance == pytest.approx(2.0 * alone, rel=0.05)


def test_chance_does_not_count_while_the_load_falls() -> None:
    until_ms = 60_000.0 * MINUTES
    falling = forecast(arrivals(*range(20 + 2 * MINUTES, 20, -2)), until_ms, 180.0)
    assert (falling.chance, falling.rises) == (0.0, False)
    rising = forecast(arrivals(*range(20, 20 + 2 * MINUTES, 2)), until_ms, 180.0)
    assert rising.chance > 0.0 and rising.rises


def test_the_recorded_time_ends_before_requests_that_still_run() -> None:
    assert recorded_until(10_000.0, []) == 10_000.0
    assert recorded_until(10_000.0, [500.0] * 95 + [9000.0] * 5) == 9_500.0


def test_a_line_through_a_short_time_says_little_about_later_times() -> None:
    """Ten seconds say nothing about the load in five minutes."""
    rising = [RecordedRequest(one.prompt, one.at_ms / 180.0, one.conversation) for one in arrivals(*range(20, 80, 2))]
    assert forecast(rising, 10_000.0, 300.0).growth == pytest.approx(forecast(rising, 10_000.0, 5.0).growth)
    assert forecast(rising, 10_000.0, 300.0).growth < 1.8
