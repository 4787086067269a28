"""Prefill and decode nodes that are scaled separately, in virtual time."""

from __future__ import annotations

from typing import Any

from warmroute.config import Config, Objective, Scaling
from warmroute.lab.engine.timing import profile
from warmroute.lab.replay_setup import parse_policy
from warmroute.lab.run import Setup
from warmroute.lab.simulated_node import Conditions, NodeSpec
from warmroute.lab.simulated_scaling import ScalingSetup, SimulatedOffer, SimulatedScaling
from warmroute.lab.workloads import parse_workload
from warmroute.lab.world import World
from warmroute.scaling.offers import Offer

H200 = profile("h200-8b")


def sim_offer(role: Any) -> SimulatedOffer:
    offer = Offer(
        provisioner="sim", name=role, island="local", gpu=H200.name, role=role, usd_per_hour=2.0, start_s=5.0
    )  # fmt: skip
    return SimulatedOffer(offer=offer, profile=H200)


def run_scaled(
    words: list[str], rate: float, requests: int, prefill: int, decode: int, **config: Any
) -> tuple[World, SimulatedScaling]:
    specs = tuple(
        NodeSpec(f"{role}-{at}", H200, role=role, usd_per_hour=2.0)  # type: ignore[arg-type]
        for role, count in (("prefill", prefill), ("decode", decode))
        for at in range(count)
    )
    settings = {"max_nodes": 12, "cooldown_up_s": 10.0, "cooldown_down_s": 30.0, "interval_s": 5.0, **config}
    setup = Setup(
        workload=parse_workload(["mixed_lengths", *words]), nodes=specs, policy=parse_policy("price"), rate=rate,
        limit=requests,
    )  # fmt: skip
    world = World(specs, Conditions(seed=7), Config())
    offers = (sim_offer("prefill"), sim_offer("decode"))
    scaling = SimulatedScaling(world, ScalingSetup(config=Scaling(enabled=True, **settings), offers=offers))
    world.run(setup.arrivals(), limit=requests)
    return world, scaling


def roles(world: World) -> dict[str, int]:
    found = [sim.spec.role for sim in (*world.nodes.values(), *world.departed)]
    return {role: found.count(role) for role in ("prefill", "decode")}


def test_long_prompts_add_prefill_nodes() -> None:
    world, scaling = run_scaled(["long_share=0.5"], 2.0, 120, 1, 4)
    assert roles(world)["prefill"] >= 3
    assert world.results.total("finished") == 120
    added = [addition for decision in scaling.decisions for addition in decision.additions]
    assert added[0].offer.role == "prefill" and added[0].reason.startswith("prefill pool: ")


def test_long_answers_add_decode_nodes() -> None:
    objective = Objective(inter_token_p90_ms=8.0)
    world, _ = run_scaled(["long_share=0", "output_tokens=600"], 24.0, 1200, 1, 1, objective=objective)
    assert roles(world) == {"prefill": 1, "decode": roles(world)["decode"]}
    assert roles(world)["decode"] >= 2
    assert world.results.total("finished") == 1200


def test_pools_shrink_to_one_node_each() -> None:
    world, _ = run_scaled(["long_share=0", "output_tokens=4"], 0.5, 90, 3, 3)
    assert {sim.spec.role for sim in world.nodes.values()} == {"prefill", "decode"}
    assert len(world.nodes) == 2


def test_decode_nodes_become_prefill_nodes_in_a_fleet_of_fixed_size() -> None:
    specs = tuple(
        NodeSpec(f"{role}-{at}", H200, role=role, kv_connector=True)  # type: ignore[arg-type]
        for role, count in (("prefill", 1), ("decode", 5))
        for at in range(count)
    )
    world = World(specs, Conditions(seed=7), Config())
    settings = Scaling(
        enabled=True,
        min_nodes=6,
        max_nodes=6,
        switch_roles=True,
        cooldown_up_s=10.0,
        cooldown_down_s=30.0,
        interval_s=5.0,
    )
    scaling = SimulatedScaling(world, ScalingSetup(config=settings, offers=(sim_offer("prefill"), sim_offer("decode"))))
    long = Setup(
        workload=parse_workload(["mixed_lengths", "long_share=0.7"]), nodes=specs, policy=parse_policy("price"),
        rate=0.8, limit=100,
    )  # fmt: skip
    world.run(long.arrivals(), limit=100)
    assert world.results.total("finished") == 100
    switches = [switch for decision in scaling.decisions for switch in decision.switches]
    assert switches and {switch.role for switch in switches} == {"prefill"}
    assert len(world.nodes) == 6 and sum(sim.node.role == "prefill" for sim in world.nodes.values()) >= 2
