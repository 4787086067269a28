"""LoRA adapters in virtual time: requests find the nodes that have theirs loaded."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from statistics import fmean

import pytest
from small_worlds import PLAIN, books_are_closed

from warmroute.config import Config, from_table
from warmroute.replay.workloads import Prompt, Segments
from warmroute.replay.workloads.segments import named
from warmroute.replay.world import Conditions, NodeSpec, World

ADAPTERS = tuple(f"adapter-{number}" for number in range(9))


def asking(count: int, seed: int, tokens: int = 96) -> Iterator[Prompt]:
    """Short prompts that share nothing, each for an adapter by chance, four a second."""
    random = Random(seed)
    at_ms = 0.0
    for number in range(count):
        at_ms += random.expovariate(4.0) * 1000.0
        adapter = random.choice(ADAPTERS)
        text = Segments().followed_by(named("prompt", number), tokens)
        answer = text.followed_by(named("answer", number), 4).in_namespace(adapter, None)
        yield Prompt(tokens, 4, answer, at_ms=at_ms, lora_name=adapter)


def lived(load_ms: float, prompts: Iterator[Prompt], slots: int = 3) -> World:
    """Three nodes with room for all adapters between them, whose engines take 200 ms to load one."""
    specs = [NodeSpec(f"node-{at}", PLAIN, adapters=ADAPTERS, max_loras=slots) for at in range(3)]
    config: Config = from_table({"price": {"adapter_load_ms": load_ms}, "index": {"min_tokens": 16}})
    world = World(specs, Conditions(seed=3), config)
    world.run(prompts)
    books_are_closed(world)
    return world


def loads(world: World) -> int:
    return sum(stats.lora_loads for sim in world.nodes.values() for stats in sim.past)


@pytest.mark.parametrize("seed", [1, 2])
def test_a_request_goes_where_its_adapter_is_loaded(seed: int) -> None:
    minding, careless = lived(200.0, asking(400, seed)), lived(0.0, asking(400, seed))
    assert minding.tally.total("finished") == careless.tally.total("finished") == 400
    assert loads(minding) < loads(careless) / 3
    assert fmean(minding.tally.ttft_ms) < fmean(careless.tally.ttft_ms) - 50.0


def test_what_is_believed_to_be_loaded_is_what_engines_have_loaded() -> None:
    world = lived(200.0, asking(300, 3))
    for sim in world.nodes.values():
        assert sim.node.loaded.slots == 3
        assert list(sim.node.loaded) == list(sim.engine._lora._resident)
        assert sim.node.loaded.loads == sum(stats.lora_loads for stats in sim.past)


def test_a_restarted_node_has_nothing_loaded() -> None:
    world = lived(200.0, asking(60, 4))
    [name, *_] = world.nodes
    assert len(world.nodes[name].node.loaded)
    world.restart(name)
    world.calendar.run_until(world.calendar.now_ms + 3000.0)
    assert not len(world.nodes[name].node.loaded)


def test_a_fleet_without_adapters_pays_nothing_for_them() -> None:
    world = World([NodeSpec("node-0", PLAIN)], Conditions(seed=3))
    group = world.fleet.group("sim")
    assert group is not None and group.adapter is None
