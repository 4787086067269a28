"""How fast a node prefills and decodes, learned from the answers it gave.

Work is counted in tokens of a short prompt. Attention makes a token dearer the more there is before it:

    work(new, cached) = new + ATTENTION · new · (cached + new / 2)
    prefill           = 1.5 · token_ms + ms_per_token · work                          [ms]

A node takes prompts one after the other, or several in one step; either way the time in which at least one of them
waited for its first token went into all of them together. So a first token's share is the time since the first token
before it, or since its own dispatch where that was later, and the speed is the ratio of the sums of both.

A step takes its time however little there is to do in it. So a short prompt tells of the step, and counts little beside
a long one:

    weight = work / (work + STEP_WORK)
"""

from __future__ import annotations

from math import exp
from typing import Final

from warmroute._kernel._books import SpeedState

ATTENTION: Final = 4e-5
"""What a token costs more for each token before it. On an H200: 3.4e-5 (32 B), 4.0e-5 (8 B), 7.2e-5 (1.5 B)."""
USUAL_MS_PER_TOKEN: Final = 0.05
STEPS: Final = 1.5
"""Steps of the batch until a first token, without its own work: half of the one that runs, and the next."""
PRIOR_WORK: Final = 2000.0
"""A guess counts as much as so many tokens seen."""
STEP_WORK: Final = 300.0
"""Tokens that take about as long as a step without any."""
KEPT_S: Final = 15.0
"""What was seen so long ago counts 1/e; but one answer never counts more than LEAST_KEPT leaves."""
LEAST_KEPT: Final = 0.7
MOST_TIMES: Final = 4.0
"""One answer counts as at most so many times slower, or quicker, than was thought: the next ones may confirm it."""
LEAST_TOOK: Final = 0.5
"""At least this share of the time went into the prefill: where first tokens come with every step, the steps of a batch
that are taken off would leave nothing, and a busy node would be believed to be infinitely quick."""
FACTOR_WEIGHT: Final = 0.05


def work(new: float, cached: float) -> float:
    """In tokens of a short prompt."""
    return new * (1.0 + ATTENTION * (cached + 0.5 * new))


class Speed(SpeedState):
    """What it is lies in SpeedState. The kernel learns by the same formulas (see _books.c)."""

    __slots__ = ()

    def __init__(self) -> None:
        self.answers = 0
        """First tokens that it was learned from."""
        self.ms_per_token = USUAL_MS_PER_TOKEN
        """Of prefill."""
        self.factor = 1.0
        """Its answers flow so many times slower than those of a node like the others (see pace)."""
        self._at_s = 0.0
        self._last_first_s = 0.0
        self.guess(USUAL_MS_PER_TOKEN)

    def guess(self, ms_per_token: float) -> None:
        """A first guess: the node's peers, or its GPU's profile."""
        self.ms_per_token = ms_per_token
        self._work = PRIOR_WORK
        self._ms = PRIOR_WORK * ms_per_token

    def saw_first_token(self, done: float, token_ms: float, sent_s: float, now_s: float) -> None:
        """`done` is the work of the prompt, sent then; `token_ms` what a step takes there."""
        since_ms = (now_s - max(sent_s, self._last_first_s)) * 1000.0
        took_ms = max(since_ms - STEPS * token_ms, LEAST_TOOK * since_ms)
        self._last_first_s = now_s
        thought_ms = done * self.ms_per_token
        kept = max(LEAST_KEPT, exp(min(0.0, self._at_s - now_s) / KEPT_S))
        self._at_s = now_s
        weight = done / (done + STEP_WORK)
        self._work = self._work * kept + weight * done
        self._ms = self._ms * kept + weight * min(max(took_ms, 0.0), MOST_TIMES * thought_ms)
        self.ms_per_token = max(1e-4, self._ms / max(1.0, self._work))
        self.answers += 1

    def saw_answer(self, times: float) -> None:
        """An answer flowed so many times slower than one would on a node like the others."""
        factor = self.factor
        most = MOST_TIMES * factor
        self.factor = factor + FACTOR_WEIGHT * ((times if times < most else most) - factor)
