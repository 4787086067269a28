"""Islands in virtual time: three clouds, one of which fails for a while, as in bench/island_outage.py."""

from __future__ import annotations

import pytest
from island_outage import IslandWorld
from small_worlds import assert_all_requests_ended

from warmroute.config import Config, from_table
from warmroute.lab.engine.timing import profile
from warmroute.lab.simulated_node import Conditions, Island, NodeSpec
from warmroute.lab.summary import percentile
from warmroute.lab.workloads import parse_workload

CLOUDS = {"near": 1.0, "far": 40.0, "farther": 280.0}
CHATS = "multi_turn_chat systems=20 system_tokens=1500 turns=4 message_tokens=300 output_tokens=40 think_s=6"


def simulate(rule: str, *, surviving: int = 0, outage: bool = True, **affinity: float) -> IslandWorld:
    specs = [NodeSpec(f"{cloud}-{at}", profile("l4-8b"), cloud) for cloud in CLOUDS for at in range(3)]
    conditions = Conditions(
        seed=1,
        islands={name: Island(round_trip_ms) for name, round_trip_ms in CLOUDS.items()},
        router_knows_islands=rule != "flat pool",
    )
    config: Config = from_table({"island_affinity": affinity, "index": {"memory_bytes": 1 << 26}}, experiment=True)
    world = IslandWorld(specs, conditions, config, nearest_only=rule == "nearest only")
    if outage:
        world.calendar.at(30_000.0, world.fail_island, "near", surviving)
        world.calendar.at(55_000.0, world.restore_island, "near")
    world.run(parse_workload(CHATS.split()).arrivals(1, 1.2), duration_s=90.0)
    assert_all_requests_ended(world)
    return world


def p95(world: IslandWorld) -> float:
    return percentile(sorted(world.results.ttft_ms), 0.95) or 0.0


def test_conversations_stay_on_their_island_until_it_fails() -> None:
    ours, flat, nearest_only = (simulate(rule) for rule in ("islands", "flat pool", "nearest only"))
    moved = ours.fleet.islands.conversations.moved
    stayed = ours.conversation_log.stayed_fraction
    assert stayed >= 0.99 and stayed > flat.conversation_log.stayed_fraction
    assert sum(count for (home, _, why), count in moved.items() if (home, why) == ("near", "down")) > 0
    assert p95(ours) < p95(nearest_only)
    assert max(ours.results.ttft_ms) < max(nearest_only.results.ttft_ms) / 2


def test_the_router_measures_the_round_trips_of_islands() -> None:
    world = simulate("islands", outage=False)
    assert {island.name: island.round_trip_ms for island in world.fleet.islands} == pytest.approx(CLOUDS)
    speeds = [sim.node.speed for sim in world.nodes.values() if sim.node.speed.answers > 20]
    assert len(speeds) > 3
    assert max(speed.ms_per_token for speed in speeds) < 2.0 * min(speed.ms_per_token for speed in speeds)


def test_conversations_leave_an_overloaded_island_and_return() -> None:
    world = simulate("islands", surviving=1, max_delay_ms=300.0)
    reasons = {why for _, _, why in world.fleet.islands.conversations.moved}
    assert "slow" in reasons
    assert world.conversation_log.stayed_fraction > 0.9
    assert not any(island.queue_ms for island in world.fleet.islands), "no request should wait any more"
