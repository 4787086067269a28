"""How often long prompts come to a model whose nodes have roles, and how much prefill time they need.

Both are averages over the recent past, in which what happened DECAY_S ago counts 1/e as much as what happens now.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp
from typing import Final

LONG_MS: Final = 50.0
"""A prompt is long if its prefill takes longer than this: users notice such a gap between two tokens."""
DECAY_S: Final = 30.0
"""Long prompts are few: over a shorter time, chance decides."""
MIN_S: Final = 2.0
"""The averages are over at least this time."""


@dataclass(slots=True, eq=False)
class LongPrompts:
    _arrivals: float = 0.0
    _prefill_ms: float = 0.0
    _updated_s: float = 0.0
    _since_s: float = 0.0

    def record(self, prefill_ms: float, now_s: float) -> None:
        """A prompt was sent to a node, whose prefill takes this long."""
        if not self._arrivals:
            self._since_s = now_s
        left = self._left(now_s)
        self._arrivals = self._arrivals * left + 1.0
        self._prefill_ms = self._prefill_ms * left + prefill_ms
        self._updated_s = now_s

    def recent(self, now_s: float) -> tuple[float, float]:
        """Return arrivals per millisecond, and the number of nodes that their prefills keep busy."""
        if not self._arrivals:
            return 0.0, 0.0
        known_s = max(MIN_S, now_s - self._since_s)
        per_ms = self._left(now_s) * 0.001 / (DECAY_S * (1.0 - exp(-known_s / DECAY_S)))
        return self._arrivals * per_ms, self._prefill_ms * per_ms

    def _left(self, now_s: float) -> float:
        return exp(min(0.0, self._updated_s - now_s) / DECAY_S)
