"""Every script with the core alone."""

from __future__ import annotations

import re
from typing import Any

import pytest

from seam.core_stage import CoreStage
from seam.player import missing, play
from seam.scenarios import SCRIPTS
from seam.scenarios.ends import LATER
from seam.script import FAULTS, Script


def test_each_scenario_has_a_script() -> None:
    found = (re.match(r"\d+", script.number) for script in SCRIPTS)
    numbers = {int(one.group()) for one in found if one is not None}
    assert numbers | {int(number) for number in LATER} == set(range(1, 135))
    assert len({script.number for script in SCRIPTS}) == len(SCRIPTS)


def as_parameter(script: Script) -> Any:
    """A fault replaces methods, which compiled code does not notice."""
    marks = [pytest.mark.interpreted] if FAULTS in script.needs else []
    return pytest.param(script, marks=marks, id=script.number)


@pytest.mark.parametrize("script", [as_parameter(script) for script in SCRIPTS])
async def test_script(script: Script) -> None:
    stage = CoreStage()
    if lacks := missing(script, stage):
        pytest.skip(f"the core alone has no {', '.join(lacks)}")
    await play(script, stage)
