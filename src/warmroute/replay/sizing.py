"""Fleet sizing for `warmroute plan`: the smallest fleet whose replay meets the latency limits, found by doubling and
then bisecting.

The search assumes that more nodes are never slower. Its result has been replayed and meets the limits; the fleet with
one node less has been replayed and does not.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from warmroute.config import Objective
from warmroute.replay.policy_spec import PolicySpec
from warmroute.replay.run import Progress, Setup, replay
from warmroute.replay.summary import Run
from warmroute.scaling.fleet_plan import excess

MIN_IMPROVEMENT = 0.01
"""Doubling the fleet has not helped if it shortens the TTFT by less than this fraction."""


class Limits(msgspec.Struct, frozen=True):
    """The highest TTFT allowed at each percentile; None for no limit. And the objective of the autoscaler, which
    judges fleets in the same way."""

    ttft_p50_ms: float | None = None
    ttft_p90_ms: float | None = None
    ttft_p99_ms: float | None = None
    inter_token_p90_ms: float | None = None
    min_good_ratio: float = 0.0

    @classmethod
    def of(cls, objective: Objective) -> Limits:
        """Return the limits that the autoscaler has."""
        return cls(
            ttft_p90_ms=objective.ttft_p90_ms or None,
            ttft_p99_ms=objective.ttft_p99_ms or None,
            inter_token_p90_ms=objective.inter_token_p90_ms or None,
            min_good_ratio=objective.min_good_ratio,
        )

    @property
    def objective(self) -> Objective:
        return Objective(
            ttft_p90_ms=self.ttft_p90_ms or 0.0,
            ttft_p99_ms=self.ttft_p99_ms or 0.0,
            inter_token_p90_ms=self.inter_token_p90_ms or 0.0,
            min_good_ratio=self.min_good_ratio,
        )

    def met(self, run: Run) -> bool:
        """Return whether the run answered every request and stayed within the limits."""
        times = run["ttft_ms"]
        if run["rejected"] or run["failed"] or any(times[key] is None for key, _ in self.given):
            return False
        is_fast = self.ttft_p50_ms is None or times["p50"] <= self.ttft_p50_ms
        good_ratio = run["good_per_s"] * run["duration_s"] / max(1, run["finished"])
        inter_token_ms = run["inter_token_ms"]["p90"]
        return is_fast and excess(self.objective, times["p90"], times["p99"], inter_token_ms, good_ratio) <= 1.0

    @property
    def given(self) -> list[tuple[str, float]]:
        limits = (("p50", self.ttft_p50_ms), ("p90", self.ttft_p90_ms), ("p99", self.ttft_p99_ms))
        return [(key, limit) for key, limit in limits if limit is not None]


class UnreachableLimit(msgspec.Struct, frozen=True):
    """A limit that no fleet size meets: `most` nodes were hardly faster than `fewer`."""

    percent: str
    limit_ms: float
    measured_ms: float
    fewer: int
    most: int


class NodesNeeded(msgspec.Struct):
    """The result of the search for one policy."""

    policy: str
    nodes: int | None
    """None if the largest fleet allowed is too small."""
    runs: dict[int, Run]
    """All replayed runs, by fleet size."""

    def unreachable_limit(self, limits: Limits) -> UnreachableLimit | None:
        """Return the limit that more nodes cannot meet; None if more nodes may help."""
        most = max(self.runs)
        fewer = max((nodes for nodes in self.runs if 2 * nodes <= most), default=None)
        if self.nodes is not None or fewer is None or self.runs[most]["rejected"] or self.runs[most]["failed"]:
            return None
        for key, limit in limits.given:
            before, after = self.runs[fewer]["ttft_ms"][key], self.runs[most]["ttft_ms"][key]
            if before is not None and after is not None and after > limit and before - after < MIN_IMPROVEMENT * before:
                return UnreachableLimit(key, limit, after, fewer, most)
        return None


def nodes_needed(
    setup: Setup,
    policy: PolicySpec,
    limits: Limits,
    most: int,
    start_run: Callable[[int], Progress | None] = lambda _nodes: None,
) -> NodesNeeded:
    """Search up to `most` copies of the setup's first node. `start_run` is called with the fleet size before each
    replay and returns the callback for its progress."""
    runs: dict[int, Run] = {}

    def enough(nodes: int) -> bool:
        if nodes not in runs:
            fleet = tuple(msgspec.structs.replace(setup.nodes[0], name=f"node-{at}") for at in range(nodes))
            replayed = msgspec.structs.replace(setup, nodes=fleet, policy=policy)
            runs[nodes] = replay(replayed, start_run(nodes))
        return limits.met(runs[nodes])

    low, high = 0, 1
    while not enough(high):
        if high >= most:
            return NodesNeeded(policy.text, None, runs)
        low, high = high, min(most, 2 * high)
    while high - low > 1:
        middle = (low + high) // 2
        if enough(middle):
            high = middle
        else:
            low = middle
    return NodesNeeded(policy.text, high, runs)
