"""`warmroute plan`: the smallest fleet that meets limits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import inf
from zlib import crc32

import msgspec

from warmroute.config import Objective, ScalingReplay
from warmroute.config.nodes import Role
from warmroute.lab.planning.recorded_traffic import MAX_CHANCE, RecordedRequest, chance_of
from warmroute.lab.replay_setup import PolicySpec
from warmroute.lab.run import Progress, Setup, replay
from warmroute.lab.summary import Run
from warmroute.lab.workloads import Trace, with_follow_ups
from warmroute.lab.workloads.workload_prompt import WorkloadPrompt
from warmroute.scaling.fleet_plan import RECENT_SHARE, excess

# Fleet sizing for `warmroute plan`: the smallest fleet whose replay meets the latency limits, found by doubling and
# then bisecting.
#
# The search assumes that more nodes are never slower. Its result has been replayed and meets the limits; the fleet with
# one node less has been replayed and does not, unless it has no nodes, or with roles only one.
#
# With prefill and decode nodes, each fleet size is replayed with several numbers of prefill nodes: from the share that
# was best at the size before, one node more or less, until neither is better.

START_SHARE = 0.5
"""Share of prefill nodes in the first fleet that is replayed."""
MIN_IMPROVEMENT = 0.01
"""Doubling the fleet has not helped if it shortens the TTFT by less than this fraction."""


class LatencyLimits(msgspec.Struct, frozen=True):
    """The highest TTFT allowed at each percentile; None for no limit. And the objective of the autoscaler, which
    judges fleets in the same way."""

    ttft_p50_ms: float | None = None
    ttft_p90_ms: float | None = None
    ttft_p99_ms: float | None = None
    inter_token_p90_ms: float | None = None
    min_good_ratio: float = 0.0

    @classmethod
    def of(cls, objective: Objective) -> LatencyLimits:
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

    def unreachable_limit(self, limits: LatencyLimits) -> UnreachableLimit | None:
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
    limits: LatencyLimits,
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


def _best_split(nodes: int, share: float, limits: LatencyLimits, run: Callable[[int, int], Run]) -> tuple[int, Run]:
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


# When the requests of a setup would arrive, known before anything is simulated: an answer is assumed to take
# ANSWER_MS_PER_TOKEN for each token, and the next turn of a conversation follows it.

ANSWER_MS_PER_TOKEN = 20.0
"""What an answer takes for each token, before anything was simulated: 50 tokens a second."""
RISING = 1.25
"""The load rises if the second half of the measured time has this many times as many requests as the first half."""
ERRORS = 3.0
"""The two halves of the measured time may differ by this many standard errors by chance."""


def expected_arrivals(setup: Setup) -> Iterator[tuple[float, WorkloadPrompt]]:
    """Return the measured requests of the setup in the order of their times."""
    measured, most = 0, setup.requests
    end_ms = inf
    for number, (at_ms, prompt) in enumerate(with_follow_ups(setup.arrivals(), ANSWER_MS_PER_TOKEN)):
        if number < setup.warm_up or at_ms < 1000.0 * setup.warm_up_s:
            continue
        if not measured and setup.duration_s is not None:
            end_ms = at_ms + 1000.0 * setup.duration_s
        if measured == most or at_ms > end_ms:
            return
        measured += 1
        yield at_ms, prompt


def load_rises(setup: Setup) -> bool:
    """Return whether the load of a generator still rises while it is measured: as many conversations begin as before,
    but the earlier ones have not ended."""
    if isinstance(setup.workload, Trace) or setup.concurrency is not None or setup.day_s is not None:
        return False
    measured = list(expected_arrivals(setup))
    if not any(prompt.next_turn is not None for _, prompt in measured):
        return False
    middle_ms = (measured[0][0] + measured[-1][0]) / 2
    first = sum(at_ms < middle_ms for at_ms, _ in measured)
    second = len(measured) - first
    return second > RISING * first and second - first > ERRORS * len(measured) ** 0.5


# The load that a fleet has to hold to meet its limits in most minutes, not only on average: the autoscaler allows for
# `ScalingReplay.margin` and for what chance does to few conversations in ten minutes (planning/recorded_traffic.py),
# and `warmroute plan --margin` does the same for a workload.


class LoadMargin(msgspec.Struct, frozen=True):
    margin: float = 0.0
    chance: float = 0.0
    """By which fraction chance makes the load of ten minutes differ: one standard deviation."""

    @property
    def load(self) -> float:
        """Relative to the workload's own."""
        return 1.0 + self.margin + self.chance


def load_margin(setup: Setup, margin: float) -> LoadMargin:
    """Add the chance of the setup's workload to a margin."""
    requests = _recorded(setup)
    recorded_ms = requests[-1].at_ms - requests[0].at_ms if requests else 0.0
    if recorded_ms <= 0.0:
        return LoadMargin(margin)
    chance = chance_of(requests, requests[0].at_ms, recorded_ms)
    span_s = RECENT_SHARE * ScalingReplay().window_s
    chance *= (RECENT_SHARE * recorded_ms / (1000.0 * span_s)) ** 0.5  # of the autoscaler's span instead of this one's
    return LoadMargin(margin, min(MAX_CHANCE, chance))


def with_load(setup: Setup, load: float) -> Setup:
    """Return the setup with `load` times as many requests per second."""
    workload = setup.workload
    if not isinstance(workload, Trace):
        return msgspec.structs.replace(setup, rate=load * (setup.rate or workload.generator.rate))
    setup = msgspec.structs.replace(setup, warm_up_s=setup.warm_up_s / load)  # the same requests of the trace
    if setup.rate is not None:
        return msgspec.structs.replace(setup, rate=load * setup.rate)
    faster = msgspec.structs.replace(workload, speed=load * workload.speed)
    return msgspec.structs.replace(setup, workload=faster)


def _recorded(setup: Setup) -> list[RecordedRequest]:
    found: list[RecordedRequest] = []
    by_number: dict[int, int] = {}
    for at_ms, prompt in expected_arrivals(setup):
        conversation = crc32(prompt.session) if prompt.session else len(found)
        conversation = by_number.get(prompt.follows, conversation) if prompt.follows >= 0 else conversation
        if prompt.number >= 0:
            by_number[prompt.number] = conversation
        found.append(RecordedRequest(prompt, at_ms, conversation))
    return found
