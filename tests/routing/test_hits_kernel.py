"""The kernel's hits equal the reference in Python, and a cache's state follows its recency list."""

from __future__ import annotations

import math
from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from warmroute._kernel import BlockIndex, Hit, add_hits, hash_blocks, match_hits
from warmroute.config import Index
from warmroute.core.cache_view import CacheView
from warmroute.core.node_cache import PENDING, ROUTED, SAVED_SHARE, NodeCache

NOW_S = 10_000.0


def floats(least: float, most: float) -> st.SearchStrategy[float]:
    return st.floats(least, most, allow_subnormal=False)


shares = floats(0.0, 1.0)


def reference_hits(
    rows: list[tuple[int, int, int, int, int]],
    owners: dict[int, tuple[NodeCache, int]],
    size: int,
    most: int,
    sure: int,
    is_sure: bool,
    now_s: float,
    stale_s: float,
    gone_s: float,
) -> dict[str, tuple[int, float, int]]:
    found: dict[str, tuple[int, float, int]] = {}
    for holder, *depths in rows:
        if holder not in owners or owners[holder][0].block_size != size:
            continue
        cache, rank = owners[holder]
        if (rank == ROUTED and is_sure and cache.complete) or (rank >= 0 and cache.token_mismatch):
            continue
        event_confidence = cache.event_confidence(now_s, stale_s, gone_s)
        limit, confidence = (sure, event_confidence) if rank >= 0 else (most, cache.accuracy.trust(now_s))
        gpu, cpu, disk, remote = (min(depth, limit) for depth in depths)
        if not remote:
            continue
        worth = gpu + SAVED_SHARE[1] * (cpu - gpu) + SAVED_SHARE[2] * (disk - cpu) + SAVED_SHARE[3] * (remote - disk)
        hit = (remote * size, worth * size * confidence, rank)
        known = found.get(cache.name)
        if known is None or hit[1:] > known[1:]:
            found[cache.name] = hit
    return found


@given(st.data())
def test_hits_equal_the_reference(data: st.DataObject) -> None:
    draw = data.draw
    cache_view = CacheView(Index())
    owners: dict[int, tuple[NodeCache, int]] = {}
    for number in range(draw(st.integers(1, 4))):
        cache = cache_view.add_node(f"n{number}", ["m"])
        cache.set_size(draw(st.sampled_from([16, 16, 16, 32])), 0)
        cache.complete, cache.token_mismatch = draw(st.booleans()), draw(st.integers(0, 5)) == 0
        cache.last_contact_s, cache.event_lag_s = NOW_S - draw(floats(0.0, 50.0)), draw(floats(0.0, 20.0))
        for _ in range(draw(st.integers(0, 2))):
            cache.accuracy.compare(draw(st.integers(0, 5000)), draw(st.integers(0, 5000)), NOW_S - 60 * draw(shares))
        for rank in draw(st.lists(st.sampled_from([ROUTED, PENDING, 0, 1]), unique=True)):
            owners[len(owners) * 3] = (cache, rank)
    depths = st.lists(st.integers(0, 20), min_size=4, max_size=4).map(sorted)
    holders = draw(st.lists(st.integers(0, 50), unique=True, max_size=3)) + list(owners)
    rows = []
    for holder in dict.fromkeys(holders):
        gpu, cpu, disk, remote = draw(depths)
        rows.append((holder, gpu, cpu, disk, remote))
    most = draw(st.integers(0, 20))
    sure, is_sure = draw(st.integers(0, most)), draw(st.booleans())
    stale_s, gone_s = draw(floats(0.0, 20.0)), draw(floats(0.0, 60.0))
    found: dict[str, Hit] = {}
    add_hits(found, rows, owners, 16, (most, sure, is_sure), NOW_S, (stale_s, gone_s), SAVED_SHARE[1:])
    reference = reference_hits(rows, owners, 16, most, sure, is_sure, NOW_S, stale_s, gone_s)
    assert set(found) == set(reference)
    for name, (tokens, expected, _rank) in reference.items():
        assert found[name].tokens == tokens
        assert found[name].expected == pytest.approx(expected, rel=1e-12)


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(1, 40)), max_size=12),
    st.integers(0, 3), st.integers(0, 40), st.sampled_from([0, 640]),
)  # fmt: skip
def test_matched_hits_equal_the_hits_of_the_rows(
    kept: list[tuple[int, int, int]], prompt: int, length: int, sure: int
) -> None:
    cache_view = CacheView(Index(assumed_cache_tokens=16 * 50))
    caches = [cache_view.add_node(f"n{number}", ["m"]) for number in range(4)]
    caches[3].add_rank(0)
    chains = [hash_blocks(7, None, array("I", [0] * 160 + [number] * 480), 16) for number in range(4)]
    for at, (node, which, blocks) in enumerate(kept):
        caches[node].record_routed(chains[which][: 8 * blocks], 0, float(at))
        if node == 3:
            cache_view.index.store_hashes(caches[3].ranks[0], chains[which][: 8 * (blocks // 2)], 1)
    looked_up = chains[prompt][: 8 * length]
    common = (cache_view._owners, 16, (39, sure // 16, False), NOW_S, (1.0, 2.0), SAVED_SHARE[1:])
    by_rows: dict[str, Hit] = {}
    add_hits(by_rows, cache_view.index.match(looked_up), *common)
    matched: dict[str, Hit] = {}
    match_hits(matched, cache_view.index, looked_up, *common)
    assert {name: repr(hit) for name, hit in matched.items()} == {name: repr(hit) for name, hit in by_rows.items()}


@pytest.mark.parametrize(
    ("wrong", "error"),
    [((None, b""), TypeError), ((1, b""), TypeError), ((2, [1]), TypeError), ((2, b"1"), ValueError)],
)
def test_wrong_arguments_to_match_are_rejected(wrong: tuple[Any, Any], error: type[Exception]) -> None:
    index, hashes = wrong
    given = BlockIndex(1 << 20) if index == 2 else index
    with pytest.raises(error):
        match_hits({}, given, hashes, {}, 16, (1, 1, True), NOW_S, (1.0, 2.0), SAVED_SHARE[1:])


def test_of_equal_hits_the_rank_with_events_counts() -> None:
    cache = CacheView(Index()).add_node("n", ["m"])
    cache.last_contact_s = NOW_S
    rows = [(1, 4, 4, 4, 4), (2, 4, 4, 4, 4), (3, 4, 4, 4, 4)]
    found: dict[str, Hit] = {}
    owners = {1: (cache, ROUTED), 2: (cache, 1), 3: (cache, 0)}
    add_hits(found, rows, owners, 16, (9, 9, True), NOW_S, (1.0, 2.0), SAVED_SHARE[1:])
    assert (found["n"].tokens, found["n"].expected, found["n"].rank) == (64, 64.0, 1)


def test_earlier_hits_must_be_hits() -> None:
    cache = CacheView(Index()).add_node("n", ["m"])
    found: dict[str, Any] = {"n": 1.5}
    with pytest.raises(TypeError):
        add_hits(found, [(0, 3, 3, 4, 5)], {0: (cache, ROUTED)}, 16, (9, 9, False), 1.0, (1.0, 2.0), SAVED_SHARE[1:])


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(1, 400)), max_size=30))
def test_the_state_of_a_cache_follows_its_recency_list(steps: list[tuple[int, int]]) -> None:
    cache = CacheView(Index(assumed_cache_tokens=1600)).add_node("n", ["m"])
    prompt = kept = b""
    for at, (step, number) in enumerate(steps):
        if step == 0:
            prompt = array("Q", [number, *range(1000 * number, 1000 * number + 30)]).tobytes()
            kept, _ = cache.record_routed(prompt, 0, float(at))
        elif step == 1:
            cache.undo_routed(prompt, kept)
        elif step == 2:
            cache.record_output(number, float(at))
        elif step == 3:
            cache.evict_older_than(float(at) - number / 100)
        elif step == 4:
            cache.set_size(0, 16 * number)
        elif step == 5:
            cache.set_size(16 << number % 2, 0)
        else:
            cache.restarted()
        recency = cache.recency
        assert cache.free_blocks == recency.capacity - len(recency)
        assert cache.oldest_s == recency.oldest or (recency.oldest is None and math.isnan(cache.oldest_s))


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 40), st.integers(0, 700), st.booleans()), max_size=20))
def test_a_cache_records_prompts_and_outputs_like_its_recency_list_and_the_index(
    steps: list[tuple[int, int, int, bool]],
) -> None:
    cache, twin = (CacheView(Index(assumed_cache_tokens=1600)).add_node("n", ["m"]) for _ in range(2))
    chains = [hash_blocks(7, None, array("I", [0] * 160 + [number] * 480), 16) for number in range(4)]
    for at, (which, blocks, tokens, prefilled) in enumerate(steps):
        prompt, now_s = chains[which][: 8 * blocks], float(at)
        uses = twin.recency.last_uses(prompt, tokens // 16, twin.prefilled_s) if tokens >= 16 else None
        assert cache.record_routed(prompt, tokens, now_s) == (
            twin._index.touch(twin.routed_holder, prompt, now_s),
            uses,
        )
        twin._update_room()
        assert (cache.free_blocks, cache.oldest_s) == (twin.free_blocks, twin.oldest_s)
        cache.record_output(tokens, now_s)
        if tokens >= 16:
            twin._index.remove_hashes(twin.routed_holder, twin.recency.add_anonymous(tokens // 16, now_s), 0)
        assert (cache.free_blocks, cache.oldest_s) == twin.recency.room
        for other in chains:
            assert [row[1:] for row in cache._index.match(other)] == [row[1:] for row in twin._index.match(other)]
        if prefilled:
            cache.prefilled_s = twin.prefilled_s = now_s
