"""Outlier detection runs in replay as in production: a node that becomes slow is ejected, healthy ones are not."""

from __future__ import annotations

from small_worlds import NEAR, assert_all_requests_ended, prompt, specs

from warmroute.config import from_table
from warmroute.core.health import HealthState
from warmroute.core.node import Node
from warmroute.lab.world import World


def run(slow_from_s: float | None) -> tuple[World, list[tuple[str, float]]]:
    """Run 120 s of traffic on four nodes. Return the world, and which nodes were ejected when."""
    config = from_table({"routing": {"policy": "overlap"}, "index": {"min_prompt_tokens": 16}}, experiment=True)
    world = World(specs(4), NEAR, config)
    ejected: list[tuple[str, float]] = []

    def note(node: Node, _before: HealthState) -> None:
        if node.health.state is HealthState.EJECTED:
            ejected.append((node.name, world.calendar.now_s))

    world.fleet.observe_health(note)
    if slow_from_s is not None:
        world.calendar.at(slow_from_s * 1000.0, world.slow, "node-2", 8.0)
    world.run(iter([prompt(number, tokens=64, output=20, at_ms=40.0 * number) for number in range(3000)]))
    assert_all_requests_ended(world)
    return world, ejected


def test_a_node_that_becomes_slow_is_ejected() -> None:
    _world, ejected = run(slow_from_s=60.0)
    assert {name for name, _at in ejected} == {"node-2"}
    assert 60.0 < ejected[0][1] < 110.0


def test_healthy_nodes_stay_up() -> None:
    world, ejected = run(slow_from_s=None)
    assert ejected == [] and all(sim.node.health.state is HealthState.UP for sim in world.nodes.values())
