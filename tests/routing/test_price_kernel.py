"""The kernel's prices equal the reference in Python, for any nodes, prompts and settings."""

from __future__ import annotations

import gc
import math
import subprocess
import sys
from array import array
from random import Random
from typing import Any

import price_formulas
import pytest
from accounting_reference import record_token_ms
from hypothesis import given
from hypothesis import strategies as st

from warmroute._kernel import CacheState, Hit, NodeState, SpeedState, add_hits, price_nodes
from warmroute.config import Health, Index, NodeConfig, Pricing, Routing
from warmroute.core.cache_view import CacheView
from warmroute.core.decision_record import TIE, Price
from warmroute.core.fleet import Fleet
from warmroute.core.messages import Lookup, RoutingRequest
from warmroute.core.node import Node
from warmroute.core.node_cache import ROUTED, SAVED_SHARE, NodeCache
from warmroute.core.prefill_work import work
from warmroute.core.reuse import BUCKETS, Reuse
from warmroute.core.router import Router
from warmroute.core.speeds import DecodeSpeed

NOW_S = 10_000.0


def floats(least: float, most: float) -> st.SearchStrategy[float]:
    return st.floats(least, most, allow_subnormal=False)


counts = st.integers(0, 200)
shares = floats(0.0, 1.0)


@st.composite
def fleets(draw: st.DrawFn) -> tuple[list[Node], list[NodeCache | None], CacheView]:
    """Nodes in any state, most of them with a cache."""
    cache_view = CacheView(Index(assumed_cache_tokens=16 * draw(st.integers(1, 50))))
    nodes: list[Node] = []
    caches: list[NodeCache | None] = []
    for number in range(draw(st.integers(1, 6))):
        node = Node(NodeConfig(url=f"http://n{number}:1"), Health())
        node.pending_work = draw(floats(-1e-6, 1e6))
        node.context_tokens, node.kv_new = draw(st.integers(0, 10**7)), draw(st.integers(0, 10**6))
        node.kv_usage, node.kv_delta = draw(shares), draw(floats(-1e6, 1e6))
        node.kv_pressure, node.queue_ms = draw(shares), draw(st.just(0.0) | floats(0.0, 6e4))
        node.inflight, node.other_load = draw(counts), draw(counts)
        node.arrival_rate, node.arrival_s = draw(floats(0.0, 1.0)), NOW_S - draw(floats(0.0, 100.0))
        node.distance_ms = draw(st.sampled_from([0.0, 0.0, 140.0]))
        node.speed.ms_per_token, node.speed.factor = draw(floats(1e-4, 10.0)), draw(floats(0.01, 100.0))
        nodes.append(node)
        if draw(st.integers(0, 4)) == 0:
            caches.append(None)
            continue
        cache = cache_view.add_node(node.name, ["m"])
        cache.set_size(draw(st.sampled_from([0, 16, 64])), draw(st.sampled_from([0, 300, 5000, 10**6])))
        for _ in range(draw(st.integers(0, 3))):
            cache.record_output(draw(st.integers(0, 4000)), NOW_S - draw(floats(0.0, 9000.0)))
        caches.append(cache)
    return nodes, caches, cache_view


@st.composite
def reuses(draw: st.DrawFn) -> Reuse:
    reuse = Reuse()
    reuse.chances = array("d", [draw(shares) for _ in range(BUCKETS)])
    return reuse


@st.composite
def decode_speeds(draw: st.DrawFn) -> DecodeSpeed:
    decode_speed = DecodeSpeed()
    for _ in range(draw(st.integers(0, 5))):
        record_token_ms(decode_speed, draw(floats(0.1, 500.0)), draw(st.integers(0, 10**6)))
    return decode_speed


pricings = st.builds(
    Pricing,
    room=st.booleans(),
    memory=st.booleans(),
    congestion=st.booleans(),
    max_saving_ms=floats(0.1, 1e5),
    cache_weight=st.sampled_from([0.0, 0.3, 1.0]),
)


@given(
    fleet=fleets(), reuse=reuses(), decode_speed=decode_speeds(), config=pricings, tokens=st.integers(0, 200_000),
    held=st.lists(shares, min_size=6, max_size=6), output=floats(1.0, 5000.0),
    behind=floats(0.0, 100.0), extra_ms=floats(0.0, 1e4),
    adapters=st.none() | st.lists(floats(0.0, 1e4), min_size=6, max_size=6),
    reserved=st.none() | st.lists(floats(0.0, 1.0), min_size=6, max_size=6), prompts=st.sampled_from([1, 2, 64]),
    due=st.tuples(floats(-1e4, 1e6), st.sampled_from([0.0, 1e4])), more=st.integers(0, 50),
)  # fmt: skip
def test_prices_equal_the_reference(
    fleet: tuple[list[Node], list[NodeCache | None], CacheView], reuse: Reuse, decode_speed: DecodeSpeed,
    config: Pricing, tokens: int, held: list[float], output: float, behind: float, extra_ms: float,
    adapters: list[float] | None, reserved: list[float] | None, prompts: int, due: tuple[float, float], more: int,
) -> None:  # fmt: skip
    nodes, caches, _ = fleet
    hits = {
        node.name: Hit(int(share * tokens), share * tokens, 0)
        for node, share in zip(nodes, held, strict=False)
        if share > 0.3
    }
    settings = (config.max_saving_ms, config.cache_weight, config.room, config.memory, config.congestion)
    adapter_ms = array("d", adapters[: len(nodes)]) if adapters is not None else None
    reserved_rates = array("d", reserved[: len(nodes)]) if reserved is not None else None
    prices = price_nodes(
        tuple(nodes), tuple(caches), hits, reuse.chances, adapter_ms, reserved_rates, NOW_S, (tokens, output, prompts),
        due, behind, decode_speed, settings,
    )  # fmt: skip
    assert len(prices) == len(nodes)
    factors = [price_formulas.decode_factor(node.speed.factor) for node in nodes]
    token_ms = [
        factor * decode_speed.token_ms(node.context_tokens) for factor, node in zip(factors, nodes, strict=True)
    ]
    reference = []
    for at, (node, cache, own_ms) in enumerate(zip(nodes, caches, token_ms, strict=True)):
        hit = hits.get(node.name)
        cached = hit.expected if hit is not None else 0.0
        reference.append(
            price_formulas.price(
                node,
                cache,
                reuse,
                NOW_S,
                float(tokens),
                cached,
                output,
                own_ms,
                min(token_ms),
                min(node.speed.ms_per_token for node in nodes),
                behind,
                config,
                adapters[at] if adapters is not None else 0.0,
                *due,
                prompts=prompts,
                reserved_rate=reserved[at] if reserved is not None else 0.0,
            )
        )
    for at, price in enumerate(reference):
        assert Price(*prices[at]) == pytest.approx(price, rel=1e-9, abs=1e-9)

    made = [Price(*prices[at]) for at in range(len(nodes))]
    tied = [at for at, price in enumerate(made) if price.total <= min(made).total * TIE]
    light = min(nodes[at].load for at in tied)
    assert prices.cheapest(TIE) == tied
    assert prices.least_loaded(tied) == [at for at in tied if nodes[at].load == light]
    assert prices.mean_load == sum(node.load for node in nodes) / len(nodes)

    def is_crowded(at: int) -> bool:
        return made[at].cached > 0.0 and nodes[at].load > 1.25 * prices.mean_load + more

    first = min(range(len(made)), key=lambda at: made[at].total)
    assert prices.clear_winner(TIE, 1.25, more) == (first if len(tied) == 1 and not is_crowded(first) else -1)
    most_own = made[0].own + extra_ms
    within = [at for at, price in enumerate(made) if price.own <= most_own]
    assert prices.cheapest_within(most_own) == min(within, key=lambda at: made[at].total, default=-1)
    home = made[0]

    def as_good(at: int) -> bool:
        price = made[at]
        extra_work = work(price.new, price.cached, prompts) - work(home.new, home.cached, prompts)
        return price.own - extra_work * nodes[at].speed.ms_per_token <= home.own

    eligible = [at for at in within if nodes[at].load <= prices.mean_load and as_good(at)] if is_crowded(0) else []
    assert prices.second_home(0, 1.25, more, extra_ms) == min(eligible, key=lambda at: made[at].total, default=0)


def test_prices_follow_caches_that_join_and_leave() -> None:
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
    cache_view.add_node(node.name, ["m"]).set_size(16, 1000)
    assert room() > 0.0
    cache_view.remove_node(node.name)
    assert room() == 0.0
    cache_view.add_node(node.name, ["m"]).set_size(16, 2000)
    assert room() > 0.0


# Wrong arguments and leaks.

COMMON: tuple[Any, ...] = (None, None, 1.0, (1.0, 1.0, 1), (0.0, 0.0), 0.0, DecodeSpeed(), (1.0, 1.0, True, True, True))
CHANCES = array("d", [0.0])


def make_node() -> Node:
    return Node(NodeConfig(url="http://n:1"), Health())


@pytest.mark.parametrize(
    "given",
    [
        ((object(),), (None,), {}, CHANCES),
        ((NodeState(),), (None,), {}, CHANCES),
        ((make_node(),), (object(),), {}, CHANCES),
        ((make_node(),), (None, None), {}, CHANCES),
        ((make_node(),), (None,), {"n:1": (1, 2.0, 3)}, CHANCES),
        ((make_node(),), (None,), {}, b""),
        ((make_node(),), (None,), {}, b"1234567"),
        ([make_node()], (None,), {}, CHANCES),
    ],
)
def test_arguments_of_a_wrong_type_are_rejected(given: tuple[Any, ...]) -> None:
    with pytest.raises((TypeError, ValueError)):
        price_nodes(*given, *COMMON)


COLLECTED = """
import gc, struct
from warmroute._kernel import NodeState, DecodeSpeedState, SpeedState
from warmroute._kernel import Hit, price_nodes
node = NodeState()
node.name, node.speed = "n", SpeedState()
class Last:
    def __init__(self): self.itself = self
    def __del__(self): del node.name
chances, hits, settings = struct.pack("d", 0.1), {"n": Hit(1, 1.0, 0)}, (1e9, 1.0, True, True, True)
request, due = (100.0, 10.0, 1), (0.0, 0.0)
given = (node,), (None,), hits, chances, None, None, 1.0, request, due, 0.0, DecodeSpeedState(), settings
gc.disable()
Last()
gc.set_threshold(1, 1, 1)
gc.enable()
try: price_nodes(*given)
except TypeError: print("rejected")
"""


def test_a_node_that_loses_its_name_to_the_garbage_collector_is_rejected() -> None:
    ran = subprocess.run([sys.executable, "-c", COLLECTED], capture_output=True, text=True, check=True)
    collects_in_allocations = sys.version_info < (3, 12)  # later versions collect between instructions only
    assert ran.stdout.split() == (["rejected"] if collects_in_allocations else [])


def test_fields_reject_values_of_a_wrong_type() -> None:
    node, cache = make_node(), CacheState()
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
    row: Any
    for row in ((1,), (0, 1, 1, 1, "1"), 5):
        with pytest.raises(TypeError):
            add_hits(
                {},
                [row],
                {0: (CacheView(Index()).add_node("n"), 0)},
                16,
                (1, 1, True),
                0.0,
                (1.0, 2.0),
                SAVED_SHARE[1:],
            )


def test_prices_that_are_nan_still_choose_a_node() -> None:
    node = make_node()
    node.pending_work = math.nan
    prices = price_nodes((node, node), (None, None), {}, CHANCES, *COMMON)
    assert prices.cheapest(TIE) == [0, 1] and prices.clear_winner(TIE, 1.0, 0.0) == -1
    with pytest.raises(TypeError):
        prices.clear_winner(TIE, 1.0)  # type: ignore[call-arg]
    with pytest.raises(IndexError):
        prices[2]
    with pytest.raises(IndexError):
        prices.least_loaded([2])
    with pytest.raises(IndexError):
        prices.second_home(2, 1.0, 0.0, 1.0)


def test_pricing_leaks_no_references() -> None:
    node, random = make_node(), Random(1)
    cache = CacheView(Index()).add_node(node.name, ["m"])
    nodes = (node,) * 50

    def price_all() -> None:
        found: dict[str, Hit] = {}
        rows = [(number, 1, 1, 1, random.randrange(1, 9)) for number in range(20)]
        add_hits(found, rows, {3: (cache, ROUTED), 5: (cache, 0)}, 16, (9, 9, False), 0.0, (1.0, 2.0), SAVED_SHARE[1:])
        prices = price_nodes(nodes, (cache,) * 50, found, CHANCES, *COMMON)
        prices.least_loaded(prices.cheapest(2.0))
        assert prices[0] and prices.mean_load == 0.0 and prices.cheapest_within(1e9) == 0
        with pytest.raises(TypeError):
            price_nodes((*nodes, None), (cache,) * 51, found, CHANCES, *COMMON)  # type: ignore[arg-type]

    price_all()
    gc.collect()
    before = [sys.getrefcount(one) for one in (nodes, node, cache, node.name, cache.name, node.speed, CHANCES)]
    blocks = sys.getallocatedblocks()
    for _ in range(300):
        price_all()
    gc.collect()
    assert [sys.getrefcount(one) for one in (nodes, node, cache, node.name, cache.name, node.speed, CHANCES)] == before
    assert sys.getallocatedblocks() - blocks < 200
