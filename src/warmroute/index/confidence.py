"""Confidence: how much a belief about a cache counts, from 0 (not at all: load only) to 1.

Two measures. Freshness: how long ago the node gave a sign of life that confirms what it told. Accuracy: how much of
what was predicted came true, by what the engine reported. Both turn a hit into an expected hit.
"""

from __future__ import annotations

from typing import Final

from warmroute._kernel._price import AccuracyState

PRIOR_TOKENS: Final = 4096.0
"""Nothing is known of a new node: it is trusted as if so many predicted tokens had come true."""
FADE: Final = 0.97
"""What one answer leaves of the answers before it."""
HALF_LIFE_S: Final = 30.0
"""Mistrust halves in this time without an answer, so that a node gets another chance."""


class Accuracy(AccuracyState):
    """Predicted against reported cached tokens, of late."""

    __slots__ = (
        "_either",
        "compared",
        "exact",
        "predicted_tokens",
        "reported_tokens",
    )

    def __init__(self) -> None:
        self._predicted = 0.0
        self._came_true = 0.0
        self._either = 0.0
        self._at_s = 0.0
        self.compared = 0
        """Answers that told what was cached."""
        self.exact = 0
        """Of these, the answers that told just what was predicted."""
        self.predicted_tokens = 0
        self.reported_tokens = 0

    def compare(self, predicted: int, reported: int, now_s: float) -> None:
        left = self._left(now_s) * FADE
        both = min(predicted, reported)
        self._predicted = self._predicted * left + predicted
        self._came_true = self._came_true * left + both
        self._either = self._either * left + max(predicted, reported)
        self._at_s = now_s
        self.compared += 1
        self.predicted_tokens += predicted
        self.reported_tokens += reported
        self.exact += predicted == reported

    def trust(self, now_s: float) -> float:
        """Share of predicted tokens that come true. More than predicted is no reason for mistrust."""
        if self._came_true == self._predicted:
            return 1.0
        left = self._left(now_s)
        return (PRIOR_TOKENS + self._came_true * left) / (PRIOR_TOKENS + self._predicted * left)

    def agreement(self) -> float:
        """Tokens both predicted and reported, of those either predicted or reported; 1 where there is nothing yet."""
        return self._came_true / self._either if self._either else 1.0

    def _left(self, now_s: float) -> float:
        return float(0.5 ** (max(0.0, now_s - self._at_s) / HALF_LIFE_S))


def freshness(age_s: float, stale_s: float, gone_s: float) -> float:
    """1 up to `stale_s`, then falling to 0 at `gone_s`."""
    if age_s <= stale_s:
        return 1.0
    return max(0.0, (gone_s - age_s) / (gone_s - stale_s)) if gone_s > stale_s else 0.0
