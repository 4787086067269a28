"""What an engine's own counters say about the last half minute: its cache hits, preemptions and queue times.

    hit share      tokens found in its cache ÷ tokens looked up
    pressure       p / (p + 3), with p preemptions in the last ten seconds or so: an engine preempts when its KV memory
                   is full, whatever its usage is when the router polls it
    prefill        mean time of a prefill for its mean number of uncached tokens: the only sign of the speed of a node
                   whose responses are not streamed
    queue          mean queue time of the requests that ended × (its queue now ÷ its mean queue), while it has a queue

Rates come from two readings of a counter. A counter that falls (a restart) or jumps by more than any engine can do
starts anew. Older readings fade: the weight of one DECAY_S ago is 1/e.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp
from typing import Final

import msgspec

DECAY_S: Final = 30.0
PREEMPTION_DECAY_S: Final = 10.0
PRESSURE_PREEMPTIONS: Final = 3.0
"""With this many preemptions, half of the free KV memory counts as used."""
MAX_TOKENS_PER_S: Final = 1e7
MAX_EVENTS_PER_S: Final = 1e5
"""Requests or preemptions."""
MIN_QUEUE_MS: Final = 100.0
"""A shorter mean queue time counts as none: a request waits for the next step of the batch in any case."""
MAX_QUEUE_MS: Final = 60_000.0
"""A longer queue time counts as this."""
MAX_PREFILL_S: Final = 600.0
"""A longer prefill counts as this."""


class EngineCounters(msgspec.Struct, frozen=True):
    """Totals since the engine's start; below 0 where the engine does not report them."""

    queried_tokens: float = -1
    """Prompt tokens that were looked up in its prefix cache."""
    hit_tokens: float = -1
    """Those that were found."""
    preemptions: float = -1
    queue_time_s: float = -1.0
    """Sum of the times that ended requests had waited in its queue."""
    queue_times: float = -1
    """Number of these requests."""
    hit_share: float = -1.0
    """Of the last requests, for engines that report no totals."""
    prefill_time_s: float = -1.0
    """Sum of the times from the engine's queue to the first token."""
    prefills: float = -1
    """Number of the requests in this sum."""
    prefilled_tokens: float = -1
    """Their prompt tokens that were not cached."""
    first_tokens_are_late: bool = False
    """Whether the engine may notice the first token of a response that is not streamed later than it comes."""


@dataclass(slots=True, eq=False)
class EngineRates:
    _last: EngineCounters | None = None
    _at_s: float = 0.0
    _queried: float = 0.0
    _hits: float = 0.0
    _preemptions: float = 0.0
    _queue_s: float = 0.0
    _queue_times: float = 0.0
    _prefill_s: float = 0.0
    _prefills: float = 0.0
    _prefilled_tokens: float = 0.0
    new_prefills: int = 0
    """Prefills that the last report added."""
    speed_answers: int = 0
    """First tokens that the node's speed was learned from up to the last report."""
    _waiting_s: float = 0.0
    """Length of its queue, integrated over time."""
    _span_s: float = 0.0
    _gauge: float | None = None
    # totals of what the engine counted while this router watched it; None where it does not report them
    queries_total: float | None = None
    hits_total: float | None = None
    preemptions_total: float | None = None
    # this router's predictions for the same node
    _last_predicted: tuple[int, int, int] | None = None
    _prompts: float = 0.0
    _routed: float = 0.0
    _predicted: float = 0.0

    def update(self, counters: EngineCounters, waiting: int, now_s: float) -> None:
        last, span_s = self._last, now_s - self._at_s
        self._last, self._at_s = counters, now_s
        self.new_prefills = 0
        if last is None or span_s <= 0.0:
            return
        share = counters.hit_share
        self._gauge = share if 0.0 <= share <= 1.0 else None
        kept = exp(-span_s / DECAY_S)
        tokens = _growths(last, counters, ("queried_tokens", "hit_tokens"), MAX_TOKENS_PER_S * span_s)
        times = _growths(last, counters, ("queue_times", "queue_time_s"), MAX_EVENTS_PER_S * span_s)
        prefills = _growths(
            last, counters, ("prefills", "prefilled_tokens", "prefill_time_s"), MAX_TOKENS_PER_S * span_s
        )
        (preempted,) = _growths(last, counters, ("preemptions",), MAX_EVENTS_PER_S * span_s)
        self._add_totals(counters, tokens, preempted)
        self._queried = self._queried * kept + tokens[0]
        self._hits = self._hits * kept + min(tokens)
        self._queue_times = self._queue_times * kept + times[0]
        self._queue_s = self._queue_s * kept + min(times[1], times[0] * MAX_QUEUE_MS / 1000.0)
        self.new_prefills = int(min(prefills[0], MAX_EVENTS_PER_S * span_s))
        self._prefills = self._prefills * kept + self.new_prefills
        self._prefilled_tokens = self._prefilled_tokens * kept + prefills[1]
        self._prefill_s = self._prefill_s * kept + min(prefills[2], self.new_prefills * MAX_PREFILL_S)
        self._preemptions = self._preemptions * exp(-span_s / PREEMPTION_DECAY_S) + preempted
        if self._preemptions < 0.05:  # the last one was more than 30 s ago
            self._preemptions = 0.0
        self._span_s = self._span_s * kept + span_s
        self._waiting_s = self._waiting_s * kept + waiting * span_s
        self._prompts *= kept
        self._routed *= kept
        self._predicted *= kept

    def _add_totals(self, counters: EngineCounters, tokens: list[float], preempted: float) -> None:
        """Unlike the engine's own totals, these survive its restart, and ignore counters that jump."""
        if counters.queried_tokens >= 0 and counters.hit_tokens >= 0:
            self.queries_total = (self.queries_total or 0.0) + tokens[0]
            self.hits_total = (self.hits_total or 0.0) + min(tokens)
        if counters.preemptions >= 0:
            self.preemptions_total = (self.preemptions_total or 0.0) + preempted

    def update_predictions(self, prompts: int, routed_tokens: int, predicted_tokens: int) -> None:
        """Take over the totals of what this router sent to the node, and of what it predicted to be cached there. To be
        called after `update`."""
        last = self._last_predicted or (prompts, routed_tokens, predicted_tokens)
        self._last_predicted = (prompts, routed_tokens, predicted_tokens)
        self._prompts += max(0, prompts - last[0])
        self._routed += max(0, routed_tokens - last[1])
        self._predicted += max(0, predicted_tokens - last[2])

    def forget(self) -> None:
        """The engine has restarted."""
        self._last = self._last_predicted = self._gauge = None
        self._queried = self._hits = self._preemptions = self._queue_s = self._queue_times = 0.0
        self._prefill_s = self._prefills = self._prefilled_tokens = 0.0
        self.new_prefills = 0
        self._waiting_s = self._span_s = self._prompts = self._routed = self._predicted = 0.0

    # What it says.

    @property
    def queried_tokens(self) -> float:
        """Tokens that the hit share is based on."""
        return self._queried

    @property
    def routed_prompts(self) -> float:
        """Prompts that the predicted share is based on."""
        return self._prompts

    @property
    def routed_tokens(self) -> float:
        """Tokens that the predicted share is based on."""
        return self._routed

    @property
    def hit_share(self) -> float | None:
        """None if the engine reports no hits, or had no request."""
        return self._hits / self._queried if self._queried >= 1.0 else self._gauge

    @property
    def predicted_share(self) -> float | None:
        """The share of the prompt tokens that this router predicted to be cached; None if it sent none."""
        return self._predicted / self._routed if self._routed >= 1.0 else None

    @property
    def preemptions_per_s(self) -> float:
        return self._preemptions / PREEMPTION_DECAY_S

    @property
    def kv_pressure(self) -> float:
        return self._preemptions / (self._preemptions + PRESSURE_PREEMPTIONS)

    @property
    def queue_time_ms(self) -> float | None:
        """Mean queue time of the requests that ended; None if the engine does not report it, or none ended."""
        return 1000.0 * self._queue_s / self._queue_times if self._queue_times >= 0.5 else None

    @property
    def mean_prefill(self) -> tuple[float, float] | None:
        """The uncached tokens and the time [ms] of a prefill; None if the engine does not report them. Prefills that
        overlap share the time."""
        if self._prefills < 0.5 or self._prefilled_tokens < 1.0:
            return None
        busy_s = min(self._prefill_s, self._span_s)
        return self._prefilled_tokens / self._prefills, 1000.0 * busy_s / self._prefills

    def expected_queue_ms(self, waiting: int) -> float:
        """Return how long a new request waits in the engine's queue, which has this many requests; 0 if unknown."""
        mean_ms = self.queue_time_ms if waiting else None
        if mean_ms is None or mean_ms < MIN_QUEUE_MS:
            return 0.0
        mean_waiting = self._waiting_s / self._span_s if self._span_s else 0.0
        return min(mean_ms, MAX_QUEUE_MS) * min(1.0, waiting / max(1.0, mean_waiting))


def _growths(before: EngineCounters, now: EngineCounters, names: tuple[str, ...], most: float) -> list[float]:
    """Return by how much these counters grew; zeros if one is not reported, fell, or grew by more than `most`."""
    grown = []
    for name in names:
        old, new = getattr(before, name), getattr(now, name)
        if old < 0.0 or not 0.0 <= new - old <= most:
            return [0.0] * len(names)
        grown.append(float(new - old))
    return grown
