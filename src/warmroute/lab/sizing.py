"""Fleet sizing for `warmroute plan`: the smallest fleet whose replay meets the latency limits, found by doubling and
then bisecting.

The search assumes that more nodes are never slower. Its result has been replayed and meets the limits; the fleet with
one node less has been replayed and does not, unless it has no nodes, or with roles only one.

With prefill and decode nodes, each fleet size is replayed with several numbers of prefill nodes: from the share that
was best at the size before, one node more or less, until neither is better.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf

import msgspec

from warmroute.config import Objective
from warmroute.config.node_settings import Role
from warmroute.replay.policy_spec import PolicySpec
from warmroute.replay.run import Progress, Setup, replay
from warmroute.replay.summary import Run
from warmroute.scaling.fleet_plan import excess

START_SHARE = 0.5
"""Of prefill nodes, in the first fleet that is replayed."""
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
        return self.excess(run) <= 1.0

    def excess(self, run: Run) -> float:
        """Return the largest measured value relative to its limit; infinity if the run did not answer every request."""
        times = run["ttft_ms"]
        if run["rejected"] or run["failed"] or any(times[key] is None for key, _ in self.given):
            return inf
        good_ratio = run["good_per_s"] * run["duration_s"] / max(1, run["finished"])
        found = excess(self.objective, times["p90"], times["p99"], run["inter_token_ms"]["p90"], good_ratio)
        return max(found, times["p50"] / self.ttft_p50_ms) if self.ttft_p50_ms is not None else found

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
    """All replayed runs, by fleet size: the best one of each size."""
    prefill_nodes: dict[int, int] = {}
    """Prefill nodes of these runs, by fleet size; empty if no node has a role."""

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
    with_roles: bool = False,
) -> NodesNeeded:
    """Search up to `most` copies of the setup's first node, with `with_roles` as prefill and decode nodes. `start_run`
    is called with the fleet size before each replay and returns the callback for its progress."""
    found = NodesNeeded(policy.text, None, {})
    runs = found.runs
    share = START_SHARE

    def run(nodes: int, prefill: int) -> Run:
        fleet = tuple(
            msgspec.structs.replace(setup.nodes[0], name=f"node-{at}", role=_role(at, prefill, with_roles))
            for at in range(nodes)
        )
        return replay(msgspec.structs.replace(setup, nodes=fleet, policy=policy), start_run(nodes))

    def enough(nodes: int) -> bool:
        nonlocal share
        if nodes in runs:
            return limits.met(runs[nodes])
        if not with_roles:
            runs[nodes] = run(nodes, 0)
            return limits.met(runs[nodes])
        prefill, runs[nodes] = _best_split(nodes, share, limits, run)
        found.prefill_nodes[nodes] = prefill
        share = prefill / nodes
        return limits.met(runs[nodes])

    low, high = (1, 2) if with_roles else (0, 1)
    while not enough(high):
        if high >= most:
            return found
        low, high = high, min(most, 2 * high)
    while high - low > 1:
        middle = (low + high) // 2
        if enough(middle):
            high = middle
        else:
            low = middle
    found.nodes = high
    return found


def _role(at: int, prefill: int, with_roles: bool) -> Role:
    if not with_roles:
        return "mixed"
    return "prefill" if at < prefill else "decode"


def _best_split(nodes: int, share: float, limits: Limits, run: Callable[[int, int], Run]) -> tuple[int, Run]:
    """Return a number of prefill nodes with which the fleet meets the limits, else the best one; and its replay."""
    tried: dict[int, Run] = {}

    def excess_of(prefill: int) -> float:
        if prefill not in tried:
            tried[prefill] = run(nodes, prefill)
        return limits.excess(tried[prefill])

    best = min(max(1, round(share * nodes)), nodes - 1)
    while excess_of(best) > 1.0:
        others = [one for one in (best + 1, best - 1) if 0 < one < nodes]
        better = min(others, key=excess_of, default=best)
        if excess_of(better) >= excess_of(best):
            break
        best = better
    return best, tried[best]
