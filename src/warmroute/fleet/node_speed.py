"""The speed of a node: prefill time per token and a decode factor, learned from the responses it gave.

Prefill work is counted in tokens of a short prompt. Attention makes a token more expensive the more tokens precede it:

    work(new, cached) = new + ATTENTION_WORK · new · (cached + new / 2)
    prefill           = 1.5 · token_ms + ms_per_token · work                          [ms]

The kernel updates the speed at each first token; tests/accounting_reference.py has the same formulas in Python. A node
prefills prompts one after the other or several in one step. Either way, the time during which at least one of them
waited for its first token went into all of them together. So a first token is charged with the time since the previous
first token, or since its own dispatch if that was later, and the speed is the ratio of the two sums. One first token
counts as at most four times slower than estimated. The rest of its time is charged to the next one, if that prompt
waited as well, up to twice what the estimate was before: both may have been prefilled in one step. A prompt whose own
time explains it, although more than that is left, is charged with nothing else: the node stood still before.

An engine takes a whole step for a prompt that needs only a part of one. So where it took at most one and a half steps,
an estimate that is up to one step shorter counts as right. A short prompt weighs less: weight = work / (work +
step_work).

Until a node has served a request, it has the speed of its peers. speed_review.py judges what was learned.

Telemetry counts costs with `long_ms_per_token`, which is learned from prompts with at least LONG_PREFILL_WORK that were
prefilled alone, and `step_ms`, the time of a step, a low quantile of the time per output token:

    prefill_cost = max(step_ms, long_ms_per_token · work)                             [ms]
"""

from __future__ import annotations

from typing import Final

from warmroute._kernel import STEP_WORK, SpeedState

DEFAULT_MS_PER_TOKEN: Final = 0.05
PRIOR_WORK: Final = 2000.0
"""An initial guess weighs as much as this many prefilled tokens."""

FACTOR_RELAXATION: Final = 0.05
"""Share of a decode factor's deviation from 1 that a health check without a response in between takes away."""


class NodeSpeed(SpeedState):
    """The learned speed of one node. SpeedState holds the fields for the kernel."""

    __slots__ = ("_responses", "implausible")

    def __init__(self) -> None:
        self.implausible = ""
        """Why the learned speed is implausible; empty if it is not."""
        self._responses = 0
        """Responses of the node at the last review."""
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
        """Set the prefill speed of a node that was not measured: that of its peers, or the default."""
        self.ms_per_token = self.learned_ms_per_token = ms_per_token
        self._work = PRIOR_WORK
        self._ms = PRIOR_WORK * ms_per_token

    def relax(self, responses: int) -> None:
        """Let the decode factor of a node without requests, and without a response since the last call, return to 1:
        a node that was slow for a while gets few requests, and has to be measured again."""
        if responses == self._responses:
            self.factor += FACTOR_RELAXATION * (1.0 - self.factor)
        self._responses = responses

    def replace(self, ms_per_token: float) -> None:
        """Use this speed in prices instead of the learned one. Learning goes on beside it."""
        self.is_replaced = True
        self.ms_per_token = ms_per_token

    def restore(self) -> None:
        """Use the learned speed again."""
        self.is_replaced = False
        self.ms_per_token = self.learned_ms_per_token

    @property
    def long_ms_per_token(self) -> float:
        """Prefill time per token of long prompts; that of all prompts until a long one was measured."""
        return self.long_ms / self.long_work if self.long_prefills and not self.is_replaced else self.ms_per_token

    @property
    def step_ms(self) -> float:
        """The least time of a prefill: a decode step that no prefill interrupts."""
        return min(self._step_ms, STEP_WORK * self.long_ms_per_token)

    @property
    def source(self) -> str:
        """Where the speed in prices comes from: `learned`, or `assumed` (that of its peers, or the default)."""
        return "learned" if self.answers and not self.is_replaced else "assumed"
