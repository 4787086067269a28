"""Every script that the lab can play, in virtual time."""

from __future__ import annotations

import pytest

from seam.player import missing, play
from seam.replay_stage import ReplayStage
from seam.scenarios import SCRIPTS
from seam.script import Script


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.number)
async def test_script(script: Script) -> None:
    stage = ReplayStage()
    if lacks := missing(script, stage):
        pytest.skip(f"the lab has no {', '.join(lacks)}")
    await play(script, stage)
