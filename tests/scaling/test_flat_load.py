"""A load that stays the same for hours: the fleet does, too. The replays are replaced by a formula, so that hours take
no time; the forecast, the search, the planner and its memory are real."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import pairwise
from random import Random

import msgspec
import pytest
from recorded_loads import plan_request, recorded

from warmroute.config import Objective, Scaling, ScalingReplay
from warmroute.core.demand import DemandMeter
from warmroute.lab.planning import search
from warmroute.lab.planning.recorded_traffic import RecordedRequest, Sample
from warmroute.scaling.fleet_plan import FleetNode, FleetPlan, PlanRequest, ReplayedFleet
from warmroute.scaling.offers import OfferKey
from warmroute.scaling.replay_planner import ReplayPlanner

PER_NODE = 0.2
"""Requests per second that a node serves within the objective."""
STEEPNESS = 6
"""Of the latency, as a power of the load."""
HOURS, QUIET_HOURS, TURN_S = 6, 2, 5.0
"""The first hours are not counted."""


class Formula:
    """Stands for FleetReplay."""

    def __init__(self, request: PlanRequest, sample: Sample, _pause: Callable[[], object]) -> None:
        self.arrivals_per_s, self.tokens_per_s = sample.arrivals_per_s, sample.tokens_per_s
        self.replays = self.requests = 0
        self.measured = len(sample.requests) - sample.warm_up

    def run(
        self, nodes: Sequence[FleetNode], load: float, offer: OfferKey | None = None, variant: int = 0
    ) -> ReplayedFleet:
        per_s = load * self.arrivals_per_s
        return ReplayedFleet(
            nodes=len(nodes),
            usd_per_hour=2.0 * len(nodes),
            offer=offer,
            load=load,
            arrivals_per_s=per_s,
            tokens_per_s=load * self.tokens_per_s,
            excess=(per_s / (PER_NODE * len(nodes))) ** STEEPNESS,
        )


class Router:
    """Counts and records requests, searches, and has the nodes that its plans want."""

    def __init__(self, requests: list[RecordedRequest], replay: ScalingReplay, search_s: float) -> None:
        self.now_s, self.nodes, self.recorded = 0.0, 9, 1000
        self.meter = DemandMeter()
        self.planner = ReplayPlanner(
            Scaling(enabled=True, objective=Objective(ttft_p90_ms=2000.0), replay=replay), self.meter, self
        )
        self._requests, self._times_ms = requests, [one.at_ms for one in requests]
        self._replay, self._search_s = replay, search_s
        self._ending: tuple[float, FleetPlan, Callable[[FleetPlan | None, str], object]] | None = None

    @property
    def recorded_s(self) -> float:
        return self.now_s

    def start(self, request: PlanRequest, done: Callable[[FleetPlan | None, str], object]) -> None:
        now_ms, times_ms = 1000.0 * self.now_s, self._times_ms
        since = bisect_left(times_ms, now_ms - 1000.0 * self._replay.window_s)
        recent = self._requests[since : bisect_left(times_ms, now_ms)]
        self._ending = self.now_s + self._search_s, search.plan_fleet(request, recent, now_ms), done

    def turn(self) -> None:
        self.now_s += TURN_S
        self.meter.arrived = bisect_left(self._times_ms, 1000.0 * self.now_s)
        self.planner.turn(self.now_s, self.nodes, lambda: plan_request(self.nodes, lead_s=240.0))
        if self._ending is not None and self.now_s >= self._ending[0]:
            _, plan, done = self._ending
            self._ending = None
            done(plan, "")
            self.nodes = plan.desired_nodes


@pytest.mark.parametrize("search_s", [20.0, 450.0])
@pytest.mark.parametrize("seed", range(2))
def test_the_fleet_stays_within_one_node(seed: int, search_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where five nodes are hardly enough, and if a search takes longer than the time between two of them."""
    monkeypatch.setattr(search, "FleetReplay", Formula)
    random, prompt, at_s = Random(seed), recorded(6.0, 10.0)[0].prompt, 0.0
    requests: list[RecordedRequest] = []
    while (at_s := at_s + random.expovariate(0.88)) < 3600.0 * HOURS:
        requests.append(RecordedRequest(prompt, 1000.0 * at_s, len(requests)))
    seen = sizes(Router(requests, ScalingReplay(), search_s))
    assert set(seen) <= {5, 6}
    assert changes(seen) <= 2 * (HOURS - QUIET_HOURS), "at most one node more, and one less, in an hour"


def sizes(router: Router) -> list[int]:
    """Return the number of nodes at each turn after the first hours."""
    seen: list[int] = []
    while router.now_s < 3600.0 * HOURS:
        router.turn()
        if router.now_s > 3600.0 * QUIET_HOURS:
            seen.append(router.nodes)
    return seen


def changes(seen: list[int]) -> int:
    return sum(before != after for before, after in pairwise(seen))


@pytest.mark.parametrize("seed", range(3))
def test_a_chat_stays_within_what_chance_does_to_its_load(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """0.22 conversations of four growing turns begin per second, at random: 132 within ten minutes, and the load of ten
    minutes has a standard deviation of a tenth. Five nodes hold the mean load (0.88 / 0.2). Seven hold two standard
    deviations more with the margin and the chance that a plan allows for: 1.2 · 1.15 · 0.88 / 0.2 = 6.1. A node that
    was added stays for ten minutes, so there are at most 6 additions and 6 removals an hour; chance needs far fewer."""
    monkeypatch.setattr(search, "FleetReplay", Formula)
    random, prompt, begins_s, number = Random(seed), recorded(6.0, 10.0)[0].prompt, -300.0, 0
    requests: list[RecordedRequest] = []
    while (begins_s := begins_s + random.expovariate(0.22)) < 3600.0 * HOURS:
        number += 1
        for turn in range(4):
            grown = msgspec.structs.replace(prompt, prompt_tokens=500 * (turn + 1))
            requests.append(RecordedRequest(grown, 1000.0 * (begins_s + 60.0 * turn), number))
    requests = sorted((one for one in requests if one.at_ms >= 0.0), key=lambda one: one.at_ms)
    seen = sizes(Router(requests, ScalingReplay(), search_s=60.0))
    assert set(seen) <= {5, 6, 7}
    assert changes(seen) <= 5 * (HOURS - 2)
