"""Islands in virtual time: three clouds, one of which fails for a while."""

from __future__ import annotations

import pytest
from small_worlds import books_are_closed

from warmroute.config import Config, from_table
from warmroute.fake_engine.profiles import profile
from warmroute.replay.summary import percentile
from warmroute.replay.workloads.choose import choose
from warmroute.replay.world import Conditions, Island, NodeSpec
from warmroute.replay.world.islands import IslandWorld

CLOUDS = {"near": 1.0, "far": 40.0, "farther": 280.0}
CHATS = "multi_turn_chat systems=20 system_tokens=1500 turns=4 message_tokens=300 output_tokens=40 think_s=6"


def lived(kind: str, *, seed: int = 1, left: int = 0, outage: bool = True, **crossing: float) -> IslandWorld:
    specs = [NodeSpec(f"{cloud}-{at}", profile("l4-8b"), cloud) for cloud in CLOUDS for at in range(3)]
    conditions = Conditions(
        seed=seed,
        islands={name: Island(round_trip_ms) for name, round_trip_ms in CLOUDS.items()},
        told_islands=kind != "flat pool",
    )
    config: Config = from_table({"crossing": crossing, "index": {"memory_bytes": 1 << 26}})
    world = IslandWorld(specs, conditions, config, home_only=kind == "home only")
    if outage:
        world.calendar.at(30_000.0, world.fail_island, "near", left)
        world.calendar.at(55_000.0, world.restore_island, "near")
    world.run(choose(CHATS.split()).arrive(seed, 1.2), duration_s=90.0)
    books_are_closed(world)
    return world


def p95(world: IslandWorld) -> float:
    return percentile(sorted(world.tally.ttft_ms), 0.95) or 0.0


def test_conversations_stay_until_they_cant_and_nobody_waits_for_the_dead() -> None:
    ours, flat, home_only = (lived(kind) for kind in ("islands", "flat pool", "home only"))
    books = ours.fleet.islands.books
    assert ours.moves.kept_share >= 0.99 and ours.moves.kept_share > flat.moves.kept_share
    assert sum(count for (home, _, why), count in books.crossed.items() if (home, why) == ("near", "down")) > 0
    assert p95(ours) < p95(home_only)
    assert max(ours.tally.ttft_ms) < max(home_only.tally.ttft_ms) / 2


def test_distances_are_measured_in_replay_as_in_life() -> None:
    world = lived("islands", outage=False)
    for name, round_trip_ms in CLOUDS.items():
        island = world.fleet.islands.get(name)
        assert island is not None and island.round_trip_ms == pytest.approx(round_trip_ms)
    speeds = [sim.node.speed for sim in world.nodes.values() if sim.node.speed.answers > 20]
    assert len(speeds) > 3
    assert max(speed.ms_per_token for speed in speeds) < 2.0 * min(speed.ms_per_token for speed in speeds)


def test_a_crowded_island_spills_over_and_gets_its_conversations_back() -> None:
    world = lived("islands", left=1, spill_ms=300.0)
    books = world.fleet.islands.books
    reasons = {why for _, _, why in books.crossed}
    assert "slow" in reasons
    assert world.moves.kept_share > 0.9
    assert not any(island.line_ms for island in world.fleet.islands), "nobody waits any more"
