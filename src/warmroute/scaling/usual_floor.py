"""The TTFT p90 that the recorded requests usually have on a fleet so large that hardly any of them waits.

Some minutes have longer prompts than others, by chance. They take longer on a fleet of any size, and the next minutes
have other prompts. So a search by replay compares this floor with the usual one, and does not count the difference
(replay/planning/fleet_search.py). The usual floor is a mean over time that fades: what was measured FADE_WINDOWS times
`scaling.replay.window_s` ago counts 1/e. It begins with an assumption that counts as one window: the first minutes say
little about what is usual.
"""

from __future__ import annotations

from math import exp, inf
from typing import Final

import msgspec

FADE_WINDOWS: Final = 4.0
ASSUMED: Final = 0.75
"""Of the limit."""


class UsualFloor(msgspec.Struct):
    _sum: float
    _weight_s: float
    _updated_s: float = -inf

    @classmethod
    def assumed(cls, limit_ms: float, window_s: float) -> UsualFloor:
        """`limit_ms`: of the TTFT p90."""
        return cls(ASSUMED * limit_ms * window_s, window_s)

    @property
    def ttft_ms(self) -> float:
        return self._sum / self._weight_s

    def record(self, ttft_ms: float, now_s: float, measured_s: float, window_s: float) -> None:
        """Take over the floor of a search. `measured_s`: the recorded time that it was measured over. Searches that
        follow each other sooner measure the same requests, so each counts for the time since the last one."""
        passed_s = max(0.0, now_s - self._updated_s) if self._updated_s > -inf else measured_s
        fades = exp(-passed_s / (FADE_WINDOWS * window_s))
        weight_s = min(passed_s, measured_s)
        self._sum = self._sum * fades + ttft_ms * weight_s
        self._weight_s = self._weight_s * fades + weight_s
        self._updated_s = now_s
