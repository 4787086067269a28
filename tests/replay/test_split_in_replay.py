"""Prefill and decode nodes in replay: the router's own code, transfers over a link, faults."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from warmroute.lab.engine.timing import profile
from warmroute.lab.replay_setup import parse_policy
from warmroute.lab.run import Setup, build_world, replay
from warmroute.lab.simulated_node import Conditions, NodeSpec
from warmroute.lab.workloads import parse_workload
from warmroute.lab.world import World, parse_fault

H200 = profile("h200-8b")
REQUESTS = 100


def nodes(prefill: int, decode: int, mixed: int = 0) -> tuple[NodeSpec, ...]:
    roles = ["prefill"] * prefill + ["decode"] * decode + ["mixed"] * mixed
    return tuple(
        NodeSpec(name=f"node-{at}", profile=H200, role=role, kv_connector=role == "mixed" and prefill + decode > 0)  # type: ignore[arg-type]
        for at, role in enumerate(roles)
    )


def setup(
    policy: str = "price", fleet: tuple[NodeSpec, ...] = nodes(2, 4), rate: float = 8.0, words: Sequence[str] = (),
    **more: Any,
) -> Setup:  # fmt: skip
    workload = parse_workload(["mixed_lengths", *words])
    return Setup(workload=workload, nodes=fleet, policy=parse_policy(policy), rate=rate, limit=REQUESTS, **more)


def run_world(one: Setup) -> World:
    world = build_world(one)
    world.run(one.arrivals(), limit=REQUESTS)
    for sim in world.nodes.values():
        assert sim.inflight == 0 and sim.node.transfer_tokens == pytest.approx(0.0, abs=1e-6)
        assert sim.node.context_tokens == sim.node.kv_new == 0
    assert not world.requests.brain.open
    return world


def test_long_prompts_are_split_and_short_ones_are_not() -> None:
    world = run_world(setup())
    splits = world.requests.counters.split_requests
    assert splits == {"transferred": splits["transferred"]} and 3 <= splits["transferred"] <= 0.25 * REQUESTS
    prefilled = sum(sim.totals.prefilled_tokens for sim in world.nodes.values())
    assert prefilled == pytest.approx(world.results.prompt_tokens, rel=0.01), "each prompt is prefilled once"


def test_idle_prefill_nodes_serve_long_prompts_without_a_transfer() -> None:
    world = run_world(setup(fleet=nodes(3, 3), rate=1.0))
    assert world.requests.counters.split_requests["transferred"] <= 2
    assert not any(sim.node.whole_answers for sim in world.nodes.values())
    alone = replay(setup(fleet=nodes(0, 0, 6), rate=1.0))
    assert replay(setup(fleet=nodes(3, 3), rate=1.0))["ttft_ms"]["p99"] <= 1.02 * alone["ttft_ms"]["p99"]


@pytest.mark.parametrize("policy", ["price", "price:split=always", "llm_d_split", "dynamo_split"])
def test_every_request_is_answered(policy: str) -> None:
    run = replay(setup(policy))
    assert run["finished"] == REQUESTS and not run["failed"] and not run["retries"]
    assert replay(setup(policy))["ttft_ms"] == run["ttft_ms"], "a run can be repeated"


def test_answers_stand_still_less_than_on_mixed_nodes() -> None:
    split, mixed = replay(setup()), replay(setup(fleet=nodes(0, 0, 6)))
    assert split["inter_token_ms"]["p99"] < 0.7 * mixed["inter_token_ms"]["p99"]


@pytest.mark.parametrize("fault", ["fail", "hang"])
@pytest.mark.parametrize("node", ["node-0", "node-2"])
def test_a_node_that_dies_or_hangs_fails_no_request(node: str, fault: str) -> None:
    faults = (parse_fault(f"4 {fault} {node}"),)
    one = setup("price:split=always", faults=faults, words=["output_tokens=4"])
    world = run_world(one)
    assert world.results.total("finished") >= REQUESTS - 2, "two answers may have begun on the decode node"
    splits = world.requests.counters.split_requests
    if node == "node-0":
        assert splits["prefill_failed"] + splits["prefill_slow"] + splits["transfer_failed"] >= 1


def test_the_transfer_takes_the_bandwidth() -> None:
    slow = Conditions(kv_gigabytes_per_s=0.5)
    words = ["long_share=1", "longest_tokens=30000"]
    fast_run = replay(setup("price:split=always", rate=0.2, words=words))
    slow_run = replay(setup("price:split=always", rate=0.2, words=words, conditions=slow))
    assert slow_run["ttft_ms"]["p50"] - fast_run["ttft_ms"]["p50"] > 3000.0, "2 GB at 0.5 instead of 10 GB/s"
    world = run_world(setup(rate=1.0, words=words, conditions=slow))
    assert world.requests.counters.split_requests["transferred"] < 10, "the router learns that, and stops splitting"


def test_mixed_nodes_can_play_either_part() -> None:
    for prefill, decode in ((2, 0), (0, 2)):
        world = run_world(setup("price:split=always", nodes(prefill, decode, 2), rate=2.0))
        assert world.requests.counters.split_requests["transferred"] >= 0.9 * REQUESTS


def test_mixed_nodes_take_the_part_that_is_lacking() -> None:
    """The price moves mixed nodes from one part to the other: nobody has to switch them. Ten long prompts of a run are
    few: which nodes get them is chance, so six runs count."""
    prefilled, served = [], []
    for long_share in (0.1, 0.6):
        words = [f"long_share={long_share}", "longest_tokens=40000"]
        prefilled.append(0.0)
        for seed in range(1, 7):
            one = setup("price", nodes(1, 2, 4), rate=3.0, words=words, conditions=Conditions(seed=seed))
            world = run_world(one)
            mixed = [sim for sim in world.nodes.values() if sim.node.role == "mixed"]
            prefilled[-1] += sum(sim.totals.prefilled_tokens for sim in mixed) / world.results.prompt_tokens / 6
            served.append(sum(sim.requests for sim in mixed))
    assert prefilled[1] > prefilled[0] + 0.1, "mixed nodes prefill more when prefill nodes are busy"
    assert min(served) > 0.4 * REQUESTS, "and they serve requests all the time"
