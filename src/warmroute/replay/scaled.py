"""What a report says of a fleet that was scaled: nodes over time, money, and time over the ceiling."""

from __future__ import annotations

from warmroute.replay.summary import Run, rounded
from warmroute.replay.world.scaling import Autoscaling
from warmroute.replay.world.world import World

SPANS = 240
OVER_SHARE = 0.1
"""A span is over the ceiling where more than this share of its first tokens is."""
MOST_DECISIONS = 200


def scaling_summary(world: World, scaling: Autoscaling) -> Run:
    totals = scaling.totals()
    counts = scaling.counts
    return {
        "node_hours": rounded(totals["node_hours"]),
        "gpu_hours": rounded(totals["gpu_hours"]),
        "usd": rounded(totals["usd"]),
        "most_nodes": max(serving for _, serving, _ in counts),
        "least_nodes": min(serving for _, serving, _ in counts),
        "changes": len(scaling.decisions),
        "refusals": scaling.refusals,
        "timeline": nodes_over_time(scaling, world.calendar.now_s),
        "decisions": [
            {
                "at_s": rounded(step.at_s),
                "desired_nodes": step.desired_nodes,
                "nodes": step.nodes,
                "add": [f"{up.offer.provisioner}/{up.offer.name}" for up in step.ups],
                "give_back": [down.node for down in step.downs],
                "why": list(step.reasons),
            }
            for step in scaling.decisions[:MOST_DECISIONS]
        ],
    }


def paid_for_all(told: Run, gpus: int, fleet_usd_per_hour: float) -> float | None:
    """USD for a fleet that is not scaled: all of its nodes, all of the time. `told` has how long."""
    hours = told["gpu_seconds_held"] / gpus / 3600.0
    return rounded(hours * fleet_usd_per_hour)


def over_ceiling(world: World) -> Run:
    """Seconds in which over a tenth of those who arrived waited longer than the ceiling for their first token, and how
    many requests did in all."""
    timeline = world.tally.timeline
    spans = [span for span in timeline.sums if span[4] and span[5] > OVER_SHARE * span[4]]
    return {
        "ms": world.tally.ceiling_ms,
        "seconds_over": rounded(len(spans) * timeline.span_ms / 1000.0),
        "requests_over": int(sum(span[5] for span in timeline.sums)),
    }


def nodes_over_time(scaling: Autoscaling, end_s: float) -> Run:
    """Nodes that serve, and those on their way, at even moments."""
    span_s = max(1.0, end_s / SPANS)
    serving: list[int] = []
    coming: list[int] = []
    at, counts = 0, scaling.counts
    for span in range(int(end_s / span_s) + 1):
        while at + 1 < len(counts) and counts[at + 1][0] <= span * span_s:
            at += 1
        serving.append(counts[at][1])
        coming.append(counts[at][2])
    return {"span_s": rounded(span_s), "serving": serving, "coming": coming}
