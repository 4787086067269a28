"""Traffic that is too much for one replay is cut by time: caches stay as warm as they were, and each node
has the same load."""

from __future__ import annotations

from random import Random

import pytest
from recorded_loads import NODE, plan_request, recorded

from warmroute.lab.planning import search
from warmroute.lab.planning.fleet_replay import OtherLoads
from warmroute.lab.planning.recorded_traffic import MIN_MEASURED_SHARE, RecordedRequest, cut, thinned
from warmroute.lab.planning.search import plan_fleet
from warmroute.lab.workloads.workload_prompt import Segments, WorkloadPrompt, segment_id
from warmroute.scaling.fleet_plan import FleetPlan, NodeFigures, OfferedNode

WINDOW_S, TURNS, GAP_S = 450.0, 8, 15.0
FAST = NodeFigures(ms_per_token=0.15, step_ms=10.0, slope_ms=0.0, kv_tokens=2_000_000)


def chats(per_s: float) -> list[RecordedRequest]:
    """Conversations of eight turns, each with all turns before it in its prompt; some began before the window."""
    random, found, number = Random(3), [], 0
    begins_s = -1.2 * TURNS * GAP_S
    while (begins_s := begins_s + random.expovariate(per_s)) < WINDOW_S:
        number += 1
        blocks, at_s = Segments(), begins_s
        for turn in range(TURNS):
            blocks = blocks.followed_by(segment_id(number, turn), 700)
            if 0.0 <= at_s <= WINDOW_S:
                prompt = WorkloadPrompt(blocks.tokens, 4, blocks, session=b"%d" % number)
                found.append(RecordedRequest(prompt, 1000.0 * at_s, number * 2_654_435_761 & 0xFFFFFFFF))
            at_s += GAP_S * random.uniform(0.5, 1.5)
    return sorted(found, key=lambda one: one.at_ms)


CHATS = chats(per_s=1.0)


def plan_chats(max_requests: int, nodes: int = 4) -> FleetPlan:
    offers = (OfferedNode(("cloud", "small"), NODE, 20),)
    request = plan_request(nodes, figures={"plain": FAST}, offers=offers, max_requests=max_requests)
    return plan_fleet(request, CHATS, 1000.0 * WINDOW_S)


def test_a_part_of_the_traffic_has_the_hits_of_the_whole() -> None:
    whole, part = plan_chats(100_000), plan_chats(1000)
    assert part.measured_s >= MIN_MEASURED_SHARE * WINDOW_S
    assert part.fleets[0].hit_ratio == pytest.approx(whole.fleets[0].hit_ratio, abs=0.05)
    assert part.fleets[0].excess == pytest.approx(whole.fleets[0].excess, rel=0.5)
    assert part.desired_nodes <= whole.desired_nodes + 1
    assert part.add == 0


def test_a_replay_has_more_requests_only_where_the_usual_ones_cover_too_little_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(search, "USUAL_REQUESTS", 1000)
    usual, larger = plan_chats(1000), plan_chats(100_000)
    assert (larger.measured_s, larger.replayed_requests) == (usual.measured_s, usual.replayed_requests)
    monkeypatch.setattr(search, "USUAL_REQUESTS", 150)
    assert plan_chats(150).skipped
    enough = plan_chats(1000)
    assert not enough.skipped and enough.measured_s == usual.measured_s


def test_traffic_of_which_only_seconds_could_be_replayed_makes_no_plan() -> None:
    plan = plan_chats(150)
    assert plan.skipped.startswith("replay has too much traffic: 150 requests cover ")
    assert plan.replays == 0


@pytest.mark.parametrize("nodes", [2, 4, 16, 60])
@pytest.mark.parametrize("most", [400, 800, 1600])
def test_a_sample_has_few_requests_of_a_long_time(nodes: int, most: int) -> None:
    sample = thinned(CHATS, 1000.0 * WINDOW_S, nodes, 1.0, most)
    assert len(sample.requests) <= 1.1 * most
    assert sample.arrivals_per_s == pytest.approx(len(CHATS) / WINDOW_S, rel=0.15)
    per_node = len(CHATS) / WINDOW_S / nodes
    if most / per_node > WINDOW_S:
        assert sample.measured_s >= MIN_MEASURED_SHARE * WINDOW_S


def test_the_last_turn_before_the_cut_fills_the_caches() -> None:
    kept, cut_ms = cut(CHATS, 1200)
    assert len(kept) <= 1200
    after = [one for one in CHATS if one.at_ms >= cut_ms]
    assert kept[-len(after) :] == after
    before = {one.conversation: one.prompt for one in kept[: -len(after)]}
    last = {one.conversation: one.prompt for one in CHATS if one.at_ms < cut_ms}
    going_on = {one.conversation for one in after} & last.keys()
    assert going_on <= before.keys()
    assert all(prompt is last[conversation] for conversation, prompt in before.items())
    assert [one.at_ms for one in kept] == sorted(one.at_ms for one in kept)


def test_requests_of_their_own_are_cut_too() -> None:
    alone = recorded(per_s=8.0, seconds=300.0)
    kept, cut_ms = cut(alone, 800)
    assert len(kept) == 800
    assert sum(one.at_ms < cut_ms for one in kept) == 200


def test_more_load_comes_after_the_cut_as_well() -> None:
    sample = thinned(CHATS, 1000.0 * WINDOW_S, 4, 1.0, 1000)
    assert sample.complete_from_ms > sample.requests[0].at_ms, "else the test shows nothing"
    measured = len(sample.requests) - sample.warm_up
    for load in (0.7, 1.2, 1.6):
        prompts, warm_up = OtherLoads(sample, 64).prompts(load)
        assert len(prompts) == round(load * len(sample.requests))
        assert (len(prompts) - warm_up) / measured == pytest.approx(load, rel=0.1)


def test_a_rising_load_is_planned_although_it_cannot_be_replayed_with_the_load_to_remove_nodes() -> None:
    rising: list[RecordedRequest] = []
    for span in range(10):
        for one in recorded(per_s=2.0 + 0.5 * span, seconds=16.0, seed=span):
            rising.append(RecordedRequest(one.prompt, one.at_ms + 16_000.0 * span, len(rising)))
    plan = plan_fleet(plan_request(2, max_requests=400), rising, rising[-1].at_ms)
    assert not plan.skipped
    assert [fleet.nodes for fleet in plan.fleets] == [2], "smaller fleets are not replayed, and no node is spare"
