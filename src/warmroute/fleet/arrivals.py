"""How often requests arrive, of late."""

from __future__ import annotations

from math import exp
from typing import Final

KEPT_S: Final = 10.0
"""What arrived so long ago counts 1/e. _price.c and _books.c have the same."""


class Arrivals:
    __slots__ = ("_at_s", "_rate")

    def __init__(self) -> None:
        self._at_s = 0.0
        self._rate = 0.0

    def saw(self, now_s: float) -> None:
        self._rate = self.rate(now_s) + 0.001 / KEPT_S
        self._at_s = now_s

    def rate(self, now_s: float) -> float:
        """Requests a millisecond, over the last ten seconds or so."""
        return self._rate * exp((self._at_s - now_s) / KEPT_S)
