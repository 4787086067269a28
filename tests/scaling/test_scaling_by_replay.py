"""Scaling by replay in virtual time: production's planner, with a search inside the simulation."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import pytest

from warmroute.app.main import main
from warmroute.config import Config, Objective, Scaling, ScalingReplay
from warmroute.lab.engine.timing import Profile, Timing
from warmroute.lab.peers.scalers import Keda
from warmroute.lab.planning.search import SimulatedPlanning
from warmroute.lab.replay_setup import parse_policy
from warmroute.lab.run import Setup
from warmroute.lab.simulated_node import Conditions, Island, NodeSpec
from warmroute.lab.simulated_scaling import CreateDecisionMaker, ScalingSetup, SimulatedOffer, SimulatedScaling
from warmroute.lab.sizing import LatencyLimits, nodes_needed
from warmroute.lab.summary import summary
from warmroute.lab.workloads import Generated
from warmroute.lab.workloads.workload_prompt import Segments, WorkloadPrompt, segment_id
from warmroute.lab.world import World
from warmroute.scaling.offers import Offer

# A prefill takes 1 ms per token, a decode step 10 ms: a node serves almost two requests of 500 tokens per second.
PLAIN = Profile(
    name="plain",
    timing=Timing(m=10.0, a=0, b=1.0, d=4e-5, h=0, e=10.0, f=0, e2=0, f2=0, g=0, overhead_ms=0),
    kv_tokens=64_000,
    kv_bytes_per_token=1,
)
OBJECTIVE = Objective(ttft_p90_ms=2000.0)


class Questions:
    """Requests without common prefixes."""

    rate = 4.0

    def generate(self, random: Random) -> Iterator[WorkloadPrompt]:
        number = 0
        while True:
            number += 1
            yield WorkloadPrompt(500, 4, Segments().followed_by(segment_id("question", number), 500))


def scaled(nodes: int, per_s: float, seconds: float, scaler: CreateDecisionMaker | None = None) -> SimulatedScaling:
    offer = Offer(provisioner="sim", name="plain", island="local", gpu="plain", usd_per_hour=2.0, start_s=30.0)
    setup = ScalingSetup(
        config=Scaling(
            enabled=True,
            max_nodes=12,
            cooldown_down_s=60.0,
            objective=OBJECTIVE,
            replay=ScalingReplay(interval_s=60.0, window_s=180.0, max_requests=400),
        ),
        offers=(SimulatedOffer(offer=offer, profile=PLAIN),),
        decision_maker=scaler,
        planning=SimulatedPlanning,
    )
    specs = [NodeSpec(f"node-{at}", PLAIN, usd_per_hour=2.0) for at in range(nodes)]
    world = World(specs, Conditions(islands={"local": Island(0.0)}, seed=5), Config())
    scaling = SimulatedScaling(world, setup)
    prompts = Generated("questions", Questions()).arrivals(3, per_s)
    world.run(prompts, duration_s=seconds)
    return scaling


@pytest.mark.parametrize("nodes", [2, 9])
def test_the_fleet_gets_the_size_that_plan_finds(nodes: int) -> None:
    scaling = scaled(nodes, per_s=3.0, seconds=500.0)
    serving = scaling.counts[-1][1]
    setup = Setup(
        workload=Generated("questions", Questions()),
        nodes=(NodeSpec("node", PLAIN),),
        policy=parse_policy("price"),
        rate=3.0,
        limit=500,
    )
    planned = nodes_needed(setup, parse_policy("price"), LatencyLimits.of(OBJECTIVE), 16).nodes
    assert planned is not None
    assert abs(serving - planned) <= 1
    last = scaling.autoscaler.last_decision
    assert last is not None and "objective 2 s" in last.reasons[0]


def test_predictions_are_compared_with_what_happened() -> None:
    scaling = scaled(4, per_s=3.0, seconds=600.0)
    planner = scaling.autoscaler.planner
    assert planner is not None
    stats = planner.stats
    assert stats.trusted
    assert stats.observed_ms > 0
    assert stats.predicted_ms == pytest.approx(stats.observed_ms, rel=0.5)


def test_another_routers_policy_is_scaled_by_thresholds(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["replay", "shared_system_prompts", "--limit", "20", "--policy", "sglang", "--nodes", "1"]
    assert main([*words, "--scaler", "warmroute", "--scaler", "warmroute:thresholds"]) == 0
    assert "warmroute:thresholds" in capsys.readouterr().out


def test_keda_keeps_a_node_for_each_number_of_waiting_requests() -> None:
    scaling = scaled(1, per_s=5.0, seconds=200.0, scaler=lambda *args: Keda(*args, target=2.0))
    assert max(serving for _, serving, _ in scaling.counts) > 2
    assert summary(scaling._world)["finished"] > 900
