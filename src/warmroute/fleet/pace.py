"""How fast answers flow: the time between two tokens, by how much context a node's batch has to look back at. Learned
from all nodes of a model together, so that a node nobody uses is not believed to be slow; what a node differs by is its
own factor.

    token_ms(node) = factor(node) · (base + slope · context)                          [ms]
"""

from __future__ import annotations

from typing import Final

USUAL_BASE_MS: Final = 15.0
USUAL_SLOPE_MS: Final = 3e-5
PRIOR_CONTEXT: Final = 20_000.0
WEIGHT: Final = 0.03
LEAST_SHARE: Final = 0.2
"""A token never takes less than this × the mean."""
MOST_TIMES: Final = 4.0


class Pace:
    """Of a model."""

    __slots__ = ("_mean_context", "_mean_ms", "_xx", "_xy", "answers", "slope_ms")

    def __init__(self) -> None:
        self.answers = 0
        self.slope_ms = USUAL_SLOPE_MS
        self._mean_context = 0.0
        self._mean_ms = USUAL_BASE_MS
        self._xx = PRIOR_CONTEXT**2
        self._xy = PRIOR_CONTEXT**2 * USUAL_SLOPE_MS

    def token_ms(self, context: float) -> float:
        """On a node like the others."""
        least_ms, mean_ms, slope_ms, mean_context = self.line
        return max(least_ms, mean_ms + slope_ms * (context - mean_context))

    @property
    def line(self) -> tuple[float, float, float, float]:
        """What `token_ms` is made of: the least, and a line through its mean, as time, slope and context."""
        return LEAST_SHARE * self._mean_ms, self._mean_ms, self.slope_ms, self._mean_context

    def saw_answer(self, token_ms: float, context: float) -> None:
        """A token took so long, beside so many tokens of context; by a node like the others."""
        self.answers += 1
        weight = max(WEIGHT, 1.0 / (self.answers + 1))
        token_ms = min(token_ms, MOST_TIMES * self.token_ms(context))
        dx, dy = context - self._mean_context, token_ms - self._mean_ms
        self._mean_context += weight * dx
        self._mean_ms += weight * dy
        self._xx += WEIGHT * (dx * dx - self._xx)
        self._xy += WEIGHT * (dx * dy - self._xy)
        self.slope_ms = max(0.0, self._xy / max(1.0, self._xx))
