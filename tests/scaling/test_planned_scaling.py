"""Decisions of the scaler by a plan, and what thresholds still do between two replays."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from fleet_views import offer, view

from warmroute.config import IslandLimits, Objective, Scaling
from warmroute.core.demand import DemandMeter, good_ttft_ms, share_within
from warmroute.scaling.fleet_plan import FleetPlan, ReplayedFleet
from warmroute.scaling.observer import FleetView
from warmroute.scaling.offer_selection import OfferSelector
from warmroute.scaling.scaler import Scaler
from warmroute.scaling.scaling_decision import ScalingDecision

CHEAP, DEAR = offer("cheap", usd_per_hour=1.0), offer("dear", gpu="H100", usd_per_hour=4.0)


def fleets(*p90_s: float, smallest: int = 3) -> tuple[ReplayedFleet, ...]:
    return tuple(
        ReplayedFleet(nodes=smallest + at, usd_per_hour=smallest + at, ttft_p90_ms=1000.0 * value, excess=value / 2.0)
        for at, value in enumerate(p90_s)
    )


class Decisions:
    def __init__(self, **config: Any) -> None:
        self.config = Scaling(enabled=True, max_nodes=12, cooldown_up_s=10.0, cooldown_down_s=60.0, **config)
        selector = OfferSelector(self.config)
        selector.update_offers([CHEAP, DEAR])
        self.scaler = Scaler(self.config, selector)

    def decide(self, seen: FleetView, plan: FleetPlan | None) -> ScalingDecision:
        return self.scaler.decide(seen, planner=lambda _inputs: plan)


def steady(now_s: float = 100.0, count: int = 4, arrivals_per_s: float = 1.0, **more: Any) -> FleetView:
    stable = {"ttft_p90_ms": 900.0, **more.pop("stable", {})}
    return view(now_s, count, arrivals_per_s, stable=stable, **more)


def plan(nodes: int = 4, **more: Any) -> FleetPlan:
    return FleetPlan(nodes=nodes, arrivals_per_s=1.0, **more)


def test_the_plan_decides_how_many_nodes_of_which_offer_are_added() -> None:
    wanted = plan(add=2, offer=DEAR.key, fleets=fleets(9.0, 2.8, 1.5, smallest=4))
    decision = Decisions().decide(steady(), wanted)
    assert [one.offer.name for one in decision.additions] == ["dear", "dear"]
    assert decision.desired_nodes == 6
    assert decision.reasons[0] == "6 nodes: TTFT p90 1.5 s (objective 2 s); 5 nodes: TTFT p90 2.8 s"


def test_the_decision_says_which_load_it_assumed() -> None:
    wanted = plan(add=1, offer=CHEAP.key, growth=1.2, margin=0.1, chance=0.05, fleets=fleets(2.8, 1.5, smallest=4))
    assert Decisions().decide(steady(), wanted).reasons[1] == (
        "replayed with 138% of the recorded load: 120% expected when a new node serves, margin 10%, chance 5%"
    )


def test_a_plan_names_the_fleet_that_was_replayed_if_the_wanted_one_was_not() -> None:
    """Earlier plans wanted five nodes; this search replayed four, and they are enough."""
    replayed = (*fleets(0.5, smallest=8), *fleets(0.6, smallest=7), *fleets(0.7, smallest=6), *fleets(0.9, smallest=4))
    assert plan(nodes=8, spare=3, fleets=replayed).explain(Scaling().objective) == (
        "5 nodes, which earlier plans wanted and this search did not replay; 4 nodes: TTFT p90 900 ms (objective 2 s)"
    )
    larger = plan(nodes=8, spare=3, fleets=fleets(0.7, 0.6, 0.5, smallest=6)).explain(Scaling().objective)
    assert larger.startswith("5 nodes, which earlier plans wanted and this search did not replay; 6 nodes: TTFT p90")


def test_a_plan_says_why_it_adds_fewer_nodes_than_are_needed() -> None:
    wanted = plan(add=1, postponed=2, offer=CHEAP.key, fleets=fleets(9.0, 4.0, 2.8, 1.5, smallest=4))
    assert wanted.explain(Scaling().objective) == (
        "7 nodes: TTFT p90 1.5 s (objective 2 s); 5 nodes for now: too few requests to add more at once; "
        "6 nodes: TTFT p90 2.8 s"
    )
    assert Decisions().decide(steady(), wanted).desired_nodes == 5


def test_an_offer_that_is_not_available_any_more_is_replaced() -> None:
    decisions = Decisions()
    decisions.scaler._offers.back_off(DEAR.key, "no capacity", 90.0)
    decision = decisions.decide(steady(), plan(add=1, offer=DEAR.key))
    assert [one.offer.name for one in decision.additions] == ["cheap"]


def test_a_hit_floor_buys_no_node_that_the_plan_does_not_want() -> None:
    seen = steady(stable={"hit_ratio": 0.05}, reuse_within=lambda age_s: min(1.0, age_s / 1e5))
    assert Decisions(min_hit_ratio=0.5).decide(seen, None).desired_nodes > 4
    assert Decisions(min_hit_ratio=0.5).decide(seen, plan()).desired_nodes == 4


def test_utilisation_and_kv_memory_buy_no_node_that_the_plan_does_not_want() -> None:
    seen = steady(arrivals_per_s=7.5, stable={"kv_usage": 0.9})
    assert Decisions().decide(seen, None).desired_nodes > 4
    calm = plan()
    calm.arrivals_per_s = 7.5
    assert Decisions().decide(seen, calm).desired_nodes == 4


def test_what_a_plan_spares_is_removed_at_once_but_not_within_a_cooldown() -> None:
    decisions = Decisions()
    removed_s: list[int] = []
    for now_s in range(100, 300, 5):
        seen = steady(float(now_s), 6 - len(removed_s))
        if decisions.decide(seen, plan(6 - len(removed_s), spare=1, fleets=fleets(1.2))).removals:
            removed_s.append(now_s)
    assert removed_s == [100, 160, 220, 280]


def test_nodes_that_no_plan_has_seen_are_not_removed_at_once() -> None:
    decisions = Decisions()
    removed_s = [
        now_s
        for now_s in range(100, 200, 5)
        if decisions.decide(steady(float(now_s), count=6), plan(nodes=4, spare=1)).removals
    ]
    assert removed_s[:1] == [155]


def test_a_node_that_is_exchanged_for_one_of_another_island_is_not_removed_at_once() -> None:
    decisions = Decisions(islands=(IslandLimits(island="far", min_nodes=1),))
    decisions.config = msgspec.structs.replace(decisions.config, max_nodes=4)
    decisions.scaler._offers.update_offers([CHEAP, offer("far", island="far")])
    decisions.scaler.limit(decisions.config, decisions.scaler._offers, "")
    removed_s = [
        now_s for now_s in range(100, 200, 5) if decisions.decide(steady(float(now_s)), plan(nodes=4)).removals
    ]
    assert removed_s[:1] == [155]


def test_a_plan_that_was_carried_out_is_not_carried_out_again() -> None:
    decision = Decisions().decide(steady(count=3), plan(nodes=4, spare=1))
    assert (decision.additions, decision.removals) == ((), ())
    decisions = Decisions()
    for now_s in range(0, 900, 5):
        decision = decisions.decide(steady(float(now_s), count=6), plan(nodes=4, add=2))
        assert (decision.additions, decision.removals) == ((), ())


def test_a_lost_node_is_replaced_at_once() -> None:
    assert len(Decisions().decide(steady(count=3), plan(nodes=4)).additions) == 1


def test_no_node_is_removed_while_the_objective_is_missed() -> None:
    decisions = Decisions()
    for now_s in range(0, 200, 5):
        seen = steady(float(now_s), stable={"ttft_p90_ms": 2500.0})
        assert not decisions.decide(seen, plan(spare=2)).removals


@pytest.mark.parametrize(
    ("objective", "missed", "met"),
    [
        (
            Objective(ttft_p90_ms=0.0, inter_token_p90_ms=50.0),
            {"inter_token_p90_ms": 80.0, "inter_token_samples": 60},
            {"inter_token_p90_ms": 40.0, "inter_token_samples": 60},
        ),
        (Objective(ttft_p90_ms=0.0, min_good_ratio=0.95), {"good_ratio": 0.9}, {"good_ratio": 0.97}),
    ],
)
def test_every_limit_of_the_objective_keeps_nodes_while_it_is_missed(
    objective: Objective, missed: dict[str, Any], met: dict[str, Any]
) -> None:
    for stable, removed in ((missed, 0), (met, 2)):
        decisions = Decisions(objective=objective)
        assert len(decisions.decide(steady(stable=stable), plan(spare=2)).removals) == removed


def test_goodput_is_measured_for_a_prompt_of_the_mean_length() -> None:
    meter = DemandMeter()
    for ttft_ms in (500.0, 2500.0, 9000.0, 9000.0):
        meter.record_ttft(ttft_ms)
    assert share_within(meter.ttft_counts, good_ttft_ms(0.0)) == 0.25
    assert share_within(meter.ttft_counts, good_ttft_ms(2000.0)) == 0.5
    assert share_within(DemandMeter().ttft_counts, 2000.0) is None


def test_a_burst_adds_nodes_at_once_in_proportion() -> None:
    seen = steady(stable={"arrivals": 105, "waiting": 30.0})
    decision = Decisions().decide(seen, plan())
    assert decision.panicking
    assert len(decision.additions) == 3  # 4 · 1.75 nodes
    assert any("1.8 × the arrivals" in reason for reason in decision.reasons)
    assert len(Decisions().decide(steady(stable={"arrivals": 600, "waiting": 30.0}), plan()).additions) == 4


def test_chance_is_no_burst() -> None:
    seen = steady(stable={"arrivals": 12, "span_s": 6.0, "waiting": 30.0})
    assert not Decisions().decide(seen, plan()).panicking


def test_many_arrivals_for_which_nobody_waits_are_no_burst() -> None:
    assert not Decisions().decide(steady(stable={"arrivals": 180, "waiting": 2.0}), plan()).panicking


def test_rejected_requests_add_a_node_whatever_was_replayed() -> None:
    decision = Decisions().decide(steady(stable={"shed_per_s": 0.2}), plan())
    assert len(decision.additions) == 1


def test_a_queue_adds_a_node_only_while_the_objective_is_missed() -> None:
    assert not Decisions().decide(steady(stable={"waiting": 40.0}), plan()).additions
    late = {"waiting": 40.0, "ttft_p90_ms": 4000.0}
    assert len(Decisions().decide(steady(stable=late), plan()).additions) == 1


def test_the_budget_and_the_maximum_count_as_without_a_plan() -> None:
    decision = Decisions(budget_usd_per_hour=5.0).decide(steady(), plan(add=3, offer=CHEAP.key))
    assert len(decision.additions) == 1
    assert "over the budget" in "; ".join(decision.obstacles)


def test_an_idle_fleet_scales_to_zero_whatever_was_replayed() -> None:
    decisions = Decisions(min_nodes=0, scale_to_zero_after_s=50.0)
    removed = 0
    for now_s in range(0, 300, 5):
        seen = steady(float(now_s), 2, 0.0, idle_s=100.0)
        removed = max(removed, len(decisions.decide(seen, plan(nodes=2)).removals))
    assert removed == 2
