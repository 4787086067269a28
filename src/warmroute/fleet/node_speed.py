"""The speed of a node: prefill time per token and a decode factor, learned from the responses it gave.

Prefill work is counted in tokens of a short prompt. Attention makes a token more expensive the more tokens precede it:

    work(new, cached) = new + ATTENTION_WORK · new · (cached + new / 2)
    prefill           = 1.5 · token_ms + ms_per_token · work                          [ms]

The kernel updates the speed at each first token; tests/accounting_reference.py has the same formulas in Python. A node
prefills prompts one after the other or several in one step. Either way, the time during which at least one of them
waited for its first token went into all of them together. So a first token is charged with the time since the previous
first token, or since its own dispatch if that was later, and the speed is the ratio of the two sums. A short prompt
says more about the step than about the prefill, so it weighs less: weight = work / (work + step_work).
"""

from __future__ import annotations

from typing import Final

from warmroute._kernel import ATTENTION_WORK, SpeedState

DEFAULT_MS_PER_TOKEN: Final = 0.05
PRIOR_WORK: Final = 2000.0
"""An initial guess weighs as much as this many prefilled tokens."""


def work(new: float, cached: float) -> float:
    """Return the prefill work of `new` tokens behind `cached` ones, in tokens of a short prompt."""
    return new * (1.0 + ATTENTION_WORK * (cached + 0.5 * new))


def saved_work(cached: float, square: float) -> float:
    """Return work(prompt, 0) - work(prompt - cached, cached), which does not depend on the prompt's length. `square` is
    cached², so that the mean over several nodes follows from two means."""
    return cached + 0.5 * ATTENTION_WORK * square


class NodeSpeed(SpeedState):
    """The learned speed of one node. SpeedState holds the fields for the kernel."""

    __slots__ = ()

    def __init__(self) -> None:
        self.answers = 0
        """First tokens that the speed was learned from."""
        self.ms_per_token = DEFAULT_MS_PER_TOKEN
        """Prefill time per token of a short prompt."""
        self.factor = 1.0
        """Decode time per token, relative to the model's DecodeSpeed."""
        self._at_s = 0.0
        self._last_first_token_s = 0.0
        self.guess(DEFAULT_MS_PER_TOKEN)

    def guess(self, ms_per_token: float) -> None:
        """Set an initial prefill speed: that of the node's peers, or of its GPU's profile."""
        self.ms_per_token = ms_per_token
        self._work = PRIOR_WORK
        self._ms = PRIOR_WORK * ms_per_token
