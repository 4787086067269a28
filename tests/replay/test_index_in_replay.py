"""The router's cache view in virtual time: exact with KV events, and never harmful without them."""

from __future__ import annotations

from statistics import fmean
from typing import Any

import pytest
from small_worlds import assert_all_requests_ended, specs

from warmroute.config import Config, Routing
from warmroute.lab.engine.timing import profile
from warmroute.lab.simulated_node import Conditions
from warmroute.lab.summary import summary
from warmroute.lab.workloads import parse_workload
from warmroute.lab.world import World

CARD = profile("l4-8b")
FEW_BLOCKS = 1200
"""A node has room for a few conversations."""
CHAT, SYSTEM = "multi_turn_chat rate=2", "shared_system_prompts rate=4"


def small_world(policy: str, seed: int = 3, blocks: int | None = None, nodes: int = 3, **conditions: Any) -> World:
    config = Config(routing=Routing(policy=policy))  # type: ignore[arg-type]
    return World(specs(nodes, profile=CARD, blocks=blocks), Conditions(seed=seed, **conditions), config)


def simulate(policy: str, workload: str, requests: int = 200, *, seed: int = 3, **more: Any) -> World:
    world = small_world(policy, seed, **more)
    world.run(parse_workload(workload.split()).arrivals(seed), limit=requests)
    assert_all_requests_ended(world)
    return world


def outcome(world: World) -> tuple[float, float, float]:
    """Return the hit rate, and the mean and p90 of the TTFT."""
    found = summary(world)
    return found["hit_rate"], found["ttft_ms"]["mean"], found["ttft_ms"]["p90"]


def assert_cache_view_is_exact(world: World) -> None:
    """When no request runs, the cache view has exactly the blocks that each engine holds, and no other nodes."""
    world.calendar.run(until_ms=world.calendar.now_ms + 5000.0)
    world.cache_view.tidy(world.calendar.now_s)
    assert {cache.name for cache in world.cache_view} == set(world.nodes)
    for cache in world.cache_view:
        assert not cache.token_mismatch
        stored = {row[0] for row in world.cache_view.index.holdings(cache.ranks[0])}
        assert stored == set(world.nodes[cache.name].engine.scheduler.pool._cached)
        assert world.cache_view.index.pair_count(cache.pending_holder) == 0


def compared(world: World) -> tuple[int, int]:
    """Return the number of exact predictions, and of all predictions that were compared."""
    return sum(cache.accuracy.exact for cache in world.cache_view), sum(
        cache.accuracy.compared for cache in world.cache_view
    )


@pytest.mark.parametrize("workload", ["multi_turn_chat rate=0.5", "shared_system_prompts rate=1"])
@pytest.mark.parametrize("blocks", [None, FEW_BLOCKS])
def test_at_light_load_every_prediction_is_exact(workload: str, blocks: int | None) -> None:
    world = simulate("overlap", workload, blocks=blocks)
    exact, of = compared(world)
    assert of == 200
    # With small caches, a block may be evicted before the request arrives.
    assert exact == 200 or (blocks is not None and exact >= 190)
    assert all(cache.complete for cache in world.cache_view)
    assert_cache_view_is_exact(world)


def test_after_a_load_the_cache_view_is_exact() -> None:
    world = simulate("overlap", "rag rate=2", 150, blocks=FEW_BLOCKS)
    assert_cache_view_is_exact(world)


@pytest.mark.parametrize("action", ["restart", "remove", "drain"])
def test_the_cache_view_is_exact_after_a_node_restarts_or_leaves(action: str) -> None:
    world = small_world("overlap")
    world.calendar.at(20_000.0, getattr(world, action), "node-0")
    world.run(parse_workload(CHAT.split()).arrivals(3), limit=200)
    assert_all_requests_ended(world)
    assert ("node-0" in world.nodes) == (action == "restart")
    assert_cache_view_is_exact(world)


def test_a_node_that_joins_again_under_its_name_starts_empty() -> None:
    world = small_world("overlap")
    (spec,) = specs(1, profile=CARD)
    world.calendar.at(20_000.0, world.remove, "node-0")
    world.calendar.at(40_000.0, world.add, spec)
    world.run(parse_workload(["unique_batch", "prompt_tokens=400", "rate=3"]).arrivals(3), limit=300)
    assert_all_requests_ended(world)
    assert world.nodes["node-0"].requests > 0
    assert_cache_view_is_exact(world)


def test_a_node_that_died_while_serving_starts_empty() -> None:
    world = small_world("overlap")
    world.calendar.at(20_000.0, world.fail, "node-0")
    world.calendar.at(25_000.0, world.restart, "node-0")
    world.run(parse_workload(CHAT.split()).arrivals(3), limit=300)
    assert_all_requests_ended(world)
    assert_cache_view_is_exact(world)


@pytest.mark.parametrize("workload", [CHAT, SYSTEM])
def test_with_half_of_the_events_lost_it_is_no_worse_than_least_loaded(workload: str) -> None:
    lossy = [outcome(simulate("overlap", workload, seed=seed, kv_loss=0.5)) for seed in (3, 4, 5)]
    plain = [outcome(simulate("least_loaded", workload, seed=seed)) for seed in (3, 4, 5)]
    for (hits, _, p90), (plain_hits, _, plain_p90) in zip(lossy, plain, strict=True):
        assert hits > plain_hits
        assert p90 < 1.05 * plain_p90


def test_losing_events_is_no_worse_than_having_none() -> None:
    """The cache view also infers from routed requests."""
    for seed in (3, 4):
        hits, mean, _ = outcome(simulate("overlap", CHAT, seed=seed, kv_loss=0.5))
        without_hits, without_mean, _ = outcome(simulate("approximate", CHAT, seed=seed))
        assert hits > without_hits - 0.01
        assert mean < 1.05 * without_mean


def test_events_beat_inference_with_small_caches() -> None:
    workload = "multi_turn_chat rate=0.5"
    exact, inferred = (
        [outcome(simulate(policy, workload, 300, seed=seed, blocks=FEW_BLOCKS)) for seed in (3, 4, 5, 6)]
        for policy in ("overlap", "approximate")
    )
    assert fmean(hits for hits, _, _ in exact) > fmean(hits for hits, _, _ in inferred) + 0.005
    assert fmean(mean for _, mean, _ in exact) < fmean(mean for _, mean, _ in inferred)


@pytest.mark.parametrize("workload", [CHAT, SYSTEM])
def test_events_are_no_worse_than_inference_with_large_caches(workload: str) -> None:
    for seed in (3, 4):
        hits, mean, p90 = outcome(simulate("overlap", workload, seed=seed))
        inferred_hits, inferred_mean, inferred_p90 = outcome(simulate("approximate", workload, seed=seed))
        assert hits > inferred_hits - 0.005
        assert mean < 1.02 * inferred_mean and p90 < 1.05 * inferred_p90
