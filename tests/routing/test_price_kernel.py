"""The kernel's hits and prices are those that Python defines, for any nodes, prompts and settings."""

from __future__ import annotations

import gc
import math
import subprocess
import sys
from array import array
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from warmroute._kernel._books import NodeState, SpeedState
from warmroute._kernel._index import BlockIndex, chain
from warmroute._kernel._price import CacheState, Hit, add_hits, match_hits, price_nodes
from warmroute.config import Health, Index, NodeConfig, Pricing, Routing
from warmroute.fleet.decode_speed import DecodeSpeed
from warmroute.fleet.fleet import Fleet
from warmroute.fleet.node import Node
from warmroute.fleet.speed import work
from warmroute.index.cache_view import CacheView
from warmroute.index.lookup import Lookup
from warmroute.index.node_cache import EXPECTED, ROUTED, NodeCache
from warmroute.index.reuse import BUCKETS, Reuse
from warmroute.index.tiers import WORTH
from warmroute.prompt.routing_request import RoutingRequest
from warmroute.routing import terms
from warmroute.routing.policies.price import TIE
from warmroute.routing.price import Price
from warmroute.routing.router import Router

NOW_S = 10_000.0


def floats(least: float, most: float) -> st.SearchStrategy[float]:
    return st.floats(least, most, allow_subnormal=False)


counts = st.integers(0, 200)
shares = floats(0.0, 1.0)


@st.composite
def fleets(draw: st.DrawFn) -> tuple[list[Node], list[NodeCache | None], CacheView]:
    """Nodes in any state, and what is believed of the caches of most of them."""
    cache_view = CacheView(Index(assumed_cache_tokens=16 * draw(st.integers(1, 50))))
    nodes: list[Node] = []
    caches: list[NodeCache | None] = []
    for number in range(draw(st.integers(1, 6))):
        node = Node(NodeConfig(url=f"http://n{number}:1"), Health())
        node.pending_work = draw(floats(-1e-6, 1e6))
        node.context, node.kv_new = draw(st.integers(0, 10**7)), draw(st.integers(0, 10**6))
        node.kv_usage, node.kv_delta = draw(shares), draw(floats(-1e6, 1e6))
        node.inflight, node.other_load = draw(counts), draw(counts)
        node.arrival_rate, node.arrival_s = draw(floats(0.0, 1.0)), NOW_S - draw(floats(0.0, 100.0))
        node.distance_ms = draw(st.sampled_from([0.0, 0.0, 140.0]))
        node.speed.ms_per_token, node.speed.factor = draw(floats(1e-4, 10.0)), draw(floats(0.01, 100.0))
        nodes.append(node)
        if draw(st.integers(0, 4)) == 0:
            caches.append(None)
            continue
        cache = cache_view.join(node.name, ["m"])
        cache.describe(draw(st.sampled_from([0, 16, 64])), draw(st.sampled_from([0, 300, 5000, 10**6])))
        for _ in range(draw(st.integers(0, 3))):
            cache.keep_answer(draw(st.integers(0, 4000)), NOW_S - draw(floats(0.0, 9000.0)))
        caches.append(cache)
    return nodes, caches, cache_view


@st.composite
def reuses(draw: st.DrawFn) -> Reuse:
    reuse = Reuse()
    reuse.chances = array("d", [draw(shares) for _ in range(BUCKETS)])
    return reuse


@st.composite
def paces(draw: st.DrawFn) -> DecodeSpeed:
    pace = DecodeSpeed()
    for _ in range(draw(st.integers(0, 5))):
        pace.saw_answer(draw(floats(0.1, 500.0)), draw(st.integers(0, 10**6)))
    return pace


pricings = st.builds(
    Pricing,
    room=st.booleans(),
    memory=st.booleans(),
    congestion=st.booleans(),
    max_saving_ms=floats(0.1, 1e5),
    locality=st.sampled_from([0.0, 0.3, 1.0]),
)


@given(
    fleet=fleets(), reuse=reuses(), pace=paces(), config=pricings, tokens=st.integers(0, 200_000),
    held=st.lists(shares, min_size=6, max_size=6), output=floats(1.0, 5000.0),
    behind=floats(0.0, 100.0), extra_ms=floats(0.0, 1e4),
    adapters=st.none() | st.lists(floats(0.0, 1e4), min_size=6, max_size=6),
    due=st.tuples(floats(-1e4, 1e6), st.sampled_from([0.0, 1e4])), more=st.integers(0, 50),
)  # fmt: skip
def test_prices_are_those_of_the_terms(
    fleet, reuse, pace, config, tokens, held, output, behind, extra_ms, adapters, due, more
) -> None:
    nodes, caches, _ = fleet
    hits = {
        node.name: Hit(int(share * tokens), share * tokens, 0)
        for node, share in zip(nodes, held, strict=False)
        if share > 0.3
    }
    settings = (config.max_saving_ms, config.locality, config.room, config.memory, config.congestion)
    adapter_ms = array("d", adapters[: len(nodes)]) if adapters is not None else None
    prices = price_nodes(
        tuple(nodes), tuple(caches), hits, reuse.chances, adapter_ms, NOW_S, (tokens, output), due, behind,
        pace, settings,
    )  # fmt: skip
    assert len(prices) == len(nodes)
    token_ms = [node.speed.factor * pace.token_ms(node.context) for node in nodes]
    plain = []
    for at, (node, cache, own_ms) in enumerate(zip(nodes, caches, token_ms, strict=True)):
        hit = hits.get(node.name)
        cached = hit.expected if hit is not None else 0.0
        plain.append(
            terms.price(
                node,
                cache,
                reuse,
                NOW_S,
                float(tokens),
                cached,
                output,
                own_ms,
                min(token_ms),
                behind,
                config,
                adapters[at] if adapters is not None else 0.0,
                *due,
            )
        )
    for at, price in enumerate(plain):
        assert Price(*prices[at]) == pytest.approx(price, rel=1e-9, abs=1e-9)

    made = [Price(*prices[at]) for at in range(len(nodes))]
    tied = [at for at, price in enumerate(made) if price.total <= min(made).total * TIE]
    light = min(nodes[at].load for at in tied)
    assert prices.cheapest(TIE) == tied
    assert prices.lightest(tied) == [at for at in tied if nodes[at].load == light]
    assert prices.mean_load == sum(node.load for node in nodes) / len(nodes)

    def is_crowded(at: int) -> bool:
        return made[at].cached > 0.0 and nodes[at].load > 1.25 * prices.mean_load + more

    first = min(range(len(made)), key=lambda at: made[at].total)
    assert prices.beyond_doubt(TIE, 1.25, more) == (first if len(tied) == 1 and not is_crowded(first) else -1)
    most_own = made[0].own + extra_ms
    within = [at for at, price in enumerate(made) if price.own <= most_own]
    assert prices.cheapest_within(most_own) == min(within, key=lambda at: made[at].total, default=-1)
    home = made[0]

    def as_good(at: int) -> bool:
        price = made[at]
        invested = work(price.new, price.cached) - work(home.new, home.cached)
        return price.own - invested * nodes[at].speed.ms_per_token <= home.own

    fitting = [at for at in within if nodes[at].load <= prices.mean_load and as_good(at)] if is_crowded(0) else []
    assert prices.second_home(0, 1.25, more, extra_ms) == min(fitting, key=lambda at: made[at].total, default=0)


# Hits.


def plain_hits(rows, owners, size, most, sure, is_sure, now_s, stale_s, gone_s) -> dict[str, tuple[int, float, int]]:
    found: dict[str, tuple[int, float, int]] = {}
    for place, *depths in rows:
        if place not in owners or owners[place][0].block_size != size:
            continue
        cache, rank = owners[place]
        if (rank == ROUTED and is_sure and cache.complete) or (rank >= 0 and cache.doubted):
            continue
        told = cache.told_confidence(now_s, stale_s, gone_s)
        limit, confidence = (sure, told) if rank >= 0 else (most, cache.accuracy.trust(now_s))
        gpu, cpu, disk, remote = (min(depth, limit) for depth in depths)
        if not remote:
            continue
        worth = gpu + WORTH[1] * (cpu - gpu) + WORTH[2] * (disk - cpu) + WORTH[3] * (remote - disk)
        hit = (remote * size, worth * size * confidence, rank)
        known = found.get(cache.name)
        if known is None or hit[1:] > known[1:]:
            found[cache.name] = hit
    return found


@given(st.data())
def test_hits_are_those_of_the_definition(data: st.DataObject) -> None:
    draw = data.draw
    cache_view = CacheView(Index())
    owners: dict[int, tuple[NodeCache, int]] = {}
    for number in range(draw(st.integers(1, 4))):
        cache = cache_view.join(f"n{number}", ["m"])
        cache.describe(draw(st.sampled_from([16, 16, 16, 32])), 0)
        cache.complete, cache.doubted = draw(st.booleans()), draw(st.integers(0, 5)) == 0
        cache.heard_s, cache.lag_s = NOW_S - draw(floats(0.0, 50.0)), draw(floats(0.0, 20.0))
        for _ in range(draw(st.integers(0, 2))):
            cache.accuracy.compare(draw(st.integers(0, 5000)), draw(st.integers(0, 5000)), NOW_S - 60 * draw(shares))
        for rank in draw(st.lists(st.sampled_from([ROUTED, EXPECTED, 0, 1]), unique=True)):
            owners[len(owners) * 3] = (cache, rank)
    depths = st.lists(st.integers(0, 20), min_size=4, max_size=4).map(sorted)
    places = draw(st.lists(st.integers(0, 50), unique=True, max_size=3)) + list(owners)
    rows = [(place, *draw(depths)) for place in dict.fromkeys(places)]
    most = draw(st.integers(0, 20))
    sure, is_sure = draw(st.integers(0, most)), draw(st.booleans())
    stale_s, gone_s = draw(floats(0.0, 20.0)), draw(floats(0.0, 60.0))
    found: dict[str, Hit] = {}
    add_hits(found, rows, owners, 16, (most, sure, is_sure), NOW_S, (stale_s, gone_s), WORTH[1:])
    plain = plain_hits(rows, owners, 16, most, sure, is_sure, NOW_S, stale_s, gone_s)
    assert set(found) == set(plain)
    for name, (tokens, expected, _rank) in plain.items():
        assert (found[name].tokens, found[name].expected) == (tokens, pytest.approx(expected, rel=1e-12))


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(1, 40)), max_size=12),
    st.integers(0, 3), st.integers(0, 40), st.sampled_from([0, 640]),
)  # fmt: skip
def test_hits_that_are_matched_are_those_of_the_rows(kept, prompt: int, length: int, sure: int) -> None:
    cache_view = CacheView(Index(assumed_cache_tokens=16 * 50))
    caches = [cache_view.join(f"n{number}", ["m"]) for number in range(4)]
    caches[3].follow(0)
    chains = [chain(7, None, array("I", [0] * 160 + [number] * 480), 16) for number in range(4)]
    for at, (node, which, blocks) in enumerate(kept):
        caches[node].keep(chains[which][: 8 * blocks], 0, float(at))
        if node == 3:
            cache_view.index.store_chain(caches[3].ranks[0], chains[which][: 8 * (blocks // 2)], 1)
    asked = chains[prompt][: 8 * length]
    common = (cache_view._owners, 16, (39, sure // 16, False), NOW_S, (1.0, 2.0), WORTH[1:])
    by_rows: dict[str, Hit] = {}
    add_hits(by_rows, cache_view.index.match(asked), *common)
    matched: dict[str, Hit] = {}
    match_hits(matched, cache_view.index, asked, *common)
    assert {name: repr(hit) for name, hit in matched.items()} == {name: repr(hit) for name, hit in by_rows.items()}


@pytest.mark.parametrize(
    ("wrong", "error"),
    [((None, b""), TypeError), ((1, b""), TypeError), ((2, [1]), TypeError), ((2, b"1"), ValueError)],
)
def test_what_cannot_be_matched_is_refused(wrong, error: type[Exception]) -> None:
    index, hashes = wrong
    given = BlockIndex(1 << 20) if index == 2 else index
    with pytest.raises(error):
        match_hits({}, given, hashes, {}, 16, (1, 1, True), NOW_S, (1.0, 2.0), WORTH[1:])


def test_of_hits_worth_the_same_the_rank_that_told_counts() -> None:
    cache = CacheView(Index()).join("n", ["m"])
    cache.heard_s = NOW_S
    rows = [(1, 4, 4, 4, 4), (2, 4, 4, 4, 4), (3, 4, 4, 4, 4)]
    found: dict[str, Hit] = {}
    owners = {1: (cache, ROUTED), 2: (cache, 1), 3: (cache, 0)}
    add_hits(found, rows, owners, 16, (9, 9, True), NOW_S, (1.0, 2.0), WORTH[1:])
    assert (found["n"].tokens, found["n"].expected, found["n"].rank) == (64, 64.0, 1)


# The state stays in step.


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(1, 400)), max_size=30))
def test_whatever_happens_to_a_cache_its_state_says_what_its_recency_says(steps: list[tuple[int, int]]) -> None:
    cache = CacheView(Index(assumed_cache_tokens=1600)).join("n", ["m"])
    prompt = kept = b""
    for at, (step, number) in enumerate(steps):
        if step == 0:
            prompt = array("Q", [number, *range(1000 * number, 1000 * number + 30)]).tobytes()
            kept, _ = cache.keep(prompt, 0, float(at))
        elif step == 1:
            cache.drop(prompt, kept)
        elif step == 2:
            cache.keep_answer(number, float(at))
        elif step == 3:
            cache.outlived(float(at) - number / 100)
        elif step == 4:
            cache.describe(0, 16 * number)
        elif step == 5:
            cache.describe(16 << number % 2, 0)
        else:
            cache.restarted()
        recency = cache.recency
        assert cache.free_blocks == recency.capacity - len(recency)
        assert cache.oldest_s == recency.oldest or (recency.oldest is None and math.isnan(cache.oldest_s))


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 40), st.integers(0, 700), st.booleans()), max_size=20))
def test_a_prompt_and_its_answer_are_kept_as_its_recency_and_the_index_would(steps) -> None:
    cache, twin = (CacheView(Index(assumed_cache_tokens=1600)).join("n", ["m"]) for _ in range(2))
    chains = [chain(7, None, array("I", [0] * 160 + [number] * 480), 16) for number in range(4)]
    for at, (which, blocks, tokens, prefilled) in enumerate(steps):
        prompt, now_s = chains[which][: 8 * blocks], float(at)
        uses = twin.recency.uses(prompt, tokens // 16, twin.prefilled_s) if tokens >= 16 else None
        assert cache.keep(prompt, tokens, now_s) == (twin._index.keep(twin.routed_place, prompt, now_s), uses)
        twin._recency_changed()
        assert (cache.free_blocks, cache.oldest_s) == (twin.free_blocks, twin.oldest_s)
        cache.keep_answer(tokens, now_s)
        if tokens >= 16:
            twin._index.remove_chain(twin.routed_place, twin.recency.push(tokens // 16, now_s), 0)
        assert (cache.free_blocks, cache.oldest_s) == twin.recency.room
        for other in chains:
            assert [row[1:] for row in cache._index.match(other)] == [row[1:] for row in twin._index.match(other)]
        if prefilled:
            cache.prefilled_s = twin.prefilled_s = now_s


def test_a_node_whose_cache_comes_or_goes_is_priced_with_what_there_is() -> None:
    fleet, cache_view = Fleet(Health()), CacheView(Index())
    node = fleet.add(NodeConfig(url="http://n:1", models=("m",)))
    fleet.check_passed(node, 0.0)
    router = Router(fleet, cache_view, Routing(policy="price"))
    lookup = Lookup(array("I", range(4000)).tobytes(), 4000, 4000)

    def room() -> float:
        price = router.decide(RoutingRequest("m"), 100.0, lookup).price
        assert price is not None
        return price.room

    assert room() == 0.0
    cache_view.join(node.name, ["m"]).describe(16, 1000)
    assert room() > 0.0
    cache_view.leave(node.name)
    assert room() == 0.0
    cache_view.join(node.name, ["m"]).describe(16, 2000)
    assert room() > 0.0


# What it refuses, and what it leaves behind.

COMMON = (None, 1.0, (1.0, 1.0), (0.0, 0.0), 0.0, DecodeSpeed(), (1.0, 1.0, True, True, True))
CHANCES = array("d", [0.0])


def a_node() -> Node:
    return Node(NodeConfig(url="http://n:1"), Health())


@pytest.mark.parametrize(
    "given",
    [
        ((object(),), (None,), {}, CHANCES),
        ((NodeState(),), (None,), {}, CHANCES),
        ((a_node(),), (object(),), {}, CHANCES),
        ((a_node(),), (None, None), {}, CHANCES),
        ((a_node(),), (None,), {"n:1": (1, 2.0, 3)}, CHANCES),
        ((a_node(),), (None,), {}, b""),
        ((a_node(),), (None,), {}, b"1234567"),
        ([a_node()], (None,), {}, CHANCES),
    ],
)
def test_what_is_no_node_or_cache_or_hit_is_refused(given) -> None:
    with pytest.raises((TypeError, ValueError)):
        price_nodes(*given, *COMMON)


def test_what_was_found_before_must_be_hits() -> None:
    cache = CacheView(Index()).join("n", ["m"])
    with pytest.raises(TypeError):
        add_hits({"n": 1.5}, [(0, 3, 3, 4, 5)], {0: (cache, ROUTED)}, 16, (9, 9, False), 1.0, (1.0, 2.0), WORTH[1:])


COLLECTED = """
import gc, struct
from warmroute._kernel._books import NodeState, PaceState, SpeedState
from warmroute._kernel._price import Hit, price_nodes
node = NodeState()
node.name, node.speed = "n", SpeedState()
class Last:
    def __init__(self): self.itself = self
    def __del__(self): del node.name
chances, hits, settings = struct.pack("d", 0.1), {"n": Hit(1, 1.0, 0)}, (1e9, 1.0, True, True, True)
given = (node,), (None,), hits, chances, None, 1.0, (100.0, 10.0), (0.0, 0.0), 0.0, PaceState(), settings
gc.disable()
Last()
gc.set_threshold(1, 1, 1)
gc.enable()
try: price_nodes(*given)
except TypeError: print("refused")
"""


def test_a_node_that_loses_its_name_to_the_collector_is_refused() -> None:
    ran = subprocess.run([sys.executable, "-c", COLLECTED], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["refused"]


def test_a_state_takes_only_what_it_can_hold() -> None:
    node, cache = a_node(), CacheState()
    for wrong in (None, 1.0, cache):
        with pytest.raises(TypeError):
            node.speed = wrong  # type: ignore[assignment]
    with pytest.raises(TypeError):
        del node.speed
    with pytest.raises(TypeError):
        node.inflight = "1"  # type: ignore[assignment]
    with pytest.raises(TypeError):
        cache.accuracy = SpeedState()  # type: ignore[assignment]
    with pytest.raises(AttributeError):
        print(cache.accuracy)
    for row in ((1,), (0, 1, 1, 1, "1"), 5):
        with pytest.raises(TypeError):
            add_hits({}, [row], {0: (CacheView(Index()).join("n"), 0)}, 16, (1, 1, True), 0.0, (1.0, 2.0), WORTH[1:])  # type: ignore[list-item]


def test_prices_that_are_no_numbers_still_name_a_node() -> None:
    node = a_node()
    node.pending_work = math.nan
    prices = price_nodes((node, node), (None, None), {}, CHANCES, *COMMON)
    assert prices.cheapest(TIE) == [0, 1] and prices.beyond_doubt(TIE, 1.0, 0.0) == -1
    with pytest.raises(TypeError):
        prices.beyond_doubt(TIE, 1.0)  # type: ignore[call-arg]
    with pytest.raises(IndexError):
        prices[2]
    with pytest.raises(IndexError):
        prices.lightest([2])
    with pytest.raises(IndexError):
        prices.second_home(2, 1.0, 0.0, 1.0)


def test_nothing_is_left_behind() -> None:
    node, random = a_node(), Random(1)
    cache = CacheView(Index()).join(node.name, ["m"])
    nodes = (node,) * 50

    def some() -> None:
        found: dict[str, Hit] = {}
        rows = [(number, 1, 1, 1, random.randrange(1, 9)) for number in range(20)]
        add_hits(found, rows, {3: (cache, ROUTED), 5: (cache, 0)}, 16, (9, 9, False), 0.0, (1.0, 2.0), WORTH[1:])
        prices = price_nodes(nodes, (cache,) * 50, found, CHANCES, *COMMON)
        prices.lightest(prices.cheapest(2.0))
        assert prices[0] and prices.mean_load == 0.0 and prices.cheapest_within(1e9) == 0
        with pytest.raises(TypeError):
            price_nodes((*nodes, None), (cache,) * 51, found, CHANCES, *COMMON)  # type: ignore[arg-type]

    some()
    gc.collect()
    before = [sys.getrefcount(one) for one in (nodes, node, cache, node.name, cache.name, node.speed, CHANCES)]
    blocks = sys.getallocatedblocks()
    for _ in range(300):
        some()
    gc.collect()
    assert [sys.getrefcount(one) for one in (nodes, node, cache, node.name, cache.name, node.speed, CHANCES)] == before
    assert sys.getallocatedblocks() - blocks < 200
