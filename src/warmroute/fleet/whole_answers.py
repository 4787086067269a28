"""The prefill speed of a node by its whole answers: nobody sees the first token of an answer that is not streamed.

    took = ms_per_token · work + token_ms · output tokens + constant                 [ms]

is a regression over the last answers, of which prompts and outputs differ. Most of the time is decoding, so the speed
counts only if it is clearly different from 0: at least MIN_SIGNIFICANCE times its standard error. One answer counts as
at most MAX_FACTOR times the mean. Only answers count whose prompt did not wait behind others, as far as the router
knows.
"""

from __future__ import annotations

from math import sqrt
from typing import Final

MIN_ANSWERS: Final = 16
MAX_ANSWERS: Final = 64
"""Older answers fade: each new one weighs at least as much as one of this number."""
MIN_SPREAD_WORK: Final = 300.0
"""Standard deviation of the prompts' work from which on their times have to differ."""
MIN_SIGNIFICANCE: Final = 4.0
MAX_FACTOR: Final = 4.0
INTERVAL_S: Final = 0.05
"""An answer that ends sooner after the last one of its node that counted does not count: a node with hundreds of
answers a second needs no more of them for its speed, and each costs about as much as its ticket."""
MAX_CORRELATION: Final = 0.9
"""Where long prompts have long answers, nothing tells what takes the time. A higher correlation counts as that."""


class WholeAnswers:
    __slots__ = ("_answers", "_dd", "_dt", "_tt", "_wd", "_wt", "_ww", "next_s", "output", "took_ms", "work")

    def __init__(self) -> None:
        self._answers = 0
        self.next_s = 0.0
        """When the next answer counts."""
        self.work = self.output = self.took_ms = 0.0
        """Moving means."""
        self._ww = self._dd = self._tt = self._wd = self._wt = self._dt = 0.0
        """Their moving covariances, w: work, d: output tokens, t: time."""

    def add(self, work: float, output: float, took_ms: float) -> None:
        self._answers += 1
        weight = max(1.0 / MAX_ANSWERS, 1.0 / self._answers)
        if self._answers > 1:
            took_ms = min(took_ms, MAX_FACTOR * self.took_ms)
        w, d, t = work - self.work, output - self.output, took_ms - self.took_ms
        self.work += weight * w
        self.output += weight * d
        self.took_ms += weight * t
        kept = 1.0 - weight
        self._ww = kept * (self._ww + weight * w * w)
        self._dd = kept * (self._dd + weight * d * d)
        self._tt = kept * (self._tt + weight * t * t)
        self._wd = kept * (self._wd + weight * w * d)
        self._wt = kept * (self._wt + weight * w * t)
        self._dt = kept * (self._dt + weight * d * t)

    @property
    def ms_per_token(self) -> float | None:
        """The prefill time per token of a short prompt; None while the answers do not show it."""
        ww, dd = self._ww, self._dd
        if self._answers < MIN_ANSWERS or ww < MIN_SPREAD_WORK * MIN_SPREAD_WORK:
            return None
        if dd < 1.0:  # all outputs are equally long
            slope, token_ms, free = self._wt / ww, 0.0, 1.0
        else:
            free = 1.0 - self._wd * self._wd / (ww * dd)
            if free < 1.0 - MAX_CORRELATION * MAX_CORRELATION:
                return None
            slope = (self._wt - self._dt * self._wd / dd) / (ww * free)
            token_ms = (self._dt - self._wt * self._wd / ww) / (dd * free)
        rest = max(0.0, self._tt - slope * self._wt - token_ms * self._dt)
        error = sqrt(rest / (min(self._answers, MAX_ANSWERS) * ww * free))
        return slope if slope > 0.0 and slope >= MIN_SIGNIFICANCE * error else None
