"""What is believed of the fleet's caches: told, routed and expected; what makes it forgotten; how it is bounded."""

from __future__ import annotations

import random
from array import array
from math import inf

import pytest
from believed import MODEL, SIZE, beliefs_of, cache_of, follows, held, hit, lookup, prompt, sends, tells, tokens

from warmroute.index import Tier
from warmroute.index.node_cache import EXPECTED, ROUTED
from warmroute.index.tiers import WORTH

# Three sources.


def test_what_a_node_tells_is_a_hit_there_and_nowhere_else():
    cache_view = beliefs_of("a", "b")
    tells(follows(cache_of(cache_view, "a")), 1, 2, 3)
    found = cache_view.hits(MODEL, prompt(1, 2, 9), 0.0)
    assert {name: (one.tokens, one.expected, one.rank) for name, one in found.items()} == {"a": (32, 32.0, 0)}


def test_what_was_sent_is_a_hit_where_nothing_is_told():
    cache_view = beliefs_of("a", "b")
    sends(cache_view, "a", prompt(1, 2, 3), 0.0)
    found = hit(cache_view, "a", prompt(1, 2, 9), 500.0)
    assert found is not None and (found.tokens, found.rank) == (32, ROUTED)
    assert hit(cache_view, "b", prompt(1, 2, 9)) is None


def test_a_beginning_was_last_used_when_somebody_with_it_was_last_sent_there():
    cache_view = beliefs_of("a", "b")
    for asked, now_s in ((prompt(1, 2, 3), 5.0), (prompt(1, 7), 8.0)):
        sends(cache_view, "a", asked, now_s)
    asked = prompt(1, 2, 9)
    assert cache_view.last_used_s(MODEL, asked, "a", 2 * SIZE) == 5.0
    assert cache_view.last_used_s(MODEL, asked, "a", 2 * SIZE - 1) == 8.0, "a block that is not whole does not count"
    assert cache_view.last_used_s(MODEL, asked, "a", 3 * SIZE) is None
    assert cache_view.last_used_s(MODEL, asked, "a", SIZE - 1) is None
    assert cache_view.last_used_s(MODEL, asked, "b", SIZE) is None
    assert cache_view.last_used_s(MODEL, asked, "c", SIZE) is None


def test_what_is_being_prefilled_is_expected_until_a_moment_after_its_first_token():
    cache_view = beliefs_of("a", expected_s=1.0)
    follows(cache_of(cache_view, "a"))
    sent = sends(cache_view, "a", prompt(1, 2, 3), 0.0)
    found = hit(cache_view, "a", prompt(1, 2, 3, 4), 60.0)  # a long queue: it still counts
    assert found is not None and (found.tokens, found.rank) == (48, EXPECTED)
    cache_view.first_token(sent, 60.0)
    assert held(cache_view, "a", prompt(1, 2, 3, 4), 60.9) == 48
    assert held(cache_view, "a", prompt(1, 2, 3, 4), 61.0) == 0  # it was not told of


def test_what_was_expected_and_then_told_stays():
    cache_view = beliefs_of("a")
    cache = follows(cache_of(cache_view, "a"))
    sent = sends(cache_view, "a", prompt(1, 2, 3), 0.0)
    cache_view.first_token(sent, 1.0)
    tells(cache, 1, 2, 3)
    assert held(cache_view, "a", prompt(1, 2, 3, 4), 1.5) == held(cache_view, "a", prompt(1, 2, 3, 4), 4.0) == 48


def test_two_of_the_same_are_expected_until_both_have_come():
    cache_view = beliefs_of("a")
    follows(cache_of(cache_view, "a"))
    first, second = (sends(cache_view, "a", prompt(1, 2), 0.0) for _ in range(2))
    cache_view.first_token(first, 1.0)
    assert held(cache_view, "a", prompt(1, 2), 3.0) == 32
    second.withdraw()
    assert held(cache_view, "a", prompt(1, 2), 3.0) == 0


def test_tidying_lets_expectations_go_without_a_request():
    cache_view = beliefs_of("a")
    cache = follows(cache_of(cache_view, "a"))
    sent = sends(cache_view, "a", prompt(1, 2), 0.0)
    cache_view.first_token(sent, 1.0)
    cache_view.tidy(9.0)
    assert cache_view.index.pairs_of(cache.expected_place) == 0


def test_what_is_told_in_whole_is_believed_over_what_was_sent():
    cache_view = beliefs_of("a")
    cache = follows(cache_of(cache_view, "a"))
    sent = sends(cache_view, "a", prompt(1, 2, 3), 0.0)
    cache_view.first_token(sent, 0.0)
    tells(cache, 1, 2, 3)
    cache.removed(0, [3])
    assert held(cache_view, "a", prompt(1, 2, 3, 4), 5.0) == 32


def test_what_was_sent_is_still_known_when_events_are_lost():
    cache_view = beliefs_of("a")
    cache = follows(cache_of(cache_view, "a"))
    sent = sends(cache_view, "a", prompt(1, 2, 3), 0.0)
    cache_view.first_token(sent, 0.0)
    tells(cache, 1, 2, 3)
    assert held(cache_view, "a", prompt(1, 2, 3), 2.0) == 48
    cache.lost(0)
    assert not cache.complete and cache.gaps == 1
    found = hit(cache_view, "a", prompt(1, 2, 3), 2.0)
    assert found is not None and (found.tokens, found.rank) == (48, ROUTED)


def test_what_was_sent_counts_beside_what_is_told_in_part():
    cache_view = beliefs_of("a")
    cache = cache_of(cache_view, "a")
    cache.follow(0)
    cache.heard(0.0)
    sends(cache_view, "a", prompt(1, 2), 0.0)
    tells(cache, 1, 2, 3)
    tells(cache, 7)
    assert held(cache_view, "a", prompt(1, 2, 3), 0.0) == 48
    assert held(cache_view, "a", prompt(7, 8), 0.0) == 16
    tells(cache, 1)
    sends(cache_view, "a", prompt(5, 6), 0.0)
    assert held(cache_view, "a", prompt(5, 6), 0.0) == 32


def test_prompts_that_events_cannot_tell_of_are_known_by_what_was_sent():
    """No tokenizer for the model: the text stands in for tokens, and a node's events match nothing of it."""
    cache_view = beliefs_of("a")
    cache = follows(cache_of(cache_view, "a"))
    tells(cache, 1, 2, 3)
    asked = prompt(1, 2, 3, sure=0, text=True)
    assert held(cache_view, "a", asked) == 0
    sent = sends(cache_view, "a", asked)
    assert not sent.expected
    assert held(cache_view, "a", prompt(1, 2, 3, sure=0, text=True), 99.0) == 48
    assert held(cache_view, "a", prompt(1, 2, 3, 4)) == 48  # and they match no block of the engine's


def test_of_what_is_told_only_sure_tokens_count():
    cache_view = beliefs_of("a")
    tells(follows(cache_of(cache_view, "a")), 1, 2, 3)
    assert held(cache_view, "a", prompt(1, 2, 3, sure=47)) == 32


# How much of it.


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize(("more", "cached"), [(0, 32), (1, 48), (15, 48)])
def test_the_last_token_is_always_computed(told, more, cached):
    cache_view = beliefs_of("a")
    asked = prompt(1, 2, 3, more=more)
    if told:
        tells(follows(cache_of(cache_view, "a")), 1, 2, 3)
    else:
        sends(cache_view, "a", asked)
    assert held(cache_view, "a", asked) == cached == (asked.token_count - 1) // SIZE * SIZE


def test_a_prompt_shorter_than_a_block_is_nobodys():
    cache_view = beliefs_of("a")
    short = lookup(tokens(1, more=0)[:15])
    assert cache_view.hits(MODEL, short, 0.0) == {}
    assert cache_view.sent(MODEL, short, "a", None, 0.0) is None


def test_farther_tiers_are_worth_less():
    cache_view = beliefs_of("a")
    cache = follows(cache_of(cache_view, "a"))
    tells(cache, 1, 2, 3, 4, 5)
    for block, tier in ((2, Tier.CPU), (3, Tier.DISK), (4, Tier.REMOTE)):
        cache.stored(0, None, [block], [], 0, tier)
        cache.removed(0, [block])
    found = hit(cache_view, "a", prompt(1, 2, 3, 4, 5))
    assert found is not None
    assert found.tokens == 80
    assert found.expected == pytest.approx(SIZE * (sum(WORTH) + WORTH[Tier.REMOTE]))  # 5 lies behind 4
    cache.removed(0, [4], Tier.REMOTE)
    found = hit(cache_view, "a", prompt(1, 2, 3, 4, 5))
    assert found is not None and found.tokens == 48


def test_the_limit_of_a_match_counts_in_every_tier():
    cache_view = beliefs_of("a")
    cache = follows(cache_of(cache_view, "a"))
    tells(cache, 1, 2, 3)
    cache.stored(0, None, [3], [], 0, Tier.CPU)
    cache.removed(0, [3])
    found = hit(cache_view, "a", prompt(1, 2, 3, more=0))
    assert found is not None and (found.tokens, found.expected) == (32, 32.0)


def test_the_rank_that_holds_most_is_named():
    cache_view = beliefs_of("a")
    cache = follows(cache_of(cache_view, "a"), 0, 1)
    tells(cache, 1, rank=0)
    tells(cache, 1, 2, rank=1)
    found = hit(cache_view, "a", prompt(1, 2, 3))
    assert found is not None and (found.tokens, found.rank) == (32, 1)
    cache.removed(1, [2])
    cache.removed(1, [1])
    found = hit(cache_view, "a", prompt(1, 2, 3))
    assert found is not None and (found.tokens, found.rank) == (16, 0)


def test_a_rank_that_is_cleared_leaves_the_others_and_what_was_sent():
    cache_view = beliefs_of("a")
    cache = follows(cache_of(cache_view, "a"), 0, 1)
    sends(cache_view, "a", prompt(5, 6))
    tells(cache, 1, rank=0)
    tells(cache, 2, rank=1)
    cache.cleared(0)
    assert [held(cache_view, "a", prompt(block)) for block in (1, 2, 5)] == [0, 16, 16]


def test_a_rank_that_nobody_tells_of_any_more_is_forgotten():
    cache_view = beliefs_of("a")
    cache = follows(cache_of(cache_view, "a"), 0, 1)
    tells(cache, 1, rank=0)
    tells(cache, 2, rank=1)
    cache.unfollow(1)
    assert [held(cache_view, "a", prompt(block)) for block in (1, 2)] == [16, 0]
    assert cache.complete
    cache.unfollow(0)
    assert not cache.complete and not cache.is_told


def test_nodes_with_blocks_of_another_size_are_asked_in_theirs():
    cache_view = beliefs_of("a", "b", "c")
    cache_of(cache_view, "b").describe(32, 0)
    follows(cache_of(cache_view, "c"))
    ids = tokens(1, 2, 3, 4)
    cache_of(cache_view, "c").stored(0, None, [77], ids[:64], 64)  # its first block tells its size
    for name in "ab":
        sends(cache_view, name, lookup(ids))
    assert cache_of(cache_view, "c").block_size == 64
    asked = lookup([*ids[:-1], 5, 6, 7])
    assert {name: one.tokens for name, one in cache_view.hits(MODEL, asked, 0.0).items()} == {"a": 64, "b": 64, "c": 64}
    asked = lookup(tokens(1, 2, 3))
    assert {name: one.tokens for name, one in cache_view.hits(MODEL, asked, 0.0).items()} == {"a": 48, "b": 32}


def test_another_block_size_forgets_what_was_sent_and_keeps_the_cache_as_large():
    cache_view = beliefs_of("a")
    cache = cache_of(cache_view, "a")
    cache.describe(16, 64_000)
    sends(cache_view, "a", prompt(1, 2))
    cache.describe(64, 0)
    assert cache.capacity_blocks == cache.recency.capacity == 1000
    assert held(cache_view, "a", lookup(tokens(1, 2, 3, 4))) == 0
    assert len(cache.recency) == 0


# Namespaces.


def test_adapters_share_nothing_with_their_base_model():
    cache_view = beliefs_of("a")
    cache = follows(cache_of(cache_view, "a"))
    cache_view.serves(cache, MODEL, ["alias"], ["fine", "other"])
    tells(cache, 1, 2)
    cache.stored(0, None, [101, 102], tokens(1, 2, more=0), SIZE, lora="fine")
    cache.removed(0, [2])
    models = (MODEL, "alias", "fine", "other")
    assert [held(cache_view, "a", prompt(1, 2), model=model) for model in models] == [16, 16, 32, 0]
    sends(cache_view, "a", prompt(8, 9), model="other")
    assert [held(cache_view, "a", prompt(8, 9), model=model) for model in models] == [0, 0, 0, 32]


def test_two_models_on_two_nodes_share_nothing():
    cache_view = beliefs_of("a")
    other = cache_view.join("b", ["n"])
    tells(follows(other), 1, 2)
    sends(cache_view, "a", prompt(1, 2))
    assert set(cache_view.hits(MODEL, prompt(1, 2), 0.0)) == {"a"}
    assert set(cache_view.hits("n", prompt(1, 2), 0.0)) == {"b"}


def test_salts_are_kept_apart_told_or_sent():
    cache_view = beliefs_of("a", "b")
    cache = follows(cache_of(cache_view, "a"))
    tells(cache, 1, 2, salt="x")
    cache.stored(0, 2, [3], tokens(3, more=0), SIZE)  # what follows has it by its parent
    sends(cache_view, "b", prompt(1, 2, 3, salt="x"))
    for name in "ab":
        assert held(cache_view, name, prompt(1, 2, 3, salt="x")) == 48
        assert held(cache_view, name, prompt(1, 2, 3)) == held(cache_view, name, prompt(1, 2, 3, salt="y")) == 0


def test_pictures_make_other_blocks():
    cache_view = beliefs_of("a", "b")
    tells(follows(cache_of(cache_view, "a")), 1, 2, 3, extra=[None, b"cat", None])
    cat, dog = ({"media": ((20, picture),)} for picture in (b"cat", b"dog"))
    sends(cache_view, "b", prompt(1, 2, 3, **cat))
    for name in "ab":
        assert held(cache_view, name, prompt(1, 2, 3, **cat)) == 48
        assert held(cache_view, name, prompt(1, 2, 3, **dog)) == held(cache_view, name, prompt(1, 2, 3)) == 16


def test_a_picture_behind_the_last_full_block_changes_nothing():
    cache_view = beliefs_of("a")
    sends(cache_view, "a", prompt(1, 2))
    assert held(cache_view, "a", prompt(1, 2, more=5, media=((34, b"cat"),))) == 32


# What makes it forgotten.


def test_a_node_that_left_is_forgotten_and_comes_back_empty():
    cache_view = beliefs_of("a", "b")
    cache = follows(cache_of(cache_view, "a"))
    tells(cache, 1, 2)
    waiting = sends(cache_view, "a", prompt(1, 2, 3))
    cache_view.first_token(waiting, 0.0)
    failing = sends(cache_view, "a", prompt(7, 8))
    before = cache_view.index.stats()["pairs"]
    cache_view.leave("a")
    assert before and cache_view.cache("a") is None
    assert cache_view.hits(MODEL, prompt(1, 2, 3), 0.0) == {}
    assert cache_view.sent(MODEL, prompt(1), "a", None, 0.0) is None
    again = cache_view.join("a", [MODEL])
    kept = sends(cache_view, "a", prompt(7, 8))
    failing.withdraw()  # late news of the node that left
    failing.reported(0, 1.0)
    cache_view.tidy(9.0)
    assert held(cache_view, "a", prompt(7, 8), 9.0) == 32
    assert kept.stands and not failing.stands and not waiting.expected
    assert not again.complete and again.accuracy.compared == 0
    cache_view.leave("nobody")


@pytest.mark.parametrize(("how", "events"), [("restarted", True), ("restarted", False), ("cleared", True)])
def test_late_news_of_what_was_before_a_restart_does_not_touch_what_is_new(how, events):
    cache_view = beliefs_of("a")
    cache = cache_of(cache_view, "a")
    if events:
        follows(cache)
    old = [sends(cache_view, "a", prompt(1, 2), 0.0) for _ in range(2)]
    cache_view.first_token(old[0], 0.5)
    if how == "restarted":
        cache.restarted()
    else:
        cache.cleared(0)
    assert held(cache_view, "a", prompt(1, 2), 0.6) == 0
    new = sends(cache_view, "a", prompt(1, 2), 0.7)
    old[1].withdraw()
    cache_view.tidy(5.0)
    old[0].reported(0, 5.0)
    old[0].counted(1)
    assert held(cache_view, "a", prompt(1, 2), 5.0) == 32
    assert cache.accuracy.compared == 0 and cache.surprises == 0
    new.withdraw()
    assert held(cache_view, "a", prompt(1, 2), 5.0) == 0


def test_a_restart_forgets_all_ranks_but_those_that_have_begun_anew():
    cache_view = beliefs_of("a")
    cache = follows(cache_of(cache_view, "a"), 0, 1)
    tells(cache, 1, rank=0)
    tells(cache, 2, rank=1)
    cache.restarted(begun=[1])
    assert [held(cache_view, "a", prompt(block)) for block in (1, 2)] == [0, 16]


def test_a_parent_that_is_not_known_says_so():
    cache_view = beliefs_of("a")
    cache = follows(cache_of(cache_view, "a"))
    assert tells(cache, 1)
    assert tells(cache, 2, parent=1)
    assert not tells(cache, 9, parent=8)
    assert cache.knows(0, 2) and not cache.knows(0, 9)


def test_events_that_make_no_sense_raise_and_change_nothing():
    cache_view = beliefs_of("a")
    cache = follows(cache_of(cache_view, "a"))
    with pytest.raises(ValueError):
        cache.stored(0, None, [1, 2, 3], [1] * 16, 16)
    assert cache_view.index.pairs_of(cache.ranks[0]) == 0


# Silence.


def test_silence_makes_what_was_told_count_less_and_then_nothing():
    cache_view = beliefs_of("a", stale_s=5.0, gone_s=30.0)
    tells(follows(cache_of(cache_view, "a")), 1, 2, 3)
    asked = prompt(1, 2, 3)
    found = [hit(cache_view, "a", asked, at_s) for at_s in (5.0, 17.5, 29.9, 30.0, 1e6)]
    assert [one and one.expected for one in found] == [48.0, 24.0, pytest.approx(0.192), 0.0, 0.0]
    assert [one and one.tokens for one in found] == [48] * 5  # what was told is not forgotten: it may speak again
    cache_of(cache_view, "a").heard(40.0)
    assert held(cache_view, "a", asked, 41.0) == 48


def test_what_was_sent_needs_no_sign_of_life():
    cache_view = beliefs_of("a")
    sends(cache_view, "a", prompt(1, 2), 0.0)
    found = hit(cache_view, "a", prompt(1, 2), 3600.0)
    assert found is not None and found.expected == 32.0


def test_events_that_come_late_count_less():
    cache_view = beliefs_of("a", stale_s=5.0, gone_s=30.0)
    cache = follows(cache_of(cache_view, "a"))
    tells(cache, 1, 2)
    cache.lag_s = 17.5
    found = hit(cache_view, "a", prompt(1, 2), 1.0)
    assert found is not None and found.expected == 16.0


# Another tokenizer.


def surprise(cache_view, cache, number, at_s, *, told=True, answered=None):
    """A prompt is prefilled, and the node tells of another one."""
    sent = sends(cache_view, cache.name, prompt(number, number + 1), at_s)
    cache_view.first_token(sent, at_s)
    if told:
        tells(cache, 500_000 + number)
    if answered is not None:
        sent.counted(answered)
    cache_view.tidy(at_s + 2.0)


@pytest.mark.parametrize("length", [None, 33])
def test_a_node_that_tells_of_other_blocks_than_it_was_sent_is_doubted(length):
    cache_view = beliefs_of("a")
    cache = follows(cache_of(cache_view, "a"))
    for number in range(7):
        surprise(cache_view, cache, 10 * number, 3.0 * number, answered=length)  # of the same length: a date, say
    assert not cache.doubted
    surprise(cache_view, cache, 70, 21.0, answered=length)
    assert cache.doubted and cache_view.doubted() == [cache] and not cache.complete
    assert held(cache_view, "a", prompt(500_000), 22.0) == 0  # what it tells is of no use
    found = hit(cache_view, "a", prompt(70, 71), 99.0)  # what was sent there is
    assert found is not None and (found.tokens, found.rank) == (32, ROUTED)
    cache.restarted()
    assert not cache.doubted and cache.complete and cache_view.doubted() == []


def test_one_prompt_that_is_as_expected_clears_the_doubt():
    cache_view = beliefs_of("a")
    cache = follows(cache_of(cache_view, "a"))
    for number in range(20):
        if number % 7 == 6:
            tells(cache, 10 * number, 10 * number + 1)
        surprise(cache_view, cache, 10 * number, 3.0 * number)
    assert not cache.doubted


def test_events_that_do_not_come_are_no_sign_of_another_tokenizer():
    cache_view = beliefs_of("a")
    cache = follows(cache_of(cache_view, "a"))
    for number in range(20):
        surprise(cache_view, cache, 10 * number, 3.0 * number, told=False)
    assert not cache.doubted


def test_a_node_that_prefills_and_tells_nothing_is_believed_by_what_was_sent_until_it_tells():
    cache_view = beliefs_of("a")
    cache = follows(cache_of(cache_view, "a"))
    tells(cache, 1, 2, 3)
    for number in range(7):
        surprise(cache_view, cache, 10 + 10 * number, 3.0 * number, told=False)
    assert cache.complete and cache_view.silent() == []
    surprise(cache_view, cache, 80, 21.0, told=False)
    assert not cache.complete and cache_view.silent() == [cache]
    found = hit(cache_view, "a", prompt(80, 81), 22.0)
    assert found is not None and (found.tokens, found.rank) == (32, ROUTED)
    assert held(cache_view, "a", prompt(1, 2, 3), 22.0) == 48, "what it told counts on"
    tells(cache, 90)
    assert cache.complete and cache_view.silent() == []


def test_what_is_all_cached_needs_no_telling():
    cache_view = beliefs_of("a")
    cache = follows(cache_of(cache_view, "a"))
    tells(cache, 1, 2, 3)
    for number in range(20):
        cache_view.first_token(sends(cache_view, "a", prompt(1, 2, 3), 3.0 * number), 3.0 * number)
        cache_view.tidy(3.0 * number + 2.0)
    assert cache.complete and cache_view.silent() == []


def test_a_silence_ends_with_the_node():
    cache_view = beliefs_of("a")
    cache = follows(cache_of(cache_view, "a"))
    for number in range(8):
        surprise(cache_view, cache, 10 * number, 3.0 * number, told=False)
    assert not cache.complete
    cache.restarted()
    assert cache.complete and cache_view.silent() == []


def test_prompts_that_were_refused_are_no_sign_of_another_tokenizer():
    cache_view = beliefs_of("a")
    cache = follows(cache_of(cache_view, "a"))
    for number in range(20):
        sent = sends(cache_view, "a", prompt(10 * number), float(number))
        cache_view.first_token(sent, float(number))  # an answer came: 400
        sent.withdraw()
        tells(cache, 10 * number + 5)
        cache_view.tidy(number + 2.0)
    assert not cache.doubted and cache.surprises == 0


def test_a_node_without_events_is_doubted_by_the_length_of_prompts():
    cache_view = beliefs_of("a")
    cache = cache_of(cache_view, "a")
    for number in range(8):
        assert not cache.doubted
        sends(cache_view, "a", prompt(number)).counted(18)
    assert cache.doubted
    assert held(cache_view, "a", prompt(3)) == 16  # what was sent still counts


def test_lengths_of_prompts_that_are_not_sure_say_nothing():
    cache_view = beliefs_of("a")
    for number in range(20):
        sends(cache_view, "a", prompt(number, sure=0)).counted(99)
    assert cache_of(cache_view, "a").surprises == 0


# Bounds.


def test_the_index_stays_within_its_budget_whatever_is_sent_and_told():
    budget = 1 << 20
    cache_view = beliefs_of(*"abcdefgh", memory_bytes=budget, assumed_cache_tokens=32_000)
    caches = list(cache_view)
    follows(caches[0])
    source = random.Random(4)
    for number in range(400):
        asked = lookup(source.choices(range(1 << 17), k=1600), sharing=source.choice(["x", "y"]))
        name = source.choice("abcdefgh")
        sent = sends(cache_view, name, asked, float(number))
        if source.random() < 0.9:
            cache_view.first_token(sent, float(number))
        else:
            sent.withdraw()
        sent.cache.keep_answer(300, float(number))
        ids = source.choices(range(1 << 17), k=1600)
        caches[0].stored(0, None, [source.getrandbits(63) for _ in range(100)], ids, SIZE)
        assert cache_view.index.stats()["bytes"] <= budget
    assert cache_view.index.stats()["evicted"] > 0
    for cache in caches:
        assert len(cache.recency) <= 2000 and cache.recency.bytes <= 2000 * 32 + 60_000


@pytest.mark.parametrize(("telling", "most"), [(True, 48), (False, 24)])
def test_a_block_of_a_node_that_tells_costs_at_most_48_bytes_and_of_another_24(telling, most):
    names = [str(number) for number in range(32)]
    cache_view = beliefs_of(*names, assumed_cache_tokens=20_000 * SIZE)
    source = random.Random(1)
    for cache in cache_view if telling else ():
        follows(cache)
    for number in range(1000):
        sent = sends(cache_view, source.choice(names), lookup(source.choices(range(1 << 17), k=1601)), float(number))
        cache_view.first_token(sent, float(number))
        if telling:
            place = sent.cache.ranks[0]
            cache_view.index.store_chain(place, sent.chain, Tier.GPU, [source.getrandbits(63) for _ in range(100)])
    cache_view.tidy(1e6)
    stats = cache_view.index.stats()
    assert stats["pairs"] == (200_000 if telling else 100_000)  # each is mirrored
    assert stats["bytes"] <= most * 100_000
    assert sum(cache.recency.bytes for cache in cache_view) <= 9 * 100_000 + 32 * 30_000


def test_what_is_evicted_from_the_mirror_is_gone_from_the_index():
    """Whatever way it went in and out, told or not: what was routed is what the mirror holds."""
    cache_view = beliefs_of("a", assumed_cache_tokens=64 * SIZE)
    cache = follows(cache_of(cache_view, "a"))
    source = random.Random(7)
    inflight = []
    whole = {}

    def is_kept(cache, chain):
        uses = cache.recency.uses(chain, len(chain) // 8, inf)
        return bool(uses) and uses[-1][1] == len(chain) // 8

    for number in range(2000):
        now_s = number / 10
        asked = prompt(*(source.randrange(40) for _ in range(source.randrange(1, 6))), sure=source.choice([None, 0]))
        sent = sends(cache_view, "a", asked, now_s)
        whole.update({sent.chain[end - 8 : end]: sent.chain[:end] for end in range(8, len(sent.chain) + 1, 8)})
        inflight.append(sent)
        if len(inflight) > 4:
            done = inflight.pop(source.randrange(5))
            fate = source.random()
            if fate < 0.2:
                done.withdraw()
            else:
                cache_view.first_token(done, now_s)
                done.reported(source.randrange(0, done.tokens + 1), now_s)
                cache.keep_answer(source.randrange(60), now_s)
        if number % 100 == 99:
            cache.tells_all(0, source.random() < 0.5)
        if number % 400 == 399:
            cache.describe(16, source.choice([30, 64, 100]) * SIZE)
        mirrored = [array("Q", [row[0]]).tobytes() for row in cache_view.index.holdings(cache.routed_place)]
        assert all(is_kept(cache, whole[block]) for block in mirrored)
        assert len(mirrored) <= len(cache.recency)
    for sent in inflight:
        sent.withdraw()
    cache_view.tidy(1e6)
    assert cache_view.index.pairs_of(cache.expected_place) == 0


def test_joining_again_changes_nothing_but_what_is_served():
    cache_view = beliefs_of("a")
    sends(cache_view, "a", prompt(1, 2))
    assert cache_view.join("a") is cache_view.join("a", [MODEL, "alias"]) is cache_of(cache_view, "a")
    assert held(cache_view, "a", prompt(1, 2), model="alias") == 32
