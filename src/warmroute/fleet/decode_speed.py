"""The decode speed of a model: the time per output token, as a line over the context of a node's batch.

    token_ms(node) = factor(node) · (base + slope · context)                          [ms]
    context        = prompt tokens of the node's requests + REQUEST_CONTEXT for each of them

All nodes of a model share one line, so that the estimate for an idle node stays current. Each node's deviation from it
is its own factor (see node_speed.py). The kernel updates both when a response ends; tests/accounting_reference.py has
the same formulas in Python.
"""

from __future__ import annotations

from typing import Final

from warmroute._kernel import DECODE_MIN_SHARE, DecodeSpeedState

DEFAULT_BASE_MS: Final = 15.0
DEFAULT_SLOPE_MS: Final = 3e-5
PRIOR_CONTEXT: Final = 20_000.0
"""The default slope weighs as much as responses spread this far around the mean context [tokens]."""


class DecodeSpeed(DecodeSpeedState):
    """The learned line of one model. DecodeSpeedState holds the fields for the kernel."""

    __slots__ = ()

    def __init__(self) -> None:
        self.answers = 0
        self.least_ms = DECODE_MIN_SHARE * DEFAULT_BASE_MS
        self.mean_ms = DEFAULT_BASE_MS
        self.slope_ms = DEFAULT_SLOPE_MS
        self.mean_context = 0.0
        self._xx = PRIOR_CONTEXT**2
        self._xy = PRIOR_CONTEXT**2 * DEFAULT_SLOPE_MS

    def token_ms(self, context: float) -> float:
        """Return the time per token on a node with factor 1 whose batch has this many tokens of context."""
        line_ms = self.mean_ms + self.slope_ms * (context - self.mean_context)
        return line_ms if line_ms > self.least_ms else self.least_ms
