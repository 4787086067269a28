"""A decaying average of how often something arrives."""

from __future__ import annotations

from dataclasses import dataclass
from math import exp

from warmroute._kernel import ARRIVAL_DECAY_S


@dataclass(slots=True, eq=False)
class ArrivalRate:
    _rate: float = 0.0
    _updated_s: float = 0.0

    def record(self, now_s: float) -> None:
        self._rate = self.per_ms(now_s) + 0.001 / ARRIVAL_DECAY_S
        self._updated_s = now_s

    def per_ms(self, now_s: float) -> float:
        """Return arrivals per millisecond, averaged over about the last ten seconds."""
        return self._rate * exp((self._updated_s - now_s) / ARRIVAL_DECAY_S)
