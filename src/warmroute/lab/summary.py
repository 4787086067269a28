"""The figures of a run, and those of a capture beside them."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from statistics import fmean, pstdev
from typing import Any

import msgspec

from warmroute.lab.request_flow import RequestResults
from warmroute.lab.simulated_node import SimulatedNode
from warmroute.lab.simulated_scaling import SimulatedScaling
from warmroute.lab.workloads import Trace
from warmroute.lab.workloads.trace import TraceFiles
from warmroute.lab.world import World

# The summary of a run: from the simulation's results to the numbers of a report, as plain dictionaries.

Run = dict[str, Any]
"""One row of a report; also one entry of `runs` in its JSON."""

OUTCOMES = ("finished", "rejected", "failed", "left")
MAX_NODE_ROWS = 64
"""A summary lists each node of a fleet up to this size."""
WORK_CLASSES = (("longest_1_percent", 0.0, 0.01), ("longest_10_percent", 0.0, 0.1), ("others", 0.1, 1.0))
"""Classes of requests, the most prefill work first: from and up to which fraction of them."""
TIMELINE_SPANS = 240
OVER_LIMIT_SHARE = 0.1
"""A span is over the limit if more than this fraction of its first tokens is."""
MAX_DECISIONS = 200


def percentile(ordered: Sequence[float], fraction: float) -> float | None:
    """Return the smallest value that at least this fraction of the values does not exceed."""
    return ordered[max(0, -int(-fraction * len(ordered) // 1) - 1)] if ordered else None


def percentiles(values: array[float], *percents: int) -> dict[str, float | None]:
    """Return percentiles by name (p50, …), and the mean."""
    ordered = sorted(values)
    found = {f"p{percent}": rounded(percentile(ordered, percent / 100)) for percent in percents}
    return {**found, "mean": rounded(fmean(ordered)) if ordered else None}


def variation(values: Sequence[float]) -> float:
    """Return the coefficient of variation: standard deviation / mean."""
    mean = fmean(values) if values else 0.0
    return pstdev(values) / mean if mean else 0.0


def rounded(value: float | None) -> float | None:
    """Round to six significant digits."""
    return None if value is None else float(f"{value:.6g}")


def summary(world: World) -> Run:
    results = world.results
    end_ms = results.last_ms
    duration_s = max(1e-9, (end_ms - (results.first_ms or 0.0)) / 1000.0)
    nodes = [*world.nodes.values(), *world.departed]
    rows = [_node_row(sim, world, duration_s) for sim in nodes]
    gpus = [sim.spec.profile.gpus for sim in nodes]
    run: Run = {
        "requests": results.total("arrived"),
        **{name: results.total(name) for name in OUTCOMES},
        "retries": results.retries,
        "hit_rate": rounded(results.cached_tokens / results.prompt_tokens if results.prompt_tokens else 0.0),
        "ttft_ms": percentiles(results.ttft_ms, 50, 90, 99),
        "ttft_ms_by_work": ttft_by_work(results),
        "inter_token_ms": percentiles(results.inter_token_ms, 50, 90, 99),
        "latency_ms": percentiles(results.latency_ms, 50, 90, 99),
        "duration_s": rounded(duration_s),
        "requests_per_s": rounded(results.total("finished") / duration_s),
        "good_per_s": rounded(results.good_first_tokens / duration_s),
        "output_tokens_per_s": rounded(results.output_tokens / duration_s),
        "prompt_tokens_per_s": rounded(results.prompt_tokens / duration_s),
        "load_variation": rounded(variation([row["mean_in_flight"] for row in rows])),
        "busy_variation": rounded(variation([row["busy_s"] for row in rows])),
        "gpu_seconds": rounded(sum(row["busy_s"] * count for row, count in zip(rows, gpus, strict=True))),
        "gpu_seconds_held": rounded(sum(row["held_s"] * count for row, count in zip(rows, gpus, strict=True))),
        "preemptions": sum(row["preemptions"] for row in rows),
    }
    if any(replica.admission.queue.queued_total for replica in world.replicas):
        run["queue"] = _queue_row(world)
    if len(results.by_priority) > 1:
        names = [name for name in ("high", "normal", "low") if name in results.by_priority]
        run["by_priority"] = {name: _priority_row(results, name) for name in names}
    if len(nodes) <= MAX_NODE_ROWS:
        run["nodes"] = rows
    run["timeline"] = _timeline(results)
    return run


def ttft_by_work(results: RequestResults) -> Run:
    """Return the TTFT of the requests with the most prefill work, and of the others: a policy may serve many short
    prompts first at the cost of a few long ones."""
    work, ttft_ms = results.prefill_work, results.ttft_ms
    by_work = array("L", sorted(range(len(work)), key=work.__getitem__, reverse=True))
    found: Run = {}
    for name, begin, end in WORK_CLASSES:
        part = by_work[int(begin * len(by_work)) : max(1, int(end * len(by_work)))]
        found[name] = percentiles(array("d", (ttft_ms[at] for at in part)), 50, 90, 99)
    return found


def _queue_row(world: World) -> Run:
    """Return how requests left the queues of all routers, warm-up included."""
    queues = [replica.admission.queue for replica in world.replicas]
    return {
        "queued": sum(queue.queued_total for queue in queues),
        "admitted_by_work": sum(queue.admitted_by_work for queue in queues),
        "admitted_by_guarantee": sum(queue.admitted_by_guarantee for queue in queues),
        "longest_wait_ratio": rounded(max(queue.guarantee.longest_wait_ratio for queue in queues)),
        "over_guarantee": sum(queue.guarantee.exceeded for queue in queues),
    }


def _priority_row(results: RequestResults, name: str) -> Run:
    one = results.by_priority[name]
    return {
        "requests": one.arrived,
        **{name: getattr(one, name) for name in OUTCOMES},
        "ttft_ms": percentiles(one.ttft_ms, 50, 90, 99),
    }


def _node_row(sim: SimulatedNode, world: World, duration_s: float) -> Run:
    now_ms = world.calendar.now_ms
    held_ms = sim.held_ms + (now_ms - sim.joined_ms if sim.node.name in world.nodes else 0.0)
    totals = sim.totals
    return {
        "node": sim.node.name,
        "requests": sim.requests,
        "mean_in_flight": rounded(sim.inflight_ms / 1000.0 / duration_s),
        "busy_s": rounded(totals.busy_ms / 1000.0),
        "held_s": rounded(held_ms / 1000.0),
        "hit_rate": rounded(totals.hit_tokens / totals.queried_tokens if totals.queried_tokens else 0.0),
        "prefilled_tokens": totals.prefilled_tokens,
        "preemptions": totals.preemptions,
    }


def _timeline(results: RequestResults) -> Run:
    timeline = results.timeline
    return {
        "span_s": timeline.span_ms / 1000.0,
        "arrived": [int(span[0]) for span in timeline.sums],
        "hit_rate": [rounded(span[2] / span[1]) if span[1] else None for span in timeline.sums],
        "ttft_ms": [rounded(span[3] / span[4]) if span[4] else None for span in timeline.sums],
    }


def scaling_summary(world: World, scaling: SimulatedScaling) -> Run:
    totals = scaling.totals()
    counts = scaling.counts
    return {
        "node_hours": rounded(totals["node_hours"]),
        "gpu_hours": rounded(totals["gpu_hours"]),
        "usd": rounded(totals["usd"]),
        "most_nodes": max(serving for _, serving, _ in counts),
        "least_nodes": min(serving for _, serving, _ in counts),
        "changes": len(scaling.decisions),
        "refusals": scaling.controller.refused,
        "timeline": nodes_over_time(scaling, world.calendar.now_s),
        "decisions": [
            {
                "at_s": rounded(decision.at_s),
                "desired_nodes": decision.desired_nodes,
                "nodes": decision.nodes,
                "add": [f"{one.offer.provisioner}/{one.offer.name}" for one in decision.additions],
                "remove": [one.node for one in decision.removals],
                "reasons": list(decision.reasons),
            }
            for decision in scaling.decisions[:MAX_DECISIONS]
        ],
    }


def over_ttft_limit(world: World) -> Run:
    """Return for how many seconds more than a tenth of the arriving requests had a TTFT over the limit, and how many
    requests had."""
    timeline = world.results.timeline
    spans = [span for span in timeline.sums if span[4] and span[5] > OVER_LIMIT_SHARE * span[4]]
    return {
        "ms": world.results.ceiling_ms,
        "seconds_over": rounded(len(spans) * timeline.span_ms / 1000.0),
        "requests_over": int(sum(span[5] for span in timeline.sums)),
        "span_s": timeline.span_ms / 1000.0,
        "first_tokens": [int(span[4]) for span in timeline.sums],
        "over": [int(span[5]) for span in timeline.sums],
    }


def nodes_over_time(scaling: SimulatedScaling, end_s: float) -> Run:
    """Return the numbers of serving and pending nodes at regular times."""
    span_s = max(1.0, end_s / TIMELINE_SPANS)
    serving: list[int] = []
    pending: list[int] = []
    at, counts = 0, scaling.counts
    for span in range(int(end_s / span_s) + 1):
        while at + 1 < len(counts) and counts[at + 1][0] <= span * span_s:
            at += 1
        serving.append(counts[at][1])
        pending.append(counts[at][2])
    return {"span_s": rounded(span_s), "serving": serving, "pending": pending}


# What a capture measured: the hit rate and the times that the nodes and clients of the live fleet had.

MEASURED = "measured"
"""Name of the row, in the column of policies."""


class Measured(msgspec.Struct):
    """Totals over the requests of a capture."""

    requests: int = 0
    prompt_tokens: int = 0
    """Prompt tokens of the responses that report their cached tokens."""
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
