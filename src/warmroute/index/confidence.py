"""Confidence: how much the router trusts what it knows of a cache, from 0 (route by load only) to 1.

Two measures. Freshness: how long ago the node last confirmed its events. Accuracy: how much of the predicted cached
tokens the engine then reported. Both scale the tokens of a hit.
"""

from __future__ import annotations

from typing import Final

from warmroute._kernel import ACCURACY_HALF_LIFE_S, ACCURACY_PRIOR_TOKENS, AccuracyState

FADE: Final = 0.97
"""Weight that older responses keep with each new one."""


class Accuracy(AccuracyState):
    """Predicted against reported cached tokens, recent responses first."""

    __slots__ = (
        "_either", "compared", "exact", "predicted_tokens", "reported_tokens",
    )  # fmt: skip

    def __init__(self) -> None:
        self._predicted = 0.0
        self._confirmed = 0.0
        self._either = 0.0
        self._at_s = 0.0
        self.compared = 0
        """Responses that reported cached tokens."""
        self.exact = 0
        """Of these, responses that reported exactly the prediction."""
        self.predicted_tokens = 0
        self.reported_tokens = 0

    def compare(self, predicted: int, reported: int, now_s: float) -> None:
        left = self._left(now_s) * FADE
        both = min(predicted, reported)
        self._predicted = self._predicted * left + predicted
        self._confirmed = self._confirmed * left + both
        self._either = self._either * left + max(predicted, reported)
        self._at_s = now_s
        self.compared += 1
        self.predicted_tokens += predicted
        self.reported_tokens += reported
        self.exact += predicted == reported

    def trust(self, now_s: float) -> float:
        """Return the share of predicted tokens that engines confirm. More cached tokens than predicted cost nothing."""
        if self._confirmed == self._predicted:
            return 1.0
        left = self._left(now_s)
        return (ACCURACY_PRIOR_TOKENS + self._confirmed * left) / (ACCURACY_PRIOR_TOKENS + self._predicted * left)

    def agreement(self) -> float:
        """Return tokens both predicted and reported, divided by tokens predicted or reported; 1 before the first."""
        return self._confirmed / self._either if self._either else 1.0

    def _left(self, now_s: float) -> float:
        return float(0.5 ** (max(0.0, now_s - self._at_s) / ACCURACY_HALF_LIFE_S))


def freshness(age_s: float, stale_s: float, gone_s: float) -> float:
    """Return 1 up to `stale_s`, then a value that falls linearly to 0 at `gone_s`."""
    if age_s <= stale_s:
        return 1.0
    return max(0.0, (gone_s - age_s) / (gone_s - stale_s)) if gone_s > stale_s else 0.0
