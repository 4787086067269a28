"""Which fleet a search chooses, by what replays of given results say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from recorded_loads import NODE, plan_request, recorded

from warmroute.config import Objective
from warmroute.replay.planning import fleet_search
from warmroute.scaling.fleet_plan import FleetNode, FleetPlan, OfferedNode, ReplayedFleet, mean_of
from warmroute.scaling.offer import OfferKey

TRAFFIC = recorded(per_s=6.0, seconds=80.0)
OBJECTIVE = Objective(ttft_p90_ms=2000.0)

Results = dict[int, float | tuple[float, float]]
"""The excess by nodes; two values for the first and for the second replay of the same fleet."""


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch) -> Any:
    def run(nodes: int, results: Results, **more: Any) -> tuple[FleetPlan, list[tuple[int, int]]]:
        asked: list[tuple[int, int]] = []

        class Replays:
            replays = requests = 0
            arrivals_per_s = tokens_per_s = 1.0

            def __init__(self, *_: object) -> None:
                pass

            def run(
                self, nodes: Sequence[FleetNode], load: float, offer: OfferKey | None = None, variant: int = 0
            ) -> ReplayedFleet:
                asked.append((len(nodes), variant))
                found = results.get(len(nodes), 0.1 if len(nodes) > max(results) else 9.0)
                excess = found[variant] if isinstance(found, tuple) else found
                usd = sum(node.usd_per_hour for node in nodes)
                return ReplayedFleet(
                    nodes=len(nodes), usd_per_hour=usd, offer=offer, load=load, ttft_p90_ms=2000.0 * excess,
                    excess=excess,
                )  # fmt: skip

        monkeypatch.setattr(fleet_search, "FleetReplay", Replays)
        return fleet_search.plan_fleet(plan_request(nodes, **more), TRAFFIC, TRAFFIC[-1].at_ms), asked

    return run


def test_a_narrow_miss_is_replayed_again_and_the_mean_counts(plan: Any) -> None:
    by_chance, asked = plan(4, {3: 2.0, 4: (1.08, 0.9), 5: 0.5})
    assert (4, 1) in asked
    assert (by_chance.add, by_chance.fleets[0].excess) == (0, pytest.approx(0.99))
    assert by_chance.fleets[0].ttft_p90_ms == pytest.approx(1980.0)
    missed, _ = plan(4, {4: (1.08, 1.2), 5: 0.5})
    assert missed.add == 1


@pytest.mark.parametrize("excess", [0.9, 1.2, 5.0])
def test_a_clear_result_is_not_replayed_again(plan: Any, excess: float) -> None:
    _, asked = plan(4, {3: 2.0, 4: excess, 5: 0.5})
    assert (4, 1) not in asked


def test_a_node_is_not_kept_by_chance(plan: Any) -> None:
    spare, asked = plan(4, {2: 5.0, 3: (1.0, 0.75), 4: 0.6})
    assert (3, 1) in asked
    assert spare.spare == 1


UNUSUAL = "prompts were longer than usual"


def test_no_node_is_bought_because_prompts_were_longer_than_usual(plan: Any) -> None:
    """On three times the nodes no request waits, and the p90 is 0.2 of the objective above the usual one."""
    found, asked = plan(7, {7: 1.1, 8: 1.0, 21: 0.8}, usual_floor=0.6)
    assert asked[0] == (21, 0)
    assert (found.add, found.floor, found.unusual) == (0, 0.8, pytest.approx(0.2))
    assert found.fleets[0].excess == pytest.approx(0.9)
    assert found.fleets[0].ttft_p90_ms == pytest.approx(2200.0), "what was replayed stays visible"
    assert found.explain(OBJECTIVE).endswith(f"20% of the objective is not counted: {UNUSUAL}")


@pytest.mark.parametrize("usual_floor", [None, 0.8, 0.9])
def test_longer_prompts_that_are_usual_count(plan: Any, usual_floor: float | None) -> None:
    found, _ = plan(7, {7: (1.1, 1.1), 8: 0.99, 21: 0.8}, usual_floor=usual_floor)
    assert (found.add, found.unusual) == (1, 0.0)
    assert UNUSUAL not in found.explain(OBJECTIVE)


def test_a_fleet_that_is_far_too_small_grows_whatever_is_usual(plan: Any) -> None:
    """Even three times the nodes are too few, so their excess says nothing about the length of prompts."""
    found, _ = plan(2, {2: 9.0, 3: 8.0, 4: 6.0, 6: 3.0, 8: 1.2, 10: 0.9}, usual_floor=0.4)
    assert found.unusual == pytest.approx(0.3)
    assert found.desired_nodes == 8


def test_an_offer_that_ends_before_the_objective_is_met_is_taken(plan: Any) -> None:
    found, _ = plan(4, {4: (1.09, 1.09), 5: 1.01, 6: 0.5}, offers=(OfferedNode(("cloud", "small"), NODE, 1),))
    assert found.add == 1
    assert "the limits allow no fleet" in found.explain(OBJECTIVE)


def test_where_no_fleet_meets_the_objective_nothing_more_is_tolerated(plan: Any) -> None:
    found, _ = plan(6, {6: 2.5, 7: 2.25, 18: 2.0}, target_excess=2.3)
    assert found.add == 1


def test_of_two_offers_the_cheaper_fleet_that_meets_the_objective_is_chosen(plan: Any) -> None:
    offers = (
        OfferedNode(("cloud", "small"), NODE, 8),
        OfferedNode(("cloud", "dear"), FleetNode("plain", "local", 20.0), 8),
    )
    found, _ = plan(4, {4: 1.5, 5: 1.2, 6: 1.05, 7: 0.99}, offers=offers)
    assert (found.desired_nodes, found.offer) == (7, ("cloud", "small"))


def test_the_mean_of_two_replays_has_the_excess_of_its_values() -> None:
    objective = Objective(ttft_p90_ms=2000.0, inter_token_p90_ms=50.0)
    one = ReplayedFleet(nodes=4, usd_per_hour=8.0, ttft_p90_ms=2160.0, inter_token_p90_ms=35.0, excess=1.08)
    other = ReplayedFleet(nodes=4, usd_per_hour=8.0, ttft_p90_ms=1600.0, inter_token_p90_ms=55.0, excess=1.1)
    mean = mean_of(one, other, objective)
    assert (mean.ttft_p90_ms, mean.inter_token_p90_ms, mean.ttft_p99_ms) == (1880.0, 45.0, None)
    assert mean.excess == pytest.approx(0.94)
    stopped = ReplayedFleet(nodes=4, usd_per_hour=8.0, ttft_p90_ms=1900.0, inter_token_p90_ms=30.0, excess=2.0)
    assert mean_of(one, stopped, objective).excess == 2.0, "it was stopped because the objective was out of reach"
