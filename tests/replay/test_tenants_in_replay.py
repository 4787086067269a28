"""Tenants that share no knowledge of caches, in virtual time: what one tenant has cached may not show in where and how
fast another one is served."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from small_worlds import NEAR, assert_all_requests_ended, prompt, specs

from warmroute.app.main import main as warmroute
from warmroute.lab.engine.timing import profile
from warmroute.lab.request_flow import SimulatedExchange
from warmroute.lab.workloads.workload_prompt import WorkloadPrompt
from warmroute.lab.world import World

PAIRS = 95
TOKENS = 600
L4 = profile("l4-1.5b")


def equal_prompts() -> Iterator[WorkloadPrompt]:
    """Each prompt twice: from one tenant, and 5 s later, when the fleet is idle, from the other one."""
    for number in range(PAIRS):
        for at in range(2):
            yield prompt(number, tokens=TOKENS, at_ms=10_000.0 * number + 5000.0 * at)


def world_of(tenants: int, *, reports_usage: bool = True) -> World:
    nodes = specs(3, profile=L4)
    if not reports_usage:  # the nodes claim that every prompt was cached
        nodes = [msgspec.structs.replace(spec, misreports=("usage",)) for spec in nodes]
    return World(nodes, msgspec.structs.replace(NEAR, tenants=tenants))


@pytest.mark.parametrize("reports_usage", [True, False])
def test_hits_that_isolation_hides_do_not_herd_an_idle_fleet_onto_one_node(reports_usage: bool) -> None:
    """Half of the requests are hits that their tenant may not learn of, wherever chance sends them to the node of the
    equal prompt. If such short times were learned as speed, one node would get nearly all of 190 requests."""
    world = world_of(2, reports_usage=reports_usage)
    world.run(equal_prompts())
    assert_all_requests_ended(world)
    isolated = [sim.requests for sim in world.nodes.values()]
    assert min(isolated) > 2 * PAIRS // 5, isolated
    speeds = [sim.node.speed.ms_per_token for sim in world.nodes.values()]
    assert max(speeds) < 1.05 * min(speeds), "all nodes are equally fast"


def test_the_time_to_first_token_says_nothing_of_another_tenants_prompts() -> None:
    """Of the second tenant's requests, chance sends a third to the node that has the prompt, and no more."""
    world, hits = world_of(2), 0
    request_ended = world.request_ended

    def count_hits(exchange: SimulatedExchange, answered: bool) -> None:
        nonlocal hits
        request_ended(exchange, answered)
        hits += bool(exchange.cached_tokens) and exchange.request.tenant == "tenant-1"

    world.request_ended = count_hits  # type: ignore[method-assign]
    world.run(equal_prompts())
    assert 0.2 * PAIRS < hits < 0.5 * PAIRS, hits


def test_the_report_compares_the_shares_of_nodes_with_and_without_tenants(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "runs.json"
    load = ["hot_prefix_storm", "--nodes", "3", "--limit", "120", "--policy", "price"]
    assert warmroute(["replay", *load, "--tenants", "0,4", "--json", str(file)]) == 0
    assert [run["tenants"] for run in json.loads(file.read_text())["runs"]] == [0, 4]
    assert "most on a" in capsys.readouterr().out
