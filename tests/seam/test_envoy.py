"""Every script that Envoy's edge can play, over ext_proc streams."""

from __future__ import annotations

import pytest

from seam.envoy_stage import EnvoyStage
from seam.player import missing, play
from seam.scenarios import SCRIPTS
from seam.script import Script


@pytest.mark.interpreted
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.number)
async def test_script(script: Script) -> None:
    stage = EnvoyStage()
    if lacks := missing(script, stage):
        pytest.skip(f"Envoy's edge has no {', '.join(lacks)}")
    await play(script, stage)
