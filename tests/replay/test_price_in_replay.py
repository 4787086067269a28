"""The policy `price` on small fleets: it spreads a hot prefix, learns wrong speeds, and survives bad information."""

from __future__ import annotations

from statistics import fmean
from typing import Any

import msgspec
import pytest

from warmroute.lab.engine.timing import profile
from warmroute.lab.replay_setup import parse_policy
from warmroute.lab.run import Setup, build_world, replay
from warmroute.lab.simulated_node import Conditions, NodeSpec
from warmroute.lab.summary import Run
from warmroute.lab.workloads import parse_workload
from warmroute.lab.world import ScheduledFault, parse_fault

FLEET = tuple(NodeSpec(f"node-{at}", profile("2xh100-32b")) for at in range(4))


def run(policy: str, workload: str, rate: float, limit: int, **more: Any) -> Run:
    setup = {"nodes": FLEET, "conditions": Conditions(seed=1), **more}
    return replay(
        Setup(workload=parse_workload([workload]), policy=parse_policy(policy), rate=rate, limit=limit, **setup)
    )


def test_a_hot_prefix_is_spread_without_losing_hits() -> None:
    policies = ("price", "price:second_home_ms=0")
    spread, not_spread = (run(policy, "hot_prefix_storm", 20.0, 600) for policy in policies)
    assert spread["load_variation"] < 0.25 < not_spread["load_variation"]
    assert spread["hit_rate"] > 0.95 * not_spread["hit_rate"]


def test_short_prompts_without_a_shared_prefix_are_balanced_by_count() -> None:
    """Half of the prompts are too short to be looked up. They decode, too."""
    workload = parse_workload(["unique_batch", "prompt_tokens=250", "output_tokens=220"])
    nodes = tuple(NodeSpec(f"node-{at}", profile("l4-8b")) for at in range(8))
    more = {"nodes": nodes, "conditions": Conditions(seed=1), "rate": 16.0, "limit": 500}
    ours, theirs = (
        replay(Setup(workload=workload, policy=parse_policy(policy), **more))  # type: ignore[arg-type]
        for policy in ("price", "least_loaded")
    )
    assert ours["load_variation"] < 0.15
    assert ours["ttft_ms"]["p50"] < 1.02 * theirs["ttft_ms"]["p50"]
    assert ours["ttft_ms"]["p90"] < theirs["ttft_ms"]["p90"]
    assert ours["inter_token_ms"]["p50"] < 1.01 * theirs["inter_token_ms"]["p50"]


def test_a_prefix_is_not_copied_for_a_few_milliseconds_of_one_request() -> None:
    """A copy takes no longer than waiting for the prefix, and stalls the requests that run on the other node."""
    nodes = tuple(NodeSpec(f"node-{at}", profile("2xh100-32b")) for at in range(8))
    ours, affine = (
        [run(policy, "few_shot", 80.0, 300, nodes=nodes, conditions=Conditions(seed=seed)) for seed in (1, 2, 3)]
        for policy in ("price", "llm_d")
    )
    assert fmean(one["hit_rate"] for one in ours) > 0.965 * fmean(one["hit_rate"] for one in affine)
    assert fmean(one["ttft_ms"]["mean"] for one in ours) < 1.1 * fmean(one["ttft_ms"]["mean"] for one in affine)
    assert fmean(one["load_variation"] for one in ours) < 0.2 < min(one["load_variation"] for one in affine)


SMALL_CACHES = tuple(msgspec.structs.replace(spec, blocks=2500) for spec in FLEET)
ONE_MISREPORTS = (msgspec.structs.replace(SMALL_CACHES[0], misreports=("cache", "usage", "load")), *SMALL_CACHES[1:])


@pytest.mark.parametrize(
    "condition",
    [
        {"conditions": Conditions(seed=1, poll_lag_ms=3000.0)},
        {"conditions": Conditions(seed=1, kv_loss=0.5)},
        {"conditions": Conditions(seed=1, poll_loss=1.0, kv_loss=1.0)},
        {"nodes": ONE_MISREPORTS},
        {"faults": (ScheduledFault(5.0, "slow", "node-0", 5.0),)},
    ],
    ids=["stale metrics", "lost events", "no metrics and no events", "a node misreports", "a node slows down"],
)
def test_bad_information_never_makes_it_worse_than_least_loaded(condition: dict[str, Any]) -> None:
    """With small caches, so that their content matters."""
    more = {"nodes": SMALL_CACHES, **condition}
    ours, theirs = (run(policy, "rag", 10.0, 300, **more) for policy in ("price", "least_loaded"))
    assert ours["ttft_ms"]["p50"] < 1.15 * theirs["ttft_ms"]["p50"]
    assert ours["ttft_ms"]["p90"] < 1.15 * theirs["ttft_ms"]["p90"]
    assert ours["good_per_s"] > 0.95 * theirs["good_per_s"]


def test_a_misreporting_node_recomputes_every_prompt() -> None:
    nodes = {row["node"]: row for row in run("least_loaded", "rag", 10.0, 100, nodes=ONE_MISREPORTS)["nodes"]}
    assert nodes["node-0"]["hit_rate"] == 0.0 < nodes["node-1"]["hit_rate"]


def test_wrong_initial_speeds_are_corrected() -> None:
    nodes = tuple(NodeSpec(name, profile(name)) for name in ("t4-1.5b", "l4-1.5b", "h100-1.5b"))
    setup = Setup(workload=parse_workload(["unique_batch"]), nodes=nodes, policy=parse_policy("price"), rate=6.0)
    world = build_world(setup)
    for sim, ms_per_token in zip(world.nodes.values(), (0.004, 0.06, 0.15), strict=True):
        sim.node.speed.guess(ms_per_token)
        sim.node.speed.answers = 1  # else it would take its peers' speed
    world.calendar.at(60_000.0, world.measure_from_now)
    world.run(setup.arrivals(), limit=600)
    t4, l4, h100 = world.nodes.values()
    assert h100.node.speed.ms_per_token < 0.2 * l4.node.speed.ms_per_token
    assert h100.node.speed.ms_per_token < 0.2 * t4.node.speed.ms_per_token
    assert h100.requests > 0.9 * (t4.requests + l4.requests + h100.requests), (
        "the fastest node should have most requests"
    )


def test_a_node_that_slows_down_gets_fewer_requests_within_seconds() -> None:
    setup = Setup(
        workload=parse_workload(["unique_batch"]),
        nodes=FLEET,
        policy=parse_policy("price"),
        rate=6.0,
        faults=(parse_fault("30 slow node-0 5"),),
    )
    world = build_world(setup)
    before: list[int] = []
    world.calendar.at(30_000.0, lambda: before.extend(sim.requests for sim in world.nodes.values()))
    world.calendar.at(35_000.0, world.measure_from_now)
    world.run(setup.arrivals(), limit=500)
    assert before[0] > 0.6 * sum(before) / 4
    after = [sim.requests for sim in world.nodes.values()]
    assert after[0] < 0.3 * sum(after) / 4
