"""How fast answers flow: the time between two tokens, by how much context a node's batch has to look back at. Learned
from all nodes of a model together, so that a node nobody uses is not believed to be slow; what a node differs by is its
own factor.

    token_ms(node) = factor(node) · (base + slope · context)                          [ms]
"""

from __future__ import annotations

from typing import Final

from warmroute._kernel._books import PaceState

USUAL_BASE_MS: Final = 15.0
USUAL_SLOPE_MS: Final = 3e-5
PRIOR_CONTEXT: Final = 20_000.0
WEIGHT: Final = 0.03
LEAST_SHARE: Final = 0.2
"""A token never takes less than this × the mean."""
MOST_TIMES: Final = 4.0


class DecodeSpeed(PaceState):
    """Of a model: the least, and a line through its mean. The kernel learns by the same formulas (see _books.c)."""

    __slots__ = ()

    def __init__(self) -> None:
        self.answers = 0
        self.least_ms = LEAST_SHARE * USUAL_BASE_MS
        self.mean_ms = USUAL_BASE_MS
        self.slope_ms = USUAL_SLOPE_MS
        self.mean_context = 0.0
        self._xx = PRIOR_CONTEXT**2
        self._xy = PRIOR_CONTEXT**2 * USUAL_SLOPE_MS

    def token_ms(self, context: float) -> float:
        """On a node like the others."""
        line_ms = self.mean_ms + self.slope_ms * (context - self.mean_context)
        return line_ms if line_ms > self.least_ms else self.least_ms

    def saw_answer(self, token_ms: float, context: float) -> None:
        """A token took so long, beside so many tokens of context; by a node like the others."""
        self.answers += 1
        weight = max(WEIGHT, 1.0 / (self.answers + 1))
        most_ms = MOST_TIMES * self.token_ms(context)
        dx = context - self.mean_context
        dy = (token_ms if token_ms < most_ms else most_ms) - self.mean_ms
        self.mean_context += weight * dx
        self.mean_ms += weight * dy
        xx = self._xx = self._xx + WEIGHT * (dx * dx - self._xx)
        xy = self._xy = self._xy + WEIGHT * (dx * dy - self._xy)
        slope_ms = xy / (xx if xx > 1.0 else 1.0)
        self.slope_ms = slope_ms if slope_ms > 0.0 else 0.0
        self.least_ms = LEAST_SHARE * self.mean_ms
