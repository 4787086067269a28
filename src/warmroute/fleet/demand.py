"""A meter: what the fleet was asked for and what came of it, only ever added to. Whoever wants a rate reads it twice.

Work is kept in the units of what does it, so that it can be set against other hardware than the present one: prefill
in tokens of a short prompt (see speed), decode in tokens and in tokens × what each of them had to look back at.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Sequence
from typing import Final

TIME_BOUNDS_MS: Final = tuple(2.0 * 1.15**step for step in range(90))
"""2 ms to 8 minutes, 15 % apart: a percentile is known to within that."""


class DemandMeter:
    __slots__ = (
        "answers",
        "arrived",
        "cached_tokens",
        "decode_context",
        "decode_tokens",
        "latency_counts",
        "prefill_ms",
        "prefill_squares",
        "prefill_work",
        "prompt_tokens",
        "sent",
        "shed",
        "ttft_counts",
    )

    def __init__(self) -> None:
        self.arrived = 0
        self.shed = 0
        self.sent = 0
        self.prompt_tokens = 0.0
        self.cached_tokens = 0.0
        """Those of them that were expected to be cached where they went."""
        self.prefill_work = 0.0
        """Of the others."""
        self.prefill_squares = 0.0
        """The same, squared: what tells requests that are alike from those that are not."""
        self.prefill_ms = 0.0
        """The same, at the speed of the node that it was sent to."""
        self.answers = 0
        self.decode_tokens = 0.0
        self.decode_context = 0.0
        """Tokens of answers × the context of their own request."""
        self.ttft_counts = array("q", bytes(8 * (len(TIME_BOUNDS_MS) + 1)))
        self.latency_counts = array("q", bytes(8 * (len(TIME_BOUNDS_MS) + 1)))

    def saw_sent(self, tokens: float, cached: float, work: float, ms_per_token: float) -> None:
        self.sent += 1
        self.prompt_tokens += tokens
        self.cached_tokens += cached
        self.prefill_work += work
        self.prefill_squares += work * work
        self.prefill_ms += work * ms_per_token

    def saw_first_token(self, after_ms: float) -> None:
        """`after_ms`: since it arrived here, waiting included."""
        self.ttft_counts[bisect_left(TIME_BOUNDS_MS, after_ms)] += 1

    def saw_answer(self, prompt_tokens: float, output_tokens: float) -> None:
        self.answers += 1
        self.decode_tokens += output_tokens
        self.decode_context += output_tokens * (prompt_tokens + 0.5 * output_tokens)

    def saw_end(self, after_ms: float) -> None:
        self.latency_counts[bisect_left(TIME_BOUNDS_MS, after_ms)] += 1


def percentile_ms(counts: Sequence[int], share: float) -> float | None:
    """What at least this share of the times did not exceed; None where there were none."""
    total = sum(counts)
    if total <= 0:
        return None
    wanted, seen = share * total, 0
    for at, count in enumerate(counts):
        seen += count
        if seen >= wanted:
            return TIME_BOUNDS_MS[min(at, len(TIME_BOUNDS_MS) - 1)]
    return TIME_BOUNDS_MS[-1]
