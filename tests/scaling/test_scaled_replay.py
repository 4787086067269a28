"""Autoscaling in virtual time, and its report."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from math import pi, sin
from pathlib import Path
from typing import Any

import pytest

from warmroute.app.main import main
from warmroute.config import Config, Scaling
from warmroute.lab.engine.timing import Profile, Timing
from warmroute.lab.peers.scalers import Hpa, Threshold
from warmroute.lab.replay_setup import parse_policy
from warmroute.lab.report import columns, number, paid_gpu_hours
from warmroute.lab.run import Setup, replay
from warmroute.lab.simulated_node import Conditions, Island, NodeSpec
from warmroute.lab.simulated_scaling import ScalingSetup, SimulatedOffer, SimulatedScaling
from warmroute.lab.summary import scaling_summary, summary
from warmroute.lab.workloads import DEPTH, follow_daily_curve, parse_workload
from warmroute.lab.workloads.workload_prompt import Segments, WorkloadPrompt, segment_id
from warmroute.lab.world import World
from warmroute.scaling.node_lifecycle import LifecycleEvent, ManagedNode
from warmroute.scaling.offers import Offer

# A prefill takes 1 ms per token, a decode step 10 ms: a node serves about one request of 500 tokens per second.
PLAIN = Profile(
    name="plain",
    timing=Timing(m=0, a=0, b=1.0, d=0, h=0, e=10.0, f=0, e2=0, f2=0, g=0, overhead_ms=0),
    kv_tokens=64_000,
    kv_bytes_per_token=1,
)
CONDITIONS = Conditions(islands={"local": Island(0.0)}, seed=5)
SHARED = Segments().followed_by(segment_id("system"), 256)


def sim_offer(name: str = "plain", **more: Any) -> SimulatedOffer:
    quota = more.pop("quota", None)
    fields: dict[str, Any] = {"island": "local", "gpu": "plain", "usd_per_hour": 2.0, "start_s": 20.0, **more}
    return SimulatedOffer(offer=Offer(provisioner="sim", name=name, **fields), profile=PLAIN, quota=quota)


def scaling(*offers: SimulatedOffer, decision_maker: Any = None, **config: Any) -> ScalingSetup:
    settings = {"max_nodes": 8, "interval_s": 5.0, "cooldown_up_s": 10.0, "cooldown_down_s": 60.0, **config}
    return ScalingSetup(
        config=Scaling(enabled=True, **settings), offers=offers or (sim_offer(),), decision_maker=decision_maker
    )


def world_of(autoscale: ScalingSetup, count: int = 2) -> tuple[World, SimulatedScaling]:
    specs = [NodeSpec(f"node-{at}", PLAIN, usd_per_hour=2.0) for at in range(count)]
    world = World(specs, CONDITIONS, Config())
    return world, SimulatedScaling(world, autoscale)


def prompt(number: int, at_ms: float, tokens: int = 500) -> WorkloadPrompt:
    blocks = SHARED.followed_by(segment_id("question", number), tokens - 256)
    return WorkloadPrompt(tokens, 4, blocks.followed_by(segment_id("answer", number), 4), at_ms=at_ms)


def rising_and_falling(seconds: float, most_per_s: float, tokens: int = 500) -> Iterator[WorkloadPrompt]:
    """A load that rises and falls."""
    at_s, number = 0.0, 0
    while at_s < seconds:
        yield prompt(number, at_s * 1000.0, tokens)
        number += 1
        at_s += 1.0 / (0.3 + most_per_s * max(0.0, sin(pi * at_s / seconds)))


def assert_all_requests_ended(world: World) -> None:
    assert world.inflight == 0 and world.admission.queue.waiting == 0
    assert world.results.ended == world.results.total("arrived")
    for sim in (*world.nodes.values(), *world.departed):
        assert sim.node.inflight == 0 and not sim.tries


def test_a_fleet_follows_its_load_and_no_request_is_cut() -> None:
    world, scaled = world_of(scaling())
    removed_with_requests: list[str] = []
    remove = world.remove

    def watched(name: str) -> None:
        if world.nodes[name].tries:
            removed_with_requests.append(name)
        remove(name)

    world.remove = watched  # type: ignore[method-assign]
    world.run(rising_and_falling(1200.0, 4.0, 1200))
    world.calendar.run(until_ms=world.calendar.now_ms + 900_000.0)
    counts = [serving for _, serving, _ in scaled.counts]
    assert max(counts) >= 4 and counts[-1] <= 2
    assert world.results.total("finished") == world.results.total("arrived") > 2500
    assert not removed_with_requests and world.departed
    assert_all_requests_ended(world)
    for decision in scaled.decisions:
        assert decision.reasons and all(isinstance(reason, str) for reason in decision.reasons)


def test_the_same_seed_gives_the_same_fleet() -> None:
    found = []
    for _ in range(2):
        world, scaled = world_of(scaling())
        world.run(rising_and_falling(400.0, 5.0))
        found.append((scaled.counts, scaled.totals(), list(world.results.ttft_ms)))
    assert found[0] == found[1]


def test_the_first_request_waits_for_a_node_and_is_answered() -> None:
    world, scaled = world_of(scaling(min_nodes=0, scale_to_zero_after_s=100.0), count=0)
    world.run(iter([prompt(0, 1000.0), prompt(1, 2000.0), prompt(2, 60_000.0)]))
    assert world.results.total("finished") == 3
    first, _, third = world.results.ttft_ms
    assert first >= 16_000.0 and third < 5000.0
    world.calendar.run(until_ms=world.calendar.now_ms + 600_000.0)
    assert scaled.counts[-1][1:] == (0, 0)  # and back to zero
    world.run(iter([prompt(3, world.calendar.now_ms + 1000.0)]))
    assert world.results.total("finished") == 4
    assert_all_requests_ended(world)


def test_a_request_does_not_wait_forever_for_the_first_node() -> None:
    world, _ = world_of(scaling(sim_offer(quota=0), min_nodes=0, first_node_wait_s=30.0), count=0)
    world.run(iter([prompt(0, 1000.0)]))
    assert world.results.total("rejected") == 1
    assert 30_000.0 <= world.calendar.now_ms <= 40_000.0
    assert_all_requests_ended(world)


def test_an_offer_whose_quota_is_used_up_backs_off_and_the_next_is_used() -> None:
    world, scaled = world_of(scaling(sim_offer(quota=3), sim_offer("expensive", usd_per_hour=9.0)))
    world.run(rising_and_falling(600.0, 7.0))
    used = [one.offer.name for decision in scaled.decisions for one in decision.additions]
    assert scaled.controller.refused >= 1 and "expensive" in used
    assert sum(managed.offer.name == "plain" for managed in scaled.autoscaler.managed) <= 3
    assert_all_requests_ended(world)


def test_a_new_node_has_hot_prefixes_before_it_serves() -> None:
    for moves_prefixes in (True, False):
        world, scaled = world_of(
            ScalingSetup(config=scaling().config, offers=(sim_offer(),), moves_prefixes=moves_prefixes)
        )
        prefilled: list[int] = []
        serve = scaled._serve

        def watched(
            managed: ManagedNode, world: World = world, serve: Any = serve, prefilled: list[int] = prefilled
        ) -> None:
            sim = world.nodes[managed.token]
            assert sim.node.draining and not sim.requests
            prefilled.append(sim.engine.stats.prompt_tokens_computed)
            serve(managed)

        scaled._serve = watched  # type: ignore[method-assign]
        world.run(rising_and_falling(500.0, 6.0))
        assert prefilled
        assert all((computed >= 256) == moves_prefixes for computed in prefilled)
        assert_all_requests_ended(world)


def test_prefixes_of_a_leaving_node_are_moved_first() -> None:
    world, scaled = world_of(scaling(max_nodes=2))
    world.run(iter([prompt(number, number * 2000.0) for number in range(20)]))
    chain = next(prefix.chain for prefix in scaled.autoscaler.prefixes_to_prewarm(world.calendar.now_s))
    name = next(iter(world.cache_view.holders(chain)))
    (other,) = set(world.nodes) - {name}
    world.restart(other)  # with an empty cache
    world.calendar.run(until_ms=world.calendar.now_ms + 5000.0)
    assert world.cache_view.holders(chain) == {name}
    assert [prefix.chain for prefix in scaled.autoscaler.prefixes_to_move(name, world.calendar.now_s)]
    managed = scaled.autoscaler.managed.named(name)
    assert managed is not None
    scaled.controller.apply(managed, LifecycleEvent.REMOVE)
    world.calendar.run(until_ms=world.calendar.now_ms + 30_000.0)
    assert name not in world.nodes
    (left,) = world.nodes
    assert left in world.cache_view.holders(chain)


def test_machines_are_paid_for_from_request_to_termination() -> None:
    world, scaled = world_of(scaling())
    world.run(rising_and_falling(800.0, 5.0))
    hours = 0.0
    counts = [*scaled.counts, (world.calendar.now_s, 0, 0)]
    for (at_s, serving, pending), (next_s, _, _) in pairwise(counts):
        hours += (serving + pending) * (next_s - at_s) / 3600.0
    paid = scaled.totals()
    assert paid["node_hours"] >= hours * 0.999  # draining is paid for, too
    assert paid["node_hours"] == pytest.approx(hours, rel=0.05)
    assert paid["usd"] == pytest.approx(2.0 * paid["node_hours"])


@pytest.mark.parametrize("peer", [Threshold, Hpa])
def test_other_scalers_scale_too(peer: Any) -> None:
    world, scaled = world_of(scaling(decision_maker=peer))
    world.run(rising_and_falling(1200.0, 6.0))
    assert max(serving for _, serving, _ in scaled.counts) > 2
    assert_all_requests_ended(world)
    run = {**summary(world), **scaling_summary(world, scaled)}
    assert run["most_nodes"] > 2 and run["gpu_hours"] > 0


def test_a_dry_run_changes_nothing() -> None:
    world, scaled = world_of(scaling(dry_run=True))
    world.run(rising_and_falling(400.0, 8.0))
    assert scaled.decisions and {serving for _, serving, _ in scaled.counts} == {2}


# The shape of a day.


def test_a_daily_curve_keeps_all_requests_and_peaks_at_noon() -> None:
    even = [WorkloadPrompt(10, 1, SHARED, at_ms=at * 100.0) for at in range(10_000)]
    moved = [one.at_ms / 1000.0 for one in follow_daily_curve(even, 1000.0)]
    assert moved == sorted(moved) and moved[-1] < 1000.0
    night, noon = sum(at < 100.0 for at in moved), sum(450.0 <= at < 550.0 for at in moved)
    assert noon / night == pytest.approx((1 + DEPTH * 0.98) / (1 - DEPTH * 0.93), rel=0.1)


# The report.


def test_a_replay_reports_nodes_cost_and_time_over_the_ttft_limit(tmp_path: Path) -> None:
    page, numbers = tmp_path / "page.html", tmp_path / "runs.json"
    words = ["shared_system_prompts", "system_tokens=2000", "question_tokens=2000", "output_tokens=200"]
    command = [
        "replay",
        *words,
        "--profile",
        "l4-1.5b",
        "--nodes",
        "1",
        "--limit",
        "600",
        "--rate",
        "4",
        "--policy",
        "price",
    ]
    scalers = ["--scaler", "warmroute", "--scaler", "hpa:target=0.6", "--scaler", "fixed"]
    more = ["--start", "20", "--usd", "1.5", "--ceiling", "1000", "--max-nodes", "4", "--day", "150"]
    assert main([*command, *scalers, *more, "--html", str(page), "--json", str(numbers), "--quiet"]) == 0
    ours, hpa, fixed = json.loads(numbers.read_text())["runs"]
    assert [run["policy"] for run in (ours, hpa, fixed)] == [
        "price, warmroute",
        "price, hpa:target=0.6",
        "price, fixed",
    ]
    for run in (ours, hpa):
        report = run["scaling"]
        assert report["usd"] == pytest.approx(1.5 * report["node_hours"], rel=1e-3)
        assert len(report["timeline"]["serving"]) > 10
        assert all(decision["reasons"] for decision in report["decisions"])
    for run in (ours, hpa, fixed):
        assert run["ceiling"]["ms"] == 1000.0 and run["ceiling"]["seconds_over"] >= 0
    assert "scaling" not in fixed
    assert fixed["usd"] == pytest.approx(1.5 * (paid_gpu_hours(fixed) or 0.0), rel=1e-2)
    usd = next(column for column in columns([ours, fixed]) if column.head == "USD")
    assert usd.text(fixed) == number(fixed["usd"])
    assert "Nodes over time" in page.read_text()


def test_offers_come_from_a_file(tmp_path: Path) -> None:
    offers, numbers = tmp_path / "offers.toml", tmp_path / "runs.json"
    offers.write_text(
        """
        [scaling]
        max_nodes = 3
        min_nodes = 3
        [[offers]]
        name = "cheap"
        profile = "l4-1.5b"
        usd_per_hour = 0.7
        start_s = 5
        quota = 2
        [[offers]]
        name = "expensive"
        profile = "l4-1.5b"
        usd_per_hour = 1.4
        start_s = 5
        """
    )
    command = [
        "replay",
        "shared_system_prompts",
        "--profile",
        "l4-1.5b",
        "--nodes",
        "1",
        "--limit",
        "400",
        "--policy",
        "price",
    ]
    assert main([*command, "--autoscale", "--offers", str(offers), "--json", str(numbers), "--quiet"]) == 0
    (run,) = json.loads(numbers.read_text())["runs"]
    assert run["scaling"]["most_nodes"] == 3 and run["scaling"]["refusals"] >= 1
    assert {name for decision in run["scaling"]["decisions"] for name in decision["add"]} == {
        "replay/cheap",
        "replay/expensive",
    }


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--scaler", "magic"], "choose one of warmroute, warmroute:thresholds, threshold, hpa, keda, fixed"),
        (["--scaler", "hpa:tagret=1"], "hpa takes target"),
        (["--autoscale", "--offers", "/nowhere.toml"], "cannot read it"),
        (["--autoscale", "--nodes", "4", "--max-nodes", "2"], "--nodes 4 is above --max-nodes 2"),
        (["--usd", "2"], "--usd: only with --autoscale"),
        (["--start", "20", "--quota", "3"], "--start, --quota: only with --autoscale"),
        (["--autoscale", "--min-nodes", "9", "--max-nodes", "3"], "above scaling.max_nodes"),
    ],
)
def test_invalid_scaling_flags_are_rejected(flags: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", "shared_system_prompts", "--limit", "5", "--quiet", *flags]) == 2
    assert words in capsys.readouterr().err


def test_an_unscaled_run_has_no_scaling_report() -> None:
    setup = Setup(
        workload=parse_workload(["shared_system_prompts"]),
        nodes=tuple(NodeSpec(f"node-{at}", PLAIN) for at in range(2)),
        policy=parse_policy("price"),
        limit=50,
    )
    run = replay(setup)
    assert "scaling" not in run and "ceiling" not in run
