"""A load rises and falls in front of a real router that starts and ends real processes: the fleet grows and shrinks,
and no request is lost on the way, nor any engine ended that still had one.
"""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from warmroute.demo.child_processes import Children, free_port
from warmroute.demo.variable_load import VariableLoad
from warmroute.demo.scaling_demo import LoadPlan, ScalingDemo, ScalingResult
from warmroute.demo.autoscaled_fleet import AutoscaledFleet, FleetOptions

SHAPE = FleetOptions(least=2, most=5)
PLOT = LoadPlan(calm_s=1.0, ramp_s=2.0, busy_s=2.0, limit_s=90.0)


async def live(children: Children, folder: Path) -> tuple[ScalingResult, VariableLoad, str]:
    """What came of it, what was sent, and the router's log."""
    async with AutoscaledFleet(children, folder, free_port(18080), SHAPE) as fleet:
        load = VariableLoad(fleet.router.url)
        story = await ScalingDemo(fleet, load, PLOT).run()
        log = fleet.router.child.said()
    return story, load, log


def processes_with(words: str) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if words in path.read_text():
                found.append(path.parent.name)
        except OSError:
            continue  # gone meanwhile
    return found


@pytest.mark.timeout(280)
def test_a_fleet_follows_its_load_and_loses_no_request(tmp_path: Path) -> None:
    with asyncio.Runner() as runner, Children() as children:
        story, load, log = runner.run(live(children, tmp_path))

    assert story.most == SHAPE.most, log
    assert story.last == SHAPE.least, log
    assert max(moment.look.serving + moment.look.coming for moment in story.moments) == SHAPE.most

    assert load.sent > 50
    assert load.whole == load.sent, (load.failed, load.short)
    assert not load.failed
    assert not load.short

    ended = re.findall(r"node \S+: (\w+) → ending \((.*)\)", log)
    removed = SHAPE.most - SHAPE.least
    assert len(ended) >= removed, log
    assert set(ended) == {("draining", "nothing runs there")}, log
    assert len(story.endings) == len(ended)
    assert set(story.endings.values()) == {0}, story.endings
    assert "went by itself" not in log
    assert not processes_with(str(tmp_path))
