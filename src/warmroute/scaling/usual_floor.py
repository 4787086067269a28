"""What prompts usually take on a fleet that is so large that none waits.

Each search replays the recorded traffic on such a fleet, too. Some minutes have longer prompts than others, by chance:
they take longer on any fleet, and more nodes do not change that. So a search compares this floor with the usual one,
and what is beyond it does not count (replay/planning/fleet_search.py). The usual floor is a mean that fades: one
FADE_WINDOWS times `scaling.replay.window_s` ago counts 1/e. It is relative to the objective, as every excess is.
"""

from __future__ import annotations

from math import exp
from typing import Final

import msgspec

FADE_WINDOWS: Final = 4.0
MAX_FLOOR: Final = 2.0
"""More counts as this: then requests wait even on a fleet that large."""


class UsualFloor(msgspec.Struct):
    _sum: float = 0.0
    _weight: float = 0.0
    _updated_s: float = 0.0

    @property
    def excess(self) -> float | None:
        """None if it is unknown."""
        return self._sum / self._weight if self._weight else None

    def record(self, floor: float, now_s: float, measured_s: float, window_s: float) -> None:
        """Take over the floor of a search. `measured_s`: the recorded time that it was measured over. Searches that
        follow each other sooner measure the same requests, so each counts for the time since the last one."""
        passed_s = max(0.0, now_s - self._updated_s)
        fades = exp(-passed_s / (FADE_WINDOWS * window_s)) if self._weight else 0.0
        weight = min(1.0, passed_s / max(1.0, measured_s)) if self._weight else 1.0
        self._sum = self._sum * fades + min(MAX_FLOOR, floor) * weight
        self._weight = self._weight * fades + weight
        self._updated_s = now_s
