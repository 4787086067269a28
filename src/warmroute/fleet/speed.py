"""How fast a node prefills, learned from the first tokens it gave.

Work is counted in tokens of a short prompt. Attention makes a token dearer the more there is before it:

    work(new, cached) = new + ATTENTION · new · (cached + new / 2)
    time              = floor + ms_per_token · work

A node takes prompts one after the other, or several in one step; either way the time in which at least one of them
waited for its first token went into them together. So a first token's share is the time since the first token before
it, or since its own dispatch where that was later, and the speed is the ratio of the two sums.
"""

from __future__ import annotations

from typing import Final

ATTENTION: Final = 4e-5
"""A token, for each token before it. Measured on an H200: 3.4e-5 (32 B), 4.0e-5 (8 B), 7.2e-5 (1.5 B)."""
USUAL_MS_PER_TOKEN: Final = 0.05
USUAL_FLOOR_MS: Final = 10.0
PRIOR_WORK: Final = 2000.0
"""The first guess counts as much as so many tokens."""
KEPT_S: Final = 20.0
"""What was seen so long ago counts 1/e."""


def work(new: float, cached: float) -> float:
    return new * (1.0 + ATTENTION * (cached + 0.5 * new))


class Speed:
    __slots__ = ("_at_s", "_last_first_s", "_ms", "_work", "floor_ms", "ms_per_token")

    def __init__(self, ms_per_token: float = USUAL_MS_PER_TOKEN) -> None:
        self.ms_per_token = ms_per_token
        self.floor_ms = USUAL_FLOOR_MS
        self._work = PRIOR_WORK
        self._ms = PRIOR_WORK * ms_per_token
        self._at_s = 0.0
        self._last_first_s = 0.0

    def prefill_ms(self, new: float, cached: float) -> float:
        return self.floor_ms + self.ms_per_token * work(new, cached)

    def saw_first_token(self, done: float, sent_s: float, now_s: float) -> None:
        """`done` is the work of the prompt."""
        began_s = max(sent_s, self._last_first_s)
        self._last_first_s = now_s
        took_ms = (now_s - began_s) * 1000.0
        left = max(0.0, 1.0 - (now_s - self._at_s) / KEPT_S) if now_s - self._at_s < KEPT_S else 0.0
        self._at_s = now_s
        if left < 0.5:
            left = 0.5
        self._work = self._work * left + done
        self._ms = self._ms * left + max(0.0, took_ms - self.floor_ms)
        if self._work > 0:
            self.ms_per_token = max(1e-4, self._ms / self._work)
