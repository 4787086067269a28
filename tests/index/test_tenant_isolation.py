"""Tenants see each other's cache hits only if they share: some cases by hand, then random ones."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
from cache_fixtures import (
    MODEL,
    SIZE,
    cache_of,
    cache_view_of,
    hit_tokens,
    lookup,
    prompt,
    report_stored,
    route,
    tokens,
    with_events,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from warmroute._kernel import BlockIndex
from warmroute.core import tenant_isolation
from warmroute.core.node_cache import Tier
from warmroute.core.tenant_isolation import UNLIMITED, TenantIsolation


@pytest.mark.parametrize("events", [True, False])
def test_a_tenant_gets_no_hits_from_prompts_of_another(events: bool) -> None:
    cache_view = cache_view_of("a")
    cache = cache_of(cache_view, "a")
    if events:
        with_events(cache)
    route(cache_view, "a", prompt(1, 2, 3, cache_group="x"))
    if events:
        report_stored(cache, 1, 2, 3)
    assert hit_tokens(cache_view, "a", prompt(1, 2, 3, cache_group="x")) == 48
    assert hit_tokens(cache_view, "a", prompt(1, 2, 3, cache_group="y")) == 0


def test_tenants_of_one_group_share_hits() -> None:
    cache_view = cache_view_of("a")
    route(cache_view, "a", prompt(1, 2, 3, cache_group="shared g"))
    assert hit_tokens(cache_view, "a", prompt(1, 2, 3, cache_group="shared g")) == 48
    assert hit_tokens(cache_view, "a", prompt(1, 2, 3, cache_group="only g")) == 0


def test_without_tenants_all_requests_share_hits() -> None:
    cache_view = cache_view_of("a")
    route(cache_view, "a", prompt(1, 2, 3))
    assert hit_tokens(cache_view, "a", prompt(1, 2, 3)) == 48


def test_a_hit_is_as_deep_as_the_blocks_that_the_tenant_sent_itself() -> None:
    cache_view = cache_view_of("a", "b")
    for cache in cache_view:
        with_events(cache)
        report_stored(cache, 1, 2, 3, 4)
    route(cache_view, "a", prompt(1, 2, 3, 4, cache_group="x"))
    route(cache_view, "b", prompt(1, 9, cache_group="y"))
    assert hit_tokens(cache_view, "a", prompt(1, 2, 3, 4, cache_group="y")) == 16
    hit_on_another_node = hit_tokens(cache_view, "b", prompt(1, 2, 3, 4, cache_group="x"))
    assert hit_on_another_node == 64


def test_response_blocks_count_if_no_other_tenant_sent_the_same_first_block() -> None:
    cache_view = cache_view_of("a")
    cache = with_events(cache_of(cache_view, "a"))
    route(cache_view, "a", prompt(1, 2, cache_group="x"))
    report_stored(cache, 1, 2, 30, 31)
    assert hit_tokens(cache_view, "a", prompt(1, 2, 30, 31, 5, cache_group="x")) == 64
    route(cache_view, "a", prompt(1, 9, cache_group="y"))
    # The response may have gone to y.
    assert hit_tokens(cache_view, "a", prompt(1, 2, 30, 31, 5, cache_group="x")) == 32


@pytest.mark.parametrize("events", [True, False])
def test_a_prompt_of_which_a_node_has_more_than_its_tenant_may_learn_has_hidden_hits(events: bool) -> None:
    cache_view = cache_view_of("a", "b")
    cache = cache_of(cache_view, "a")
    if events:
        with_events(cache)

    def hides(name: str, *blocks: int, **about: Any) -> bool:
        prediction = route(cache_view, name, prompt(*blocks, **about))
        hides = prediction.has_hidden_hits
        prediction.withdraw()
        return hides

    assert not hides("a", 1, 2, 3, cache_group="x"), "nobody has sent it"
    pending = route(cache_view, "a", prompt(1, 2, 3, cache_group="x"))
    assert hides("a", 1, 2, 3, cache_group="y"), "the node is prefilling it"
    if events:
        report_stored(cache, 1, 2, 3)
        pending.end_pending()
    assert hides("a", 1, 2, 3, cache_group="z")
    assert not hides("a", 1, 2, 3, 4, cache_group="z"), "z has sent three blocks by now, and the node has no more"
    assert not hides("b", 1, 2, 3, cache_group="w"), "another node has them"
    route(cache_view, "b", prompt(1, cache_group="u"))
    assert hides("a", 1, 2, 3, cache_group="u"), "u has sent only the first block"
    assert not hides("a", 9, 8, 7, cache_group="v"), "other blocks"
    assert not hides("a", 1, 2, 3, cache_group="x"), "x has sent it"
    assert not hides("a", 1, 2, 3), "without tenants, nothing is hidden"


def test_guessing_the_start_of_a_response_does_not_reveal_its_end() -> None:
    cache_view = cache_view_of("a")
    cache = with_events(cache_of(cache_view, "a"))
    route(cache_view, "a", prompt(1, 2, cache_group="x"))
    report_stored(cache, 1, 2, 30, 31)
    route(cache_view, "a", prompt(1, 2, 30, 77, cache_group="y"))
    assert hit_tokens(cache_view, "a", prompt(1, 2, 30, 31, cache_group="y")) == 48


def test_a_failed_request_still_counts_as_sent() -> None:
    cache_view = cache_view_of("a")
    report_stored(with_events(cache_of(cache_view, "a")), 1, 2, 3)
    assert hit_tokens(cache_view, "a", prompt(1, 2, 3, cache_group="y")) == 0
    route(cache_view, "a", prompt(1, 2, cache_group="y")).withdraw()
    route(cache_view, "a", prompt(1, 5, cache_group="x"))
    assert hit_tokens(cache_view, "a", prompt(1, 2, 3, cache_group="y")) == 32


def test_memory_is_bounded_and_the_largest_tenant_loses_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tenant_isolation, "MAX_BLOCKS", 100)
    index = BlockIndex(1 << 22)
    tenants = TenantIsolation(index)
    chains = {
        number: lookup(tokens(*range(10 * number, 10 * number + 10))).blocks("m", "", SIZE) for number in range(40)
    }
    tenants.record("small", chains[0], 0.0)
    for number in range(1, 40):
        tenants.record("large", chains[number], float(number))
        assert index.stats()["pairs"] <= 100
    assert tenants.visible_depth("small", index.match(chains[0])) == UNLIMITED
    assert tenants.visible_depth("large", index.match(chains[1])) == 0
    assert tenants.visible_depth("large", index.match(chains[39])) == UNLIMITED
    assert tenants.visible_depth("nobody", index.match(chains[0])) == 0


def test_a_single_tenant_may_use_the_whole_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tenant_isolation, "MAX_BLOCKS", 8)
    index = BlockIndex(1 << 22)
    tenants = TenantIsolation(index)
    for number in range(20):
        chain = lookup(tokens(*range(100 * number, 100 * number + 12))).blocks("m", "", SIZE)
        tenants.record("x", chain, float(number))
        assert index.stats()["pairs"] == 8
        assert tenants.visible_depth("x", [(0, 8, 8, 8, 8)]) == UNLIMITED


# Random cases. Two blocks and short prompts: most prompts share prefixes, and guesses are often right.

blocks = st.lists(st.integers(1, 2), min_size=1, max_size=4)
requests = st.lists(
    st.tuples(st.sampled_from("xyz"), st.sampled_from("ab"), blocks, st.lists(st.integers(1, 2), max_size=2)),
    min_size=1,
    max_size=12,
)


@given(requests, st.sampled_from(["events", "routed", "both"]))
@settings(max_examples=300)
def test_hits_are_limited_to_own_prompts_and_own_responses(
    requests: list[tuple[str, str, list[int], list[int]]], source: str
) -> None:
    """x and y are tenants of their own; z shares with x."""
    cache_view = cache_view_of("a", "b")
    caches = {name: cache_of(cache_view, name) for name in "ab"}
    if source != "routed":
        for cache in caches.values():
            cache.add_rank(0)
            cache.set_complete(0, source == "events")
            cache.last_contact_s = 0.0
    group = {"x": "shared g", "y": "only y", "z": "shared g"}
    owners: dict[tuple[int, ...], set[str]] = defaultdict(set)
    """Prefix of a prompt or response → the groups that caused it."""
    sent: dict[str, set[tuple[int, ...]]] = defaultdict(set)
    names: dict[tuple[int, ...], int] = {}
    stored: dict[str, set[tuple[int, ...]]] = defaultdict(set)
    for tenant, node, wanted, answer in requests:
        mine = group[tenant]
        request = prompt(*wanted, cache_group=mine)
        for one in cache_view.hits(MODEL, request, 0.0).values():
            depth = one.tokens // SIZE
            for at in range(1, depth + 1):
                prefix = tuple(wanted[:at])
                assert prefix in sent[mine] or owners[prefix] == {mine}, (prefix, dict(owners))
        prediction = route(cache_view, node, request)
        cache_view.first_token(prediction, 0.0)
        whole = (*wanted, *answer)
        for at in range(1, len(whole) + 1):
            prefix = whole[:at]
            owners[prefix].add(mine)
            if at <= len(wanted):
                sent[mine].add(prefix)
            if source != "routed" and prefix not in stored[node]:
                stored[node].add(prefix)
                name = names.setdefault(prefix, len(names) + 1)
                parent = names[prefix[:-1]] if at > 1 else None
                assert caches[node].blocks_stored(0, parent, [name], tokens(prefix[-1], more=0), SIZE, Tier.GPU)
