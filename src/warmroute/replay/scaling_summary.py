"""The part of a run's summary about scaling: nodes over time, cost, and time over the TTFT limit."""

from __future__ import annotations

from warmroute.replay.simulation.simulated_scaling import SimulatedScaling
from warmroute.replay.simulation.world import World
from warmroute.replay.summary import Run, rounded

TIMELINE_SPANS = 240
OVER_LIMIT_SHARE = 0.1
"""A span is over the limit if more than this fraction of its first tokens is."""
MAX_DECISIONS = 200


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


def fixed_fleet_usd(run: Run, gpus: int, fleet_usd_per_hour: float) -> float | None:
    """Return the cost of a fleet that is not scaled: all of its nodes, for the whole run."""
    hours = run["gpu_seconds_held"] / gpus / 3600.0
    return rounded(hours * fleet_usd_per_hour)


def over_ttft_limit(world: World) -> Run:
    """Return for how many seconds more than a tenth of the arriving requests had a TTFT over the limit, and how many
    requests had."""
    timeline = world.results.timeline
    spans = [span for span in timeline.sums if span[4] and span[5] > OVER_LIMIT_SHARE * span[4]]
    return {
        "ms": world.results.ceiling_ms,
        "seconds_over": rounded(len(spans) * timeline.span_ms / 1000.0),
        "requests_over": int(sum(span[5] for span in timeline.sums)),
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
