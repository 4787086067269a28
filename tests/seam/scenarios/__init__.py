"""The scenarios of the specification of calls, by their numbers."""

from __future__ import annotations

from typing import Final

from seam.scenarios import added, ends, envoy, failover, hedges, leave, pairs, queue
from seam.script import Script

SCRIPTS: Final[tuple[Script, ...]] = (
    *queue.SCRIPTS, *failover.SCRIPTS, *leave.SCRIPTS, *hedges.SCRIPTS, *pairs.SCRIPTS, *envoy.SCRIPTS, *ends.SCRIPTS,
    *added.SCRIPTS,
)  # fmt: skip
