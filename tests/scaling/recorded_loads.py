"""Recorded traffic for tests of scaling by replay."""

from __future__ import annotations

from random import Random
from typing import Any

from warmroute.config import Objective
from warmroute.lab.planning.recorded_traffic import RecordedRequest
from warmroute.lab.workloads.workload_prompt import Segments, WorkloadPrompt, segment_id
from warmroute.scaling.fleet_plan import FleetNode, NodeFigures, OfferedNode, PlanRequest

PLAIN = NodeFigures(ms_per_token=1.0, step_ms=10.0, slope_ms=0.0, kv_tokens=64_000)
"""A node of this kind serves about two requests of 500 tokens per second."""
NODE = FleetNode("plain", "local", 2.0)


def recorded(per_s: float, seconds: float = 300.0, tokens: int = 500, seed: int = 1) -> list[RecordedRequest]:
    """Requests without common prefixes, at random times."""
    random = Random(seed)
    found: list[RecordedRequest] = []
    at_s = 0.0
    while (at_s := at_s + random.expovariate(per_s)) < seconds:
        blocks = Segments().followed_by(segment_id("question", len(found)), tokens)
        found.append(RecordedRequest(WorkloadPrompt(tokens, 4, blocks), at_s * 1000.0, len(found)))
    return found


def plan_request(nodes: int, **more: Any) -> PlanRequest:
    fields: dict[str, Any] = {
        "nodes": (NODE,) * nodes,
        "removable": nodes - 1,
        "offers": (OfferedNode(("cloud", "small"), NODE, 8),),
        "figures": {"plain": PLAIN},
        "objective": Objective(ttft_p90_ms=2000.0),
        **more,
    }
    return PlanRequest(**fields)
