"""Every script over real sockets: a client, the HTTP edge, the core, and nodes that do what the script says."""

from __future__ import annotations

import pytest

from seam.http_stage import HttpStage
from seam.player import missing, play
from seam.scenarios import SCRIPTS
from seam.script import Script


@pytest.mark.interpreted
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.number)
async def test_script(script: Script) -> None:
    stage = HttpStage()
    if lacks := missing(script, stage):
        pytest.skip(f"the HTTP edge has no {', '.join(lacks)}")
    await play(script, stage)
