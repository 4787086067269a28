"""What a capture measured: the hit rate and the times that the nodes and clients of the live fleet had."""

from __future__ import annotations

from array import array
from collections import Counter

import msgspec

from warmroute.replay.summary import Run, percentiles, rounded
from warmroute.replay.workloads.catalog import Trace
from warmroute.replay.workloads.trace_files import TraceFiles

MEASURED = "measured"
"""Name of the row, in the column of policies."""


class Measured(msgspec.Struct):
    """Totals over the requests of a capture."""

    requests: int = 0
    prompt_tokens: int = 0
    """Of responses that report their cached tokens."""
    cached_tokens: int = 0
    reporting: int = 0
    """Responses that report them."""
    input_estimated: int = 0
    output_estimated: int = 0
    ttft_ms: array[float] = msgspec.field(default_factory=lambda: array("d"))
    latency_ms: array[float] = msgspec.field(default_factory=lambda: array("d"))
    outcomes: Counter[str] = msgspec.field(default_factory=Counter)
    models: Counter[str] = msgspec.field(default_factory=Counter)
    nodes: Counter[str] = msgspec.field(default_factory=Counter)
    first_ms: float = 0.0
    last_ms: float = 0.0

    @property
    def hit_rate(self) -> float | None:
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else None

    def run(self, name: str) -> Run | None:
        """Return the row of a report; None if no response reported its cached tokens."""
        if self.hit_rate is None:
            return None
        duration_s = max(1e-9, (self.last_ms - self.first_ms) / 1000.0)
        return {
            "policy": MEASURED,
            "workload": name,
            "node_count": len(self.nodes),
            "rate": None,
            "concurrency": None,
            "queue_threshold": None,
            "requests": self.requests,
            "finished": self.outcomes["ok"],
            "rejected": self.outcomes["not_admitted"],
            "failed": self.outcomes["failed"] + self.outcomes["broken"],
            "left": self.outcomes["cancelled"],
            "hit_rate": rounded(self.hit_rate),
            "ttft_ms": percentiles(self.ttft_ms, 50, 90, 99),
            "latency_ms": percentiles(self.latency_ms, 50, 90, 99),
            "duration_s": rounded(duration_s),
            "requests_per_s": rounded(self.outcomes["ok"] / duration_s),
        }

    def notes(self) -> list[str]:
        """Return what a reader of a comparison has to know."""
        found: list[str] = []
        if len(self.models) > 1:
            names = ", ".join(f"{model} ({count / self.requests:.0%})" for model, count in self.models.most_common(4))
            found.append(
                f"The trace has {len(self.models)} models: {names}. The replay serves all of them on the same nodes; "
                "add model=NAME to replay one."
            )
        if self.outcomes["ok"] and 0 < self.reporting < 0.99 * self.outcomes["ok"]:
            share = self.reporting / self.outcomes["ok"]
            found.append(f"The measured hit rate is that of the {share:.0%} of the responses that report it.")
        if self.input_estimated > 0.01 * self.requests:
            found.append(
                f"{self.input_estimated / self.requests:.0%} of the prompts were read without a tokenizer: their "
                "lengths are estimates (four bytes to a token)."
            )
        if self.output_estimated > 0.01 * self.requests:
            found.append(f"{self.output_estimated / self.requests:.0%} of the output lengths are estimates.")
        return found


def measure(
    trace: Trace, skip: int = 0, limit: int | None = None, duration_s: float | None = None, skip_s: float = 0.0
) -> Measured | None:  # fmt: skip
    """Read what a capture measured, without its first `skip` requests and those of its first `skip_s`. Return None if
    the trace is no capture.

    Raises BadTrace.
    """
    found = Measured()
    start_ms: float | None = None
    for number, row in enumerate(TraceFiles(trace.path, trace.model).rows()):
        if not row.block_size:
            return None
        start_ms = row.timestamp if start_ms is None else start_ms
        if number < skip or row.timestamp - start_ms < 1000.0 * skip_s:
            continue
        if limit is not None and found.requests >= limit:
            break
        if not found.requests:
            found.first_ms = row.timestamp
        if duration_s is not None and row.timestamp - found.first_ms >= duration_s * 1000.0:
            break
        found.requests += 1
        found.last_ms = row.timestamp + (row.duration_ms or 0.0)
        found.outcomes[row.outcome] += 1
        found.models[row.model] += 1
        found.input_estimated += row.input_estimated
        found.output_estimated += row.output_estimated
        if row.node:
            found.nodes[row.node] += 1
        if row.ttft_ms is not None:
            found.ttft_ms.append(row.ttft_ms)
        if row.duration_ms is not None and row.outcome == "ok":
            found.latency_ms.append(row.duration_ms)
        if row.prompt_tokens and row.cached_tokens is not None:
            found.reporting += 1
            found.prompt_tokens += row.prompt_tokens
            found.cached_tokens += min(row.cached_tokens, row.prompt_tokens)
    return found if found.requests else None
