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

    __slots__ = ("_xx", "_xy", "answers", "line")

    def __init__(self) -> None:
        self.answers = 0
        self.line = (LEAST_SHARE * USUAL_BASE_MS, USUAL_BASE_MS, USUAL_SLOPE_MS, 0.0)
        """What `token_ms` is made of: the least, and a line through its mean, as time, slope and context."""
        self._xx = PRIOR_CONTEXT**2
        self._xy = PRIOR_CONTEXT**2 * USUAL_SLOPE_MS

    @property
    def slope_ms(self) -> float:
        return self.line[2]

    def token_ms(self, context: float) -> float:
        """On a node like the others."""
        least_ms, mean_ms, slope_ms, mean_context = self.line
        line_ms = mean_ms + slope_ms * (context - mean_context)
        return line_ms if line_ms > least_ms else least_ms

    def saw_answer(self, token_ms: float, context: float) -> None:
        """A token took so long, beside so many tokens of context; by a node like the others."""
        self.answers += 1
        weight = max(WEIGHT, 1.0 / (self.answers + 1))
        most_ms = MOST_TIMES * self.token_ms(context)
        _, mean_ms, _, mean_context = self.line
        dx, dy = context - mean_context, (token_ms if token_ms < most_ms else most_ms) - mean_ms
        mean_context += weight * dx
        mean_ms += weight * dy
        xx = self._xx = self._xx + WEIGHT * (dx * dx - self._xx)
        xy = self._xy = self._xy + WEIGHT * (dx * dy - self._xy)
        slope_ms = xy / (xx if xx > 1.0 else 1.0)
        self.line = (LEAST_SHARE * mean_ms, mean_ms, slope_ms if slope_ms > 0.0 else 0.0, mean_context)
