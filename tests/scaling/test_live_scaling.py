"""A rising and falling load on a real router that starts and ends real processes: the fleet follows the load, no
request is lost, and no engine ends while it has requests.
"""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from warmroute.lab.demo.part_scaling import (
    AutoscaledFleet,
    FleetOptions,
    LoadPlan,
    ScalingDemo,
    ScalingResult,
    VariableLoad,
)
from warmroute.lab.demo.processes import Children, free_port

OPTIONS = FleetOptions(min_nodes=2, max_nodes=5)
PLAN = LoadPlan(low_s=1.0, ramp_s=2.0, peak_s=2.0, timeout_s=90.0)


async def run_demo(children: Children, folder: Path) -> tuple[ScalingResult, VariableLoad, str]:
    """Return the result, the load, and the router's log."""
    async with AutoscaledFleet(children, folder, free_port(18080), OPTIONS) as fleet:
        load = VariableLoad(fleet.router.url)
        result = await ScalingDemo(fleet, load, PLAN).run()
        log = fleet.router.child.stderr_text()
    return result, load, log


def processes_with(words: str) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if words in path.read_text():
                found.append(path.parent.name)
        except OSError:
            continue  # it has ended
    return found


@pytest.mark.timeout(280)
def test_a_fleet_follows_its_load_and_loses_no_request(tmp_path: Path) -> None:
    with asyncio.Runner() as runner, Children() as children:
        result, load, log = runner.run(run_demo(children, tmp_path))

    assert result.max_serving == OPTIONS.max_nodes, log
    assert result.final_serving == OPTIONS.min_nodes, log
    assert max(sample.fleet.serving + sample.fleet.starting for sample in result.samples) == OPTIONS.max_nodes

    assert load.sent > 50
    assert load.completed == load.sent, (load.failed, load.truncated)
    assert not load.failed
    assert not load.truncated

    ended = re.findall(r'state=terminating previous_state=(\w+) reason="(.*?)"', log)
    removed = OPTIONS.max_nodes - OPTIONS.min_nodes
    assert len(ended) >= removed, log
    assert set(ended) == {("draining", "no requests left")}, log
    assert len(result.requests_at_stop) == len(ended)
    assert set(result.requests_at_stop.values()) == {0}, result.requests_at_stop
    assert "node_lost" not in log
    assert not processes_with(str(tmp_path))
