"""What the router does with the engines' own counters, in virtual time."""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import count
from random import Random

import msgspec
import pytest

from warmroute.config import from_table
from warmroute.core.node import EngineCounters
from warmroute.lab import simulated_router
from warmroute.lab.engine.timing import profile
from warmroute.lab.engine.values import EngineRequest
from warmroute.lab.simulated_node import Conditions, NodeSpec
from warmroute.lab.workloads import poisson
from warmroute.lab.workloads.generators import SharedSystemPrompts
from warmroute.lab.workloads.workload_prompt import Segments, WorkloadPrompt, segment_id
from warmroute.lab.world import World

SMALL = msgspec.structs.replace(profile("l4-1.5b"), max_num_seqs=8)
REQUESTS = SharedSystemPrompts(prompts=40, system_tokens=500, question_tokens=500, output_tokens=60)


def other_clients(world: World, name: str, every_ms: float, requests: int, output: int) -> None:
    """Send requests to a node's engine past the router, many at once."""
    sim, numbers = world.nodes[name], count()

    def send() -> None:
        for _ in range(requests):
            number = next(numbers)
            text = Segments().followed_by(segment_id("other", number), 300)
            prompt = WorkloadPrompt(300, output, text.followed_by(segment_id("answer", number), output))
            request = EngineRequest(f"other {number}", 300, output, prompt.blocks.content(16))
            sim.engine.submit(request, world.calendar.now_ms)
        world.arm(sim)
        world.calendar.after(every_ms, send)

    world.calendar.after(100.0, send)


def run(rate: float, prepare: Callable[[World], None] = lambda _: None, seed: int = 1) -> World:
    world = World([NodeSpec("a", SMALL), NodeSpec("b", SMALL)], Conditions(seed=seed + 1), from_table({}))
    prepare(world)
    world.run(poisson(REQUESTS.generate(Random(seed)), rate, Random(seed + 1)), limit=300)
    return world


def test_the_queue_time_that_an_engine_reports_keeps_requests_out_of_its_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other clients fill a node's queue now and then. The router's own requests say nothing about that. A run has some
    five slow requests, so eight runs count."""

    def fill(world: World) -> None:
        other_clients(world, "a", 20_000.0, 20, 200)

    def slow_ones(worlds: list[World]) -> int:
        return sum(ttft_ms > 2000.0 for world in worlds for ttft_ms in world.results.ttft_ms)

    reported = [run(8.0, fill, seed) for seed in range(1, 9)]
    monkeypatch.setattr(simulated_router, "_counters", lambda _stats: EngineCounters())
    unreported = [run(8.0, fill, seed) for seed in range(1, 9)]
    assert slow_ones(unreported) > 1.1 * slow_ones(reported)
    assert reported[0].nodes["a"].node.rates.queue_time_ms is not None


def test_a_node_that_preempts_counts_as_short_of_memory() -> None:
    small = [NodeSpec(name, profile("l4-1.5b"), blocks=800) for name in "ab"]
    world = World(small, Conditions(seed=2), from_table({}))
    other_clients(world, "a", 4000.0, 12, 800)
    pressures: list[float] = []

    def look() -> None:
        pressures.append(world.nodes["a"].node.kv_pressure)
        world.calendar.after(1000.0, look)

    world.calendar.after(1000.0, look)
    world.run(poisson(REQUESTS.generate(Random(1)), 3.0, Random(2)), limit=100)
    assert world.nodes["a"].totals.preemptions > 20 and max(pressures) > 0.5
    assert world.nodes["a"].requests < world.nodes["b"].requests


def test_engines_and_router_agree_about_hits_in_replay(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        world = run(4.0)
    for sim in world.nodes.values():
        share, predicted = sim.node.rates.hit_share, sim.node.rates.predicted_share
        assert share is not None and predicted is not None and abs(share - predicted) < 0.1
    assert not caplog.records


def test_an_engine_that_computes_every_prompt_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    """It sends KV events of blocks that it then does not use, and its responses report no cached tokens."""
    specs = [NodeSpec("a", SMALL, misreports=("cache", "usage"))]
    world = World(specs, Conditions(seed=2), from_table({}))
    with caplog.at_level(logging.WARNING):
        world.run(poisson(REQUESTS.generate(Random(1)), 5.0, Random(2)), limit=300)
    found = [record.message for record in caplog.records if "cache_prediction_disagrees" in record.message]
    assert len(found) == 1 and "far less in its cache" in found[0]
