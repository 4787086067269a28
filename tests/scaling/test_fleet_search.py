"""The search by replay: the cheapest fleet on which the recorded traffic meets the objective."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest
from recorded_loads import NODE, PLAIN, plan_request, recorded

from warmroute.config import Config, Objective
from warmroute.lab.planning import fleet_replay, search
from warmroute.lab.planning.fleet_replay import OtherLoads
from warmroute.lab.planning.recorded_traffic import RecordedRequest, thinned
from warmroute.lab.workloads.workload_prompt import WorkloadPrompt
from warmroute.scaling.fleet_plan import MIN_REQUESTS, FleetNode, FleetPlan, NodeFigures, OfferedNode, PlanRequest


def plan_fleet(request: PlanRequest, requests: list[RecordedRequest], **more: Any) -> FleetPlan:
    return search.plan_fleet(request, requests, requests[-1].at_ms, **more)


BUSY = recorded(per_s=6.0, seconds=80.0)


def test_an_overloaded_fleet_gets_the_fewest_nodes_that_meet_the_objective() -> None:
    plan = plan_fleet(plan_request(1), BUSY)
    chosen, smaller = plan.fleet(plan.desired_nodes), plan.fleet(plan.desired_nodes - 1)
    assert plan.add > 0
    assert plan.offer == ("cloud", "small")
    assert chosen is not None and chosen.excess <= 1.0
    assert smaller is not None and smaller.excess > 1.0


def test_what_is_left_of_a_large_fleet_meets_the_objective() -> None:
    plan = plan_fleet(plan_request(8), BUSY)
    assert plan.add == 0
    assert plan.spare > 0
    left = plan.fleet(plan.desired_nodes)
    assert left is not None and left.excess <= 1.0


def test_a_fleet_of_the_right_size_stays() -> None:
    wanted = plan_fleet(plan_request(1), BUSY).desired_nodes
    plan = plan_fleet(plan_request(wanted), BUSY)
    assert (plan.add, plan.spare) == (0, 0)


def test_the_fleet_meets_the_objective_with_more_requests_than_expected() -> None:
    plan = plan_fleet(plan_request(2, margin=0.5), BUSY)
    assert plan.fleets[0].load == pytest.approx((1.5 + plan.chance) * plan.growth)
    assert plan.desired_nodes > plan_fleet(plan_request(2, margin=0.0), BUSY).desired_nodes


def test_nodes_are_not_removed_with_less_than_twice_the_margin() -> None:
    plan = plan_fleet(plan_request(8, margin=0.1), BUSY)
    assert 0.0 < plan.chance < 0.1
    loads = [(1.1 + plan.chance) * plan.growth, 1.2 * plan.growth]
    assert [fleet.load for fleet in plan.fleets[:2]] == pytest.approx(loads)


def test_a_node_is_removed_while_the_load_rises_only_if_there_is_far_too_much() -> None:
    rising: list[RecordedRequest] = []
    for span in range(10):
        for one in recorded(per_s=2.0 + 0.5 * span, seconds=8.0, seed=span):
            rising.append(RecordedRequest(one.prompt, one.at_ms + 8000.0 * span, len(rising)))
    plan = plan_fleet(plan_request(12), rising)
    assert plan.growth > 1.1
    assert plan.fleets[1].load == pytest.approx(search.RISING * plan.growth * (1.05 + max(0.05, plan.chance)))
    assert (plan.add, plan.spare > 0) == (0, True)


def test_few_conversations_need_more_room_than_many_requests_of_their_own() -> None:
    alone = plan_fleet(plan_request(2), BUSY)
    chats = [RecordedRequest(one.prompt, one.at_ms, at // 8) for at, one in enumerate(BUSY)]
    plan = plan_fleet(plan_request(2), chats)
    assert plan.load > alone.load
    assert plan.desired_nodes >= alone.desired_nodes


def test_nodes_that_do_not_help_are_not_bought() -> None:
    """Each prompt takes three seconds by itself: no fleet reaches two."""
    long_prompts = recorded(per_s=0.5, seconds=400.0, tokens=3000)
    plan = plan_fleet(plan_request(6), long_prompts)
    assert (plan.add, plan.spare) == (0, 0)
    assert plan.target_excess > 1.0
    assert "no fleet meets the objective" in plan.explain(Objective(ttft_p90_ms=2000.0))


def test_an_objective_that_a_fleet_meets_again_is_not_given_up() -> None:
    """A search before found that no fleet meets it; now the fleet meets it, or would with more nodes."""
    wanted = plan_fleet(plan_request(1), BUSY).desired_nodes
    met = plan_fleet(plan_request(wanted + 1, target_excess=2.0), BUSY)
    assert met.target_excess == 1.0
    missed = plan_fleet(plan_request(wanted - 1, target_excess=9.0), BUSY)
    assert missed.fleets[0].excess > 1.0, "else the test shows nothing"
    assert (missed.target_excess, missed.desired_nodes) == (1.0, wanted)
    assert "no fleet meets" not in missed.explain(Objective(ttft_p90_ms=2000.0))


def test_an_objective_that_no_fleet_meets_stays_given_up() -> None:
    long_prompts = recorded(per_s=0.5, seconds=400.0, tokens=3000)
    first = plan_fleet(plan_request(6), long_prompts)
    again = plan_fleet(plan_request(6, target_excess=first.target_excess), long_prompts)
    assert again.target_excess == first.target_excess > 1.0
    left = again.fleet(again.desired_nodes)
    assert left is not None and left.excess <= first.target_excess, "what is left comes as close to the best"


def test_a_fleet_that_is_far_too_large_shrinks_in_large_steps() -> None:
    plan = plan_fleet(plan_request(40), BUSY)
    assert plan.desired_nodes == 8
    left = plan.fleet(8)
    assert left is not None and left.excess <= 1.0


def test_the_cheaper_of_two_offers_is_chosen() -> None:
    fast = NodeFigures(ms_per_token=0.5, step_ms=10.0, slope_ms=0.0, kv_tokens=64_000)

    def chosen(usd_per_hour: float) -> object:
        offers = (
            OfferedNode(("cloud", "small"), NODE, 8),
            OfferedNode(("cloud", "fast"), FleetNode("fast", "local", usd_per_hour), 8),
        )
        return plan_fleet(plan_request(2, offers=offers, figures={"plain": PLAIN, "fast": fast}), BUSY).offer

    assert chosen(usd_per_hour=2.5) == ("cloud", "fast")
    assert chosen(usd_per_hour=20.0) == ("cloud", "small")


def test_an_offer_that_is_too_far_away_is_not_chosen() -> None:
    offers = (
        OfferedNode(("cloud", "far"), FleetNode("plain", "far", 1.0), 8),
        OfferedNode(("cloud", "near"), NODE, 8),
    )
    request = plan_request(1, offers=offers, round_trip_ms={"local": 1.0, "far": 5000.0})
    assert plan_fleet(request, BUSY).offer == ("cloud", "near")


def test_an_offer_is_used_up_to_its_limit() -> None:
    plan = plan_fleet(plan_request(1, offers=(OfferedNode(("cloud", "small"), NODE, 1),)), BUSY)
    assert plan.add == 1
    assert "the limits allow no fleet that meets the objective" in plan.explain(Objective(ttft_p90_ms=2000.0))


@pytest.mark.parametrize(
    ("objective", "nodes"),
    [
        (Objective(ttft_p90_ms=0, ttft_p99_ms=1500.0), 3),
        (Objective(ttft_p90_ms=0, inter_token_p90_ms=100.0), 5),
        (Objective(ttft_p90_ms=0, min_good_ratio=0.99), 3),
    ],
)
def test_every_kind_of_objective_adds_nodes(objective: Objective, nodes: int) -> None:
    plan = plan_fleet(plan_request(nodes, objective=objective), BUSY)
    assert plan.add > 0
    assert "objective" in plan.explain(objective)


def test_little_traffic_says_nothing() -> None:
    plan = plan_fleet(plan_request(2), BUSY[: MIN_REQUESTS - 1])
    assert plan.replays == 0
    assert "too little traffic" in plan.skipped


def test_a_search_ends_with_its_cpu_time() -> None:
    times = iter(range(1000))
    request = plan_request(1, max_cpu_s=0.5)
    assert plan_fleet(request, BUSY, cpu_s=lambda: float(next(times))).replays <= 2


def test_a_clear_result_of_the_last_minutes_is_not_replayed_again() -> None:
    first = plan_fleet(plan_request(8), BUSY)
    again = plan_fleet(plan_request(8, known=first.fleets), BUSY)
    assert again.replays < first.replays
    assert again.desired_nodes == first.desired_nodes
    more = plan_fleet(plan_request(8, known=first.fleets), recorded(per_s=12.0, seconds=80.0))
    assert more.fleets[0].arrivals_per_s > first.fleets[0].arrivals_per_s, "more load is another question"
    longer = plan_fleet(plan_request(8, known=first.fleets), recorded(per_s=6.0, seconds=80.0, tokens=1500))
    assert longer.fleets[0].tokens_per_s > first.fleets[0].tokens_per_s, "longer prompts are, too"
    assert longer.desired_nodes > first.desired_nodes


def test_the_plan_explains_itself() -> None:
    plan = plan_fleet(plan_request(1, show_larger=True), BUSY)
    sentence = plan.explain(Objective(ttft_p90_ms=2000.0))
    assert re.match(
        r"\d nodes: TTFT p90 .* \(objective 2 s\); \d nodes?: TTFT p90 .* s; \d nodes would save ", sentence
    )


def test_a_large_fleet_is_replayed_in_part() -> None:
    """A tenth of the requests on a tenth of the nodes has about the same result."""
    requests = recorded(per_s=60.0, seconds=60.0)
    sample = thinned(requests, 60_000.0, nodes=40, share=1.0, most=600)
    assert len(sample.requests) <= 600
    assert sample.share < 0.3
    assert sample.arrivals_per_s == pytest.approx(60.0, rel=0.15)
    offers = (OfferedNode(("cloud", "small"), NODE, 60),)
    plan = plan_fleet(plan_request(20, max_requests=600, offers=offers), requests)
    assert 30 <= plan.desired_nodes <= 60


@pytest.mark.parametrize(
    ("per_s", "share", "nodes", "most"),
    [(60.0, 1.0, 30, 400), (30.0, 0.5, 30, 400), (6.0, 0.06, 10, 1000), (4.0, 1.0, 2, 400)],
)
def test_no_replay_has_more_requests_than_configured(
    per_s: float, share: float, nodes: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the load that is expected, also while it rises."""
    counts: list[int] = []

    class Counted(OtherLoads):
        def prompts(self, load: float, variant: int = 0) -> tuple[list[WorkloadPrompt], int]:
            found = super().prompts(load, variant)
            counts.append(len(found[0]))
            return found

    monkeypatch.setattr(fleet_replay, "OtherLoads", Counted)
    rising: list[RecordedRequest] = []
    for span in range(10):
        for one in recorded(per_s=per_s * (0.2 + 0.1 * span), seconds=8.0, seed=span):
            rising.append(RecordedRequest(one.prompt, one.at_ms + 8000.0 * span, len(rising)))
    request = plan_request(nodes, max_requests=most, share=share, show_larger=True, predict_current=True)
    plan = plan_fleet(request, rising)
    assert plan.load > 1.05
    assert 0 < max(counts) <= most


def test_the_expected_load_does_not_depend_on_the_size_of_the_sample() -> None:
    """Few long conversations cannot be thinned: the sample has only the last minutes."""
    rising: list[RecordedRequest] = []
    for span in range(10):
        for one in recorded(per_s=2.0 + 0.5 * span, seconds=16.0, seed=span):
            rising.append(RecordedRequest(one.prompt, one.at_ms + 16_000.0 * span, len(rising) % 2))
    plans = [plan_fleet(plan_request(12, max_requests=most), rising) for most in (20_000, 900)]
    whole, part = (plan.arrivals_per_s * plan.growth for plan in plans)
    assert plans[1].measured_s < 0.7 * plans[0].measured_s
    assert part == pytest.approx(whole, rel=0.12)


def test_a_plan_says_with_which_load_a_fleet_was_replayed() -> None:
    """To remove a node the rest has to hold more than the fleet."""
    wanted = plan_fleet(plan_request(1), BUSY).desired_nodes
    plan = plan_fleet(plan_request(wanted + 1, removable=1, margin=0.2), BUSY)
    assert plan.spare == 0, "else the test shows nothing"
    chosen, smaller = plan.fleets[:2]
    assert smaller.load > chosen.load == plan.load
    sentence = plan.explain(Objective(ttft_p90_ms=2000.0))
    assert sentence.startswith(f"{wanted + 1} nodes: TTFT p90 ")
    assert f"; {wanted} nodes with {smaller.load:.0%} of the recorded load: TTFT p90 " in sentence


def test_a_result_of_an_earlier_search_has_its_load_relative_to_the_traffic_of_this_one() -> None:
    first = plan_fleet(plan_request(8), BUSY)
    again = plan_fleet(plan_request(8, known=first.fleets), recorded(per_s=5.0, seconds=80.0))
    reused = [one for one in again.fleets if one.question in {known.question for known in first.fleets}]
    assert reused
    assert all(one.load * again.arrivals_per_s == pytest.approx(one.arrivals_per_s) for one in reused)


def test_the_traffic_of_one_of_two_routers_counts_twice() -> None:
    half = plan_fleet(plan_request(2, share=0.5), recorded(per_s=3.0, seconds=160.0)).desired_nodes
    whole = plan_fleet(plan_request(2), recorded(per_s=6.0, seconds=160.0)).desired_nodes
    assert abs(half - whole) <= 1


def test_traffic_that_has_stopped_says_nothing() -> None:
    plan = search.plan_fleet(plan_request(4), BUSY, 30.0 * BUSY[-1].at_ms)
    assert "too little traffic of the last minutes" in plan.skipped


def test_requests_and_plans_cross_a_pipe() -> None:
    request = plan_request(2, router=Config())
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=PlanRequest) == request
    plan = plan_fleet(request, BUSY)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=FleetPlan) == plan


def test_one_long_conversation_is_not_thinned_away() -> None:
    requests = recorded(per_s=60.0, seconds=60.0)
    for conversation in range(20):
        same = [RecordedRequest(one.prompt, one.at_ms, conversation) for one in requests]
        assert thinned(same, 60_000.0, nodes=16, share=1.0, most=600).requests
