"""The baseline of the hit rate: real drops are noticed within a minute, noise and seasons are not."""

from __future__ import annotations

from collections.abc import Callable
from math import pi, sin
from random import Random

import pytest

from warmroute.app.hit_rate import ADAPT_S, CHECK_S, HitRate, Totals

Share = Callable[[Random, float], float]


class Series:
    """Synthetic traffic: prompts of very different lengths, of which a share is cached or not at all."""

    def __init__(self, seed: int = 1, rate: float = 3.0) -> None:
        self.rate = HitRate()
        self.now_s = 0.0
        self.drops: list[float] = []
        self.ended: list[tuple[float, str]] = []
        self._random = Random(seed)
        self._arrivals_per_s = rate
        self._prompts = self._tokens = self._cached = 0
        self._shares = self._squares = 0.0

    def run(self, seconds: float, share: Share, rate: float | None = None) -> None:
        random = self._random
        until_s = self.now_s + seconds
        while self.now_s < until_s:
            self.now_s += CHECK_S
            mean = (rate if rate is not None else self._arrivals_per_s) * CHECK_S
            for _ in range(max(0, round(random.gauss(mean, mean**0.5)))):
                self.add(min(200_000, int(random.lognormvariate(7, 1.5)) + 20), share(random, self.now_s))
            self.check()

    def add(self, tokens: int, share: float) -> None:
        self._prompts += 1
        self._tokens += tokens
        self._cached += int(tokens * share)
        self._shares += share
        self._squares += share * share

    def check(self) -> None:
        had = self.rate.drop is not None
        saved_ms = 0.05 * self._cached
        self.rate.update(
            Totals(
                self.now_s,
                self._prompts,
                self._tokens,
                self._cached,
                self._shares,
                self._squares,
                saved_ms,
                0.05 * self._tokens,
                0,
                0,
            )
        )
        if self.rate.drop is not None and not had:
            self.drops.append(self.now_s)
        if self.rate.ended is not None:
            self.ended.append((self.now_s, self.rate.ended))


def cached(probability: float) -> Share:
    return lambda random, _now_s: random.betavariate(20, 2) if random.random() < probability else 0.0


@pytest.mark.parametrize("rate", [0.6, 3.0, 30.0])
def test_a_drop_from_92_percent_to_nothing_is_noticed_within_a_minute(rate: float) -> None:
    for seed in range(3):
        series = Series(seed, rate)
        series.run(600, cached(1.0))
        series.run(120, cached(0.0))
        assert not [at_s for at_s in series.drops if at_s <= 600]
        assert series.drops[0] - 600 <= 60


def test_a_smaller_drop_is_noticed_within_a_minute_of_enough_traffic() -> None:
    series = Series(rate=20.0)
    series.run(600, cached(0.9))
    series.run(60, cached(0.5))
    assert [at_s for at_s in series.drops if 600 < at_s <= 660]


@pytest.mark.parametrize("probability", [0.95, 0.5, 0.2])
@pytest.mark.parametrize("rate", [0.05, 0.5, 3.0])
def test_noise_is_no_drop(probability: float, rate: float) -> None:
    series = Series(rate=rate)
    series.run(2 * 3600, cached(probability))
    assert not series.drops


def test_a_season_is_no_drop() -> None:
    """The rate swings by 30 points, and the traffic by nine tenths, within a day."""

    def share(random: Random, now_s: float) -> float:
        return cached(0.6 + 0.3 * sin(2 * pi * now_s / 86400))(random, now_s)

    series = Series(rate=0.5)
    for hour in range(24):
        series.run(3600, share, rate=0.5 + 0.45 * sin(2 * pi * hour / 24 + 1))
    assert not series.drops


def test_one_huge_cold_prompt_is_no_drop() -> None:
    series = Series()
    series.run(600, cached(0.95))
    for _ in range(3):
        series.add(2_000_000, 0.0)
        series.run(30, cached(0.95))
    assert not series.drops


def test_few_prompts_are_no_drop() -> None:
    series = Series()
    series.run(600, cached(0.95))
    series.run(1200, cached(0.0), rate=0.02)
    assert not series.drops


def test_a_young_baseline_alerts_nobody() -> None:
    series = Series()
    series.run(90, cached(0.95))
    series.run(120, cached(0.0))
    assert not series.drops


def test_a_drop_ends_when_the_rate_recovers_and_states_its_cost() -> None:
    series = Series(rate=10.0)
    series.run(900, cached(1.0))
    series.run(120, cached(0.0))
    drop = series.rate.drop
    assert drop is not None and drop.hit_ratio < 0.1 and drop.baseline_ratio > 0.85
    tokens = drop.lost_ms / 0.05 / drop.baseline_ratio
    series.run(120, cached(1.0))
    assert [why for _at_s, why in series.ended] == ["recovered"] and series.rate.drop is None
    # about 1,200 prompts with a mean of 3,400 tokens
    assert 2.5e6 < tokens < 6e6
    assert abs(series.rate.baseline.hit_ratio - 0.91) < 0.03


def test_a_rate_that_stays_low_becomes_the_baseline() -> None:
    series = Series()
    series.run(900, cached(0.95))
    series.run(ADAPT_S + 900, cached(0.3))
    assert [why for _at_s, why in series.ended] == ["adapted"] and len(series.drops) == 1
    assert series.rate.baseline.hit_ratio < 0.4


def test_drops_that_recur_do_not_alert_each_time() -> None:
    series = Series(rate=10.0)
    series.run(900, cached(0.95))
    for _ in range(12):
        series.run(40, cached(0.6))
        series.run(560, cached(0.95))
    assert 1 <= len(series.drops) <= 4
    before = len(series.drops)
    series.run(60, cached(0.0))  # a real one still does
    assert len(series.drops) == before + 1


@pytest.mark.parametrize("rate", [0.6, 3.0, 30.0])
def test_no_traffic_is_no_recovery(rate: float) -> None:
    series = Series(rate=rate)
    series.run(900, cached(0.95))
    while series.rate.drop is None:
        series.run(CHECK_S, cached(0.0))
    drop = series.rate.drop
    series.run(2 * ADAPT_S, cached(0.0), rate=0.0)
    assert series.rate.drop is drop and not series.ended
    assert drop.hit_ratio < 0.6 and series.rate.hit_ratio == drop.hit_ratio
    series.run(600, cached(0.95))
    assert [why for _at_s, why in series.ended] == ["recovered"]


def test_low_prompts_before_a_pause_do_not_count_as_recovered_by_few_prompts_after_it() -> None:
    series = Series(rate=3.0)
    series.run(900, cached(0.95))
    series.run(60, cached(0.0))
    assert series.rate.drop is not None
    series.run(600, cached(0.95), rate=0.01)
    assert not series.ended


def test_an_hour_without_traffic_does_not_make_a_low_rate_the_baseline() -> None:
    series = Series()
    series.run(900, cached(0.95))
    series.run(ADAPT_S / 2, cached(0.3))
    series.run(ADAPT_S, cached(0.3), rate=0.0)
    assert not series.ended
    series.run(ADAPT_S / 2 + 900, cached(0.3))
    assert [why for _at_s, why in series.ended] == ["adapted"]
