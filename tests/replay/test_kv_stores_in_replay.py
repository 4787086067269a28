"""Shared KV stores in replay: nodes load what other nodes have prefilled."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from warmroute.config import Config
from warmroute.lab.engine.blocks import SharedStore, SharedStoreConfig
from warmroute.lab.engine.timing import profile
from warmroute.lab.request_flow import MODEL, simulated_request
from warmroute.lab.simulated_node import Conditions, NodeSpec
from warmroute.lab.workloads.workload_prompt import Segments, WorkloadPrompt, segment_id
from warmroute.lab.world import World

H200 = profile("h200-8b")
TOKENS = 8_000


def prompt(document: int, number: int, at_ms: float) -> WorkloadPrompt:
    """A question about a document of TOKENS tokens."""
    blocks = Segments().followed_by(segment_id("document", document), TOKENS)
    blocks = blocks.followed_by(segment_id("question", number), 64)
    return WorkloadPrompt(TOKENS + 64, 4, blocks.followed_by(segment_id("answer", number), 4), at_ms=at_ms)


def documents(count: int, rounds: int, gap_ms: float) -> Iterator[WorkloadPrompt]:
    """Each document is asked about once in each round."""
    for number in range(count * rounds):
        yield prompt(number % count, number, number * gap_ms)


def world_with_store(
    gigabytes_per_s: float, nodes: int = 3, blocks: int = 1500, attached: int | None = None, capacity: int = 2_000_000
) -> World:
    """The nodes' own caches hold two documents each."""
    specs = tuple(
        NodeSpec(f"node-{at}", H200, blocks=blocks, kv_store="store" if attached is None or at < attached else "")
        for at in range(nodes)
    )
    store = SharedStoreConfig(capacity_tokens=capacity, gigabytes_per_s=gigabytes_per_s)
    return World(specs, Conditions(seed=3, kv_stores=(store,) if gigabytes_per_s else ()), Config())


def run(world: World, prompts: Iterator[WorkloadPrompt]) -> World:
    world.run(prompts)
    assert world.results.total("finished") == world.results.total("arrived")
    return world


def ttft_p50(world: World) -> float:
    times = sorted(world.results.ttft_ms)
    return times[len(times) // 2]


def test_nodes_load_what_others_have_prefilled() -> None:
    without = run(world_with_store(0.0), documents(12, 5, 700.0))
    with_store = run(world_with_store(20.0), documents(12, 5, 700.0))
    assert without.results.cached_tokens < 0.3 * without.results.prompt_tokens, "their own caches are too small"
    assert with_store.results.cached_tokens > 0.7 * with_store.results.prompt_tokens
    assert with_store.stores["store"].loaded_tokens > 20 * TOKENS
    assert ttft_p50(with_store) < 0.6 * ttft_p50(without)


def test_the_router_knows_what_the_store_holds() -> None:
    world = run(world_with_store(20.0), documents(12, 5, 700.0))
    accuracy = world.cache_view.stores["store"].accuracy
    assert accuracy.compared >= 20 and accuracy.agreement() > 0.95
    for sim in world.nodes.values():
        cache = world.cache_view.cache(sim.node.name)
        assert cache is not None and cache.accuracy.agreement() > 0.95, "what the store holds is not the node's fault"


def test_the_price_prefers_the_own_cache_to_the_store_and_the_store_to_prefilling() -> None:
    world = run(world_with_store(20.0, attached=2), documents(1, 1, 0.0))
    first = next(sim.node.name for sim in world.nodes.values() if sim.totals.prefilled_tokens)
    if first == "node-2":
        pytest.skip("the node without a store got the first prompt")
    hits = world.cache_view.hits(MODEL, simulated_request(prompt(0, 99, 0.0), 0).lookup(), world.calendar.now_s)
    other = "node-1" if first == "node-0" else "node-0"
    assert hits[first].expected > hits[other].expected > 0.5 * TOKENS and "node-2" not in hits
    assert set(hits) == {"node-0", "node-1"}, "the store is no node"


def test_a_slow_store_is_not_used_in_prices() -> None:
    world = world_with_store(0.05)  # 2.6 ms per token: prefilling takes about 0.05
    run(world, documents(8, 3, 3000.0))
    speed = world.fleet.group(MODEL).transfer_speeds.from_store("store", "local")  # type: ignore[union-attr]
    lookup, now_s = simulated_request(prompt(0, 99, 0.0), 0).lookup(), world.calendar.now_s
    assert speed.measured >= 1 and speed.ms_per_token(now_s) > world.nodes["node-0"].node.speed.ms_per_token
    hits = {name: hit.expected for name, hit in world.cache_view.hits(MODEL, lookup, now_s).items()}
    world.cache_view.set_stores({})
    own = {name: hit.expected for name, hit in world.cache_view.hits(MODEL, lookup, now_s).items()}
    assert hits == own and len(own) < 3, "only what nodes have in their own caches counts"


def test_a_small_store_evicts() -> None:
    small = run(world_with_store(20.0, capacity=3 * TOKENS), documents(12, 4, 700.0))
    assert len(small.stores["store"]) <= 3 * TOKENS // 16
    assert small.results.cached_tokens < 0.4 * small.results.prompt_tokens
    assert small.cache_view.stores["store"].blocks <= 3 * TOKENS // 16


def test_the_bandwidth_is_shared() -> None:
    store = SharedStore(SharedStoreConfig(gigabytes_per_s=1.0), 16, 131_072)
    one_ms = store.load_ms(1000, 0.0)
    assert one_ms == pytest.approx(131.072)
    assert store.load_ms(1000, 50.0) == pytest.approx(2 * one_ms - 50.0), "the second load waits for the first"
