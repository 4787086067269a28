"""Confidence in hits: freshness and accuracy, and how both recover."""

from __future__ import annotations

import pytest
from cache_fixtures import cache_of, cache_view_of, hit, prompt, report_stored, route, with_events
from hypothesis import given
from hypothesis import strategies as st

from warmroute._kernel import ACCURACY_HALF_LIFE_S, ACCURACY_PRIOR_TOKENS
from warmroute.core.node_cache import Accuracy, freshness


@pytest.mark.parametrize(
    ("age_s", "fresh"), [(-1.0, 1.0), (0.0, 1.0), (5.0, 1.0), (10.0, 0.8), (17.5, 0.5), (30.0, 0.0), (1e9, 0.0)]
)
def test_freshness_falls_from_stale_to_gone(age_s: float, fresh: float) -> None:
    assert freshness(age_s, 5.0, 30.0) == pytest.approx(fresh)


@pytest.mark.parametrize(("age_s", "fresh"), [(4.9, 1.0), (5.0, 1.0), (5.1, 0.0)])
def test_freshness_drops_at_once_if_gone_is_not_after_stale(age_s: float, fresh: float) -> None:
    assert freshness(age_s, 5.0, 5.0) == freshness(age_s, 5.0, 3.0) == fresh


def test_a_new_node_is_trusted() -> None:
    accuracy = Accuracy()
    assert accuracy.trust(0.0) == accuracy.trust(1e6) == accuracy.agreement() == 1.0


def test_confirmed_predictions_keep_full_trust() -> None:
    accuracy = Accuracy()
    for at in range(100):
        accuracy.compare(1600, 1600, float(at))
    assert accuracy.trust(100.0) == accuracy.agreement() == 1.0
    assert (accuracy.compared, accuracy.exact) == (100, 100)
    assert accuracy.predicted_tokens == accuracy.reported_tokens == 160_000


def test_each_wrong_prediction_lowers_trust() -> None:
    accuracy = Accuracy()
    trust = [1.0]
    for at in range(20):
        accuracy.compare(4096, 0, float(at))
        trust.append(accuracy.trust(float(at)))
    assert trust == sorted(trust, reverse=True)
    assert trust[1] == pytest.approx(ACCURACY_PRIOR_TOKENS / (ACCURACY_PRIOR_TOKENS + 4096))
    assert trust[-1] < 0.1
    assert accuracy.exact == 0 and accuracy.agreement() == 0.0


def test_trust_falls_with_the_size_of_the_error() -> None:
    small, large = Accuracy(), Accuracy()
    small.compare(64, 0, 0.0)
    large.compare(64_000, 0, 0.0)
    assert small.trust(0.0) > 0.98 and large.trust(0.0) < 0.07


def test_more_cached_tokens_than_predicted_cost_no_trust() -> None:
    accuracy = Accuracy()
    accuracy.compare(0, 50_000, 0.0)
    assert accuracy.trust(0.0) == 1.0
    assert accuracy.agreement() == 0.0


def test_trust_recovers_with_confirmed_predictions() -> None:
    accuracy = Accuracy()
    for _ in range(20):
        accuracy.compare(4096, 0, 0.0)
    low = accuracy.trust(0.0)
    for _ in range(200):
        accuracy.compare(4096, 4096, 0.0)
    assert low < 0.1 and accuracy.trust(0.0) > 0.99


def test_trust_recovers_with_time() -> None:
    """Otherwise a node that gets no requests for lack of trust could never regain it."""
    accuracy = Accuracy()
    accuracy.compare(40_960, 0, 0.0)
    trust = [accuracy.trust(at * ACCURACY_HALF_LIFE_S) for at in range(12)]
    assert trust == sorted(trust)
    assert trust[0] == pytest.approx(1 / 11) and trust[1] == pytest.approx(1 / 6) and trust[-1] > 0.99


def test_trust_does_not_change_when_the_clock_goes_back() -> None:
    accuracy = Accuracy()
    accuracy.compare(1000, 500, 10.0)
    assert accuracy.trust(5.0) == accuracy.trust(10.0)


@given(st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(0, 1 << 20), st.floats(0, 100)), max_size=30))
def test_trust_and_agreement_stay_between_0_and_1(reports: list[tuple[int, int, float]]) -> None:
    accuracy, now_s = Accuracy(), 0.0
    for predicted, reported, later_s in reports:
        now_s += later_s
        accuracy.compare(predicted, reported, now_s)
        assert 0.0 < accuracy.trust(now_s) <= 1.0
        assert 0.0 <= accuracy.agreement() <= 1.0
    assert accuracy.exact <= accuracy.compared == len(reports)


def test_hits_of_a_node_with_wrong_predictions_count_less_until_time_passes() -> None:
    cache_view = cache_view_of("a", "b")
    for name in "ab":
        with_events(cache_of(cache_view, name), now_s=0.0)
        report_stored(cache_of(cache_view, name), *range(100))
    request = prompt(*range(100))
    for _ in range(10):
        route(cache_view, "a", request, 0.0).check_cached_tokens(0, 0.0)
        route(cache_view, "b", request, 0.0).check_cached_tokens(1600, 0.0)

    def expected(name: str, at_s: float) -> float:
        cache_of(cache_view, name).last_contact_s = at_s
        found = hit(cache_view, name, prompt(*range(100)), at_s)
        assert found is not None
        return found.expected

    assert expected("a", 0.0) < 0.3 * expected("b", 0.0)
    assert expected("b", 0.0) == 1600.0
    assert expected("a", 300.0) > 0.99 * 1600


def test_confidence_is_that_of_the_source_in_use() -> None:
    cache_view = cache_view_of("a")
    cache = with_events(cache_of(cache_view, "a"), now_s=0.0)
    assert cache.confidence(17.5, 5.0, 30.0) == 0.5
    cache.events_lost(0)
    assert cache.confidence(17.5, 5.0, 30.0) == 1.0  # what was routed does not age
