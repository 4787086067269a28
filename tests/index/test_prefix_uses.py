"""How often a prefix is used."""

from __future__ import annotations

from random import Random

import pytest

from warmroute.core.reuse import FIRST_INTERVAL_S, MAX_PREFIXES, PrefixUses


def test_a_prefix_that_was_never_used_has_no_interval() -> None:
    assert PrefixUses().interval_s(b"block", 1.0) is None


@pytest.mark.parametrize("interval_s", [0.02, 1.0, 30.0])
def test_the_interval_of_regular_uses_is_learned(interval_s: float) -> None:
    uses = PrefixUses()
    for number in range(25):
        uses.record(b"block", number * interval_s)
    assert uses.interval_s(b"block", 25 * interval_s) == pytest.approx(interval_s, rel=0.1, abs=0.01)


def test_two_uses_in_quick_succession_do_not_make_a_prefix_hot() -> None:
    uses = PrefixUses()
    uses.record(b"block", 0.0)
    uses.record(b"block", 0.01)
    interval_s = uses.interval_s(b"block", 0.02)
    assert interval_s is not None and interval_s > 0.3 * FIRST_INTERVAL_S


def test_a_prefix_that_is_no_longer_used_cools_down() -> None:
    uses = PrefixUses()
    for number in range(20):
        uses.record(b"block", number * 0.1)
    interval_s = uses.interval_s(b"block", 60.0)
    assert interval_s is not None and interval_s > FIRST_INTERVAL_S


def test_random_arrivals_are_estimated_within_a_factor_of_three() -> None:
    random, uses, now_s, found = Random(1), PrefixUses(), 0.0, []
    for _ in range(2000):
        now_s += random.expovariate(1.0)
        found.append(uses.interval_s(b"block", now_s) or FIRST_INTERVAL_S)
        uses.record(b"block", now_s)
    close = sum(1 / 3 < one < 3 for one in found[20:])
    assert close > 0.95 * len(found[20:])


def test_the_table_is_bounded_and_keeps_what_is_used() -> None:
    uses = PrefixUses()
    for number in range(3 * MAX_PREFIXES):
        uses.record(b"%d" % number, float(number))
        if number % 1000 == 0:
            uses.record(b"used", float(number))
        assert number % 100 or len(uses) <= MAX_PREFIXES
    assert uses.interval_s(b"used", 3.0 * MAX_PREFIXES) is not None
    assert uses.interval_s(b"1", 3.0 * MAX_PREFIXES) is None


def test_a_clock_that_goes_back_counts_as_no_time() -> None:
    uses = PrefixUses()
    uses.record(b"block", 5.0)
    assert uses.interval_s(b"block", 4.0) == pytest.approx(0.7 * FIRST_INTERVAL_S)
