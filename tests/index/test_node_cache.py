"""A NodeCache over time: restarts, late and missing events, another tokenizer, memory bounds."""

from __future__ import annotations

import random
from array import array
from math import inf

import pytest
from cache_fixtures import (
    MODEL,
    SIZE,
    cache_of,
    cache_view_of,
    hit,
    hit_tokens,
    lookup,
    prompt,
    report_stored,
    route,
    with_events,
)

from warmroute.core.cache_view import CacheView
from warmroute.core.node_cache import ROUTED, NodeCache, Tier

# Forgetting.


def test_a_removed_node_is_forgotten_and_comes_back_empty() -> None:
    cache_view = cache_view_of("a", "b")
    cache = with_events(cache_of(cache_view, "a"))
    report_stored(cache, 1, 2)
    waiting = route(cache_view, "a", prompt(1, 2, 3))
    cache_view.first_token(waiting, 0.0)
    failing = route(cache_view, "a", prompt(7, 8))
    before = cache_view.index.stats()["pairs"]
    cache_view.remove_node("a")
    assert before and cache_view.cache("a") is None
    assert cache_view.hits(MODEL, prompt(1, 2, 3), 0.0) == {}
    assert cache_view.record_routed(MODEL, prompt(1), "a", None, 0.0) is None
    again = cache_view.add_node("a", [MODEL])
    kept = route(cache_view, "a", prompt(7, 8))
    failing.withdraw()  # responses of the removed node arrive late
    failing.check_cached_tokens(0, 1.0)
    cache_view.tidy(9.0)
    assert hit_tokens(cache_view, "a", prompt(7, 8), 9.0) == 32
    assert kept.is_current and not failing.is_current and not waiting.pending
    assert not again.complete and again.accuracy.compared == 0
    cache_view.remove_node("nobody")


@pytest.mark.parametrize(("how", "events"), [("restarted", True), ("restarted", False), ("cleared", True)])
def test_late_responses_from_before_a_restart_change_nothing(how: str, events: bool) -> None:
    cache_view = cache_view_of("a")
    cache = cache_of(cache_view, "a")
    if events:
        with_events(cache)
    old = [route(cache_view, "a", prompt(1, 2), 0.0) for _ in range(2)]
    cache_view.first_token(old[0], 0.5)
    if how == "restarted":
        cache.restarted()
    else:
        cache.all_blocks_cleared(0)
    assert hit_tokens(cache_view, "a", prompt(1, 2), 0.6) == 0
    new = route(cache_view, "a", prompt(1, 2), 0.7)
    old[1].withdraw()
    cache_view.tidy(5.0)
    old[0].check_cached_tokens(0, 5.0)
    old[0].check_prompt_tokens(1)
    assert hit_tokens(cache_view, "a", prompt(1, 2), 5.0) == 32
    assert cache.accuracy.compared == 0 and cache.token_mismatches == 0
    new.withdraw()
    assert hit_tokens(cache_view, "a", prompt(1, 2), 5.0) == 0


def test_a_restart_forgets_all_ranks_except_current_ones() -> None:
    cache_view = cache_view_of("a")
    cache = with_events(cache_of(cache_view, "a"), 0, 1)
    report_stored(cache, 1, rank=0)
    report_stored(cache, 2, rank=1)
    cache.restarted(current_ranks=[1])
    assert [hit_tokens(cache_view, "a", prompt(block)) for block in (1, 2)] == [0, 16]


def test_an_unknown_parent_is_reported() -> None:
    cache_view = cache_view_of("a")
    cache = with_events(cache_of(cache_view, "a"))
    assert report_stored(cache, 1)
    assert report_stored(cache, 2, parent=1)
    assert not report_stored(cache, 9, parent=8)
    assert cache.knows(0, 2) and not cache.knows(0, 9)


def test_inconsistent_events_raise_and_change_nothing() -> None:
    cache_view = cache_view_of("a")
    cache = with_events(cache_of(cache_view, "a"))
    with pytest.raises(ValueError):
        cache.blocks_stored(0, None, [1, 2, 3], [1] * 16, 16)
    assert cache_view.index.pair_count(cache.ranks[0]) == 0


# Late and missing events.


def test_blocks_from_events_count_less_while_the_node_is_silent() -> None:
    cache_view = cache_view_of("a")
    report_stored(with_events(cache_of(cache_view, "a")), 1, 2, 3)
    request = prompt(1, 2, 3)
    found = [hit(cache_view, "a", request, at_s) for at_s in (5.0, 17.5, 29.9, 30.0, 1e6)]
    assert [one and one.expected for one in found] == [48.0, 24.0, pytest.approx(0.192), 0.0, 0.0]
    assert [one and one.tokens for one in found] == [48] * 5  # the blocks are kept: the node may come back
    cache_of(cache_view, "a").last_contact_s = 40.0
    assert hit_tokens(cache_view, "a", request, 41.0) == 48


def test_routed_prompts_do_not_age() -> None:
    cache_view = cache_view_of("a")
    route(cache_view, "a", prompt(1, 2), 0.0)
    found = hit(cache_view, "a", prompt(1, 2), 3600.0)
    assert found is not None and found.expected == 32.0


def test_late_events_count_less() -> None:
    cache_view = cache_view_of("a")
    cache = with_events(cache_of(cache_view, "a"))
    report_stored(cache, 1, 2)
    cache.event_lag_s = 17.5
    found = hit(cache_view, "a", prompt(1, 2), 1.0)
    assert found is not None and found.expected == 16.0


# Another tokenizer.


def prefill_other_tokens(
    cache_view: CacheView,
    cache: NodeCache,
    number: int,
    at_s: float,
    *,
    events: bool = True,
    prompt_tokens: int | None = None,
) -> None:
    """Let the node prefill a prompt and report other blocks than the router computed."""
    prediction = route(cache_view, cache.name, prompt(number, number + 1), at_s)
    cache_view.first_token(prediction, at_s)
    if events:
        report_stored(cache, 500_000 + number)
    if prompt_tokens is not None:
        prediction.check_prompt_tokens(prompt_tokens)
    cache_view.tidy(at_s + 2.0)


@pytest.mark.parametrize("length", [None, 33])
def test_a_node_that_reports_other_blocks_has_another_tokenizer(length: int | None) -> None:
    """Also if the length of the prompts is right (33), as with a date in the chat template."""
    cache_view = cache_view_of("a")
    cache = with_events(cache_of(cache_view, "a"))
    for number in range(7):
        prefill_other_tokens(cache_view, cache, 10 * number, 3.0 * number, prompt_tokens=length)
    assert not cache.token_mismatch
    prefill_other_tokens(cache_view, cache, 70, 21.0, prompt_tokens=length)
    assert cache.token_mismatch and not cache.complete
    assert hit_tokens(cache_view, "a", prompt(500_000), 22.0) == 0  # its events match no prompt
    found = hit(cache_view, "a", prompt(70, 71), 99.0)  # routed prompts still match
    assert found is not None and (found.tokens, found.rank) == (32, ROUTED)
    cache.restarted()
    assert not cache.token_mismatch and cache.complete


def test_one_matching_prompt_resets_the_count_of_mismatches() -> None:
    cache_view = cache_view_of("a")
    cache = with_events(cache_of(cache_view, "a"))
    for number in range(20):
        if number % 7 == 6:
            report_stored(cache, 10 * number, 10 * number + 1)
        prefill_other_tokens(cache_view, cache, 10 * number, 3.0 * number)
    assert not cache.token_mismatch


def test_missing_events_are_no_sign_of_another_tokenizer() -> None:
    cache_view = cache_view_of("a")
    cache = with_events(cache_of(cache_view, "a"))
    for number in range(20):
        prefill_other_tokens(cache_view, cache, 10 * number, 3.0 * number, events=False)
    assert not cache.token_mismatch


def test_a_node_without_events_is_matched_with_routed_prompts_until_events_arrive() -> None:
    cache_view = cache_view_of("a")
    cache = with_events(cache_of(cache_view, "a"))
    report_stored(cache, 1, 2, 3)
    for number in range(7):
        prefill_other_tokens(cache_view, cache, 10 + 10 * number, 3.0 * number, events=False)
    assert cache.complete and not cache.events_missing
    prefill_other_tokens(cache_view, cache, 80, 21.0, events=False)
    assert not cache.complete and cache.events_missing
    found = hit(cache_view, "a", prompt(80, 81), 22.0)
    assert found is not None and (found.tokens, found.rank) == (32, ROUTED)
    assert hit_tokens(cache_view, "a", prompt(1, 2, 3), 22.0) == 48, "blocks that it reported still count"
    report_stored(cache, 90)
    assert cache.complete and not cache.events_missing


def test_fully_cached_prompts_need_no_events() -> None:
    cache_view = cache_view_of("a")
    cache = with_events(cache_of(cache_view, "a"))
    report_stored(cache, 1, 2, 3)
    for number in range(20):
        cache_view.first_token(route(cache_view, "a", prompt(1, 2, 3), 3.0 * number), 3.0 * number)
        cache_view.tidy(3.0 * number + 2.0)
    assert cache.complete and not cache.events_missing


def test_a_restart_resets_missing_events() -> None:
    cache_view = cache_view_of("a")
    cache = with_events(cache_of(cache_view, "a"))
    for number in range(8):
        prefill_other_tokens(cache_view, cache, 10 * number, 3.0 * number, events=False)
    assert not cache.complete
    cache.restarted()
    assert cache.complete and not cache.events_missing


def test_rejected_prompts_are_no_sign_of_another_tokenizer() -> None:
    cache_view = cache_view_of("a")
    cache = with_events(cache_of(cache_view, "a"))
    for number in range(20):
        prediction = route(cache_view, "a", prompt(10 * number), float(number))
        cache_view.first_token(prediction, float(number))  # the response was an error 400
        prediction.withdraw()
        report_stored(cache, 10 * number + 5)
        cache_view.tidy(number + 2.0)
    assert not cache.token_mismatch and cache.token_mismatches == 0


def test_prompt_lengths_show_another_tokenizer_without_events() -> None:
    cache_view = cache_view_of("a")
    cache = cache_of(cache_view, "a")
    for number in range(8):
        assert not cache.token_mismatch
        route(cache_view, "a", prompt(number)).check_prompt_tokens(18)
    assert cache.token_mismatch
    assert hit_tokens(cache_view, "a", prompt(3)) == 16  # routed prompts still count


def test_lengths_of_inexact_prompts_are_ignored() -> None:
    cache_view = cache_view_of("a")
    for number in range(20):
        route(cache_view, "a", prompt(number, exact=0)).check_prompt_tokens(99)
    assert cache_of(cache_view, "a").token_mismatches == 0


# Bounds.


def test_the_index_stays_within_its_memory_budget() -> None:
    budget = 1 << 20
    cache_view = cache_view_of(*"abcdefgh", memory_bytes=budget, assumed_cache_tokens=32_000)
    caches = list(cache_view)
    with_events(caches[0])
    source = random.Random(4)
    for number in range(400):
        request = lookup(source.choices(range(1 << 17), k=1600), cache_group=source.choice(["x", "y"]))
        name = source.choice("abcdefgh")
        prediction = route(cache_view, name, request, float(number))
        if source.random() < 0.9:
            cache_view.first_token(prediction, float(number))
        else:
            prediction.withdraw()
        prediction.cache.record_output(300, float(number))
        ids = source.choices(range(1 << 17), k=1600)
        caches[0].blocks_stored(0, None, [source.getrandbits(63) for _ in range(100)], ids, SIZE)
        assert cache_view.index.stats()["bytes"] <= budget
    assert cache_view.index.stats()["evicted"] > 0
    for cache in caches:
        assert len(cache.recency) <= 2000 and cache.recency.bytes <= 2000 * 32 + 60_000


@pytest.mark.parametrize(("events", "most"), [(True, 48), (False, 24)])
def test_a_block_takes_at_most_48_bytes_with_events_and_24_without(events: bool, most: int) -> None:
    names = [str(number) for number in range(32)]
    cache_view = cache_view_of(*names, assumed_cache_tokens=20_000 * SIZE)
    source = random.Random(1)
    for cache in cache_view if events else ():
        with_events(cache)
    for number in range(1000):
        prediction = route(
            cache_view, source.choice(names), lookup(source.choices(range(1 << 17), k=1601)), float(number)
        )
        cache_view.first_token(prediction, float(number))
        if events:
            holder = prediction.cache.ranks[0]
            cache_view.index.store_hashes(
                holder, prediction.chain, Tier.GPU, [source.getrandbits(63) for _ in range(100)]
            )
    cache_view.tidy(1e6)
    stats = cache_view.index.stats()
    assert stats["pairs"] == (200_000 if events else 100_000)  # events and routed
    assert stats["bytes"] <= most * 100_000
    assert sum(cache.recency.bytes for cache in cache_view) <= 9 * 100_000 + 32 * 30_000


def test_evicted_routed_blocks_leave_the_index() -> None:
    """The routed holder holds what its recency list holds, whatever the order of calls."""
    cache_view = cache_view_of("a", assumed_cache_tokens=64 * SIZE)
    cache = with_events(cache_of(cache_view, "a"))
    source = random.Random(7)
    inflight = []
    whole = {}

    def is_held(cache: NodeCache, chain: bytes) -> bool:
        uses = cache.recency.last_uses(chain, len(chain) // 8, inf)
        return bool(uses) and uses[-1][1] == len(chain) // 8

    for number in range(2000):
        now_s = number / 10
        request = prompt(*(source.randrange(40) for _ in range(source.randrange(1, 6))), exact=source.choice([None, 0]))
        prediction = route(cache_view, "a", request, now_s)
        whole.update(
            {prediction.chain[end - 8 : end]: prediction.chain[:end] for end in range(8, len(prediction.chain) + 1, 8)}
        )
        inflight.append(prediction)
        if len(inflight) > 4:
            done = inflight.pop(source.randrange(5))
            fate = source.random()
            if fate < 0.2:
                done.withdraw()
            else:
                cache_view.first_token(done, now_s)
                done.check_cached_tokens(source.randrange(0, done.tokens + 1), now_s)
                cache.record_output(source.randrange(60), now_s)
        if number % 100 == 99:
            cache.set_complete(0, source.random() < 0.5)
        if number % 400 == 399:
            cache.set_size(16, source.choice([30, 64, 100]) * SIZE)
        routed = [array("Q", [row[0]]).tobytes() for row in cache_view.index.holdings(cache.routed_holder)]
        assert all(is_held(cache, whole[block]) for block in routed)
        assert len(routed) <= len(cache.recency)
    for prediction in inflight:
        prediction.withdraw()
    cache_view.tidy(1e6)
    assert cache_view.index.pair_count(cache.pending_holder) == 0
