"""The price of one node for one request. `terms.py` says how each part is made."""

from __future__ import annotations

from typing import Final, NamedTuple

TIE: Final = 1.02
"""Prices within this × the lowest are equal."""


class Price(NamedTuple):
    """Of one node for one request, in milliseconds."""

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
    """Tokens of the prompt that are expected to be cached there."""
    new: float
    """Tokens of the prompt that are not."""
    output: float
    """Tokens that the answer is expected to have."""

    @property
    def own(self) -> float:
        """What the request pays itself until its first token."""
        return self.wait + self.prefill + self.room + self.adapter + self.distance


TERMS: Final = Price._fields[1 : Price._fields.index("cached")]
"""What a price adds up from, in milliseconds."""
