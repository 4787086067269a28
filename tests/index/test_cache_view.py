"""The CacheView: hits from events, routed prompts and pending blocks; tiers, ranks, block sizes and namespaces."""

from __future__ import annotations

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
    tokens,
    with_events,
)

from warmroute.config import Index
from warmroute.core.cache_view import CacheView
from warmroute.core.node_cache import PENDING, ROUTED, SAVED_SHARE, Tier
from warmroute.core.reuse import FIRST_INTERVAL_S

# Three sources.


def test_blocks_from_events_are_a_hit_on_that_node_only() -> None:
    cache_view = cache_view_of("a", "b")
    report_stored(with_events(cache_of(cache_view, "a")), 1, 2, 3)
    found = cache_view.hits(MODEL, prompt(1, 2, 9), 0.0)
    assert {name: (one.tokens, one.expected, one.rank) for name, one in found.items()} == {"a": (32, 32.0, 0)}


def test_routed_prompts_are_a_hit_without_events() -> None:
    cache_view = cache_view_of("a", "b")
    route(cache_view, "a", prompt(1, 2, 3), 0.0)
    found = hit(cache_view, "a", prompt(1, 2, 9), 500.0)
    assert found is not None and (found.tokens, found.rank) == (32, ROUTED)
    assert hit(cache_view, "b", prompt(1, 2, 9)) is None


def test_the_interval_of_a_prefix_counts_the_requests_that_find_it_cached() -> None:
    cache_view = cache_view_of("a", "b")
    prediction = route(cache_view, "a", prompt(1, 2, 3), 5.0)
    cache_view.first_token(prediction, 5.5)
    request = prompt(1, 2, 9)
    found = hit(cache_view, "a", request, 6.0)
    assert found is not None and found.tokens == 2 * SIZE
    assert cache_view.use_interval_s(MODEL, request, "a", found, 6.0) == FIRST_INTERVAL_S, "used once"
    for number in range(30):
        cache_view.record_routed(MODEL, request, "a", found, 6.0 + number)
    assert cache_view.use_interval_s(MODEL, request, "a", found, 36.0) == pytest.approx(1.0, rel=0.01)
    other = prompt(7, 8, 9)
    assert cache_view.use_interval_s(MODEL, other, "a", found, 36.0) is None, "no prompt of this router"
    assert cache_view.use_interval_s(MODEL, request, "c", found, 36.0) is None, "no such node"


def test_pending_blocks_count_until_shortly_after_the_first_token() -> None:
    cache_view = cache_view_of("a")
    with_events(cache_of(cache_view, "a"))
    prediction = route(cache_view, "a", prompt(1, 2, 3), 0.0)
    found = hit(cache_view, "a", prompt(1, 2, 3, 4), 60.0)  # also after a long wait in the queue
    assert found is not None and (found.tokens, found.rank) == (48, PENDING)
    cache_view.first_token(prediction, 60.0)
    assert hit_tokens(cache_view, "a", prompt(1, 2, 3, 4), 60.9) == 48
    assert hit_tokens(cache_view, "a", prompt(1, 2, 3, 4), 61.0) == 0  # no event reported it


def test_pending_blocks_that_events_report_stay() -> None:
    cache_view = cache_view_of("a")
    cache = with_events(cache_of(cache_view, "a"))
    prediction = route(cache_view, "a", prompt(1, 2, 3), 0.0)
    cache_view.first_token(prediction, 1.0)
    report_stored(cache, 1, 2, 3)
    assert (
        hit_tokens(cache_view, "a", prompt(1, 2, 3, 4), 1.5)
        == hit_tokens(cache_view, "a", prompt(1, 2, 3, 4), 4.0)
        == 48
    )


def test_blocks_of_two_equal_prompts_stay_pending_until_both_end() -> None:
    cache_view = cache_view_of("a")
    with_events(cache_of(cache_view, "a"))
    first, second = (route(cache_view, "a", prompt(1, 2), 0.0) for _ in range(2))
    cache_view.first_token(first, 1.0)
    assert hit_tokens(cache_view, "a", prompt(1, 2), 3.0) == 32
    second.withdraw()
    assert hit_tokens(cache_view, "a", prompt(1, 2), 3.0) == 0


def test_tidy_expires_pending_blocks_without_a_lookup() -> None:
    cache_view = cache_view_of("a")
    cache = with_events(cache_of(cache_view, "a"))
    prediction = route(cache_view, "a", prompt(1, 2), 0.0)
    cache_view.first_token(prediction, 1.0)
    cache_view.tidy(9.0)
    assert cache_view.index.pair_count(cache.pending_holder) == 0


def test_complete_events_override_routed_prompts() -> None:
    cache_view = cache_view_of("a")
    cache = with_events(cache_of(cache_view, "a"))
    prediction = route(cache_view, "a", prompt(1, 2, 3), 0.0)
    cache_view.first_token(prediction, 0.0)
    report_stored(cache, 1, 2, 3)
    cache.blocks_removed(0, [3])
    assert hit_tokens(cache_view, "a", prompt(1, 2, 3, 4), 5.0) == 32


def test_routed_prompts_count_when_events_are_lost() -> None:
    cache_view = cache_view_of("a")
    cache = with_events(cache_of(cache_view, "a"))
    prediction = route(cache_view, "a", prompt(1, 2, 3), 0.0)
    cache_view.first_token(prediction, 0.0)
    report_stored(cache, 1, 2, 3)
    assert hit_tokens(cache_view, "a", prompt(1, 2, 3), 2.0) == 48
    cache.events_lost(0)
    assert not cache.complete and cache.gaps == 1
    found = hit(cache_view, "a", prompt(1, 2, 3), 2.0)
    assert found is not None and (found.tokens, found.rank) == (48, ROUTED)


def test_routed_prompts_count_beside_incomplete_events() -> None:
    cache_view = cache_view_of("a")
    cache = cache_of(cache_view, "a")
    cache.add_rank(0)
    cache.last_contact_s = 0.0
    route(cache_view, "a", prompt(1, 2), 0.0)
    report_stored(cache, 1, 2, 3)
    report_stored(cache, 7)
    assert hit_tokens(cache_view, "a", prompt(1, 2, 3), 0.0) == 48
    assert hit_tokens(cache_view, "a", prompt(7, 8), 0.0) == 16
    report_stored(cache, 1)
    route(cache_view, "a", prompt(5, 6), 0.0)
    assert hit_tokens(cache_view, "a", prompt(5, 6), 0.0) == 32


def test_prompts_that_events_cannot_match_are_matched_with_routed_ones() -> None:
    """Without a tokenizer the router matches text, which no event contains."""
    cache_view = cache_view_of("a")
    cache = with_events(cache_of(cache_view, "a"))
    report_stored(cache, 1, 2, 3)
    request = prompt(1, 2, 3, exact=0, text=True)
    assert hit_tokens(cache_view, "a", request) == 0
    prediction = route(cache_view, "a", request)
    assert not prediction.pending
    assert hit_tokens(cache_view, "a", prompt(1, 2, 3, exact=0, text=True), 99.0) == 48
    assert hit_tokens(cache_view, "a", prompt(1, 2, 3, 4)) == 48  # text matches no block of the engine


def test_only_exact_tokens_match_events() -> None:
    cache_view = cache_view_of("a")
    report_stored(with_events(cache_of(cache_view, "a")), 1, 2, 3)
    assert hit_tokens(cache_view, "a", prompt(1, 2, 3, exact=47)) == 32


# The size of a hit.


@pytest.mark.parametrize("events", [True, False])
@pytest.mark.parametrize(("more", "cached"), [(0, 32), (1, 48), (15, 48)])
def test_the_last_token_is_never_a_hit(events: bool, more: int, cached: int) -> None:
    cache_view = cache_view_of("a")
    request = prompt(1, 2, 3, more=more)
    if events:
        report_stored(with_events(cache_of(cache_view, "a")), 1, 2, 3)
    else:
        route(cache_view, "a", request)
    assert hit_tokens(cache_view, "a", request) == cached == (request.token_count - 1) // SIZE * SIZE


def test_a_prompt_shorter_than_a_block_has_no_hits() -> None:
    cache_view = cache_view_of("a")
    short = lookup(tokens(1, more=0)[:15])
    assert cache_view.hits(MODEL, short, 0.0) == {}
    assert cache_view.record_routed(MODEL, short, "a", None, 0.0) is None


def test_blocks_in_lower_tiers_count_less() -> None:
    cache_view = cache_view_of("a")
    cache = with_events(cache_of(cache_view, "a"))
    report_stored(cache, 1, 2, 3, 4, 5)
    for block, tier in ((2, Tier.CPU), (3, Tier.DISK), (4, Tier.REMOTE)):
        cache.blocks_stored(0, None, [block], [], 0, tier)
        cache.blocks_removed(0, [block])
    found = hit(cache_view, "a", prompt(1, 2, 3, 4, 5))
    assert found is not None
    assert found.tokens == 80
    # Block 5 counts like block 4, which it follows.
    assert found.expected == pytest.approx(SIZE * (sum(SAVED_SHARE) + SAVED_SHARE[Tier.REMOTE]))
    cache.blocks_removed(0, [4], Tier.REMOTE)
    found = hit(cache_view, "a", prompt(1, 2, 3, 4, 5))
    assert found is not None and found.tokens == 48


def test_the_last_token_is_no_hit_in_any_tier() -> None:
    cache_view = cache_view_of("a")
    cache = with_events(cache_of(cache_view, "a"))
    report_stored(cache, 1, 2, 3)
    cache.blocks_stored(0, None, [3], [], 0, Tier.CPU)
    cache.blocks_removed(0, [3])
    found = hit(cache_view, "a", prompt(1, 2, 3, more=0))
    assert found is not None and (found.tokens, found.expected) == (32, 32.0)


def test_a_hit_names_the_rank_that_holds_most() -> None:
    cache_view = cache_view_of("a")
    cache = with_events(cache_of(cache_view, "a"), 0, 1)
    report_stored(cache, 1, rank=0)
    report_stored(cache, 1, 2, rank=1)
    found = hit(cache_view, "a", prompt(1, 2, 3))
    assert found is not None and (found.tokens, found.rank) == (32, 1)
    cache.blocks_removed(1, [2])
    cache.blocks_removed(1, [1])
    found = hit(cache_view, "a", prompt(1, 2, 3))
    assert found is not None and (found.tokens, found.rank) == (16, 0)


def test_clearing_one_rank_keeps_the_others_and_routed_prompts() -> None:
    cache_view = cache_view_of("a")
    cache = with_events(cache_of(cache_view, "a"), 0, 1)
    route(cache_view, "a", prompt(5, 6))
    report_stored(cache, 1, rank=0)
    report_stored(cache, 2, rank=1)
    cache.all_blocks_cleared(0)
    assert [hit_tokens(cache_view, "a", prompt(block)) for block in (1, 2, 5)] == [0, 16, 16]


def test_a_removed_rank_is_forgotten() -> None:
    cache_view = cache_view_of("a")
    cache = with_events(cache_of(cache_view, "a"), 0, 1)
    report_stored(cache, 1, rank=0)
    report_stored(cache, 2, rank=1)
    cache.remove_rank(1)
    assert [hit_tokens(cache_view, "a", prompt(block)) for block in (1, 2)] == [16, 0]
    assert cache.complete
    cache.remove_rank(0)
    assert not cache.complete and not cache.has_events


def test_nodes_with_different_block_sizes_are_all_matched() -> None:
    cache_view = cache_view_of("a", "b", "c")
    cache_of(cache_view, "b").set_size(32, 0)
    with_events(cache_of(cache_view, "c"))
    ids = tokens(1, 2, 3, 4)
    cache_of(cache_view, "c").blocks_stored(0, None, [77], ids[:64], 64)  # its first block shows its block size
    for name in "ab":
        route(cache_view, name, lookup(ids))
    assert cache_of(cache_view, "c").block_size == 64
    request = lookup([*ids[:-1], 5, 6, 7])
    assert {name: one.tokens for name, one in cache_view.hits(MODEL, request, 0.0).items()} == {
        "a": 64,
        "b": 64,
        "c": 64,
    }
    request = lookup(tokens(1, 2, 3))
    assert {name: one.tokens for name, one in cache_view.hits(MODEL, request, 0.0).items()} == {"a": 48, "b": 32}


def test_another_block_size_forgets_routed_prompts_and_keeps_the_capacity() -> None:
    cache_view = cache_view_of("a")
    cache = cache_of(cache_view, "a")
    cache.set_size(16, 64_000)
    route(cache_view, "a", prompt(1, 2))
    cache.set_size(64, 0)
    assert cache.capacity_blocks == cache.recency.capacity == 1000
    assert hit_tokens(cache_view, "a", lookup(tokens(1, 2, 3, 4))) == 0
    assert len(cache.recency) == 0


# Namespaces.


def test_adapters_share_no_blocks_with_their_base_model() -> None:
    cache_view = cache_view_of("a")
    cache = with_events(cache_of(cache_view, "a"))
    cache_view.set_models(cache, MODEL, ["alias"], ["fine", "other"])
    report_stored(cache, 1, 2)
    cache.blocks_stored(0, None, [101, 102], tokens(1, 2, more=0), SIZE, lora="fine")
    cache.blocks_removed(0, [2])
    models = (MODEL, "alias", "fine", "other")
    assert [hit_tokens(cache_view, "a", prompt(1, 2), model=model) for model in models] == [16, 16, 32, 0]
    route(cache_view, "a", prompt(8, 9), model="other")
    assert [hit_tokens(cache_view, "a", prompt(8, 9), model=model) for model in models] == [0, 0, 0, 32]


def test_two_models_share_no_blocks() -> None:
    cache_view = cache_view_of("a")
    other = cache_view.add_node("b", ["n"])
    report_stored(with_events(other), 1, 2)
    route(cache_view, "a", prompt(1, 2))
    assert set(cache_view.hits(MODEL, prompt(1, 2), 0.0)) == {"a"}
    assert set(cache_view.hits("n", prompt(1, 2), 0.0)) == {"b"}


def test_prompts_with_different_salts_share_no_blocks() -> None:
    cache_view = cache_view_of("a", "b")
    cache = with_events(cache_of(cache_view, "a"))
    report_stored(cache, 1, 2, salt="x")
    cache.blocks_stored(0, 2, [3], tokens(3, more=0), SIZE)  # the next block inherits the salt from its parent
    route(cache_view, "b", prompt(1, 2, 3, salt="x"))
    for name in "ab":
        assert hit_tokens(cache_view, name, prompt(1, 2, 3, salt="x")) == 48
        assert (
            hit_tokens(cache_view, name, prompt(1, 2, 3))
            == hit_tokens(cache_view, name, prompt(1, 2, 3, salt="y"))
            == 0
        )


def test_prompts_with_different_images_share_no_blocks() -> None:
    cache_view = cache_view_of("a", "b")
    report_stored(with_events(cache_of(cache_view, "a")), 1, 2, 3, extra=[None, b"cat", None])
    cat, dog = (((20, picture),) for picture in (b"cat", b"dog"))
    route(cache_view, "b", prompt(1, 2, 3, media=cat))
    for name in "ab":
        assert hit_tokens(cache_view, name, prompt(1, 2, 3, media=cat)) == 48
        assert (
            hit_tokens(cache_view, name, prompt(1, 2, 3, media=dog))
            == hit_tokens(cache_view, name, prompt(1, 2, 3))
            == 16
        )


def test_an_image_after_the_last_full_block_changes_nothing() -> None:
    cache_view = cache_view_of("a")
    route(cache_view, "a", prompt(1, 2))
    assert hit_tokens(cache_view, "a", prompt(1, 2, more=5, media=((34, b"cat"),))) == 32


def test_adding_a_node_again_changes_only_its_models() -> None:
    cache_view = cache_view_of("a")
    route(cache_view, "a", prompt(1, 2))
    assert cache_view.add_node("a") is cache_view.add_node("a", [MODEL, "alias"]) is cache_of(cache_view, "a")
    assert hit_tokens(cache_view, "a", prompt(1, 2), model="alias") == 32


def test_names_of_models_that_no_node_serves_are_forgotten() -> None:
    cache_view = CacheView(Index())
    other = cache_view.add_node("other", ["base", "alias"])
    for turn in range(5):
        cache = cache_view.add_node("n")
        cache_view.set_models(cache, f"base{turn}", [f"alias{turn}"], [f"adapter{turn}"])
        assert len(cache_view._models) == 5
    cache_view.set_models(other, "base", ["alias4"])
    assert cache_view._models["alias4"] == ("base", ""), "the latest node counts"
    cache_view.remove_node("n")
    assert cache_view._models == {"base": ("base", ""), "alias4": ("base", "")}
