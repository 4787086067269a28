"""The scaler: when it adds and removes nodes, how many, and why."""

from __future__ import annotations

from itertools import pairwise
from math import inf, nan
from typing import Any

import msgspec
import pytest
from fleet_views import create_scaler, node, nodes, offer, pending, view, window
from hypothesis import given, settings
from hypothesis import strategies as st

from warmroute.config import Hours, IslandLimits
from warmroute.scaling.observer import FleetView, NodeView, WindowMetrics
from warmroute.scaling.scaling_decision import PaidNode

NOON_ON_A_MONDAY_S = 4 * 86_400 + 12 * 3600.0
"""1970-01-05 12:00 UTC."""


def test_an_idle_fleet_of_one_node_does_not_change() -> None:
    scaler, _ = create_scaler()
    decision = scaler.decide(view(1000.0, 1, 0.5))
    assert not decision.changes and decision.desired_nodes == 1


def test_high_utilisation_adds_all_needed_nodes_at_once() -> None:
    scaler, _ = create_scaler(target_utilisation=0.6)
    decision = scaler.decide(view(1000.0, 2, 8.0))  # 4 node seconds per second on 2 nodes
    assert len(decision.additions) == decision.desired_nodes - 2
    assert 4.0 / decision.desired_nodes <= 0.6 < 4.0 / (decision.desired_nodes - 3)
    assert "utilisation is 200%, limit 60%" in decision.reasons[0]


def test_pending_nodes_count_as_serving() -> None:
    scaler, _ = create_scaler(target_utilisation=0.6)
    assert not scaler.decide(view(1000.0, 2, 8.0), pending(6)).additions


def test_step_size_and_maximum_limit_additions() -> None:
    scaler, _ = create_scaler(max_step_up=3)
    assert len(scaler.decide(view(1000.0, 2, 40.0)).additions) == 3
    scaler, _ = create_scaler(max_nodes=4)
    decision = scaler.decide(view(1000.0, 2, 40.0))
    assert len(decision.additions) == 2 and decision.desired_nodes == 4
    scaler, _ = create_scaler(max_nodes=2)
    decision = scaler.decide(view(1000.0, 2, 40.0))
    assert not decision.additions and "maximum of 2 nodes reached" in decision.reasons


def test_slower_hardware_has_less_weight() -> None:
    scaler, _ = create_scaler(offer("slow", gpu="T4"), target_utilisation=0.6)
    fleet = (*nodes(4), *(node(f"t{at}", gpu="T4", ms_per_token=0.2) for at in range(2)))
    few = scaler.decide(view(1000.0, 0, 6.0, nodes=fleet))  # usual speed is the L4s'
    scaler, _ = create_scaler(target_utilisation=0.6)
    many = scaler.decide(view(1000.0, 6, 6.0))
    assert few.utilisation > many.utilisation


def test_uneven_requests_on_few_nodes_add_a_node_before_they_are_busy() -> None:
    even, _ = create_scaler(max_mean_wait_ms=250.0)
    assert not even.decide(view(1000.0, 2, 1.2)).additions
    uneven, _ = create_scaler(max_mean_wait_ms=250.0)
    decision = uneven.decide(view(1000.0, 2, 1.2, stable={"variation": 12.0}))
    assert decision.additions and "estimated wait is" in decision.reasons[0]
    many, _ = create_scaler(max_mean_wait_ms=250.0)  # the same utilisation of many nodes causes no wait
    assert not many.decide(view(1000.0, 20, 12.0, stable={"variation": 12.0})).additions


def test_a_long_queue_adds_one_node() -> None:
    scaler, _ = create_scaler(max_queue_per_node=4.0)
    decision = scaler.decide(view(1000.0, 3, 1.0, stable={"waiting": 13.0}))
    assert len(decision.additions) == 1 and "4.3 requests wait per node, limit 4" in decision.reasons[0]


@pytest.mark.parametrize("what", ["ttft_p99_ms", "latency_p99_ms"])
def test_response_times_over_a_limit_add_one_node_if_nodes_are_busy(what: str) -> None:
    config = {"max_ttft_p99_ms": 2000.0, "max_latency_p99_ms": 2000.0}
    scaler, _ = create_scaler(**config)
    slow: dict[str, Any] = {what: 5000.0}
    assert len(scaler.decide(view(1000.0, 3, 1.0, stable={**slow, "waiting": 6.0})).additions) == 1
    scaler, _ = create_scaler(**config)  # no queue and idle nodes: the prompts are long
    assert not scaler.decide(view(1000.0, 3, 1.0, stable=slow)).additions


def test_rejected_requests_add_one_node() -> None:
    scaler, _ = create_scaler()
    assert scaler.decide(view(1000.0, 3, 1.0, stable={"shed_per_s": 0.5})).additions


def test_full_kv_memory_adds_nodes() -> None:
    scaler, _ = create_scaler(max_kv_usage=0.8)
    decision = scaler.decide(view(1000.0, 4, 1.0, stable={"kv_usage": 0.95}))
    assert decision.additions and "KV memory" in decision.reasons[0]


def thrashing(age_s: float) -> float:
    """Blocks that are reused after some minutes."""
    return 0.1 + 0.7 * min(1.0, age_s / 1200.0)


def test_a_low_hit_ratio_adds_a_node_only_if_more_cache_helps() -> None:
    low = {"hit_ratio": 0.1}
    full = nodes(4, held_blocks=10_000, oldest_age_s=300.0)
    scaler, _ = create_scaler(min_hit_ratio=0.3)
    decision = scaler.decide(view(1000.0, 4, 1.0, nodes=full, stable=low, reuse_within=thrashing))
    assert len(decision.additions) == 1 and any(
        "1.5 × the cache would raise it" in reason for reason in decision.reasons
    )
    scaler, _ = create_scaler(min_hit_ratio=0.3)
    decision = scaler.decide(view(1000.0, 4, 1.0, nodes=full, stable=low, reuse_within=lambda _age_s: 0.1))
    assert not decision.additions and any("more cache would not help" in reason for reason in decision.reasons)


def test_spare_nodes_are_removed_after_a_cooldown() -> None:
    scaler, _ = create_scaler(cooldown_down_s=180.0, interval_s=5.0, max_step_down=4)
    decisions = [scaler.decide(view(at * 5.0, 8, 2.0)) for at in range(60)]
    first = next(at for at, decision in enumerate(decisions) if decision.removals)
    assert first * 5.0 >= 170.0
    gone = decisions[first].removals
    assert len(gone) == 4 and len({one.node for one in gone}) == 4
    assert sum(len(decision.removals) for decision in decisions) == 4


def test_no_node_is_removed_whose_load_or_cache_the_rest_could_not_hold() -> None:
    full = nodes(4, held_blocks=10_000, oldest_age_s=300.0)
    views: tuple[dict[str, Any], ...] = (
        {"stable": {"waiting": 20.0}},
        {"stable": {"kv_usage": 0.75}},
        {"nodes": full, "reuse_within": lambda age_s: min(0.9, age_s / 500.0)},
    )
    for more in views:
        scaler, _ = create_scaler(min_hit_ratio=0.75, cooldown_down_s=60.0)
        assert not any(scaler.decide(view(at * 5.0, 4, 2.0, **more)).removals for at in range(60))
    scaler, _ = create_scaler(cooldown_down_s=60.0)
    assert any(scaler.decide(view(at * 5.0, 4, 2.0)).removals for at in range(60))


def test_nodes_without_a_provisioner_are_never_removed() -> None:
    scaler, _ = create_scaler(cooldown_down_s=60.0)
    fleet = nodes(4, offer=None)
    assert not any(scaler.decide(view(at * 5.0, 4, 0.1, nodes=fleet)).removals for at in range(60))


def test_the_most_expensive_node_is_removed_first_then_the_one_with_the_least_valuable_cache() -> None:
    fleet = (
        node("expensive", usd_per_hour=3.0),
        node("cold", held_blocks=10),
        node("warm"),
        node("hot", held_blocks=9000),
    )
    scaler, _ = create_scaler(cooldown_down_s=60.0, max_step_down=2)
    more: dict[str, Any] = {"nodes": fleet, "reuse_chance": lambda _age_s: 0.5}
    decision = next(
        decision for at in range(60) if (decision := scaler.decide(view(at * 5.0, 4, 0.2, **more))).removals
    )
    assert [one.node for one in decision.removals] == ["expensive", "cold"]


def test_the_short_window_starts_panic_mode_in_which_no_node_is_removed() -> None:
    scaler, _ = create_scaler(target_utilisation=0.6, stable_window_s=60.0, cooldown_down_s=30.0)
    calm, rush = window(1.0), window(20.0, waiting=30.0)
    decision = scaler.decide(FleetView(now_s=1000.0, stable=calm, panic=rush, nodes=nodes(4)))
    assert decision.panicking and len(decision.additions) == 8
    for at in range(11):
        later = scaler.decide(FleetView(now_s=1005.0 + 5.0 * at, stable=calm, panic=calm, nodes=nodes(12)))
        assert later.panicking and not later.removals


def test_one_long_prompt_does_not_start_panic_mode() -> None:
    scaler, _ = create_scaler()
    giant = window(0.1, prefill_work=1e6, arrivals=2, waiting=30.0)
    assert not scaler.decide(FleetView(now_s=1000.0, stable=window(1.0), panic=giant, nodes=nodes(4))).panicking


def test_a_rising_trend_adds_nodes_early() -> None:
    scaler, _ = create_scaler(offer(start_s=120.0), target_utilisation=0.6)
    steady = scaler.decide(view(1000.0, 4, 4.4))
    assert not steady.additions
    scaler, _ = create_scaler(offer(start_s=120.0), target_utilisation=0.6)
    rising = scaler.decide(view(1000.0, 4, 4.4, growth_per_s=0.004))
    assert rising.additions and "forecast: " in rising.reasons[0]


def test_scaling_from_zero_requests_one_node_at_once() -> None:
    scaler, _ = create_scaler(min_nodes=0)
    nothing = WindowMetrics(span_s=60.0)
    asleep = FleetView(now_s=1000.0, stable=nothing, panic=nothing, idle_s=inf)
    assert scaler.decide(asleep).desired_nodes == 0
    woken = FleetView(now_s=1005.0, stable=nothing, panic=nothing, waiting=1)
    assert len(scaler.decide(woken).additions) == 1
    assert not scaler.decide(msgspec.structs.replace(woken, now_s=1010.0), pending(1)).additions


def test_the_fleet_scales_to_zero_only_after_the_idle_time() -> None:
    nothing = WindowMetrics(span_s=60.0)
    scaler, _ = create_scaler(min_nodes=0, scale_to_zero_after_s=600.0, cooldown_down_s=60.0)
    removals = []
    for at in range(200):
        idle_s = at * 5.0
        decision = scaler.decide(FleetView(now_s=idle_s, stable=nothing, panic=nothing, nodes=nodes(1), idle_s=idle_s))
        if decision.removals:
            removals.append(idle_s)
            break
    assert removals and 600.0 <= removals[0] <= 700.0
    scaler, _ = create_scaler(min_nodes=1, scale_to_zero_after_s=600.0)
    for at in range(200):
        assert not scaler.decide(
            FleetView(now_s=at * 5.0, stable=nothing, panic=nothing, nodes=nodes(1), idle_s=at * 5.0)
        ).removals


def test_schedule_and_islands_have_minimums() -> None:
    hours = (Hours(start="09:00", end="18:00", days=("mon",), min_nodes=5),)
    scaler, _ = create_scaler(hours=hours)
    assert scaler.decide(view(1000.0, 2, 0.5), wall_s=NOON_ON_A_MONDAY_S).desired_nodes == 5
    scaler, _ = create_scaler(hours=hours)
    assert scaler.decide(view(1000.0, 2, 0.5), wall_s=NOON_ON_A_MONDAY_S + 86_400).desired_nodes == 2
    islands = (IslandLimits(island="far", min_nodes=2), IslandLimits(island="local", max_nodes=2))
    scaler, _ = create_scaler(offer(), offer("there", island="far", usd_per_hour=9.0), islands=islands)
    decision = scaler.decide(view(1000.0, 2, 0.5))
    assert [up.offer.island for up in decision.additions] == ["far", "far"]


def test_a_dry_run_decides_and_is_marked() -> None:
    scaler, _ = create_scaler(dry_run=True)
    decision = scaler.decide(view(1000.0, 2, 8.0))
    assert decision.additions and decision.dry_run and decision.reasons


def test_missing_offers_are_a_reason() -> None:
    scaler, offers = create_scaler(budget_usd_per_hour=2.0)
    decision = scaler.decide(view(1000.0, 2, 8.0))
    assert not decision.additions and any("over the budget" in reason for reason in decision.reasons)
    scaler, offers = create_scaler()
    offers.update_offers(())
    assert any("no provisioner offers nodes" in reason for reason in scaler.decide(view(1000.0, 2, 8.0)).reasons)


def test_without_offers_the_desired_number_stays_until_it_is_reached() -> None:
    scaler, offers = create_scaler(cooldown_down_s=60.0)
    offers.update_offers(())
    fleet = nodes(4, offer=None)
    desired = [scaler.decide(view(at * 5.0, 4, 0.1, nodes=fleet)).desired_nodes for at in range(20)]
    assert desired[0] == 4 and desired[-1] < 4
    first = next(at for at, count in enumerate(desired) if count < 4)
    assert len(set(desired[first:])) == 1
    scaler, offers = create_scaler()
    offers.update_offers(())
    assert scaler.decide(view(1000.0, 4, 40.0, nodes=fleet)).desired_nodes > 4


BAD = st.sampled_from([nan, inf, -inf, -1.0, 0.0, 1e300])


@pytest.mark.parametrize("ms_per_token", [1e308, 1e-308])
def test_an_impossible_speed_is_ignored(ms_per_token: float) -> None:
    scaler, _ = create_scaler(max_nodes=2, cooldown_down_s=10.0)
    fleet = (*nodes(3, ms_per_token=1e-6), node("broken", gpu="X", ms_per_token=ms_per_token))
    decisions = [scaler.decide(view(at * 5.0, 0, 0.01, nodes=fleet)) for at in range(8)]
    assert any(decision.removals for decision in decisions)
    assert any(problem.endswith("of node broken") for problem in decisions[0].invalid_inputs)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_impossible_metrics_are_ignored_and_reported(data: st.DataObject) -> None:
    fields = [field.name for field in msgspec.structs.fields(WindowMetrics)]
    bad = {name: data.draw(BAD) for name in data.draw(st.sets(st.sampled_from(fields)))}
    worse = {
        name: data.draw(BAD)
        for name in data.draw(st.sets(st.sampled_from(["usd_per_hour", "kv_usage", "ms_per_token", "oldest_age_s"])))
    }
    scaler, _ = create_scaler(max_nodes=16)
    stable = msgspec.structs.replace(window(2.0), **bad)
    fleet = (node("good"), node("bad", **worse))
    view_ = FleetView(now_s=1000.0, stable=stable, panic=stable, nodes=fleet, growth_per_s=data.draw(BAD))
    decision = scaler.decide(view_)
    assert 1 <= decision.desired_nodes <= 16
    impossible = [value for value in (*bad.values(), *worse.values()) if not 0 <= value < inf]
    assert len(decision.invalid_inputs) >= len(impossible)


@settings(max_examples=25, deadline=None)
@given(
    level=st.floats(0.5, 12.0),
    noise=st.floats(0.0, 0.12),
    seed=st.integers(0, 2**32),
    count=st.integers(1, 10),
    queue=st.floats(0.0, 6.0),
)
def test_noise_changes_the_fleet_at_most_once_per_cooldown(
    level: float, noise: float, seed: int, count: int, queue: float
) -> None:
    """After the first changes the fleet stays, or changes at most once per cooldown."""
    from random import Random

    random = Random(seed)
    scaler, _ = create_scaler(cooldown_up_s=30.0, cooldown_down_s=180.0, max_mean_wait_ms=250.0)
    changes: list[tuple[float, int]] = []
    for at in range(400):
        now_s = at * 5.0
        arrivals = level * (1.0 + noise * (2.0 * random.random() - 1.0))
        waits = queue * (1.0 + noise * (2.0 * random.random() - 1.0)) * count
        decision = scaler.decide(view(now_s, count, arrivals, stable={"waiting": waits, "variation": 4.0}))
        if decision.changes:
            changes.append((now_s, len(decision.additions) - len(decision.removals)))
            count += len(decision.additions) - len(decision.removals)
    for (before_s, was), (after_s, then) in pairwise(changes):
        if (was > 0) != (then > 0):
            assert after_s - before_s >= 180.0, changes
        else:
            assert after_s - before_s >= (30.0 if then > 0 else 180.0), changes


def test_an_island_without_offers_does_not_block_other_changes() -> None:
    moon = (IslandLimits("moon", min_nodes=3),)
    empty, _ = create_scaler(islands=moon, max_step_up=2)
    decision = empty.decide(view(1000.0, 0, 0.0, waiting=5))
    assert len(decision.additions) == 1 and decision.obstacles == (
        "island moon needs 3 nodes more, and no provisioner offers nodes there",
    )
    assert decision.obstacles[0] in decision.reasons
    busy, _ = create_scaler(islands=moon, max_step_up=2)
    assert len(busy.decide(view(1000.0, 2, 40.0)).additions) == 2
    spare, _ = create_scaler(islands=moon, cooldown_down_s=60.0)
    assert any(spare.decide(view(at * 5.0, 8, 2.0)).removals for at in range(60))


def test_an_island_whose_offers_are_used_up_does_not_block_other_changes() -> None:
    full = (offer("here"), offer("there", island="moon", max_nodes=0))
    moon = (IslandLimits("moon", min_nodes=3),)
    empty, _ = create_scaler(*full, islands=moon, max_step_up=2)
    decision = empty.decide(view(1000.0, 0, 0.0, waiting=5))
    assert [up.offer.name for up in decision.additions] == ["here"]
    assert any("no offer is available" in reason for reason in decision.obstacles)
    spare, _ = create_scaler(*full, islands=moon, cooldown_down_s=60.0)
    assert any(spare.decide(view(at * 5.0, 8, 2.0)).removals for at in range(60))


def test_nodes_for_islands_count_toward_the_needed_nodes() -> None:
    scaler, _ = create_scaler(
        offer("here"), offer("there", island="moon"), islands=(IslandLimits("moon", 1),), min_nodes=2
    )
    decision = scaler.decide(view(1000.0, 0, 0.0))
    assert sorted(up.offer.island for up in decision.additions)[-1] == "moon" and len(decision.additions) == 2


# Machines that are paid for.


def test_machines_that_do_not_answer_or_are_leaving_count_toward_the_maximum() -> None:
    down: dict[str, Any] = {"serving": False}
    for fleet, ending in (
        ((*nodes(1), *(node(f"down{at}", **down) for at in range(3))), 0),
        ((*nodes(2), node("leaving", draining=True, **down), node("down", **down)), 0),
        (nodes(2), 2),
    ):
        scaler, _ = create_scaler(min_nodes=4, max_nodes=4)
        gone = [PaidNode(("cloud", "small"), "local", 1.0)] * ending
        decision = scaler.decide(view(1000.0, 0, 0.5, nodes=fleet), (), 0.0, gone)
        assert not decision.additions and decision.desired_nodes == 4
        assert any("maximum of 4 nodes reached" in reason for reason in decision.obstacles)
        roomy, _ = create_scaler(min_nodes=4, max_nodes=5)
        assert len(roomy.decide(view(1000.0, 0, 0.5, nodes=fleet), (), 0.0, gone).additions) == 1


def test_reclaimed_machines_and_unmanaged_nodes_that_are_down_do_not_count_toward_the_maximum() -> None:
    for gone in (node("spot", serving=False, draining=True, reclaimed=True), node("theirs", serving=False, offer=None)):
        scaler, _ = create_scaler(min_nodes=2, max_nodes=2)
        assert len(scaler.decide(view(1000.0, 0, 0.5, nodes=(node("well"), gone))).additions) == 1


def test_terminating_machines_count_toward_the_budget() -> None:
    ending = [PaidNode(("cloud", "small"), "local", 1.0)]
    scaler, _ = create_scaler(min_nodes=3, budget_usd_per_hour=3.0)
    assert not scaler.decide(view(1000.0, 2, 0.5), (), 0.0, ending).additions
    scaler, _ = create_scaler(min_nodes=3, budget_usd_per_hour=3.0)
    assert len(scaler.decide(view(1000.0, 2, 0.5)).additions) == 1


def test_an_unchecked_node_counts_as_pending() -> None:
    new = node("new", serving=False, unchecked=True, offer=None)
    scaler, _ = create_scaler(min_nodes=1)
    decision = scaler.decide(view(1000.0, 0, 0.0, nodes=(new,)))
    assert not decision.changes and decision.nodes == decision.desired_nodes == 1
    scaler, offers = create_scaler(min_nodes=0)
    offers.update_offers(())
    assert scaler.decide(view(1000.0, 0, 0.0, nodes=(new, new, new))).desired_nodes == 3


# Islands in a full fleet.

TWO_ISLANDS = (offer("a", island="A"), offer("b", island="B"))


def test_in_a_full_fleet_an_island_gets_its_minimum_by_an_exchange() -> None:
    scaler, _ = create_scaler(
        *TWO_ISLANDS, max_nodes=4, islands=(IslandLimits("A", min_nodes=1),), cooldown_up_s=30.0, cooldown_down_s=60.0
    )
    fleet: list[NodeView] = list(nodes(4, island="B"))
    most = 0
    for at in range(120):
        decision = scaler.decide(view(at * 5.0, 0, 4.0, nodes=tuple(fleet)))  # utilisation 50%: no node is spare
        going = {down.node for down in decision.removals}
        fleet = [one for one in fleet if one.name not in going]
        fleet += [node(f"new{at}", island=up.offer.island) for up in decision.additions]
        most = max(most, len(fleet))
    assert most == 4 and sorted(one.island for one in fleet) == ["A", "B", "B", "B"]


def test_no_node_is_exchanged_for_an_island_without_an_available_offer() -> None:
    islands = (IslandLimits("A", min_nodes=1),)
    full = (offer("a", island="A", max_nodes=0), offer("b", island="B"))
    scaler, _ = create_scaler(*full, max_nodes=4, islands=islands, cooldown_down_s=60.0)
    fleet = nodes(4, island="B")
    assert not any(scaler.decide(view(at * 5.0, 0, 4.0, nodes=fleet)).removals for at in range(60))
    scaler, _ = create_scaler(
        *TWO_ISLANDS, max_nodes=1, islands=islands, cooldown_down_s=60.0
    )  # nor the only node that serves
    assert not any(scaler.decide(view(at * 5.0, 0, 0.5, nodes=fleet[:1])).removals for at in range(60))


def test_an_island_below_its_minimum_does_not_keep_spare_nodes_elsewhere() -> None:
    scaler, _ = create_scaler(
        *TWO_ISLANDS, max_nodes=4, islands=(IslandLimits("A", min_nodes=1),), cooldown_down_s=60.0
    )
    fleet = nodes(4, island="B")
    assert any(len(scaler.decide(view(at * 5.0, 0, 0.001, nodes=fleet)).removals) > 1 for at in range(60))


def test_a_fleet_above_its_maximum_shrinks_to_the_islands_minimums() -> None:
    islands = (IslandLimits("A", min_nodes=2), IslandLimits("B", min_nodes=2))
    fleet = (*nodes(3, island="A", usd_per_hour=2.0), *(node(f"b{at}", island="B") for at in range(3)))
    scaler, _ = create_scaler(*TWO_ISLANDS, max_nodes=4, islands=islands, cooldown_down_s=60.0)
    decision = next(
        decision for at in range(60) if (decision := scaler.decide(view(at * 5.0, 0, 0.01, nodes=fleet))).removals
    )
    assert [one.node for one in decision.removals] == ["n0", "b0"]
