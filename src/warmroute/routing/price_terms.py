"""The terms of the price of one node for one request.

policies/price_policy.py explains them, tests/routing/price_formulas.py has the formulas in Python, and
_kernel/price.c computes them.
"""

from __future__ import annotations

from typing import Final, NamedTuple

TIE: Final = 1.02
"""Prices up to this × the lowest one count as equal."""
ASSUMED_PROMPT_TOKENS: Final = 100.0
"""Length of a prompt that was not tokenized."""


class Price(NamedTuple):
    """All costs are in milliseconds."""

    total: float
    wait: float
    prefill: float
    room: float
    contention: float
    distance: float
    adapter: float
    risk: float
    memory: float
    congestion: float
    cached: float
    """Prompt tokens that the router expects to be cached on the node."""
    new: float
    """The other prompt tokens."""
    output: float
    """Expected output tokens."""

    @property
    def own(self) -> float:
        """The request's own time until its first token."""
        return self.wait + self.prefill + self.room + self.adapter + self.distance


TERMS: Final = Price._fields[1 : Price._fields.index("cached")]
"""The terms that add up to `total`."""
