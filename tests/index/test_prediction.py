"""A prediction from dispatch to its end: what is taken back, what is compared, what is learned of the node's LRU."""

from __future__ import annotations

import random

import pytest
from believed import SIZE, beliefs_of, cache_of, follows, held, prompt, sends, tells

from warmroute.index.node_cache import OUTLIVED_AT_ONCE


def done(beliefs, name, asked, now_s, cached=None):
    """A prompt that was prefilled; the answer says how much of it was cached where a number is given."""
    sent = sends(beliefs, name, asked, now_s)
    beliefs.first_token(sent, now_s)
    if cached is not None:
        sent.reported(cached, now_s)
    return sent


# Taken back.


@pytest.mark.parametrize("events", [True, False])
def test_what_never_got_there_is_taken_back(events):
    beliefs = beliefs_of("a")
    if events:
        follows(cache_of(beliefs, "a"))
    sent = sends(beliefs, "a", prompt(1, 2, 3))
    assert held(beliefs, "a", prompt(1, 2, 3)) == 48
    sent.withdraw()
    assert held(beliefs, "a", prompt(1, 2, 3)) == 0
    assert len(cache_of(beliefs, "a").recency) == 0
    sent.withdraw()  # once more changes nothing
    assert beliefs.index.stats()["pairs"] == 0


@pytest.mark.parametrize("events", [True, False])
def test_only_what_it_would_have_brought_is_taken_back(events):
    beliefs = beliefs_of("a")
    cache = cache_of(beliefs, "a")
    if events:
        follows(cache)
    done(beliefs, "a", prompt(1, 2), 0.0)
    if events:
        tells(cache, 1, 2)
    sends(beliefs, "a", prompt(1, 2, 3), 5.0).withdraw()
    assert held(beliefs, "a", prompt(1, 2, 3), 6.0) == 32


def test_a_refusal_after_the_first_byte_is_taken_back_too():
    beliefs = beliefs_of("a")
    follows(cache_of(beliefs, "a"))
    sent = sends(beliefs, "a", prompt(1, 2), 0.0)
    beliefs.first_token(sent, 0.1)
    sent.withdraw()
    assert held(beliefs, "a", prompt(1, 2), 0.2) == 0
    again = sends(beliefs, "a", prompt(1, 2), 0.3)
    beliefs.tidy(5.0)  # the moment of the first has come, and is nobody's
    assert held(beliefs, "a", prompt(1, 2), 5.0) == 32
    again.withdraw()
    assert held(beliefs, "a", prompt(1, 2), 5.0) == 0


def test_fulfilled_twice_ends_one_expectation():
    beliefs = beliefs_of("a")
    follows(cache_of(beliefs, "a"))
    first, second = (sends(beliefs, "a", prompt(1, 2)) for _ in range(2))
    first.fulfilled()
    first.fulfilled()
    assert held(beliefs, "a", prompt(1, 2)) == 32
    second.fulfilled()
    assert held(beliefs, "a", prompt(1, 2)) == 0


# Compared.


def test_what_is_predicted_is_what_was_believed_at_dispatch():
    beliefs = beliefs_of("a")
    cache = follows(cache_of(beliefs, "a"))
    tells(cache, 1, 2)
    sent = sends(beliefs, "a", prompt(1, 2, 3, more=5))
    assert (sent.tokens, sent.prompt_tokens, sent.rank, sent.sure, sent.expected) == (32, 53, 0, True, True)
    sent.reported(32, 1.0)
    assert (cache.accuracy.compared, cache.accuracy.exact) == (1, 1)
    assert cache.accuracy.predicted_tokens == cache.accuracy.reported_tokens == 32


def test_a_cold_prompt_predicts_nothing_and_that_counts():
    beliefs = beliefs_of("a")
    sent = sends(beliefs, "a", prompt(1, 2))
    assert sent.tokens == 0
    sent.reported(0, 0.0)
    assert cache_of(beliefs, "a").accuracy.exact == 1


# The mirror of the node's LRU.


def test_the_mirror_forgets_as_the_node_would():
    beliefs = beliefs_of("a")
    cache_of(beliefs, "a").describe(SIZE, 6 * SIZE)
    done(beliefs, "a", prompt(1, 2, 3), 0.0)
    done(beliefs, "a", prompt(4, 5, 6), 1.0)
    done(beliefs, "a", prompt(1, 2, 3), 2.0)
    done(beliefs, "a", prompt(7, 8), 3.0)
    assert held(beliefs, "a", prompt(1, 2, 3), 4.0) == 48
    assert held(beliefs, "a", prompt(4, 5, 6), 4.0) == 16  # its end went first
    assert held(beliefs, "a", prompt(7, 8), 4.0) == 32


def test_answers_take_room_in_the_mirror():
    beliefs = beliefs_of("a")
    cache = cache_of(beliefs, "a")
    cache.describe(SIZE, 6 * SIZE)
    done(beliefs, "a", prompt(1, 2, 3), 0.0)
    cache.keep_answer(15, 1.0)
    assert len(cache.recency) == 3
    cache.keep_answer(16 * 4 + 3, 1.0)
    assert len(cache.recency) == 6
    assert held(beliefs, "a", prompt(1, 2, 3), 2.0) == 32


def test_a_smaller_cache_than_was_thought_forgets_at_once():
    beliefs = beliefs_of("a", assumed_cache_tokens=100 * SIZE)
    for number in range(10):
        done(beliefs, "a", prompt(2 * number, 2 * number + 1), float(number))
    cache_of(beliefs, "a").describe(SIZE, 4 * SIZE)
    assert [held(beliefs, "a", prompt(2 * n, 2 * n + 1), 20.0) for n in range(10)] == [0] * 8 + [32] * 2
    assert beliefs.index.pairs_of(cache_of(beliefs, "a").routed_place) == 4


def test_a_block_that_is_gone_takes_all_older_ones_with_it():
    """The router thinks that the cache is larger than it is; an answer that had less cached shows it."""
    beliefs = beliefs_of("a", assumed_cache_tokens=1000 * SIZE)
    for number in range(20):
        done(beliefs, "a", prompt(2 * number, 2 * number + 1), float(number))
    done(beliefs, "a", prompt(10, 11), 20.0, cached=0)  # number 5: sent at 5.0, gone by now
    left = [held(beliefs, "a", prompt(2 * n, 2 * n + 1), 21.0) // SIZE for n in range(20)]
    assert left == [0] * 5 + [2] + [2] * 14  # itself was sent again
    assert cache_of(beliefs, "a").recency.capacity == 1000


def test_a_prompt_of_which_only_the_end_is_gone_says_less():
    """The beginning is of a later day: of what is gone, the latest use counts."""
    beliefs = beliefs_of("a")
    done(beliefs, "a", prompt(1, 2), 0.0)
    done(beliefs, "a", prompt(3, 4, 5, 6), 1.0)
    done(beliefs, "a", prompt(7, 8), 2.0)
    done(beliefs, "a", prompt(3, 4, 9), 3.0)
    done(beliefs, "a", prompt(3, 4, 5, 6), 4.0, cached=32)  # 5 and 6, last used at 1.0, are gone
    assert [held(beliefs, "a", prompt(*blocks), 5.0) for blocks in ((1, 2), (7, 8), (3, 4, 9))] == [0, 32, 48]


def test_one_answer_makes_a_bounded_number_of_blocks_forgotten():
    beliefs = beliefs_of("a", assumed_cache_tokens=4000 * SIZE)
    cache = cache_of(beliefs, "a")
    for number in range(30):
        done(beliefs, "a", prompt(*range(100 * number, 100 * number + 100)), float(number))
    done(beliefs, "a", prompt(*range(2900, 3000)), 30.0, cached=0)
    assert len(cache.recency) == 3000 - OUTLIVED_AT_ONCE
    assert beliefs.index.pairs_of(cache.routed_place) == len(cache.recency)


def test_a_prompt_that_was_still_being_prefilled_says_nothing_of_the_lru():
    """Two that begin alike are sent at once: the second finds nothing cached yet, and nothing was evicted."""
    beliefs = beliefs_of("a")
    done(beliefs, "a", prompt(1, 2), 0.0)
    first = sends(beliefs, "a", prompt(5, 6), 1.0)
    second = sends(beliefs, "a", prompt(5, 6), 1.0)
    assert second.tokens == 32
    beliefs.first_token(first, 2.0)
    beliefs.first_token(second, 2.0)
    second.reported(0, 3.0)
    assert held(beliefs, "a", prompt(1, 2), 4.0) == held(beliefs, "a", prompt(5, 6), 4.0) == 32


def test_a_report_of_as_much_as_predicted_or_more_forgets_nothing():
    beliefs = beliefs_of("a")
    done(beliefs, "a", prompt(1, 2), 0.0)
    done(beliefs, "a", prompt(3, 4), 1.0)
    done(beliefs, "a", prompt(3, 4), 2.0, cached=32)
    done(beliefs, "a", prompt(3, 4), 3.0, cached=64)
    assert held(beliefs, "a", prompt(1, 2), 4.0) == 32


def test_reports_make_a_mirror_right_that_is_far_too_large():
    """The node has room for 40 blocks, the router assumes 4,000, and 200 are in use."""

    def wrong(reports):
        beliefs = beliefs_of("a", assumed_cache_tokens=4000 * SIZE)
        real = beliefs_of("real", assumed_cache_tokens=40 * SIZE)
        source, count = random.Random(3), 0
        for number in range(1000):
            first = 2 * min(source.randrange(100), source.randrange(100))
            cached = held(real, "real", prompt(first, first + 1), float(number))
            done(real, "real", prompt(first, first + 1), float(number))
            sent = done(beliefs, "a", prompt(first, first + 1), float(number), cached if reports else None)
            count += sent.tokens > cached
        return count, len(cache_of(beliefs, "a").recency)

    without, all_of_them = wrong(reports=False)
    corrected, held_in_the_end = wrong(reports=True)
    assert all_of_them > 180 and without > 500
    assert held_in_the_end < 100 and corrected < without / 2
