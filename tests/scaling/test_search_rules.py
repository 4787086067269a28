"""Which fleet a search chooses, by what replays of given results say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from recorded_loads import NODE, plan_request, recorded

from warmroute.config import Objective
from warmroute.lab.planning import search
from warmroute.scaling.fleet_plan import FleetNode, FleetPlan, OfferedNode, ReplayedFleet, judged_excess, mean_of
from warmroute.scaling.offers import OfferKey

TRAFFIC = recorded(per_s=6.0, seconds=80.0)
OBJECTIVE = Objective(ttft_p90_ms=2000.0)

Results = dict[int, float | tuple[float, float]]
"""The excess by nodes; two values for the first and for the second replay of the same fleet."""


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch) -> Any:
    def run(
        nodes: int, results: Results, measured_requests: int = 1000, **more: Any
    ) -> tuple[FleetPlan, list[tuple[int, int]]]:
        asked: list[tuple[int, int]] = []

        class Replays:
            replays = requests = 0
            arrivals_per_s = tokens_per_s = 1.0
            measured = measured_requests

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

        monkeypatch.setattr(search, "FleetReplay", Replays)
        return search.plan_fleet(plan_request(nodes, **more), TRAFFIC, TRAFFIC[-1].at_ms), asked

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


UNUSUAL = "longer than usual"


def test_no_node_is_bought_because_prompts_were_longer_than_usual(plan: Any) -> None:
    """On fifteen nodes hardly any request waits, and their p90 is 400 ms above the usual one."""
    found, asked = plan(7, {7: 1.1, 8: 1.0, 15: 0.8}, baseline_ttft_ms=1200.0)
    assert asked[:2] == [(7, 0), (15, 0)]
    assert (found.add, found.floor_ms, found.above_baseline_ms) == (0, 1600.0, pytest.approx(400.0))
    assert found.fleets[0].excess == pytest.approx(1.1), "what was replayed stays visible"
    explained = found.explain(OBJECTIVE)
    assert "; 400 ms of each TTFT p90 do not count: many more nodes also take 400 ms longer than usual" in explained


@pytest.mark.parametrize("baseline_ttft_ms", [None, 1600.0, 1800.0])
def test_longer_prompts_that_are_usual_count(plan: Any, baseline_ttft_ms: float | None) -> None:
    found, _ = plan(7, {7: (1.1, 1.1), 8: 0.99, 15: 0.8}, baseline_ttft_ms=baseline_ttft_ms)
    assert (found.add, found.above_baseline_ms) == (1, 0.0)
    assert UNUSUAL not in found.explain(OBJECTIVE)


def test_the_floor_of_an_overloaded_fleet_is_not_measured(plan: Any) -> None:
    """Requests may wait on three times its nodes, too, so that their p90 says nothing about the length of prompts."""
    found, asked = plan(2, {2: 9.0, 3: 8.0, 4: 6.0, 6: 3.0, 8: 1.2, 10: 0.9}, baseline_ttft_ms=800.0)
    assert (6, 0) not in asked[:2]
    assert (found.floor_ms, found.above_baseline_ms, found.desired_nodes) == (None, 0.0, 10)


def test_an_unusual_floor_does_not_excuse_every_fleet(plan: Any) -> None:
    found, _ = plan(7, {7: 1.6, 8: 1.5, 9: 1.25, 15: 1.2}, baseline_ttft_ms=800.0)
    assert found.above_baseline_ms == pytest.approx(600.0), "at most 0.3 of the limit"
    assert found.desired_nodes == 9


def test_few_requests_add_few_nodes(plan: Any) -> None:
    results: Results = {4: 1.9, 5: 1.8, 6: 1.4, 8: 1.1, 12: 0.9}
    assert [plan(4, results, measured)[0].add for measured in (20, 60, 150, 1000)] == [1, 2, 6, 8]


def test_without_a_limit_of_the_ttft_there_is_no_floor(plan: Any) -> None:
    found, asked = plan(4, {3: 2.0, 4: 0.9}, objective=Objective(ttft_p90_ms=0.0, ttft_p99_ms=2000.0))
    assert (12, 0) not in asked
    assert found.floor_ms is None
    assert UNUSUAL not in found.explain(Objective(ttft_p90_ms=0.0, ttft_p99_ms=2000.0))


def test_an_earlier_replay_is_judged_by_what_is_unusual_now(plan: Any) -> None:
    """Five nodes were nearly too few when prompts were long. Now prompts are as usual, and five are clearly too few to
    spare one."""
    results: Results = {4: 9.0, 5: 0.98, 6: 0.9, 14: 0.8}
    first, _ = plan(6, results, baseline_ttft_ms=1000.0)
    assert (first.above_baseline_ms, first.spare) == (pytest.approx(600.0), 1)
    second, _ = plan(6, results, baseline_ttft_ms=1600.0, known=first.fleets)
    assert (second.above_baseline_ms, second.spare) == (0.0, 0)


def test_only_the_ttft_is_excused(plan: Any) -> None:
    objective = Objective(ttft_p90_ms=2000.0, inter_token_p90_ms=50.0)
    slow = ReplayedFleet(nodes=4, usd_per_hour=8.0, ttft_p90_ms=2200.0, inter_token_p90_ms=55.0, excess=1.1)
    fast = ReplayedFleet(nodes=4, usd_per_hour=8.0, ttft_p90_ms=2200.0, inter_token_p90_ms=30.0, excess=1.1)
    assert judged_excess(slow, objective, 400.0) == pytest.approx(1.1)
    assert judged_excess(fast, objective, 400.0) == pytest.approx(0.9)
    stopped = ReplayedFleet(nodes=4, usd_per_hour=8.0, ttft_p90_ms=1900.0, excess=2.0)
    assert judged_excess(stopped, objective, 400.0) == 2.0


def test_an_offer_that_ends_before_the_objective_is_met_is_taken(plan: Any) -> None:
    found, _ = plan(4, {4: (1.09, 1.09), 5: 1.01, 6: 0.5}, offers=(OfferedNode(("cloud", "small"), NODE, 1),))
    assert found.add == 1
    assert "the limits allow no fleet" in found.explain(OBJECTIVE)


def test_where_no_fleet_meets_the_objective_the_smallest_that_comes_close_is_chosen(plan: Any) -> None:
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
