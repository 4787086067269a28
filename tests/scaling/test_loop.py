"""The loop: when nodes come and go, how many, and why."""

from __future__ import annotations

from itertools import pairwise
from math import inf, nan
from typing import Any

import msgspec
import pytest
from fleets_seen import coming, node, nodes, offer, scaler, seen, view
from hypothesis import given, settings
from hypothesis import strategies as st

from warmroute.config import Hours, IslandLimits
from warmroute.scaling.choose_up import Holding
from warmroute.scaling.observe import FleetView, NodeView, Seen

NOON_ON_A_MONDAY_S = 4 * 86_400 + 12 * 3600.0
"""1970-01-05 12:00 UTC."""


def test_a_fleet_with_little_to_do_and_nothing_to_spare_stays() -> None:
    loop, _ = scaler()
    step = loop.step(view(1000.0, 1, 0.5))
    assert not step.changes and step.desired_nodes == 1


def test_work_over_the_limit_adds_as_many_nodes_as_it_takes_at_once() -> None:
    loop, _ = scaler(utilisation=0.6)
    step = loop.step(view(1000.0, 2, 8.0))  # 4 node seconds a second on 2 nodes
    assert len(step.ups) == step.desired_nodes - 2
    assert 4.0 / step.desired_nodes <= 0.6 < 4.0 / (step.desired_nodes - 3)
    assert "takes 200% of the nodes' time, over 60%" in step.reasons[0]


def test_nodes_on_their_way_count_as_if_they_were_there() -> None:
    loop, _ = scaler(utilisation=0.6)
    assert not loop.step(view(1000.0, 2, 8.0), coming(6)).ups


def test_no_more_than_a_step_no_more_than_the_limit() -> None:
    loop, _ = scaler(max_step_up=3)
    assert len(loop.step(view(1000.0, 2, 40.0)).ups) == 3
    loop, _ = scaler(max_nodes=4)
    step = loop.step(view(1000.0, 2, 40.0))
    assert len(step.ups) == 2 and step.desired_nodes == 4
    loop, _ = scaler(max_nodes=2)
    step = loop.step(view(1000.0, 2, 40.0))
    assert not step.ups and any("the most there may be" in why for why in step.reasons)


def test_slower_hardware_counts_for_less() -> None:
    loop, _ = scaler(offer("slow", gpu="T4"), utilisation=0.6)
    fleet = (*nodes(4), *(node(f"t{at}", gpu="T4", ms_per_token=0.2) for at in range(2)))
    few = loop.step(view(1000.0, 0, 6.0, nodes=fleet))  # usual speed is the L4s'
    loop, _ = scaler(utilisation=0.6)
    many = loop.step(view(1000.0, 6, 6.0))
    assert few.utilisation > many.utilisation


def test_uneven_work_on_few_nodes_adds_one_long_before_they_are_busy() -> None:
    even, _ = scaler(wait_ms=250.0)
    assert not even.step(view(1000.0, 2, 1.2)).ups
    uneven, _ = scaler(wait_ms=250.0)
    step = uneven.step(view(1000.0, 2, 1.2, stable={"variation": 12.0}))
    assert step.ups and "is uneven" in step.reasons[0]
    many, _ = scaler(wait_ms=250.0)  # the same share of many nodes is no wait
    assert not many.step(view(1000.0, 20, 12.0, stable={"variation": 12.0})).ups


def test_what_waits_for_each_node_adds_one() -> None:
    loop, _ = scaler(queue_up=4.0)
    step = loop.step(view(1000.0, 3, 1.0, stable={"waiting": 13.0}))
    assert len(step.ups) == 1 and "wait for each node" in step.reasons[0]


@pytest.mark.parametrize("what", ["ttft_p99_ms", "latency_p99_ms"])
def test_a_broken_ceiling_adds_one_where_nodes_are_what_lacks(what: str) -> None:
    config = {"ttft_p99_ceiling_ms": 2000.0, "latency_p99_ceiling_ms": 2000.0}
    loop, _ = scaler(**config)
    slow: dict[str, Any] = {what: 5000.0}
    assert len(loop.step(view(1000.0, 3, 1.0, stable={**slow, "waiting": 6.0})).ups) == 1
    loop, _ = scaler(**config)  # nobody waits, nodes are idle: long prompts are long
    assert not loop.step(view(1000.0, 3, 1.0, stable=slow)).ups


def test_refusals_add_one() -> None:
    loop, _ = scaler()
    assert loop.step(view(1000.0, 3, 1.0, stable={"shed_per_s": 0.5})).ups


def test_full_kv_memory_adds_nodes() -> None:
    loop, _ = scaler(kv_usage=0.8)
    step = loop.step(view(1000.0, 4, 1.0, stable={"kv_usage": 0.95}))
    assert step.ups and "KV memory" in step.reasons[0]


def thrashing(age_s: float) -> float:
    """Blocks that come again after some minutes."""
    return 0.1 + 0.7 * min(1.0, age_s / 1200.0)


def test_a_low_hit_ratio_adds_a_node_where_more_cache_helps_and_only_there() -> None:
    low = {"hit_ratio": 0.1}
    full = nodes(4, held_blocks=10_000, oldest_age_s=300.0)
    loop, _ = scaler(hit_floor=0.3)
    step = loop.step(view(1000.0, 4, 1.0, nodes=full, stable=low, reuse_within=thrashing))
    assert len(step.ups) == 1 and any("times the cache it would be" in why for why in step.reasons)
    loop, _ = scaler(hit_floor=0.3)
    step = loop.step(view(1000.0, 4, 1.0, nodes=full, stable=low, reuse_within=lambda _age_s: 0.1))
    assert not step.ups and any("more cache would not help" in why for why in step.reasons)


def test_nodes_go_that_the_rest_can_do_without_after_a_cooldown() -> None:
    loop, _ = scaler(cooldown_down_s=180.0, interval_s=5.0, max_step_down=4)
    steps = [loop.step(view(at * 5.0, 8, 2.0)) for at in range(60)]
    first = next(at for at, step in enumerate(steps) if step.downs)
    assert first * 5.0 >= 170.0
    gone = steps[first].downs
    assert len(gone) == 4 and len({one.node for one in gone}) == 4
    assert sum(len(step.downs) for step in steps) == 4


def test_nobody_goes_whose_work_or_warm_set_would_not_fit_the_rest() -> None:
    for more in (
        {"stable": {"waiting": 20.0}},
        {"stable": {"kv_usage": 0.75}},
        {
            "nodes": nodes(4, held_blocks=10_000, oldest_age_s=300.0),
            "reuse_within": lambda age_s: min(0.9, age_s / 500.0),
        },
    ):
        loop, _ = scaler(hit_floor=0.75, cooldown_down_s=60.0)
        told: dict[str, Any] = more
        assert not any(loop.step(view(at * 5.0, 4, 2.0, **told)).downs for at in range(60))
    loop, _ = scaler(cooldown_down_s=60.0)
    assert any(loop.step(view(at * 5.0, 4, 2.0)).downs for at in range(60))


def test_nodes_that_no_provisioner_made_are_left_alone() -> None:
    loop, _ = scaler(cooldown_down_s=60.0)
    fleet = nodes(4, offer=None)
    assert not any(loop.step(view(at * 5.0, 4, 0.1, nodes=fleet)).downs for at in range(60))


def test_the_dearest_for_its_speed_goes_and_of_equals_the_one_whose_cache_is_worth_least() -> None:
    fleet = (node("dear", usd_per_hour=3.0), node("cold", held_blocks=10), node("warm"), node("hot", held_blocks=9000))
    loop, _ = scaler(cooldown_down_s=60.0, max_step_down=2)
    told: dict[str, Any] = {"nodes": fleet, "reuse_chance": lambda _age_s: 0.5}
    step = next(step for at in range(60) if (step := loop.step(view(at * 5.0, 4, 0.2, **told))).downs)
    assert [one.node for one in step.downs] == ["dear", "cold"]


def test_a_panic_is_seen_in_the_short_window_and_nobody_goes_meanwhile() -> None:
    loop, _ = scaler(utilisation=0.6, stable_window_s=60.0, cooldown_down_s=30.0)
    calm, mad = seen(1.0), seen(20.0, waiting=30.0)
    step = loop.step(FleetView(now_s=1000.0, stable=calm, panic=mad, nodes=nodes(4)))
    assert step.panicking and len(step.ups) == 8
    for at in range(11):
        later = loop.step(FleetView(now_s=1005.0 + 5.0 * at, stable=calm, panic=calm, nodes=nodes(12)))
        assert later.panicking and not later.downs


def test_one_long_prompt_is_no_panic() -> None:
    loop, _ = scaler()
    giant = seen(0.1, work=1e6, arrivals=2, waiting=30.0)
    assert not loop.step(FleetView(now_s=1000.0, stable=seen(1.0), panic=giant, nodes=nodes(4))).panicking


def test_a_trend_is_met_in_time() -> None:
    loop, _ = scaler(offer(start_s=120.0), utilisation=0.6)
    steady = loop.step(view(1000.0, 4, 4.4))
    assert not steady.ups
    loop, _ = scaler(offer(start_s=120.0), utilisation=0.6)
    rising = loop.step(view(1000.0, 4, 4.4, growth_per_s=0.004))
    assert rising.ups and "when a node would serve" in rising.reasons[0]


def test_from_zero_at_once_and_only_once_while_it_comes() -> None:
    loop, _ = scaler(min_nodes=0)
    nothing = Seen(span_s=60.0)
    asleep = FleetView(now_s=1000.0, stable=nothing, panic=nothing, idle_s=inf)
    assert loop.step(asleep).desired_nodes == 0
    woken = FleetView(now_s=1005.0, stable=nothing, panic=nothing, waiting=1)
    assert len(loop.step(woken).ups) == 1
    assert not loop.step(msgspec.structs.replace(woken, now_s=1010.0), coming(1)).ups


def test_to_zero_when_nobody_has_come_for_long_enough_and_not_before() -> None:
    nothing = Seen(span_s=60.0)
    loop, _ = scaler(min_nodes=0, to_zero_after_s=600.0, cooldown_down_s=60.0)
    downs = []
    for at in range(200):
        idle_s = at * 5.0
        step = loop.step(FleetView(now_s=idle_s, stable=nothing, panic=nothing, nodes=nodes(1), idle_s=idle_s))
        if step.downs:
            downs.append(idle_s)
            break
    assert downs and 600.0 <= downs[0] <= 700.0
    loop, _ = scaler(min_nodes=1, to_zero_after_s=600.0)
    for at in range(200):
        assert not loop.step(
            FleetView(now_s=at * 5.0, stable=nothing, panic=nothing, nodes=nodes(1), idle_s=at * 5.0)
        ).downs


def test_the_hours_and_the_islands_have_their_least() -> None:
    hours = (Hours(start="09:00", end="18:00", days=("mon",), min_nodes=5),)
    loop, _ = scaler(hours=hours)
    assert loop.step(view(1000.0, 2, 0.5), wall_s=NOON_ON_A_MONDAY_S).desired_nodes == 5
    loop, _ = scaler(hours=hours)
    assert loop.step(view(1000.0, 2, 0.5), wall_s=NOON_ON_A_MONDAY_S + 86_400).desired_nodes == 2
    islands = (IslandLimits(island="far", min_nodes=2), IslandLimits(island="local", max_nodes=2))
    loop, _ = scaler(offer(), offer("there", island="far", usd_per_hour=9.0), islands=islands)
    step = loop.step(view(1000.0, 2, 0.5))
    assert [up.offer.island for up in step.ups] == ["far", "far"]


def test_a_dry_run_says_it_and_marks_it() -> None:
    loop, _ = scaler(dry_run=True)
    step = loop.step(view(1000.0, 2, 8.0))
    assert step.ups and step.dry_run and step.reasons


def test_no_offer_is_said_with_its_reason() -> None:
    loop, market = scaler(budget_usd_per_hour=2.0)
    step = loop.step(view(1000.0, 2, 8.0))
    assert not step.ups and any("over the budget" in why for why in step.reasons)
    loop, market = scaler()
    market.offered(())
    assert any("nobody offers a node" in why for why in loop.step(view(1000.0, 2, 8.0)).reasons)


def test_where_somebody_else_scales_what_is_desired_is_said_and_stands() -> None:
    loop, market = scaler(cooldown_down_s=60.0)
    market.offered(())
    fleet = nodes(4, offer=None)
    desired = [loop.step(view(at * 5.0, 4, 0.1, nodes=fleet)).desired_nodes for at in range(20)]
    assert desired[0] == 4 and desired[-1] < 4
    first = next(at for at, count in enumerate(desired) if count < 4)
    assert len(set(desired[first:])) == 1
    loop, market = scaler()
    market.offered(())
    assert loop.step(view(1000.0, 4, 40.0, nodes=fleet)).desired_nodes > 4


BAD = st.sampled_from([nan, inf, -inf, -1.0, 0.0, 1e300])


@pytest.mark.parametrize("ms_per_token", [1e308, 1e-308])
def test_a_speed_that_nothing_has_is_not_known(ms_per_token: float) -> None:
    loop, _ = scaler(max_nodes=2, cooldown_down_s=10.0)
    fleet = (*nodes(3, ms_per_token=1e-6), node("mad", gpu="X", ms_per_token=ms_per_token))
    steps = [loop.step(view(at * 5.0, 0, 0.01, nodes=fleet)) for at in range(8)]
    assert any(step.downs for step in steps)
    assert any("ms_per_token of mad" in doubt for doubt in steps[0].doubts)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_values_that_cannot_be_are_survived_and_said(data: st.DataObject) -> None:
    fields = [field.name for field in msgspec.structs.fields(Seen)]
    bad = {name: data.draw(BAD) for name in data.draw(st.sets(st.sampled_from(fields)))}
    worse = {
        name: data.draw(BAD)
        for name in data.draw(st.sets(st.sampled_from(["usd_per_hour", "kv_usage", "ms_per_token", "oldest_age_s"])))
    }
    loop, _ = scaler(max_nodes=16)
    stable = msgspec.structs.replace(seen(2.0), **bad)
    fleet = (node("good"), node("bad", **worse))
    view_ = FleetView(now_s=1000.0, stable=stable, panic=stable, nodes=fleet, growth_per_s=data.draw(BAD))
    step = loop.step(view_)
    assert 1 <= step.desired_nodes <= 16
    impossible = [value for value in (*bad.values(), *worse.values()) if not 0 <= value < inf]
    assert len(step.doubts) >= len(impossible)


@settings(max_examples=25, deadline=None)
@given(
    level=st.floats(0.5, 12.0),
    noise=st.floats(0.0, 0.12),
    seed=st.integers(0, 2**32),
    count=st.integers(1, 10),
    queue=st.floats(0.0, 6.0),
)
def test_noise_around_a_threshold_changes_nothing_more_than_once_in_a_cooldown(
    level: float, noise: float, seed: int, count: int, queue: float
) -> None:
    """Whatever it begins with: after the first changes the fleet stands still, or moves once in a cooldown."""
    from random import Random

    random = Random(seed)
    loop, _ = scaler(cooldown_up_s=30.0, cooldown_down_s=180.0, wait_ms=250.0)
    changes: list[tuple[float, int]] = []
    for at in range(400):
        now_s = at * 5.0
        arrivals = level * (1.0 + noise * (2.0 * random.random() - 1.0))
        waits = queue * (1.0 + noise * (2.0 * random.random() - 1.0)) * count
        step = loop.step(view(now_s, count, arrivals, stable={"waiting": waits, "variation": 4.0}))
        if step.changes:
            changes.append((now_s, len(step.ups) - len(step.downs)))
            count += len(step.ups) - len(step.downs)
    for (before_s, was), (after_s, then) in pairwise(changes):
        if (was > 0) != (then > 0):
            assert after_s - before_s >= 180.0, changes
        else:
            assert after_s - before_s >= (30.0 if then > 0 else 180.0), changes


def test_an_island_that_nobody_offers_holds_nothing_up() -> None:
    moon = (IslandLimits("moon", min_nodes=3),)
    nobody, _ = scaler(islands=moon, max_step_up=2)
    step = nobody.step(view(1000.0, 0, 0.0, waiting=5))
    assert len(step.ups) == 1 and step.obstacles == ("moon is to have 3 nodes more, and nobody offers any there",)
    assert step.obstacles[0] in step.reasons
    busy, _ = scaler(islands=moon, max_step_up=2)
    assert len(busy.step(view(1000.0, 2, 40.0)).ups) == 2
    spare, _ = scaler(islands=moon, cooldown_down_s=60.0)
    assert any(spare.step(view(at * 5.0, 8, 2.0)).downs for at in range(60))


def test_an_island_whose_offers_are_all_taken_holds_nothing_up() -> None:
    full = (offer("here"), offer("there", island="moon", most=0))
    moon = (IslandLimits("moon", min_nodes=3),)
    nobody, _ = scaler(*full, islands=moon, max_step_up=2)
    step = nobody.step(view(1000.0, 0, 0.0, waiting=5))
    assert [up.offer.name for up in step.ups] == ["here"]
    assert any("no offer can be taken" in why for why in step.obstacles)
    spare, _ = scaler(*full, islands=moon, cooldown_down_s=60.0)
    assert any(spare.step(view(at * 5.0, 8, 2.0)).downs for at in range(60))


def test_what_an_island_misses_counts_among_what_lacks() -> None:
    loop, _ = scaler(offer("here"), offer("there", island="moon"), islands=(IslandLimits("moon", 1),), min_nodes=2)
    step = loop.step(view(1000.0, 0, 0.0))
    assert sorted(up.offer.island for up in step.ups)[-1] == "moon" and len(step.ups) == 2


# What is paid for.


def test_machines_that_do_not_answer_or_are_on_their_way_out_count_against_the_limit() -> None:
    ill: dict[str, Any] = {"serving": False}
    for fleet, ending in (
        ((*nodes(1), *(node(f"ill{at}", **ill) for at in range(3))), 0),
        ((*nodes(2), node("goes", draining=True, **ill), node("ill", **ill)), 0),
        (nodes(2), 2),
    ):
        loop, _ = scaler(min_nodes=4, max_nodes=4)
        gone = [Holding(("cloud", "small"), "local", 1.0)] * ending
        step = loop.step(view(1000.0, 0, 0.5, nodes=fleet), (), 0.0, gone)
        assert not step.ups and step.desired_nodes == 4
        assert any("4 nodes paid for, the most there may be" in why for why in step.obstacles)
        roomy, _ = scaler(min_nodes=4, max_nodes=5)
        assert len(roomy.step(view(1000.0, 0, 0.5, nodes=fleet), (), 0.0, gone).ups) == 1


def test_what_a_cloud_takes_back_and_what_nobody_here_can_give_back_keeps_no_other_from_coming() -> None:
    for gone in (node("spot", serving=False, draining=True, leaving=True), node("theirs", serving=False, offer=None)):
        loop, _ = scaler(min_nodes=2, max_nodes=2)
        assert len(loop.step(view(1000.0, 0, 0.5, nodes=(node("well"), gone))).ups) == 1


def test_what_is_on_its_way_out_counts_against_the_budget() -> None:
    ending = [Holding(("cloud", "small"), "local", 1.0)]
    loop, _ = scaler(min_nodes=3, budget_usd_per_hour=3.0)
    assert not loop.step(view(1000.0, 2, 0.5), (), 0.0, ending).ups
    loop, _ = scaler(min_nodes=3, budget_usd_per_hour=3.0)
    assert len(loop.step(view(1000.0, 2, 0.5)).ups) == 1


def test_a_node_that_was_not_checked_yet_is_on_its_way() -> None:
    new = node("new", serving=False, unchecked=True, offer=None)
    loop, _ = scaler(min_nodes=1)
    step = loop.step(view(1000.0, 0, 0.0, nodes=(new,)))
    assert not step.changes and step.nodes == step.desired_nodes == 1
    loop, market = scaler(min_nodes=0)
    market.offered(())
    assert loop.step(view(1000.0, 0, 0.0, nodes=(new, new, new))).desired_nodes == 3


# Islands in a full fleet.

TWO_ISLANDS = (offer("a", island="A"), offer("b", island="B"))


def test_an_island_that_lacks_a_node_in_a_full_fleet_gets_it_in_exchange() -> None:
    loop, _ = scaler(
        *TWO_ISLANDS, max_nodes=4, islands=(IslandLimits("A", min_nodes=1),), cooldown_up_s=30.0, cooldown_down_s=60.0
    )
    fleet: list[NodeView] = list(nodes(4, island="B"))
    most = 0
    for at in range(120):
        step = loop.step(view(at * 5.0, 0, 4.0, nodes=tuple(fleet)))  # half of the nodes' time: none is to spare
        going = {down.node for down in step.downs}
        fleet = [one for one in fleet if one.name not in going]
        fleet += [node(f"new{at}", island=up.offer.island) for up in step.ups]
        most = max(most, len(fleet))
    assert most == 4 and sorted(one.island for one in fleet) == ["A", "B", "B", "B"]


def test_no_node_goes_for_an_island_where_none_can_be_had() -> None:
    islands = (IslandLimits("A", min_nodes=1),)
    full = (offer("a", island="A", most=0), offer("b", island="B"))
    loop, _ = scaler(*full, max_nodes=4, islands=islands, cooldown_down_s=60.0)
    fleet = nodes(4, island="B")
    assert not any(loop.step(view(at * 5.0, 0, 4.0, nodes=fleet)).downs for at in range(60))
    loop, _ = scaler(*TWO_ISLANDS, max_nodes=1, islands=islands, cooldown_down_s=60.0)  # nor the only one that serves
    assert not any(loop.step(view(at * 5.0, 0, 0.5, nodes=fleet[:1])).downs for at in range(60))


def test_an_island_that_lacks_a_node_in_a_full_fleet_keeps_no_others_that_are_too_many() -> None:
    loop, _ = scaler(*TWO_ISLANDS, max_nodes=4, islands=(IslandLimits("A", min_nodes=1),), cooldown_down_s=60.0)
    fleet = nodes(4, island="B")
    assert any(len(loop.step(view(at * 5.0, 0, 0.001, nodes=fleet)).downs) > 1 for at in range(60))


def test_a_fleet_over_its_limit_shrinks_and_leaves_islands_what_they_are_to_have() -> None:
    islands = (IslandLimits("A", min_nodes=2), IslandLimits("B", min_nodes=2))
    fleet = (*nodes(3, island="A", usd_per_hour=2.0), *(node(f"b{at}", island="B") for at in range(3)))
    loop, _ = scaler(*TWO_ISLANDS, max_nodes=4, islands=islands, cooldown_down_s=60.0)
    step = next(step for at in range(60) if (step := loop.step(view(at * 5.0, 0, 0.01, nodes=fleet))).downs)
    assert [one.node for one in step.downs] == ["n0", "b0"]
