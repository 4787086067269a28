"""Which fleet a search chooses, by what replays of given results say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from recorded_loads import plan_request, recorded

from warmroute.config import Objective
from warmroute.replay.planning import fleet_search
from warmroute.scaling.fleet_plan import FleetNode, FleetPlan, ReplayedFleet
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
                self, nodes: Sequence[FleetNode], load: float, offer: OfferKey | None = None, turn: int = 0
            ) -> ReplayedFleet:
                asked.append((len(nodes), turn))
                found = results.get(len(nodes), 0.1 if len(nodes) > max(results) else 9.0)
                excess = found[turn] if isinstance(found, tuple) else found
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
    spare, asked = plan(4, {2: 5.0, 3: (0.9, 0.75), 4: 0.6})
    assert (3, 1) in asked
    assert spare.spare == 1


def test_nodes_that_hardly_help_are_not_bought(plan: Any) -> None:
    """Seven nodes miss the objective narrowly. Ten would meet it, with a p90 that is hardly shorter."""
    found, _ = plan(7, {7: (1.06, 1.06), 8: 1.04, 9: 1.03, 10: 0.96, 11: 0.95})
    assert (found.add, found.spare, found.target_excess) == (0, 0, 1.0)
    assert found.explain(OBJECTIVE).endswith("more nodes would hardly help")


def test_of_several_nodes_those_that_help_are_bought(plan: Any) -> None:
    found, _ = plan(4, {4: 1.5, 5: 1.2, 6: 1.05, 7: 1.0, 8: 0.99})
    assert found.desired_nodes == 6
    assert found.explain(OBJECTIVE).endswith("more nodes would hardly help")


@pytest.mark.parametrize("excess", [(1.05, 1.05), 1.3])
def test_a_node_that_helps_is_bought(plan: Any, excess: float | tuple[float, float]) -> None:
    found, _ = plan(4, {4: excess, 5: 0.85})
    assert found.add == 1
    assert "hardly" not in found.explain(OBJECTIVE)
