"""Prefill nodes and nodes that serve requests are scaled separately, each by what it lacks."""

from __future__ import annotations

from typing import Any

import pytest
from fleet_views import MS_PER_TOKEN, PREFILL_WORK, node, nodes, offer

from warmroute.config import ConfigError, Objective, Scaling, from_table
from warmroute.config.scaling import Pool, RoleLimits
from warmroute.core.demand import COUNTERS, TIME_BOUNDS_MS, DemandMeter
from warmroute.scaling.autoscaler import RolePools, has_pools
from warmroute.scaling.observer import FleetView, MetricWindows, NodeView, PoolSample, Sample, WindowMetrics
from warmroute.scaling.offer_selection import OfferSelector
from warmroute.scaling.scaling_decision import PaidNode, ScalingDecision

SPAN_S = 60.0


def pool_nodes(prefill: int, decode: int, **more: Any) -> tuple[NodeView, ...]:
    return (
        *(node(f"p{at}", role="prefill", offer=("cloud", "p"), **more) for at in range(prefill)),
        *(node(f"d{at}", role="decode", offer=("cloud", "d"), **more) for at in range(decode)),
    )


class Pools:
    """Two pools, the work of the last minute, and the scaler of both."""

    def __init__(self, *offers: Any, **config: Any) -> None:
        self.config = Scaling(enabled=True, **{"max_nodes": 32, "max_mean_wait_ms": 1e6, **config})
        self.offers = OfferSelector(self.config)
        self.offers.update_offers(offers or (offer("p", role="prefill"), offer("d", role="decode")))
        self.pools = RolePools(self.config, self.offers)

    def decide(
        self, fleet: tuple[NodeView, ...], now_s: float = 1000.0, *, on_prefill: float = 0.0, on_decode: float = 0.0,
        waiting: int = 0, kv_usage: float = 0.0, inter_token_ms: float = 0.0, idle_s: float = 0.0,
        pending: tuple[PaidNode, ...] = (), streams: int = 10**6, **more: Any,
    ) -> ScalingDecision:  # fmt: skip
        """`on_prefill`, `on_decode`: node seconds of prefill per second on each pool. `streams`: responses whose time
        between tokens is measured, at most."""
        meter = DemandMeter()
        for rate, in_pool in ((on_prefill, True), (on_decode, False)):
            for _ in range(int(rate * SPAN_S * 1000.0 / (PREFILL_WORK * MS_PER_TOKEN))):
                meter.arrived += 1
                meter.record_sent(PREFILL_WORK, 0.0, PREFILL_WORK, in_pool)
                meter.record_ttft(900.0)
                if meter.arrived <= streams:
                    meter.record_inter_token(inter_token_ms)
        ttft, latency, inter_token = meter.times()
        samples: dict[Pool, PoolSample] = {"prefill": PoolSample(), "decode": PoolSample(0, kv_usage)}
        windows = MetricWindows(self.config)
        windows.add(Sample(now_s, SPAN_S, meter.counts(), ttft, latency, waiting, 0.0, inter_token, samples))
        view = FleetView(
            now_s=now_s, stable=windows.stable, panic=windows.panic, nodes=fleet, waiting=waiting, idle_s=idle_s, **more
        )  # fmt: skip
        assert has_pools(view, self.offers)
        return self.pools.decide(view, windows, self.config, self.offers, pending, 0.0, ())


def added(decision: ScalingDecision) -> dict[str, int]:
    names = [addition.offer.role for addition in decision.additions]
    return {name: names.count(name) for name in dict.fromkeys(names)}


def test_prefill_work_adds_prefill_nodes_only() -> None:
    decision = Pools().decide(pool_nodes(2, 4), on_prefill=3.0)
    assert set(added(decision)) == {"prefill"}
    assert decision.reasons[0].startswith("prefill pool: utilisation is 150%")
    assert decision.pools["prefill"].desired_nodes == 2 + len(decision.additions)
    assert decision.pools["decode"].desired_nodes == 4
    assert decision.desired_nodes == 6 + len(decision.additions)


def test_prompts_that_decode_nodes_prefill_add_decode_nodes_only() -> None:
    assert set(added(Pools().decide(pool_nodes(2, 2), on_decode=3.0))) == {"decode"}


def test_running_requests_that_fill_the_memory_add_decode_nodes() -> None:
    decision = Pools().decide(pool_nodes(2, 4), on_prefill=0.5, kv_usage=0.7)
    assert set(added(decision)) == {"decode"}
    assert "decode pool: running requests fill 70% of KV memory, limit 35%" in decision.reasons


def test_slow_tokens_add_decode_nodes_until_the_objective_is_met() -> None:
    pools = Pools(objective=Objective(inter_token_p90_ms=40.0))
    decision = pools.decide(pool_nodes(2, 4), on_prefill=0.5, inter_token_ms=48.0, decode_base_ms=10.0)
    assert added(decision) == {"decode": 3}, "10 + 40 · 4 / 7 ms is below 85 % of the objective"
    assert any("decode pool: inter-token p90 is" in reason for reason in decision.reasons)
    hopeless = pools.decide(pool_nodes(2, 4), 2000.0, on_prefill=0.5, inter_token_ms=75.0, decode_base_ms=39.0)
    assert not hopeless.additions and any("more nodes would not help" in reason for reason in hopeless.reasons)


def test_few_slow_streams_add_no_nodes_and_many_double_the_pool_at_most() -> None:
    pools = Pools(objective=Objective(inter_token_p90_ms=50.0), max_nodes=1000)
    few = pools.decide(pool_nodes(2, 8), on_prefill=0.5, inter_token_ms=3000.0, decode_base_ms=10.0, streams=1)
    assert not few.needed and few.pools["decode"].desired_nodes == 8, "one stream is no percentile"
    many = pools.decide(pool_nodes(2, 8), 2000.0, on_prefill=0.5, inter_token_ms=3000.0, decode_base_ms=10.0)
    assert many.needed == 8
    starting = tuple(PaidNode(("cloud", "d"), "local", 1.0, "L4", role="decode") for _ in range(8))
    more = pools.decide(
        pool_nodes(2, 8), 3000.0, on_prefill=0.5, inter_token_ms=3000.0, decode_base_ms=10.0, pending=starting
    )
    assert not more.needed, "the nodes that start double it already"


def test_slow_tokens_keep_decode_nodes() -> None:
    limit = Objective(inter_token_p90_ms=40.0)
    pools = Pools(objective=limit, cooldown_down_s=10.0, interval_s=5.0)
    for step in range(4):
        decision = pools.decide(
            pool_nodes(1, 4), 1000.0 + 5.0 * step, on_prefill=0.4, inter_token_ms=27.0, decode_base_ms=5.0
        )
        assert not decision.removals
    for step in range(4):
        decision = pools.decide(
            pool_nodes(1, 4), 2000.0 + 5.0 * step, on_prefill=0.4, inter_token_ms=8.0, decode_base_ms=5.0
        )
    assert decision.removals


def test_waiting_requests_count_for_the_busier_pool() -> None:
    assert set(added(Pools().decide(pool_nodes(2, 2), on_prefill=1.1, on_decode=0.1, waiting=40))) == {"prefill"}
    assert set(added(Pools().decide(pool_nodes(2, 2), on_prefill=0.1, on_decode=1.1, waiting=40))) == {"decode"}


def test_each_pool_has_its_own_cooldown_and_loses_its_own_nodes() -> None:
    pools = Pools(cooldown_down_s=10.0, interval_s=5.0)
    seen: list[ScalingDecision] = []
    for step in range(4):
        now_s = 1000.0 + 5.0 * step
        seen.append(pools.decide(pool_nodes(4, 4), now_s, on_prefill=2.6 if step == 0 else 2.3, on_decode=0.01))
    assert added(seen[0]).keys() == {"prefill"}
    removed = [removal.node for decision in seen for removal in decision.removals]
    assert removed and all(name.startswith("d") for name in removed), "the other pool's cooldown does not count"


def test_the_last_node_of_a_pool_stays_while_the_other_one_has_nodes() -> None:
    pools = Pools(min_nodes=0, scale_to_zero_after_s=5.0, cooldown_down_s=10.0, interval_s=5.0)
    for step in range(6):
        decision = pools.decide(pool_nodes(1, 3), 1000.0 + 5.0 * step, idle_s=3600.0)
        assert "p0" not in [removal.node for removal in decision.removals]
    removed: set[str] = set()
    for step in range(6):
        decision = pools.decide(pool_nodes(1, 1), 2000.0 + 5.0 * step, idle_s=3600.0)
        removed |= {removal.node for removal in decision.removals}
    assert removed == {"p0", "d0"}, "without requests both go to zero"


def test_a_busy_decode_pool_does_not_cost_the_prefill_pool_its_only_node() -> None:
    pools = Pools(cooldown_down_s=10.0, interval_s=5.0)
    for step in range(6):
        assert not pools.decide(pool_nodes(1, 4), 1000.0 + 5.0 * step, on_decode=2.2).removals


def test_an_empty_fleet_gets_a_node_of_each_role() -> None:
    assert added(Pools(min_nodes=0).decide((), waiting=3)) == {"prefill": 1, "decode": 1}
    assert added(Pools(min_nodes=1).decide(())) == {"prefill": 1, "decode": 1}


def test_limits_of_a_role() -> None:
    limits = (RoleLimits(role="prefill", min_nodes=2, max_nodes=3),)
    assert added(Pools(roles=limits).decide(pool_nodes(1, 2))) == {"prefill": 1}
    decision = Pools(roles=limits).decide(pool_nodes(2, 2), on_prefill=9.0)
    assert added(decision) == {"prefill": 1}
    full = Pools(roles=limits).decide(pool_nodes(3, 2), on_prefill=9.0)
    assert not full.additions and "prefill pool: maximum of 3 nodes reached" in full.obstacles


def test_both_pools_together_stay_within_the_limits_of_the_fleet() -> None:
    decision = Pools(max_nodes=8).decide(pool_nodes(2, 3), on_prefill=9.0, on_decode=9.0)
    assert len(decision.additions) == 3
    decision = Pools(budget_usd_per_hour=7.0).decide(pool_nodes(2, 3), on_prefill=9.0, on_decode=9.0)
    assert len(decision.additions) == 2
    decision = Pools(budget_usd_per_hour=5.0).decide(pool_nodes(2, 3), on_prefill=9.0, on_decode=9.0)
    assert not decision.additions and any("over the budget" in text for text in decision.obstacles)


def test_minimums_do_not_exceed_the_maximum_of_the_fleet() -> None:
    pools = Pools(max_nodes=1)
    decision = pools.decide((), waiting=3)
    assert added(decision) == {"decode": 1}, "a prefill node alone would serve nothing"
    assert "prefill pool: maximum of 1 node for both pools reached" in decision.obstacles
    for step in range(60):  # also while both run, because somebody lowered max_nodes
        assert not pools.decide(pool_nodes(1, 1), 2000.0 + 5.0 * step).changes
    limits = (RoleLimits(role="prefill", min_nodes=4),)
    assert added(Pools(max_nodes=6, roles=limits).decide(pool_nodes(2, 3))) == {"prefill": 1}


def test_a_busy_pool_leaves_the_other_one_its_minimum() -> None:
    decision = Pools(max_nodes=4).decide(pool_nodes(2, 0), on_prefill=9.0)
    assert added(decision) == {"prefill": 1, "decode": 1}


def test_machines_that_changed_their_role_count_towards_the_maximum_of_their_offer() -> None:
    pools = Pools(offer("p", role="prefill", max_nodes=3), offer("d", role="decode"))
    changed = tuple(node(f"p{at}", role="decode", offer=("cloud", "p")) for at in range(2, 4))
    fleet = (*pool_nodes(1, 2), *changed)
    decision = pools.decide(fleet, on_prefill=3.0)
    assert not decision.additions and any("offer is used up" in text for text in decision.obstacles)
    assert added(pools.decide(fleet[:-1], 2000.0, on_prefill=3.0)) == {"prefill": 1}


def test_an_excess_is_removed_once() -> None:
    pools = Pools(max_nodes=5, cooldown_down_s=10.0, interval_s=5.0)
    decisions = [
        pools.decide(pool_nodes(3, 4), 1000.0 + 5.0 * step, on_prefill=1.4, on_decode=1.6) for step in range(4)
    ]
    assert {len(decision.removals) for decision in decisions} == {0, 2}


def test_mixed_nodes_are_in_the_pool_of_those_that_serve() -> None:
    fleet = (*pool_nodes(2, 0), *nodes(2))
    pools = Pools(offer("p", role="prefill"), offer("m"))
    assert set(added(pools.decide(fleet, on_decode=3.0))) == {"mixed"}


def test_a_pool_without_offers_says_so_and_blocks_nothing() -> None:
    pools = Pools(offer("d", role="decode"))
    decision = pools.decide(pool_nodes(1, 1), on_prefill=3.0, on_decode=3.0)
    assert set(added(decision)) == {"decode"}
    assert "prefill pool: no provisioner offers prefill nodes" in decision.obstacles


def test_metrics_of_a_pool() -> None:
    meter = DemandMeter(arrived=4)
    meter.record_sent(1000.0, 100.0, 900.0, True)
    for _ in range(3):
        meter.record_sent(100.0, 50.0, 50.0)
    meter.record_output(1000.0, 10.0)
    meter.record_inter_token(TIME_BOUNDS_MS[5])
    ttft, latency, inter_token = meter.times()
    windows = MetricWindows(Scaling())
    assert windows.of_pool("prefill") == (WindowMetrics(), WindowMetrics())
    pools: dict[Pool, PoolSample] = {"prefill": PoolSample(3, 0.2), "decode": PoolSample(5, 0.6)}
    windows.add(Sample(10.0, 10.0, meter.counts(), ttft, latency, 9, 0.4, inter_token, pools))
    prefill, decode = windows.of_pool("prefill")[0], windows.of_pool("decode")[0]
    assert prefill.arrivals == 1 and prefill.prefill_work == 900.0 and prefill.hit_ratio == pytest.approx(0.1)
    assert decode.arrivals == 4 and decode.prefill_work == 150 / 4 and decode.hit_ratio == pytest.approx(0.5)
    assert (prefill.waiting, decode.waiting, prefill.kv_usage, decode.kv_usage) == (3, 5, 0.2, 0.6)
    assert prefill.decode_context is None and decode.decode_context is not None
    assert prefill.inter_token_p90_ms is None and decode.inter_token_p90_ms == TIME_BOUNDS_MS[5]
    assert windows.stable.arrivals == 4 and len(COUNTERS) == len(meter.counts())


def test_rounding_errors_of_a_pool_without_prefills_are_no_work() -> None:
    """The decode pool has what the prefill pool leaves of each sum."""
    counts = dict.fromkeys(COUNTERS, 0.0) | {"arrived": 100.0, "sent": 100.0, "responses": 100.0}
    for name, in_pool, value in (
        ("prompt_tokens", "prefill_pool_tokens", 1e6),
        ("cached_tokens", "prefill_pool_cached", 1e5),
        ("prefill_work", "prefill_pool_work", 0.1 + 0.2),
        ("prefill_squares", "prefill_pool_squares", 1e9),
    ):
        counts |= {name: value, in_pool: value * (1.0 + 1e-13)}
    meter = DemandMeter()
    windows = MetricWindows(Scaling())
    windows.add(Sample(10.0, 10.0, list(counts.values()), *meter.times()[:2], 0, 0.0, meter.times()[2]))
    decode = windows.of_pool("decode")[0]
    assert (decode.prefill_work, decode.hit_ratio, decode.variation) == (0.0, None, 0.0)


def test_contradicting_limits_are_rejected() -> None:
    for roles, problem in (
        ([{"role": "prefill", "min_nodes": 4, "max_nodes": 2}], "above its max_nodes"),
        ([{"role": "prefill"}, {"role": "prefill"}], "defined twice"),
        ([{"role": "prefill", "min_nodes": 9}, {"role": "decode", "min_nodes": 9}], "sum of all min_nodes"),
    ):
        with pytest.raises(ConfigError, match=problem):
            from_table({"scaling": {"enabled": True, "max_nodes": 16, "roles": roles}})


@pytest.mark.parametrize("decode", ["decode", "mixed"])
def test_a_maximum_below_one_node_of_each_pool_is_rejected(decode: str) -> None:
    def check(max_nodes: int, *roles: dict[str, Any]) -> None:
        provisioners = [
            {"kind": "kubernetes", "name": role, "role": role, "gpu": "H200", "workload_name": role}
            for role in ("prefill", decode)
        ]
        scaling = {"enabled": True, "max_nodes": max_nodes, "roles": list(roles)}
        from_table({"scaling": scaling, "provisioners": provisioners}, experiment=True)

    check(2)
    with pytest.raises(ConfigError, match=r"max_nodes \(1\) is below the minimums of both pools: 1 prefill"):
        check(1)
    with pytest.raises(ConfigError, match="3 prefill and 1 decode"):
        check(3, {"role": "prefill", "min_nodes": 3})
    from_table(
        {"scaling": {"enabled": True, "max_nodes": 1}, "nodes": [{"url": "http://a:1", "role": "prefill"}]},
        experiment=True,
    )


# Nodes that change sides.


def test_a_spare_decode_node_becomes_a_prefill_node() -> None:
    fleet = pool_nodes(2, 4, switchable=True)
    assert set(added(Pools().decide(fleet, on_prefill=1.5))) == {"prefill"}, "not without the setting"
    pools = Pools(switch_roles=True)
    decision = pools.decide(fleet, on_prefill=1.5)
    assert {(one.node[0], one.role) for one in decision.switches} == {("d", "prefill")} and not decision.additions
    assert decision.pools["prefill"].desired_nodes == 2 + len(decision.switches)
    assert decision.pools["decode"].desired_nodes == 4 - len(decision.switches) and decision.desired_nodes == 6
    assert any("of the decode pool become prefill nodes" in reason for reason in decision.reasons)
    again = pools.decide(fleet, 1005.0, on_prefill=1.5)
    assert not again.changes, "cooldown"


def test_a_node_changes_back_only_after_a_longer_time() -> None:
    pools = Pools(switch_roles=True, cooldown_up_s=10.0, cooldown_down_s=100.0)
    assert pools.decide(pool_nodes(2, 4, switchable=True), on_prefill=1.5).switches
    fleet = pool_nodes(4, 2, switchable=True)
    assert not pools.decide(fleet, 1050.0, on_decode=1.5).switches
    assert {one.role for one in pools.decide(fleet, 1150.0, on_decode=1.5).switches} == {"decode"}


@pytest.mark.parametrize(
    ("more", "demand"),
    [
        ({"switchable": False}, {}),
        ({"switchable": True}, {"on_decode": 1.5}),  # the other pool is busy
        ({"switchable": True}, {"kv_usage": 0.3}),  # its memory is needed
    ],
)  # fmt: skip
def test_no_node_changes_sides_if_its_pool_needs_it_or_its_engine_cannot(more: Any, demand: Any) -> None:
    decision = Pools(switch_roles=True).decide(pool_nodes(2, 4, **more), on_prefill=1.5, **demand)
    assert not decision.switches and added(decision)["prefill"]


def test_the_last_node_of_a_pool_and_mixed_nodes_do_not_change_sides() -> None:
    assert not Pools(switch_roles=True).decide(pool_nodes(2, 1, switchable=True), on_prefill=1.5).switches
    fleet = (*pool_nodes(2, 0), *nodes(4, switchable=True))
    assert not Pools(switch_roles=True).decide(fleet, on_prefill=1.5).switches, "the price uses them as it needs"


def test_roles_change_without_provisioners() -> None:
    pools = Pools(switch_roles=True)
    pools.offers.update_offers(())
    decision = pools.decide(pool_nodes(2, 4, switchable=True), on_prefill=1.5)
    assert decision.switches and decision.desired_nodes >= 6


def test_a_pool_does_not_desire_again_the_nodes_that_left_it() -> None:
    pools = Pools(switch_roles=True, cooldown_up_s=10.0, cooldown_down_s=100.0, max_step_down=2)
    pools.offers.update_offers(())
    for now_s in range(1000, 1101, 5):
        smaller = pools.decide(pool_nodes(2, 8), float(now_s), on_prefill=1.0, on_decode=0.1)
    assert smaller.pools["decode"].desired_nodes == 6
    fleet = pool_nodes(2, 6, switchable=True)
    switched = len(pools.decide(fleet, 1120.0, on_prefill=1.5, on_decode=0.1).switches)
    assert switched
    fleet = pool_nodes(2 + switched, 6 - switched, switchable=True)
    assert pools.decide(fleet, 1125.0, on_prefill=1.5, on_decode=0.1).pools["decode"].desired_nodes == 6 - switched
