"""The results of a simulation's requests: counts, sums, and the times that percentiles need.

Memory grows by four floats a request. The timeline has a bounded length.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from dataclasses import dataclass, field
from math import inf

from warmroute.fleet.demand import good_ttft_ms
from warmroute.fleet.prefill_work import work
from warmroute.replay.workloads.workload_prompt import WorkloadPrompt

TIMELINE_SPANS = 240


class Timeline:
    """Sums over equal spans of time. A span doubles whenever the run needs more than TIMELINE_SPANS of them."""

    FIELDS = ("arrived", "prompt_tokens", "cached_tokens", "ttft_ms", "first_tokens", "over_ceiling")

    def __init__(self) -> None:
        self.span_ms = 1000.0
        self.sums: list[list[float]] = []

    def at(self, at_ms: float) -> list[float]:
        """Return the sums of the span that contains this time; the caller adds to them."""
        sums = self.sums
        while (span := int(at_ms / self.span_ms)) >= TIMELINE_SPANS:
            self.span_ms *= 2
            paired = [[a + b for a, b in zip(*pair, strict=True)] for pair in zip(sums[::2], sums[1::2], strict=False)]
            self.sums = sums = paired + (sums[-1:] if len(sums) % 2 else [])
        while len(sums) <= span:
            sums.append([0.0] * len(self.FIELDS))
        return sums[span]


@dataclass(slots=True)
class PriorityResults:
    """Counts and TTFTs of the requests of one priority."""

    arrived: int = 0
    finished: int = 0
    rejected: int = 0
    failed: int = 0
    left: int = 0
    ttft_ms: array[float] = field(default_factory=lambda: array("d"))


class RequestResults:
    def __init__(self, start_ms: float = 0.0) -> None:
        self._start_ms = start_ms
        self.by_priority: defaultdict[str, PriorityResults] = defaultdict(PriorityResults)
        self.timeline = Timeline()
        self.ttft_ms = array("d")
        self.prefill_work = array("d")
        """The prefill work of each request in `ttft_ms`: its uncached tokens, in tokens of a short prompt."""
        self.inter_token_ms = array("d")
        """The mean time between tokens of each request."""
        self.latency_ms = array("d")
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.output_tokens = 0
        self.retries = 0
        self.good_first_tokens = 0
        self.first_ms: float | None = None
        self.last_ms = 0.0
        self.ceiling_ms = inf
        """The timeline counts first tokens that take longer than this."""

    def arrived(self, prompt: WorkloadPrompt, now_ms: float) -> None:
        self.by_priority[prompt.priority].arrived += 1
        self.timeline.at(now_ms - self._start_ms)[0] += 1
        if self.first_ms is None:
            self.first_ms = now_ms

    def first_token(self, prompt: WorkloadPrompt, arrived_ms: float, cached_tokens: int, now_ms: float) -> None:
        ttft_ms = now_ms - arrived_ms
        self.ttft_ms.append(ttft_ms)
        self.prefill_work.append(work(prompt.prompt_tokens - cached_tokens, cached_tokens))
        self.good_first_tokens += ttft_ms <= good_ttft_ms(prompt.prompt_tokens)
        self.by_priority[prompt.priority].ttft_ms.append(ttft_ms)
        self.prompt_tokens += prompt.prompt_tokens
        self.cached_tokens += cached_tokens
        span = self.timeline.at(arrived_ms - self._start_ms)
        span[1] += prompt.prompt_tokens
        span[2] += cached_tokens
        span[3] += ttft_ms
        span[4] += 1
        span[5] += ttft_ms > self.ceiling_ms

    def finished(self, prompt: WorkloadPrompt, arrived_ms: float, first_ms: float, now_ms: float) -> None:
        self.by_priority[prompt.priority].finished += 1
        self.output_tokens += prompt.output_tokens
        self.latency_ms.append(now_ms - arrived_ms)
        if prompt.output_tokens > 1:
            self.inter_token_ms.append((now_ms - first_ms) / (prompt.output_tokens - 1))
        self.last_ms = now_ms

    def rejected(self, prompt: WorkloadPrompt, now_ms: float) -> None:
        self.by_priority[prompt.priority].rejected += 1
        self.last_ms = now_ms

    def failed(self, prompt: WorkloadPrompt, now_ms: float) -> None:
        self.by_priority[prompt.priority].failed += 1
        self.last_ms = now_ms

    def left(self, prompt: WorkloadPrompt, now_ms: float) -> None:
        """The client gave up before the first token."""
        self.by_priority[prompt.priority].left += 1
        self.last_ms = now_ms

    def total(self, what: str) -> int:
        """Return one count, by its name, summed over all priorities."""
        return sum(getattr(one, what) for one in self.by_priority.values())

    @property
    def ended(self) -> int:
        return sum(one.finished + one.rejected + one.failed + one.left for one in self.by_priority.values())
