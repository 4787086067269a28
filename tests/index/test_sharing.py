"""Tenants know of each other's blocks only where they share: a few cases by hand, and any by chance."""

from __future__ import annotations

from collections import defaultdict

import pytest
from believed import MODEL, SIZE, beliefs_of, cache_of, follows, held, lookup, prompt, sends, tells, tokens
from hypothesis import given, settings
from hypothesis import strategies as st

from warmroute.index import BlockIndex, Tier, sharing
from warmroute.index.sharing import WHOLE, Sharing


@pytest.mark.parametrize("events", [True, False])
def test_a_tenant_does_not_know_of_what_another_one_sent(events):
    cache_view = beliefs_of("a")
    cache = cache_of(cache_view, "a")
    if events:
        follows(cache)
    sends(cache_view, "a", prompt(1, 2, 3, sharing="x"))
    if events:
        tells(cache, 1, 2, 3)
    assert held(cache_view, "a", prompt(1, 2, 3, sharing="x")) == 48
    assert held(cache_view, "a", prompt(1, 2, 3, sharing="y")) == 0


def test_a_group_knows_of_what_its_members_sent():
    cache_view = beliefs_of("a")
    sends(cache_view, "a", prompt(1, 2, 3, sharing="shared g"))  # whoever of the group it was
    assert held(cache_view, "a", prompt(1, 2, 3, sharing="shared g")) == 48
    assert held(cache_view, "a", prompt(1, 2, 3, sharing="only g")) == 0


def test_without_tenants_everybody_knows_all():
    cache_view = beliefs_of("a")
    sends(cache_view, "a", prompt(1, 2, 3))
    assert held(cache_view, "a", prompt(1, 2, 3)) == 48


def test_a_tenant_knows_of_others_blocks_as_far_as_it_sent_them_itself():
    cache_view = beliefs_of("a", "b")
    for cache in cache_view:
        follows(cache)
        tells(cache, 1, 2, 3, 4)
    sends(cache_view, "a", prompt(1, 2, 3, 4, sharing="x"))
    sends(cache_view, "b", prompt(1, 9, sharing="y"))
    assert held(cache_view, "a", prompt(1, 2, 3, 4, sharing="y")) == 16
    assert (
        held(cache_view, "b", prompt(1, 2, 3, 4, sharing="x")) == 64
    )  # what it sent to one node, it may know of another


def test_a_tenants_own_answers_count_where_nobody_else_began_like_that():
    cache_view = beliefs_of("a")
    cache = follows(cache_of(cache_view, "a"))
    sends(cache_view, "a", prompt(1, 2, sharing="x"))
    tells(cache, 1, 2, 30, 31)
    assert held(cache_view, "a", prompt(1, 2, 30, 31, 5, sharing="x")) == 64
    sends(cache_view, "a", prompt(1, 9, sharing="y"))
    assert held(cache_view, "a", prompt(1, 2, 30, 31, 5, sharing="x")) == 32  # it may be an answer to the other one


def test_guessing_an_answers_beginning_does_not_show_its_end():
    cache_view = beliefs_of("a")
    cache = follows(cache_of(cache_view, "a"))
    sends(cache_view, "a", prompt(1, 2, sharing="x"))
    tells(cache, 1, 2, 30, 31)
    sends(cache_view, "a", prompt(1, 2, 30, 77, sharing="y"))
    assert held(cache_view, "a", prompt(1, 2, 30, 31, sharing="y")) == 48


def test_what_a_tenant_sends_to_no_avail_is_still_its_own():
    cache_view = beliefs_of("a")
    tells(follows(cache_of(cache_view, "a")), 1, 2, 3)
    assert held(cache_view, "a", prompt(1, 2, 3, sharing="y")) == 0
    sends(cache_view, "a", prompt(1, 2, sharing="y")).withdraw()
    sends(cache_view, "a", prompt(1, 5, sharing="x"))
    assert held(cache_view, "a", prompt(1, 2, 3, sharing="y")) == 32


def test_what_is_kept_of_tenants_is_bounded_and_the_largest_pays(monkeypatch):
    monkeypatch.setattr(sharing, "KEPT_BLOCKS", 100)
    index = BlockIndex(1 << 22)
    tenants = Sharing(index)
    chains = {
        number: lookup(tokens(*range(10 * number, 10 * number + 10))).blocks("m", "", SIZE) for number in range(40)
    }
    tenants.sent("small", chains[0], 0.0)
    for number in range(1, 40):
        tenants.sent("large", chains[number], float(number))
        assert index.stats()["pairs"] <= 100
    assert tenants.owned_depth("small", index.match(chains[0])) == WHOLE
    assert tenants.owned_depth("large", index.match(chains[1])) == 0
    assert tenants.owned_depth("large", index.match(chains[39])) == WHOLE
    assert tenants.owned_depth("nobody", index.match(chains[0])) == 0


def test_a_tenant_alone_may_fill_what_is_kept(monkeypatch):
    monkeypatch.setattr(sharing, "KEPT_BLOCKS", 8)
    index = BlockIndex(1 << 22)
    tenants = Sharing(index)
    for number in range(20):
        chain = lookup(tokens(*range(100 * number, 100 * number + 12))).blocks("m", "", SIZE)
        tenants.sent("x", chain, float(number))
        assert index.stats()["pairs"] == 8
        assert tenants.owned_depth("x", [(0, 8, 8, 8, 8)]) == WHOLE


# By chance. Two blocks to choose from and short prompts: everything begins alike, and guesses are often right.

blocks = st.lists(st.integers(1, 2), min_size=1, max_size=4)
requests = st.lists(
    st.tuples(st.sampled_from("xyz"), st.sampled_from("ab"), blocks, st.lists(st.integers(1, 2), max_size=2)),
    min_size=1,
    max_size=12,
)


@given(requests, st.sampled_from(["told", "routed", "both"]))
@settings(max_examples=300)
def test_no_tenants_hit_is_more_than_it_sent_and_answers_that_only_it_can_have_got(asked, source):
    """x and y are tenants of their own; z shares with x."""
    cache_view = beliefs_of("a", "b")
    caches = {name: cache_of(cache_view, name) for name in "ab"}
    if source != "routed":
        for cache in caches.values():
            cache.follow(0)
            cache.tells_all(0, source == "told")
            cache.heard(0.0)
    group = {"x": "shared g", "y": "only y", "z": "shared g"}
    owners: dict[tuple[int, ...], set[str]] = defaultdict(set)
    """Each beginning that was sent or answered: who caused it."""
    sent: dict[str, set[tuple[int, ...]]] = defaultdict(set)
    names: dict[tuple[int, ...], int] = {}
    stored: dict[str, set[tuple[int, ...]]] = defaultdict(set)
    for tenant, node, wanted, answer in asked:
        mine = group[tenant]
        request = prompt(*wanted, sharing=mine)
        for one in cache_view.hits(MODEL, request, 0.0).values():
            depth = one.tokens // SIZE
            for at in range(1, depth + 1):
                beginning = tuple(wanted[:at])
                assert beginning in sent[mine] or owners[beginning] == {mine}, (beginning, dict(owners))
        prediction = sends(cache_view, node, request)
        cache_view.first_token(prediction, 0.0)
        whole = (*wanted, *answer)
        for at in range(1, len(whole) + 1):
            beginning = whole[:at]
            owners[beginning].add(mine)
            if at <= len(wanted):
                sent[mine].add(beginning)
            if source != "routed" and beginning not in stored[node]:
                stored[node].add(beginning)
                name = names.setdefault(beginning, len(names) + 1)
                parent = names[beginning[:-1]] if at > 1 else None
                assert caches[node].stored(0, parent, [name], tokens(beginning[-1], more=0), SIZE, Tier.GPU)
