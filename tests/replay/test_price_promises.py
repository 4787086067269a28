"""What the price promises, on small fleets: a hot prefix is spread, wrong speeds are learned, trouble does no harm."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from warmroute.fake_engine.profiles import profile
from warmroute.replay import Run, Setup, contender, replay, world_of
from warmroute.replay.workloads import choose
from warmroute.replay.world import Conditions, NodeSpec
from warmroute.replay.world.fault_schedule import Happening, parse

FLEET = tuple(NodeSpec(f"node-{at}", profile("2xh100-32b")) for at in range(4))


def run(policy: str, workload: str, rate: float, limit: int, **more: Any) -> Run:
    setup = {"nodes": FLEET, "conditions": Conditions(seed=1), **more}
    return replay(Setup(workload=choose([workload]), contender=contender(policy), rate=rate, limit=limit, **setup))


def test_a_storm_is_spread_and_keeps_its_hits() -> None:
    ours, affine = (run(policy, "hot_prefix_storm", 20.0, 600) for policy in ("price", "price:second_home_ms=0"))
    assert ours["load_variation"] < 0.25 < affine["load_variation"]
    assert ours["hit_rate"] > 0.95 * affine["hit_rate"]


LITTLE = tuple(msgspec.structs.replace(spec, blocks=2500) for spec in FLEET)
LIAR = (msgspec.structs.replace(LITTLE[0], lies=("cache", "usage", "load")), *LITTLE[1:])


@pytest.mark.parametrize(
    "trouble",
    [
        {"conditions": Conditions(seed=1, poll_lag_ms=3000.0)},
        {"conditions": Conditions(seed=1, kv_loss=0.5)},
        {"conditions": Conditions(seed=1, poll_loss=1.0, kv_loss=1.0)},
        {"nodes": LIAR},
        {"happenings": (Happening(5.0, "slow", "node-0", 5.0),)},
    ],
    ids=["stale metrics", "lost events", "nothing told", "a liar", "a node slows down"],
)
def test_trouble_never_makes_it_worse_than_least_loaded(trouble: dict[str, Any]) -> None:
    """With so little memory that what is told of it matters."""
    more = {"nodes": LITTLE, **trouble}
    ours, theirs = (run(policy, "rag", 10.0, 300, **more) for policy in ("price", "least_loaded"))
    assert ours["ttft_ms"]["p50"] < 1.15 * theirs["ttft_ms"]["p50"]
    assert ours["ttft_ms"]["p90"] < 1.15 * theirs["ttft_ms"]["p90"]
    assert ours["good_per_s"] > 0.95 * theirs["good_per_s"]


def test_a_node_that_lies_computes_everything_anew_and_tells_otherwise() -> None:
    books = {book["node"]: book for book in run("least_loaded", "rag", 10.0, 100, nodes=LIAR)["nodes"]}
    assert books["node-0"]["hit_rate"] == 0.0 < books["node-1"]["hit_rate"]


def test_speeds_that_were_guessed_wrong_are_learned() -> None:
    nodes = tuple(NodeSpec(name, profile(name)) for name in ("t4-1.5b", "l4-1.5b", "h100-1.5b"))
    setup = Setup(workload=choose(["unique_batch"]), nodes=nodes, contender=contender("price"), rate=6.0)
    world = world_of(setup)
    for sim, ms_per_token in zip(world.nodes.values(), (0.004, 0.06, 0.15), strict=True):
        sim.node.speed.guess(ms_per_token)
    world.calendar.at(60_000.0, world.measure_from_now)
    world.run(setup.arrivals(), limit=600)
    t4, l4, h100 = world.nodes.values()
    assert h100.node.speed.ms_per_token < 0.2 * l4.node.speed.ms_per_token
    assert h100.node.speed.ms_per_token < 0.2 * t4.node.speed.ms_per_token
    assert h100.requests > 0.9 * (t4.requests + l4.requests + h100.requests), "after a minute it has the work"


def test_a_node_that_slows_down_has_less_to_do_within_seconds() -> None:
    setup = Setup(
        workload=choose(["unique_batch"]),
        nodes=FLEET,
        contender=contender("price"),
        rate=6.0,
        happenings=(parse("30 slow node-0 5"),),
    )
    world = world_of(setup)
    before: list[int] = []
    world.calendar.at(30_000.0, lambda: before.extend(sim.requests for sim in world.nodes.values()))
    world.calendar.at(35_000.0, world.measure_from_now)
    world.run(setup.arrivals(), limit=500)
    assert before[0] > 0.6 * sum(before) / 4
    after = [sim.requests for sim in world.nodes.values()]
    assert after[0] < 0.3 * sum(after) / 4
