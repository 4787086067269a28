"""When a search by replay starts, when its plan counts, and when the autoscaler goes by thresholds instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from recorded_loads import plan_request

from warmroute.config import Objective, Scaling, ScalingReplay
from warmroute.core.demand import DemandMeter
from warmroute.scaling.fleet_plan import CannotPlan, FleetPlan, PlanRequest, ReplayedFleet
from warmroute.scaling.replay_planner import PREDICT_EVERY, ReplayPlanner

INTERVAL_S = 100.0
CONFIG = Scaling(
    enabled=True, objective=Objective(ttft_p90_ms=2000.0), replay=ScalingReplay(interval_s=INTERVAL_S, window_s=1000.0)
)


class Runner:
    """Answers a search when the test says so."""

    def __init__(self) -> None:
        self.recorded, self.recorded_s = 1000, 1000.0
        self.requests: list[PlanRequest] = []
        self.done: Callable[[FleetPlan | None, str], object]

    def start(self, request: PlanRequest, done: Callable[[FleetPlan | None, str], object]) -> None:
        self.requests.append(request)
        self.done = done


class Planning:
    def __init__(self, config: Scaling = CONFIG) -> None:
        self.runner, self.meter = Runner(), DemandMeter()
        self.planner = ReplayPlanner(config, self.meter, self.runner)
        self.now_s = 0.0

    def turn(self, nodes: int = 4) -> None:
        self.now_s += INTERVAL_S
        self.planner.turn(self.now_s, nodes, lambda: plan_request(nodes))

    def wait(self, seconds: float, per_s: float) -> int:
        """Let time pass with so many arrivals. Return how many searches have started."""
        before = len(self.runner.requests)
        for _ in range(round(seconds / 5.0)):
            self.now_s += 5.0
            self.meter.arrived += round(5.0 * per_s)
            self.planner.turn(self.now_s, 4, lambda: plan_request(4))
        return len(self.runner.requests) - before

    def search(self, predicted_ms: float = 0.0, observed_ms: float = 0.0, **plan: Any) -> None:
        """Let an interval pass in which requests took `observed_ms`, and a search end that predicted `predicted_ms`."""
        for _ in range(100 if observed_ms else 0):
            self.meter.record_ttft(observed_ms)
        self.turn()
        fields: dict[str, Any] = {"nodes": 4, "measured_s": INTERVAL_S, "recorded": 1000, **plan}
        if predicted_ms:
            fields["predicted"] = ReplayedFleet(nodes=4, usd_per_hour=8.0, ttft_p90_ms=predicted_ms)
        self.runner.done(FleetPlan(**fields), "")

    @property
    def plan(self) -> FleetPlan | None:
        return self.planner.plan(self.now_s)


@pytest.fixture
def planning() -> Planning:
    return Planning()


def test_searches_do_not_overlap_and_keep_their_interval(planning: Planning) -> None:
    planning.turn()
    planning.turn()
    assert len(planning.runner.requests) == 1
    planning.runner.done(FleetPlan(nodes=4), "")
    planning.planner.turn(planning.now_s + 1.0, 4, lambda: plan_request(4))
    assert len(planning.runner.requests) == 2
    planning.runner.done(FleetPlan(nodes=4), "")
    planning.planner.turn(planning.now_s + 2.0, 4, lambda: plan_request(4))
    assert len(planning.runner.requests) == 2


def test_more_arrivals_than_the_plan_expected_start_a_search_early() -> None:
    replay = ScalingReplay(interval_s=1000.0, window_s=3000.0)
    for per_s, searches in ((2.2, 0), (2.8, 1)):
        planning = Planning(Scaling(enabled=True, replay=replay))
        assert planning.wait(5.0, 2.0) == 1
        planning.runner.done(FleetPlan(nodes=4, arrivals_per_s=2.0, growth=1.05, margin=0.1, chance=0.1), "")
        assert planning.wait(900.0, per_s) == searches


def test_requests_that_were_not_recorded_start_no_search() -> None:
    """The meter counts more arrivals than the recorded traffic has: rejected ones, and those that still run."""
    planning = Planning(Scaling(enabled=True, replay=ScalingReplay(interval_s=1000.0, window_s=3000.0)))
    planning.wait(1000.0, 2.6)
    planning.runner.done(FleetPlan(nodes=4), "")
    assert planning.wait(5.0, 2.6) == 1
    planning.runner.done(FleetPlan(nodes=4, arrivals_per_s=2.0, margin=0.05, measured_s=900.0), "")
    assert planning.wait(900.0, 2.6) == 0


def test_chance_starts_no_search() -> None:
    planning = Planning(Scaling(enabled=True, replay=ScalingReplay(interval_s=1000.0, window_s=3000.0)))
    assert planning.wait(5.0, 2.0) == 1
    planning.runner.done(FleetPlan(nodes=4, arrivals_per_s=2.0, margin=0.05, chance=0.2), "")
    assert planning.wait(900.0, 2.4) == 0


def test_searches_that_start_early_keep_a_distance() -> None:
    planning = Planning(Scaling(enabled=True, replay=ScalingReplay(interval_s=1000.0, window_s=3000.0)))
    planning.wait(400.0, 9.0)
    for _ in range(3):
        planning.runner.done(FleetPlan(nodes=4, arrivals_per_s=2.0), "")
        assert planning.wait(5.0, 9.0) == 1
        planning.runner.done(FleetPlan(nodes=4, arrivals_per_s=2.0), "")
        assert planning.wait(190.0, 9.0) == 0
        assert planning.wait(10.0, 9.0) == 1
        planning.wait(400.0, 9.0)


@pytest.mark.parametrize(
    ("rises", "excess", "target", "searches"),
    [(True, 0.9, 1.0, 1), (True, 0.7, 1.0, 0), (False, 0.9, 1.0, 0), (True, 1.2, 1.0, 0), (True, 0.9, 2.0, 0)],
)
def test_while_the_load_rises_a_fleet_that_is_only_just_large_enough_is_searched_for_soon(
    rises: bool, excess: float, target: float, searches: int
) -> None:
    planning = Planning(Scaling(enabled=True, replay=ScalingReplay(interval_s=1000.0, window_s=3000.0)))
    assert planning.wait(5.0, 2.0) == 1
    fleet = ReplayedFleet(nodes=4, usd_per_hour=8.0, excess=excess)
    plan = FleetPlan(nodes=4, arrivals_per_s=2.0, rises=rises, margin=0.5, fleets=(fleet,), target_excess=target)
    planning.runner.done(plan, "")
    assert planning.wait(390.0, 2.0) == 0
    assert planning.wait(100.0, 2.0) == searches


def test_a_plan_counts_until_it_is_old(planning: Planning) -> None:
    assert planning.plan is None
    planning.search(add=2)
    assert planning.plan is not None and planning.plan.add == 2
    planning.now_s += 10 * INTERVAL_S
    assert planning.plan is None
    assert planning.planner.problem


def test_no_search_starts_before_there_is_enough_traffic(planning: Planning) -> None:
    planning.runner.recorded = 12
    planning.turn()
    assert not planning.runner.requests
    assert planning.planner.problem == "replay has too little traffic: 12 of 50 requests"
    planning.runner.recorded = 50
    planning.planner.turn(planning.now_s + 1.0, 4, lambda: plan_request(4))
    assert len(planning.runner.requests) == 1


def test_no_search_starts_before_minutes_are_recorded(planning: Planning) -> None:
    """Many requests of a few seconds would be replayed on empty caches."""
    planning.runner.recorded, planning.runner.recorded_s = 5000, 12.0
    planning.turn()
    assert not planning.runner.requests
    assert planning.planner.problem == "replay has too little traffic: 12 of 300 s"
    planning.runner.recorded_s = 300.0
    planning.turn()
    assert len(planning.runner.requests) == 1
    short = Planning(Scaling(enabled=True, replay=ScalingReplay(interval_s=INTERVAL_S, window_s=120.0)))
    short.runner.recorded_s = 60.0
    short.turn()
    assert len(short.runner.requests) == 1


def test_a_search_for_an_earlier_objective_does_not_count(planning: Planning) -> None:
    planning.turn()
    planning.planner.reconfigure(msgspec.structs.replace(CONFIG, objective=Objective(ttft_p90_ms=500.0)))
    fleet = ReplayedFleet(nodes=4, usd_per_hour=8.0, arrivals_per_s=3.0, excess=0.4)
    planning.runner.done(FleetPlan(nodes=4, recorded=1000, fleets=(fleet,), measured_s=60.0), "")
    assert planning.plan is None
    planning.planner.turn(planning.now_s + 1.0, 4, lambda: plan_request(4))
    assert len(planning.runner.requests) == 2, "the next search starts at once"
    assert not planning.runner.requests[-1].known


def test_a_search_without_a_result_leaves_the_decision_to_thresholds(planning: Planning) -> None:
    planning.search(skipped="replay has too little traffic: 12 of 50 requests")
    assert planning.plan is None
    assert "too little traffic" in planning.planner.problem


def test_a_failure_is_logged_once_and_the_last_plan_counts_until_it_is_old(
    planning: Planning, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    planning.search()
    for _ in range(3):
        planning.turn()
        planning.runner.done(None, "the process was ended by signal 9")
    assert planning.plan is not None
    assert caplog.text.count("scaling_replay_failed") == 1
    assert planning.planner.stats.failures == 3
    planning.search()
    assert caplog.text.count("scaling_replay_recovered") == 1


def refuse() -> PlanRequest:
    raise CannotPlan("the speed of no node is known yet")


def test_a_fleet_that_cannot_be_replayed_is_left_to_thresholds(planning: Planning) -> None:
    planning.search()
    planning.planner.turn(planning.now_s + INTERVAL_S, 4, refuse)
    assert planning.plan is None
    assert "the speed of no node is known yet" in planning.planner.problem


def test_wrong_predictions_end_scaling_by_replay_until_they_are_right_again(
    planning: Planning, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    planning.search(predicted_ms=500.0, observed_ms=500.0)
    for _ in range(2):
        planning.search(predicted_ms=500.0, observed_ms=3000.0)
    assert planning.plan is not None, "two wrong predictions may be chance"
    planning.search(predicted_ms=500.0, observed_ms=3000.0)
    assert planning.plan is None
    assert not planning.planner.stats.trusted
    assert "scaling_replay_inaccurate" in caplog.text
    planning.search(predicted_ms=1500.0, observed_ms=1400.0)
    assert planning.plan is None
    planning.search(predicted_ms=1500.0, observed_ms=1400.0)
    assert planning.plan is not None
    assert "scaling_replay_accurate" in caplog.text


@pytest.mark.parametrize(
    ("objective", "predicted", "name"),
    [
        (Objective(ttft_p90_ms=0.0, inter_token_p90_ms=50.0), {"inter_token_p90_ms": 20.0}, "inter-token p90"),
        (Objective(ttft_p90_ms=2000.0, inter_token_p90_ms=50.0), {"inter_token_p90_ms": 20.0}, "inter-token p90"),
        (Objective(ttft_p90_ms=0.0, ttft_p99_ms=3000.0), {"ttft_p99_ms": 900.0}, "TTFT p99"),
    ],
)
def test_whatever_the_objective_limits_is_compared(objective: Objective, predicted: dict[str, Any], name: str) -> None:
    planning = Planning(msgspec.structs.replace(CONFIG, objective=objective))
    for _ in range(4):
        for at in range(100):
            planning.meter.record_ttft(500.0 if at < 95 else 9000.0)
            planning.meter.record_inter_token(80.0)
        planning.turn()
        fleet = ReplayedFleet(nodes=4, usd_per_hour=8.0, ttft_p90_ms=500.0, **predicted)
        planning.runner.done(FleetPlan(nodes=4, measured_s=INTERVAL_S, recorded=1000, predicted=fleet), "")
    assert planning.plan is None
    assert planning.planner.problem.startswith(f"replay predicts {name} ")
    assert planning.planner.stats.observed_ms == pytest.approx(500.0, rel=0.15), "the metric has the TTFT p90"


def test_a_wrong_ttft_does_not_matter_if_the_objective_does_not_limit_it() -> None:
    planning = Planning(msgspec.structs.replace(CONFIG, objective=Objective(ttft_p90_ms=0.0, inter_token_p90_ms=50.0)))
    for _ in range(5):
        planning.search(predicted_ms=500.0, observed_ms=9000.0)
    assert planning.plan is not None


def test_a_wrong_prediction_far_below_the_objective_does_not_matter(planning: Planning) -> None:
    for _ in range(6):
        planning.search(predicted_ms=100.0, observed_ms=400.0)
    assert planning.plan is not None


def test_predictions_are_not_compared_while_the_fleet_changes(planning: Planning) -> None:
    planning.search(predicted_ms=500.0, observed_ms=500.0)
    for nodes in (5, 6, 7, 8, 9):
        for _ in range(100):
            planning.meter.record_ttft(9000.0)
        planning.turn(nodes)
        predicted = ReplayedFleet(nodes=nodes, usd_per_hour=8.0, ttft_p90_ms=500.0)
        planning.runner.done(FleetPlan(nodes=nodes, measured_s=INTERVAL_S, predicted=predicted), "")
    assert planning.planner.stats.trusted


def test_some_searches_also_predict_the_current_fleet(planning: Planning) -> None:
    for _ in range(2 * PREDICT_EVERY):
        planning.search()
    assert sum(request.predict_current for request in planning.runner.requests) == 2


def test_a_search_looks_ahead_for_as_long_as_it_takes_itself(planning: Planning) -> None:
    planning.search(cpu_s=3.0)
    planning.search()
    assert [request.lead_s for request in planning.runner.requests] == [0.0, 3.0 / CONFIG.replay.cpu_share]


def test_the_share_of_the_traffic_that_other_routers_get_is_known(planning: Planning) -> None:
    planning.meter.peers = DemandMeter()
    planning.meter.arrived, planning.meter.peers.arrived = 100, 300
    planning.search()
    assert planning.runner.requests[-1].share == pytest.approx(0.25)


def test_the_share_of_the_traffic_is_that_of_the_recorded_time(planning: Planning) -> None:
    """Not that of the last minute, in which by chance only this router had requests."""
    planning.meter.peers = DemandMeter()
    for _ in range(4):
        planning.meter.arrived += 100
        planning.meter.peers.arrived += 300
        planning.search()
    planning.meter.arrived += 20
    planning.search()
    assert planning.runner.requests[-1].share == pytest.approx(320 / 1220)


def test_replays_are_remembered_for_a_quarter_of_an_hour(planning: Planning) -> None:
    fleet = ReplayedFleet(nodes=4, usd_per_hour=8.0, arrivals_per_s=3.0, excess=0.3)
    for _ in range(9):
        planning.search(fleets=(fleet,))
    assert planning.runner.requests[-1].known == (fleet,)
    planning.search(fleets=(fleet,))
    planning.search()
    assert not planning.runner.requests[-1].known, "a result that was only reused does not stay"


def spared(planning: Planning, **plan: Any) -> int:
    planning.search(nodes=4, **plan)
    assert planning.plan is not None
    return planning.plan.spare


def test_a_node_is_spare_if_no_plan_of_the_last_minutes_wanted_it(planning: Planning) -> None:
    """The arrivals of a third of the window count as those of now: for as long a node has to be spare."""
    assert spared(planning) == 0
    assert [spared(planning, spare=1) for _ in range(5)] == [0, 0, 0, 1, 1]


def test_the_first_plans_make_no_node_spare(planning: Planning) -> None:
    assert [spared(planning, spare=1) for _ in range(4)] == [0, 0, 0, 1]


def test_searches_that_take_long_make_nodes_spare_too(planning: Planning) -> None:
    assert spared(planning, spare=1) == 0
    planning.now_s += 2.5 * INTERVAL_S
    assert spared(planning, spare=1) == 1


def test_plans_of_before_a_gap_make_no_node_spare(planning: Planning) -> None:
    """After a night, or while another router led, one old plan and one new plan are no agreement."""
    for gap in ("skipped", "little traffic", "cannot plan", "time", "another leader"):
        for _ in range(5):
            before = spared(planning, spare=1)
        assert before == 1, gap
        if gap == "skipped":
            for _ in range(4):
                planning.search(skipped="replay has too little traffic of the last minutes")
        elif gap == "little traffic":
            planning.runner.recorded = 12
            for _ in range(4):
                planning.turn()
            planning.runner.recorded = 1000
        elif gap == "cannot plan":
            planning.now_s += INTERVAL_S
            planning.planner.turn(planning.now_s, 4, refuse)
        elif gap == "time":
            planning.now_s += 6 * INTERVAL_S
        else:
            planning.planner.forget()
        assert [spared(planning, spare=1) for _ in range(4)] == [0, 0, 0, 1], gap


def test_a_search_without_a_result_makes_no_node_spare(planning: Planning) -> None:
    planning.search(skipped="replay has too little traffic: 12 of 50 requests")
    planning.now_s += 3 * INTERVAL_S
    assert spared(planning, spare=1) == 0


def test_an_objective_that_no_fleet_meets_is_remembered_for_a_while(planning: Planning) -> None:
    planning.search(target_excess=1.4)
    planning.search(target_excess=1.4)
    assert planning.runner.requests[-1].target_excess == pytest.approx(1.4)
    planning.now_s += 2000.0
    planning.search()
    assert planning.runner.requests[-1].target_excess == 1.0


def test_searches_know_the_usual_floor_until_the_objective_changes(planning: Planning) -> None:
    def usual_ms() -> float:
        found = planning.runner.requests[-1].baseline_ttft_ms
        assert found is not None
        return found

    planning.search(floor_ms=600.0, measured_s=600.0)
    assumed_ms = usual_ms()
    planning.search()
    assert 600.0 < usual_ms() < assumed_ms
    planning.planner.forget()
    planning.search()
    assert usual_ms() == assumed_ms
