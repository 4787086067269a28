"""A prediction from dispatch to its end: withdrawing it, comparing it with the report, learning the node's LRU."""

from __future__ import annotations

import random

import pytest
from cache_fixtures import SIZE, cache_of, cache_view_of, hit_tokens, prompt, report_stored, route, with_events

from warmroute.core.cache_view import CacheView
from warmroute.core.messages import Lookup, PromptBatch
from warmroute.core.node_cache import MAX_EVICTED_AT_ONCE
from warmroute.core.prediction import Prediction


def prefilled(cache_view: CacheView, name: str, request: Lookup, now_s: float, cached: int | None = None) -> Prediction:
    """Route a prompt, get its first token, and report `cached` tokens if it is a number."""
    prediction = route(cache_view, name, request, now_s)
    cache_view.first_token(prediction, now_s)
    if cached is not None:
        prediction.check_cached_tokens(cached, now_s)
    return prediction


# Withdrawing.


@pytest.mark.parametrize("events", [True, False])
def test_a_withdrawn_prediction_leaves_no_blocks(events: bool) -> None:
    cache_view = cache_view_of("a")
    if events:
        with_events(cache_of(cache_view, "a"))
    prediction = route(cache_view, "a", prompt(1, 2, 3))
    assert hit_tokens(cache_view, "a", prompt(1, 2, 3)) == 48
    prediction.withdraw()
    assert hit_tokens(cache_view, "a", prompt(1, 2, 3)) == 0
    assert len(cache_of(cache_view, "a").recency) == 0
    prediction.withdraw()  # once more changes nothing
    assert cache_view.index.stats()["pairs"] == 0


@pytest.mark.parametrize("events", [True, False])
def test_withdrawing_keeps_blocks_that_were_there_before(events: bool) -> None:
    cache_view = cache_view_of("a")
    cache = cache_of(cache_view, "a")
    if events:
        with_events(cache)
    prefilled(cache_view, "a", prompt(1, 2), 0.0)
    if events:
        report_stored(cache, 1, 2)
    route(cache_view, "a", prompt(1, 2, 3), 5.0).withdraw()
    assert hit_tokens(cache_view, "a", prompt(1, 2, 3), 6.0) == 32


def test_an_error_after_the_first_byte_can_be_withdrawn() -> None:
    cache_view = cache_view_of("a")
    with_events(cache_of(cache_view, "a"))
    prediction = route(cache_view, "a", prompt(1, 2), 0.0)
    cache_view.first_token(prediction, 0.1)
    prediction.withdraw()
    assert hit_tokens(cache_view, "a", prompt(1, 2), 0.2) == 0
    again = route(cache_view, "a", prompt(1, 2), 0.3)
    cache_view.tidy(5.0)  # the first one's timeout has passed
    assert hit_tokens(cache_view, "a", prompt(1, 2), 5.0) == 32
    again.withdraw()
    assert hit_tokens(cache_view, "a", prompt(1, 2), 5.0) == 0


def test_ending_pending_twice_removes_the_blocks_once() -> None:
    cache_view = cache_view_of("a")
    with_events(cache_of(cache_view, "a"))
    first, second = (route(cache_view, "a", prompt(1, 2)) for _ in range(2))
    first.end_pending()
    first.end_pending()
    assert hit_tokens(cache_view, "a", prompt(1, 2)) == 32
    second.end_pending()
    assert hit_tokens(cache_view, "a", prompt(1, 2)) == 0


# Comparing.


def test_a_prediction_is_the_hit_at_dispatch() -> None:
    cache_view = cache_view_of("a")
    cache = with_events(cache_of(cache_view, "a"))
    report_stored(cache, 1, 2)
    prediction = route(cache_view, "a", prompt(1, 2, 3, more=5))
    assert (prediction.tokens, prediction.prompt_tokens, prediction.rank) == (32, 53, 0)
    assert prediction.exact and prediction.pending
    prediction.check_cached_tokens(32, 1.0)
    assert (cache.accuracy.compared, cache.accuracy.exact) == (1, 1)
    assert cache.accuracy.predicted_tokens == cache.accuracy.reported_tokens == 32


def test_a_correct_prediction_of_zero_counts_as_exact() -> None:
    cache_view = cache_view_of("a")
    prediction = route(cache_view, "a", prompt(1, 2))
    assert prediction.tokens == 0
    prediction.check_cached_tokens(0, 0.0)
    assert cache_of(cache_view, "a").accuracy.exact == 1


def accuracy_after(cache_view: CacheView, request: Lookup, cached: int, prompt_tokens: int | None = None) -> float:
    """Route a prompt that node a should hold, report `cached` tokens, and return how far the node is trusted then."""
    prefilled(cache_view, "a", request, 0.0)
    prediction = route(cache_view, "a", request, 1.0)
    assert prediction.tokens
    prediction.check_cached_tokens(cached, 2.0, prompt_tokens)
    return cache_of(cache_view, "a").accuracy.trust(2.0)


BLOCKS = range(100)


def test_a_missing_prefix_costs_trust() -> None:
    assert accuracy_after(cache_view_of("a"), prompt(*BLOCKS), 0, 1601) < 0.9


def test_reports_that_cannot_be_compared_cost_no_trust() -> None:
    """Those of prompt lists are of one of the prompts; a truncated prompt begins with other tokens."""
    cache_view = cache_view_of("a")
    assert accuracy_after(cache_view, prompt(*BLOCKS, batch=PromptBatch()), 0, 1601) == 1.0
    assert cache_of(cache_view, "a").accuracy.compared == 0
    assert hit_tokens(cache_view, "a", prompt(*BLOCKS), 3.0) == 1600, "nothing was evicted"


def test_a_prompt_of_a_list_tells_nothing_about_the_tokenizer() -> None:
    cache_view = cache_view_of("a")
    for _ in range(20):
        route(cache_view, "a", prompt(1, 2, batch=PromptBatch())).check_prompt_tokens(5000)
    assert not cache_of(cache_view, "a").token_mismatch


def test_text_is_compared_by_its_share_of_the_prompt() -> None:
    """Its tokens are four bytes each, and those of the engine longer or shorter, here and there."""
    text = {"text": True, "exact": 0}
    for reported, prompt_tokens in ((800, 801), (700, 801), (3200, 3201), (3100, 3601)):
        cache_view = cache_view_of("a")
        assert accuracy_after(cache_view, prompt(*BLOCKS, **text), reported, prompt_tokens) == 1.0
        assert cache_of(cache_view, "a").accuracy.exact == 1
    for reported, prompt_tokens in ((0, 801), (400, 801), (1600, 3201)):
        assert accuracy_after(cache_view_of("a"), prompt(*BLOCKS, **text), reported, prompt_tokens) < 0.9
    assert accuracy_after(cache_view_of("a"), prompt(*BLOCKS, **text), 0, None) == 1.0, "nothing to compare with"


def test_a_node_with_another_tokenizer_is_compared_by_shares_too() -> None:
    cache_view = cache_view_of("a")
    cache_of(cache_view, "a").token_mismatch = True
    assert accuracy_after(cache_view, prompt(*BLOCKS), 790, 801) == 1.0


# Several prompts, and prompts for which the engine does not read its cache.


def test_the_hits_of_several_prompts_add_up() -> None:
    cache_view = cache_view_of("a", "b")
    route(cache_view, "a", prompt(1, 2, 3))
    route(cache_view, "b", prompt(7, 8))
    route(cache_view, "a", prompt(7))
    several = prompt(1, 2, 5, batch=PromptBatch(others=(prompt(7, 8, 9), prompt(30)), prompts=3))
    assert hit_tokens(cache_view, "a", several, 1.0) == 32 + 16
    assert hit_tokens(cache_view, "b", several, 1.0) == 32


def test_a_prompt_for_which_the_engine_skips_its_cache_has_no_hit_and_fills_it() -> None:
    cache_view = cache_view_of("a")
    assert hit_tokens(cache_view, "a", prompt(1, 2)) == 0
    skipping = PromptBatch(skips_cache=True)
    route(cache_view, "a", prompt(1, 2, batch=skipping))
    assert hit_tokens(cache_view, "a", prompt(1, 2, batch=skipping)) == 0
    assert hit_tokens(cache_view, "a", prompt(1, 2)) == 32


# The estimate of the node's LRU.


def test_the_least_recently_used_blocks_are_evicted_first() -> None:
    cache_view = cache_view_of("a")
    cache_of(cache_view, "a").set_size(SIZE, 6 * SIZE)
    prefilled(cache_view, "a", prompt(1, 2, 3), 0.0)
    prefilled(cache_view, "a", prompt(4, 5, 6), 1.0)
    prefilled(cache_view, "a", prompt(1, 2, 3), 2.0)
    prefilled(cache_view, "a", prompt(7, 8), 3.0)
    assert hit_tokens(cache_view, "a", prompt(1, 2, 3), 4.0) == 48
    assert hit_tokens(cache_view, "a", prompt(4, 5, 6), 4.0) == 16  # its end went first
    assert hit_tokens(cache_view, "a", prompt(7, 8), 4.0) == 32


def test_output_tokens_take_room_in_the_cache() -> None:
    cache_view = cache_view_of("a")
    cache = cache_of(cache_view, "a")
    cache.set_size(SIZE, 6 * SIZE)
    prefilled(cache_view, "a", prompt(1, 2, 3), 0.0)
    cache.record_output(15, 1.0)
    assert len(cache.recency) == 3
    cache.record_output(16 * 4 + 3, 1.0)
    assert len(cache.recency) == 6
    assert hit_tokens(cache_view, "a", prompt(1, 2, 3), 2.0) == 32


def test_a_smaller_capacity_evicts_at_once() -> None:
    cache_view = cache_view_of("a", assumed_cache_tokens=100 * SIZE)
    for number in range(10):
        prefilled(cache_view, "a", prompt(2 * number, 2 * number + 1), float(number))
    cache_of(cache_view, "a").set_size(SIZE, 4 * SIZE)
    assert [hit_tokens(cache_view, "a", prompt(2 * n, 2 * n + 1), 20.0) for n in range(10)] == [0] * 8 + [32] * 2
    assert cache_view.index.pair_count(cache_of(cache_view, "a").routed_holder) == 4


def test_an_evicted_block_evicts_all_older_ones() -> None:
    """The router assumes too large a cache; a response with fewer cached tokens shows it."""
    cache_view = cache_view_of("a", assumed_cache_tokens=1000 * SIZE)
    for number in range(20):
        prefilled(cache_view, "a", prompt(2 * number, 2 * number + 1), float(number))
    prefilled(cache_view, "a", prompt(10, 11), 20.0, cached=0)  # number 5: sent at 5.0, gone by now
    left = [hit_tokens(cache_view, "a", prompt(2 * n, 2 * n + 1), 21.0) // SIZE for n in range(20)]
    assert left == [0] * 5 + [2] + [2] * 14  # itself was sent again
    assert cache_of(cache_view, "a").recency.capacity == 1000


def test_only_the_age_of_the_missing_blocks_counts() -> None:
    """The first blocks were used later. Of the evicted blocks, the latest use counts."""
    cache_view = cache_view_of("a")
    prefilled(cache_view, "a", prompt(1, 2), 0.0)
    prefilled(cache_view, "a", prompt(3, 4, 5, 6), 1.0)
    prefilled(cache_view, "a", prompt(7, 8), 2.0)
    prefilled(cache_view, "a", prompt(3, 4, 9), 3.0)
    prefilled(cache_view, "a", prompt(3, 4, 5, 6), 4.0, cached=32)  # 5 and 6, last used at 1.0, are gone
    assert [hit_tokens(cache_view, "a", prompt(*blocks), 5.0) for blocks in ((1, 2), (7, 8), (3, 4, 9))] == [0, 32, 48]


def test_one_response_evicts_a_bounded_number_of_blocks() -> None:
    cache_view = cache_view_of("a", assumed_cache_tokens=4000 * SIZE)
    cache = cache_of(cache_view, "a")
    for number in range(30):
        prefilled(cache_view, "a", prompt(*range(100 * number, 100 * number + 100)), float(number))
    prefilled(cache_view, "a", prompt(*range(2900, 3000)), 30.0, cached=0)
    assert len(cache.recency) == 3000 - MAX_EVICTED_AT_ONCE
    assert cache_view.index.pair_count(cache.routed_holder) == len(cache.recency)


def test_a_prefix_that_was_still_being_prefilled_evicts_nothing() -> None:
    """Two prompts with one prefix are sent at once: the second finds nothing cached, and nothing was evicted."""
    cache_view = cache_view_of("a")
    prefilled(cache_view, "a", prompt(1, 2), 0.0)
    first = route(cache_view, "a", prompt(5, 6), 1.0)
    second = route(cache_view, "a", prompt(5, 6), 1.0)
    assert second.tokens == 32
    cache_view.first_token(first, 2.0)
    cache_view.first_token(second, 2.0)
    second.check_cached_tokens(0, 3.0)
    assert hit_tokens(cache_view, "a", prompt(1, 2), 4.0) == hit_tokens(cache_view, "a", prompt(5, 6), 4.0) == 32


def test_a_report_of_at_least_the_prediction_evicts_nothing() -> None:
    cache_view = cache_view_of("a")
    prefilled(cache_view, "a", prompt(1, 2), 0.0)
    prefilled(cache_view, "a", prompt(3, 4), 1.0)
    prefilled(cache_view, "a", prompt(3, 4), 2.0, cached=32)
    prefilled(cache_view, "a", prompt(3, 4), 3.0, cached=64)
    assert hit_tokens(cache_view, "a", prompt(1, 2), 4.0) == 32


def test_reports_correct_a_capacity_that_is_far_too_large() -> None:
    """The node has room for 40 blocks, the router assumes 4,000, and the prompts have 200."""

    def wrong(reports: bool) -> tuple[int, int]:
        cache_view = cache_view_of("a", assumed_cache_tokens=4000 * SIZE)
        real = cache_view_of("real", assumed_cache_tokens=40 * SIZE)
        source, count = random.Random(3), 0
        for number in range(1000):
            first = 2 * min(source.randrange(100), source.randrange(100))
            cached = hit_tokens(real, "real", prompt(first, first + 1), float(number))
            prefilled(real, "real", prompt(first, first + 1), float(number))
            prediction = prefilled(
                cache_view, "a", prompt(first, first + 1), float(number), cached if reports else None
            )
            count += prediction.tokens > cached
        return count, len(cache_of(cache_view, "a").recency)

    without, assumed = wrong(reports=False)
    corrected, learned = wrong(reports=True)
    assert assumed > 180 and without > 500
    assert learned < 100 and corrected < without / 2
