"""A prediction from dispatch to its end: what is taken back, what is compared, what is learned of the node's LRU."""

from __future__ import annotations

import random

import pytest
from believed import SIZE, beliefs_of, cache_of, follows, held, prompt, sends, tells

from warmroute.index.node_cache import OUTLIVED_AT_ONCE


def done(cache_view, name, asked, now_s, cached=None):
    """A prompt that was prefilled; the answer says how much of it was cached where a number is given."""
    sent = sends(cache_view, name, asked, now_s)
    cache_view.first_token(sent, now_s)
    if cached is not None:
        sent.reported(cached, now_s)
    return sent


# Taken back.


@pytest.mark.parametrize("events", [True, False])
def test_what_never_got_there_is_taken_back(events):
    cache_view = beliefs_of("a")
    if events:
        follows(cache_of(cache_view, "a"))
    sent = sends(cache_view, "a", prompt(1, 2, 3))
    assert held(cache_view, "a", prompt(1, 2, 3)) == 48
    sent.withdraw()
    assert held(cache_view, "a", prompt(1, 2, 3)) == 0
    assert len(cache_of(cache_view, "a").recency) == 0
    sent.withdraw()  # once more changes nothing
    assert cache_view.index.stats()["pairs"] == 0


@pytest.mark.parametrize("events", [True, False])
def test_only_what_it_would_have_brought_is_taken_back(events):
    cache_view = beliefs_of("a")
    cache = cache_of(cache_view, "a")
    if events:
        follows(cache)
    done(cache_view, "a", prompt(1, 2), 0.0)
    if events:
        tells(cache, 1, 2)
    sends(cache_view, "a", prompt(1, 2, 3), 5.0).withdraw()
    assert held(cache_view, "a", prompt(1, 2, 3), 6.0) == 32


def test_a_refusal_after_the_first_byte_is_taken_back_too():
    cache_view = beliefs_of("a")
    follows(cache_of(cache_view, "a"))
    sent = sends(cache_view, "a", prompt(1, 2), 0.0)
    cache_view.first_token(sent, 0.1)
    sent.withdraw()
    assert held(cache_view, "a", prompt(1, 2), 0.2) == 0
    again = sends(cache_view, "a", prompt(1, 2), 0.3)
    cache_view.tidy(5.0)  # the moment of the first has come, and is nobody's
    assert held(cache_view, "a", prompt(1, 2), 5.0) == 32
    again.withdraw()
    assert held(cache_view, "a", prompt(1, 2), 5.0) == 0


def test_fulfilled_twice_ends_one_expectation():
    cache_view = beliefs_of("a")
    follows(cache_of(cache_view, "a"))
    first, second = (sends(cache_view, "a", prompt(1, 2)) for _ in range(2))
    first.fulfilled()
    first.fulfilled()
    assert held(cache_view, "a", prompt(1, 2)) == 32
    second.fulfilled()
    assert held(cache_view, "a", prompt(1, 2)) == 0


# Compared.


def test_what_is_predicted_is_what_was_believed_at_dispatch():
    cache_view = beliefs_of("a")
    cache = follows(cache_of(cache_view, "a"))
    tells(cache, 1, 2)
    sent = sends(cache_view, "a", prompt(1, 2, 3, more=5))
    assert (sent.tokens, sent.prompt_tokens, sent.rank, sent.sure, sent.expected) == (32, 53, 0, True, True)
    sent.reported(32, 1.0)
    assert (cache.accuracy.compared, cache.accuracy.exact) == (1, 1)
    assert cache.accuracy.predicted_tokens == cache.accuracy.reported_tokens == 32


def test_a_cold_prompt_predicts_nothing_and_that_counts():
    cache_view = beliefs_of("a")
    sent = sends(cache_view, "a", prompt(1, 2))
    assert sent.tokens == 0
    sent.reported(0, 0.0)
    assert cache_of(cache_view, "a").accuracy.exact == 1


# The mirror of the node's LRU.


def test_the_mirror_forgets_as_the_node_would():
    cache_view = beliefs_of("a")
    cache_of(cache_view, "a").describe(SIZE, 6 * SIZE)
    done(cache_view, "a", prompt(1, 2, 3), 0.0)
    done(cache_view, "a", prompt(4, 5, 6), 1.0)
    done(cache_view, "a", prompt(1, 2, 3), 2.0)
    done(cache_view, "a", prompt(7, 8), 3.0)
    assert held(cache_view, "a", prompt(1, 2, 3), 4.0) == 48
    assert held(cache_view, "a", prompt(4, 5, 6), 4.0) == 16  # its end went first
    assert held(cache_view, "a", prompt(7, 8), 4.0) == 32


def test_answers_take_room_in_the_mirror():
    cache_view = beliefs_of("a")
    cache = cache_of(cache_view, "a")
    cache.describe(SIZE, 6 * SIZE)
    done(cache_view, "a", prompt(1, 2, 3), 0.0)
    cache.keep_answer(15, 1.0)
    assert len(cache.recency) == 3
    cache.keep_answer(16 * 4 + 3, 1.0)
    assert len(cache.recency) == 6
    assert held(cache_view, "a", prompt(1, 2, 3), 2.0) == 32


def test_a_smaller_cache_than_was_thought_forgets_at_once():
    cache_view = beliefs_of("a", assumed_cache_tokens=100 * SIZE)
    for number in range(10):
        done(cache_view, "a", prompt(2 * number, 2 * number + 1), float(number))
    cache_of(cache_view, "a").describe(SIZE, 4 * SIZE)
    assert [held(cache_view, "a", prompt(2 * n, 2 * n + 1), 20.0) for n in range(10)] == [0] * 8 + [32] * 2
    assert cache_view.index.pairs_of(cache_of(cache_view, "a").routed_place) == 4


def test_a_block_that_is_gone_takes_all_older_ones_with_it():
    """The router thinks that the cache is larger than it is; an answer that had less cached shows it."""
    cache_view = beliefs_of("a", assumed_cache_tokens=1000 * SIZE)
    for number in range(20):
        done(cache_view, "a", prompt(2 * number, 2 * number + 1), float(number))
    done(cache_view, "a", prompt(10, 11), 20.0, cached=0)  # number 5: sent at 5.0, gone by now
    left = [held(cache_view, "a", prompt(2 * n, 2 * n + 1), 21.0) // SIZE for n in range(20)]
    assert left == [0] * 5 + [2] + [2] * 14  # itself was sent again
    assert cache_of(cache_view, "a").recency.capacity == 1000


def test_a_prompt_of_which_only_the_end_is_gone_says_less():
    """The beginning is of a later day: of what is gone, the latest use counts."""
    cache_view = beliefs_of("a")
    done(cache_view, "a", prompt(1, 2), 0.0)
    done(cache_view, "a", prompt(3, 4, 5, 6), 1.0)
    done(cache_view, "a", prompt(7, 8), 2.0)
    done(cache_view, "a", prompt(3, 4, 9), 3.0)
    done(cache_view, "a", prompt(3, 4, 5, 6), 4.0, cached=32)  # 5 and 6, last used at 1.0, are gone
    assert [held(cache_view, "a", prompt(*blocks), 5.0) for blocks in ((1, 2), (7, 8), (3, 4, 9))] == [0, 32, 48]


def test_one_answer_makes_a_bounded_number_of_blocks_forgotten():
    cache_view = beliefs_of("a", assumed_cache_tokens=4000 * SIZE)
    cache = cache_of(cache_view, "a")
    for number in range(30):
        done(cache_view, "a", prompt(*range(100 * number, 100 * number + 100)), float(number))
    done(cache_view, "a", prompt(*range(2900, 3000)), 30.0, cached=0)
    assert len(cache.recency) == 3000 - OUTLIVED_AT_ONCE
    assert cache_view.index.pairs_of(cache.routed_place) == len(cache.recency)


def test_a_prompt_that_was_still_being_prefilled_says_nothing_of_the_lru():
    """Two that begin alike are sent at once: the second finds nothing cached yet, and nothing was evicted."""
    cache_view = beliefs_of("a")
    done(cache_view, "a", prompt(1, 2), 0.0)
    first = sends(cache_view, "a", prompt(5, 6), 1.0)
    second = sends(cache_view, "a", prompt(5, 6), 1.0)
    assert second.tokens == 32
    cache_view.first_token(first, 2.0)
    cache_view.first_token(second, 2.0)
    second.reported(0, 3.0)
    assert held(cache_view, "a", prompt(1, 2), 4.0) == held(cache_view, "a", prompt(5, 6), 4.0) == 32


def test_a_report_of_as_much_as_predicted_or_more_forgets_nothing():
    cache_view = beliefs_of("a")
    done(cache_view, "a", prompt(1, 2), 0.0)
    done(cache_view, "a", prompt(3, 4), 1.0)
    done(cache_view, "a", prompt(3, 4), 2.0, cached=32)
    done(cache_view, "a", prompt(3, 4), 3.0, cached=64)
    assert held(cache_view, "a", prompt(1, 2), 4.0) == 32


def test_reports_make_a_mirror_right_that_is_far_too_large():
    """The node has room for 40 blocks, the router assumes 4,000, and 200 are in use."""

    def wrong(reports):
        cache_view = beliefs_of("a", assumed_cache_tokens=4000 * SIZE)
        real = beliefs_of("real", assumed_cache_tokens=40 * SIZE)
        source, count = random.Random(3), 0
        for number in range(1000):
            first = 2 * min(source.randrange(100), source.randrange(100))
            cached = held(real, "real", prompt(first, first + 1), float(number))
            done(real, "real", prompt(first, first + 1), float(number))
            sent = done(cache_view, "a", prompt(first, first + 1), float(number), cached if reports else None)
            count += sent.tokens > cached
        return count, len(cache_of(cache_view, "a").recency)

    without, all_of_them = wrong(reports=False)
    corrected, held_in_the_end = wrong(reports=True)
    assert all_of_them > 180 and without > 500
    assert held_in_the_end < 100 and corrected < without / 2
