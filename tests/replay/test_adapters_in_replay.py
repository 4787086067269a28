"""LoRA adapters in virtual time: requests go to nodes that have their adapter loaded."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from statistics import fmean

import pytest
from small_worlds import PLAIN, assert_all_requests_ended

from warmroute.config import Config, from_table
from warmroute.lab.simulated_node import Conditions, NodeSpec
from warmroute.lab.workloads.workload_prompt import Segments, WorkloadPrompt, segment_id
from warmroute.lab.world import World

ADAPTERS = tuple(f"adapter-{number}" for number in range(9))


def adapter_prompts(count: int, seed: int, tokens: int = 96) -> Iterator[WorkloadPrompt]:
    """Return short prompts that share nothing, each for a random adapter, four per second."""
    random = Random(seed)
    at_ms = 0.0
    for number in range(count):
        at_ms += random.expovariate(4.0) * 1000.0
        adapter = random.choice(ADAPTERS)
        text = Segments().followed_by(segment_id("prompt", number), tokens)
        answer = text.followed_by(segment_id("answer", number), 4)
        yield WorkloadPrompt(tokens, 4, answer, at_ms=at_ms, lora_name=adapter)


def simulate(load_ms: float, prompts: Iterator[WorkloadPrompt], slots: int = 3) -> World:
    """Run three nodes that together have room for all adapters and take 200 ms to load one."""
    specs = [NodeSpec(f"node-{at}", PLAIN, adapters=ADAPTERS, max_loras=slots) for at in range(3)]
    config: Config = from_table(
        {"price": {"adapter_load_ms": load_ms}, "index": {"min_prompt_tokens": 16}}, experiment=True
    )
    world = World(specs, Conditions(seed=3), config)
    world.run(prompts)
    assert_all_requests_ended(world)
    return world


def loads(world: World) -> int:
    return sum(stats.lora_loads for sim in world.nodes.values() for stats in sim.incarnation_stats)


@pytest.mark.parametrize("seed", [1, 2])
def test_a_request_goes_where_its_adapter_is_loaded(seed: int) -> None:
    priced, unpriced = simulate(200.0, adapter_prompts(400, seed)), simulate(0.0, adapter_prompts(400, seed))
    assert priced.results.total("finished") == unpriced.results.total("finished") == 400
    assert loads(priced) < loads(unpriced) / 3
    assert fmean(priced.results.ttft_ms) < fmean(unpriced.results.ttft_ms) - 50.0


def test_the_router_knows_which_adapters_the_engines_have_loaded() -> None:
    world = simulate(200.0, adapter_prompts(300, 3))
    for sim in world.nodes.values():
        assert sim.node.loaded_adapters.slots == 3
        assert list(sim.node.loaded_adapters) == list(sim.engine.scheduler.lora._resident)
        assert sim.node.loaded_adapters.load_count == sum(stats.lora_loads for stats in sim.incarnation_stats)


def test_a_restarted_node_has_no_adapter_loaded() -> None:
    world = simulate(200.0, adapter_prompts(60, 4))
    [name, *_] = world.nodes
    assert len(world.nodes[name].node.loaded_adapters)
    world.restart(name)
    world.calendar.run(until_ms=world.calendar.now_ms + 3000.0)
    assert not len(world.nodes[name].node.loaded_adapters)


def test_a_fleet_without_adapters_has_no_adapter_group() -> None:
    world = World([NodeSpec("node-0", PLAIN)], Conditions(seed=3))
    group = world.fleet.group("sim")
    assert group is not None and group.adapter is None
