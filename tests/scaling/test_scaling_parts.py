"""The parts of the autoscaler: offers, lifecycle, windows, observation, capacity, schedule, hot prefixes."""

from __future__ import annotations

from array import array
from math import inf, nan
from random import Random
from typing import Any

import pytest
from fleet_views import node, nodes, offer, view, window
from hypothesis import given, settings
from hypothesis import strategies as st

from warmroute.config import (
    ConfigError,
    Health,
    Hours,
    Index,
    IslandConfig,
    IslandLimits,
    NodeConfig,
    Scaling,
    from_table,
)
from warmroute.core.cache_view import CacheView
from warmroute.core.demand import COUNTERS, TIME_BOUNDS_MS, DemandMeter, percentile_ms
from warmroute.core.fleet import Fleet
from warmroute.core.hot_prefixes import MAX_COUNTS, MAX_EXAMPLES, HotPrefixes
from warmroute.core.islands import IslandRegistry
from warmroute.core.messages import Lookup
from warmroute.scaling import node_lifecycle, offer_selection
from warmroute.scaling.autoscaler import Autoscaler
from warmroute.scaling.capacity import Demand, FleetSize, GpuSpeeds, ScalingInputs, size_of
from warmroute.scaling.node_lifecycle import PENDING_STATES, LifecycleEvent, LifecycleState, ManagedNode, ManagedNodes
from warmroute.scaling.observer import FleetObserver, MetricWindows, Sample, WindowMetrics
from warmroute.scaling.offer_selection import OfferSelector
from warmroute.scaling.scaler import scheduled_min_nodes
from warmroute.scaling.scaling_decision import PaidNode
from warmroute.scaling.thresholds import rank_candidates

CONFIG = Scaling(enabled=True)

PROMPT = Lookup(bytes(4096), 1024, 1024)


def selector(*offers: Any, **config: Any) -> OfferSelector:
    made = OfferSelector(Scaling(enabled=True, **config))
    made.update_offers(offers)
    return made


def paid(count: int) -> list[PaidNode]:
    return [PaidNode(("cloud", "small"), "local", 1.0)] * count


# Offers.


def test_the_cheapest_offer_for_its_speed_is_selected() -> None:
    speeds = GpuSpeeds((node("a", gpu="L4", ms_per_token=0.1), node("b", gpu="H100", ms_per_token=0.02)))
    found, reason = selector(
        offer("slow", gpu="L4", usd_per_hour=1.0), offer("fast", gpu="H100", usd_per_hour=4.0)
    ).select((), speeds, 0.0)
    assert found is not None and found.name == "fast" and "cheapest" in reason


def test_start_time_adds_to_the_cost_and_panic_mode_skips_slow_starts() -> None:
    speeds = GpuSpeeds(())
    offers = selector(offer("slow", usd_per_hour=1.0, start_s=900.0), offer("quick", usd_per_hour=1.5, start_s=30.0))
    assert offers.select((), speeds, 0.0)[0].name == "slow"  # type: ignore[union-attr]
    assert offers.select((), speeds, 0.0, panicking=True)[0].name == "quick"  # type: ignore[union-attr]
    offers.node_started(("cloud", "slow"), 4000.0)  # the measured time replaces the estimate
    assert offers.select((), speeds, 0.0)[0].name == "quick"  # type: ignore[union-attr]


def test_the_backoff_of_an_offer_doubles_until_a_node_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offer_selection, "MAX_BACKOFF_S", 200.0)
    offers = selector(offer(), offer("expensive", usd_per_hour=9.0), offer_backoff_s=60.0)
    speeds = GpuSpeeds(())

    def name(now_s: float) -> str:
        found, _ = offers.select((), speeds, now_s)
        assert found is not None
        return found.name

    offers.back_off(("cloud", "small"), "no capacity", 0.0)
    assert name(59.0) == "expensive" and name(61.0) == "small"
    offers.back_off(("cloud", "small"), "no capacity", 61.0)
    assert name(180.0) == "expensive" and name(182.0) == "small"
    offers.back_off(("cloud", "small"), "no capacity", 182.0)
    assert offers.backing_off(182.0)[("cloud", "small")] == (382.0, "no capacity")
    offers.node_started(("cloud", "small"), 10.0)
    offers.back_off(("cloud", "small"), "no capacity", 500.0)
    assert name(561.0) == "small"


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({"budget_usd_per_hour": 3.5}, "over the budget"),
        ({"islands": (IslandLimits(island="local", max_nodes=3),)}, "island is full"),
    ],
)
def test_budget_and_island_limits_are_reasons_against_an_offer(limits: dict[str, Any], words: str) -> None:
    found, reason = selector(offer(), **limits).select(paid(3), GpuSpeeds(()), 0.0)
    assert found is None and words in reason
    found, _ = selector(offer(), **limits).select(paid(2), GpuSpeeds(()), 0.0)
    assert found is not None


def test_used_up_and_too_slow_offers_are_skipped() -> None:
    found, reason = selector(offer(max_nodes=3)).select(paid(3), GpuSpeeds(()), 0.0)
    assert found is None and "offer is used up" in reason
    speeds = GpuSpeeds((node("a", gpu="T4", ms_per_token=1.0),))
    found, reason = selector(offer(gpu="T4"), max_ttft_p99_ms=5000.0).select((), speeds, 0.0, prefill_work=10_000.0)
    assert found is None and "too slow" in reason


def test_offers_too_far_away_for_the_latency_limits_are_skipped() -> None:
    speeds = GpuSpeeds((node("a", gpu="L4", ms_per_token=0.1),))
    near, far = offer("near", usd_per_hour=2.0, round_trip_ms=5.0), offer("far", usd_per_hour=1.0, round_trip_ms=300.0)

    def selected(prefill_work: float = 1000.0, **limits: float) -> str | None:
        found, _ = selector(near, far, **limits).select((), speeds, 0.0, prefill_work=prefill_work)
        return found.name if found is not None else None

    assert selected() == "far", "the cheaper one"
    assert selected(max_ttft_p99_ms=500.0) == "far" and selected(max_ttft_p99_ms=350.0) == "near"
    assert selected(max_latency_p99_ms=250.0) == "near"
    found, reason = selector(far, max_ttft_p99_ms=350.0).select((), speeds, 0.0, prefill_work=1000.0)
    assert found is None and reason == "no offer is available: 1 × too far away for max_ttft_p99_ms"


def test_an_offer_without_a_round_trip_has_that_of_its_island() -> None:
    islands = IslandRegistry([IslandConfig(name="far", round_trip_ms=300.0)])
    offers = OfferSelector(Scaling(enabled=True, max_ttft_p99_ms=200.0), islands.round_trip_ms)
    offers.update_offers([offer("a", island="far"), offer("b", island="local", usd_per_hour=9.0)])
    found, _ = offers.select((), GpuSpeeds(()), 0.0)
    assert found is not None and found.name == "b"
    offers.update_offers([offer("a", island="far", round_trip_ms=10.0), offer("b", island="local", usd_per_hour=9.0)])
    assert offers.select((), GpuSpeeds(()), 0.0)[0].name == "a", "the provisioner knows better"  # type: ignore[union-attr]


@pytest.mark.parametrize("price", [nan, inf, -1.0, 1e9])
def test_an_impossible_price_is_ignored_and_reported(price: float) -> None:
    offers = selector(offer("bad", usd_per_hour=price), offer("good", usd_per_hour=2.0))
    assert [one.name for one in offers.offers] == ["good"]
    assert len(offers.problems) == 1 and "bad" in offers.problems[0]


# Removal.


def test_removal_respects_the_minimum_of_an_island() -> None:
    fleet = (node("far-1", island="far"), node("far-2", island="far"), node("near"))
    limits = Scaling(enabled=True, islands=(IslandLimits(island="far", min_nodes=2),))
    inputs = ScalingInputs(limits, view(0.0, 0, 1.0, nodes=fleet), (), 1.0)
    assert [one.node.name for one in rank_candidates(inputs)] == ["near"]


def test_prefixes_that_only_one_node_holds_are_found() -> None:
    fleet, cache_view, hot = Fleet(Health()), CacheView(Index()), HotPrefixes()
    autoscaler = Autoscaler(CONFIG, fleet, cache_view, DemandMeter(), hot, lambda: 0)
    chain = bytes(range(64))
    for name in "ab":
        fleet.add(NodeConfig(url=f"http://{name}:1", name=name))
    a, b = cache_view.add_node("a", ["m"]), cache_view.add_node("b", ["m"])
    a.record_routed(chain, 128, 0.0)
    for at in range(10):
        hot.record(chain, 16, PROMPT, float(at))
    found = autoscaler.prefixes_to_move("a", 10.0)
    assert [(prefix.chain, prefix.tokens) for prefix in found] == [(chain, 8 * 16)]
    assert not autoscaler.prefixes_to_move("b", 10.0)
    b.record_routed(chain, 128, 11.0)
    assert not autoscaler.prefixes_to_move("a", 11.0)


# Hot prefixes.


def test_only_the_hot_prefix_of_a_prompt_is_kept() -> None:
    """A long conversation behind a system prompt is not part of the prefix, and takes no memory."""
    hot, random = HotPrefixes(), Random(5)
    shared = array("I", [random.randrange(50_000) for _ in range(512)]).tobytes()
    for at in range(20):
        own = array("I", [random.randrange(50_000) for _ in range(20_000)]).tobytes()
        prompt = Lookup(shared + own, 20_512, 20_512, salt="s")
        hot.record(prompt.blocks("m", "", 16), 16, prompt, float(at))
    (found,) = hot.hottest(8, 20.0)
    example = found.example
    assert found.tokens == example.token_count == example.exact_tokens == 512
    assert example.first_tokens(10_000) == array("I", shared).tolist()
    assert example.model_of(found.chain) == "m" and example.salt == "s"
    assert example.blocks("m", "", 16) == found.chain


def test_the_longest_shared_prefix_is_hot() -> None:
    hot, random = HotPrefixes(), Random(7)
    shared = random.randbytes(8 * 32)
    for at in range(50):
        hot.record(shared + random.randbytes(8 * 20), 16, PROMPT, at * 0.5)
        hot.record(random.randbytes(8 * 40), 16, PROMPT, at * 0.5)
    (found,) = hot.hottest(8, 25.0)
    assert found.chain == shared and found.tokens == 32 * 16
    assert not hot.hottest(8, 25.0 + 1200.0)  # its uses have decayed


def test_the_hottest_prefixes_are_those_that_cost_the_most_work() -> None:
    """A short prefix of many requests, a long one of few, and one of a middle length whose loss costs the most."""
    hot, random = HotPrefixes(), Random(9)
    short, middle, long = (random.randbytes(8 * blocks) for blocks in (1, 16, 64))
    for chain, times in ((short, 60), (long, 5), (middle, 40)):
        for _ in range(times):
            hot.record(chain, 16, PROMPT, 0.0)
    assert [found.chain for found in hot.hottest(8, 0.0)] == [middle, long, short]
    assert [found.chain for found in hot.hottest(1, 0.0)] == [middle]


def test_a_prefix_that_was_cold_needs_new_uses_to_be_hot_again() -> None:
    """Its example and its place among the MAX_EXAMPLES are free meanwhile."""
    hot, random = HotPrefixes(), Random(4)
    chains = [random.randbytes(8) for _ in range(MAX_EXAMPLES + 1)]
    for chain in chains[:MAX_EXAMPLES]:
        for _ in range(4):
            hot.record(chain, 16, PROMPT, 0.0)
    assert len(hot.hottest(10_000, 0.0)) == MAX_EXAMPLES
    assert not hot.hottest(10_000, 600.0)
    for chain in chains:
        for _ in range(4):
            hot.record(chain, 16, PROMPT, 600.0)
    assert {found.chain for found in hot.hottest(10_000, 600.0)} == {*chains[:MAX_EXAMPLES]}


def test_hot_prefixes_are_bounded() -> None:
    hot, random = HotPrefixes(), Random(3)
    for at in range(3000):
        chain = random.randbytes(8 * 6)
        for _ in range(4):
            hot.record(chain, 16, PROMPT, at * 0.01)
        assert len(hot) <= MAX_COUNTS
    assert len(hot.hottest(10_000, 30.0)) <= MAX_EXAMPLES


# The lifecycle of a node.

OFFER = offer()


def test_the_lifecycle_from_request_to_termination() -> None:
    states: list[LifecycleState] = []
    nodes_ = ManagedNodes(CONFIG)
    managed = nodes_.add("t", OFFER, 0.0)
    assert nodes_.add("t", OFFER, 5.0) is managed
    for at, event in enumerate(
        (
            LifecycleEvent.ACCEPTED,
            LifecycleEvent.HAS_ADDRESS,
            LifecycleEvent.CHECK_PASSED,
            LifecycleEvent.PREWARMED,
            LifecycleEvent.REMOVE,
            LifecycleEvent.DRAINED,
            LifecycleEvent.GONE,
        )
    ):
        assert nodes_.apply(managed, event, float(at))
        assert not nodes_.apply(managed, event, float(at))  # a repeated event changes nothing
        states.append(managed.state)
    assert states == [
        LifecycleState.BOOTING,
        LifecycleState.LOADING,
        LifecycleState.WARMING,
        LifecycleState.SERVING,
        LifecycleState.DRAINING,
        LifecycleState.TERMINATING,
        LifecycleState.TERMINATED,
    ]
    assert not len(nodes_)


def test_a_node_that_does_not_start_is_terminated_and_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_lifecycle, "PREWARM_TIMEOUT_S", 10.0)
    nodes_ = ManagedNodes(Scaling(enabled=True, boot_timeout_s=100.0))
    never, slow = nodes_.add("never", OFFER, 0.0), nodes_.add("slow to warm", OFFER, 0.0)
    for event in (LifecycleEvent.ACCEPTED, LifecycleEvent.HAS_ADDRESS, LifecycleEvent.CHECK_PASSED):
        nodes_.apply(slow, event, 0.0)
    nodes_.apply(never, LifecycleEvent.ACCEPTED, 0.0)
    assert nodes_.timed_out(50.0) == [slow]
    nodes_.apply(slow, LifecycleEvent.TIMED_OUT, 50.0)
    assert slow.state is LifecycleState.SERVING and not slow.failed_to_start
    assert nodes_.timed_out(101.0) == [never]
    nodes_.apply(never, LifecycleEvent.TIMED_OUT, 101.0)
    assert never.state is LifecycleState.TERMINATING and never.failed_to_start


@settings(max_examples=200, deadline=None)
@given(events=st.lists(st.sampled_from(list(LifecycleEvent)), max_size=30))
def test_a_lifecycle_never_goes_back_whatever_a_provisioner_reports(events: list[LifecycleEvent]) -> None:
    order = list(LifecycleState)
    nodes_ = ManagedNodes(CONFIG)
    managed = nodes_.add("t", OFFER, 0.0)
    before = managed.state
    for at, event in enumerate(events):
        nodes_.apply(managed, event, float(at))
        assert order.index(managed.state) >= order.index(before)
        before = managed.state
    assert (managed.state is LifecycleState.TERMINATED) == (nodes_.get("t") is None)
    assert not (managed.failed_to_start and managed.serving_since_s is not None)
    assert managed.pending == (managed.state in PENDING_STATES)


# Observation.


def sample(at_s: float, arrived: float) -> Sample:
    counts = [arrived if name == "arrived" else 0.0 for name in COUNTERS]
    no_times = array("q", bytes(8 * (len(TIME_BOUNDS_MS) + 1)))
    return Sample(at_s, 5.0, counts, no_times, no_times)


def test_windows_hold_exactly_their_time() -> None:
    windows = MetricWindows(Scaling(enabled=True, stable_window_s=60.0, panic_window_s=10.0, trend_window_s=0.0))
    for at in range(1, 101):
        windows.add(sample(at * 5.0, 50.0 if at > 98 else 5.0))
    assert windows.panic.arrivals_per_s == pytest.approx(10.0)
    assert windows.panic.span_s == pytest.approx(10.0)
    assert windows.stable.span_s == pytest.approx(60.0)
    assert windows.stable.arrivals_per_s == pytest.approx((10 * 5.0 + 2 * 50.0) / 60.0)


def test_noise_is_not_a_trend() -> None:
    random = Random(5)
    config = Scaling(enabled=True, trend_window_s=300.0)
    rising, noisy = MetricWindows(config), MetricWindows(config)
    for at in range(1, 61):
        rising.add(sample(at * 5.0, 20.0 + at))
        noisy.add(sample(at * 5.0, 50.0 + random.choice((-8.0, 8.0))))
    assert rising.growth_per_s == pytest.approx(0.04 / 16.0, rel=0.2)
    assert abs(noisy.growth_per_s) < 0.0005


def test_a_sample_covers_the_time_since_the_last_one() -> None:
    fleet, cache_view, demand_meter = Fleet(Health()), CacheView(Index()), DemandMeter()
    one = fleet.add(NodeConfig(url="http://a:1", name="a", models=("m",), gpu="L4", usd_per_hour=2.0))
    fleet.check_passed(one, 0.0)
    waiting = 3
    observer = FleetObserver(fleet, cache_view, demand_meter, lambda: waiting)
    observer.sample(0.0)
    demand_meter.arrived += 4
    demand_meter.record_sent(100.0, 60.0, 40.0)
    demand_meter.record_ttft(250.0)
    first = observer.sample(10.0)
    assert (first.span_s, first.counts[0], sum(first.ttft), first.waiting) == (10.0, 4.0, 1, 3)
    assert observer.sample(20.0).counts[0] == 0.0
    windows = MetricWindows(CONFIG)
    windows.add(first)
    managed = ManagedNode("t", OFFER, 0.0)
    managed.node, managed.state = one, LifecycleState.SERVING
    observed = observer.view(20.0, windows.stable, windows.panic, 0.0, [managed])
    assert observed.stable.hit_ratio == pytest.approx(0.6)
    assert observed.stable.prefill_work == pytest.approx(40.0)
    (node_,) = observed.nodes
    assert (node_.gpu, node_.usd_per_hour, node_.serving, node_.offer) == ("L4", 2.0, True, ("cloud", "small"))
    fleet.drain("a")
    assert not observer.view(20.0, windows.stable, windows.panic).nodes[0].serving


def test_idle_time_starts_with_the_first_sample() -> None:
    fleet, demand_meter = Fleet(Health()), DemandMeter()
    observer = FleetObserver(fleet, CacheView(Index()), demand_meter, lambda: 0)

    def idle_s(now_s: float) -> float:
        observer.sample(now_s)
        return observer.view(now_s, WindowMetrics(), WindowMetrics()).idle_s

    assert [idle_s(now_s) for now_s in (5000.0, 5010.0)] == [0.0, 10.0]
    demand_meter.arrived += 1
    assert [idle_s(now_s) for now_s in (5020.0, 5025.0)] == [0.0, 5.0]


def test_an_unchecked_node_differs_from_one_that_is_down() -> None:
    fleet = Fleet(Health())
    new, down, drained = (fleet.add(NodeConfig(url=f"http://{name}:1", name=name)) for name in "abc")
    fleet.check_failed(down, 1.0, "connection refused")
    fleet.drain(drained.name)
    observer = FleetObserver(fleet, CacheView(Index()), DemandMeter(), lambda: 0)
    observed = observer.view(2.0, WindowMetrics(), WindowMetrics()).nodes
    assert [(node_.unchecked, node_.serving) for node_ in observed] == [(True, False), (False, False), (False, False)]
    fleet.check_passed(new, 3.0)
    assert observer.view(4.0, WindowMetrics(), WindowMetrics()).nodes[0].unchecked is False


@given(times=st.lists(st.floats(2.0, 400_000.0), min_size=1, max_size=300), share=st.sampled_from([0.5, 0.9, 0.99]))
def test_a_percentile_is_exact_to_one_bucket(times: list[float], share: float) -> None:
    demand_meter = DemandMeter()
    for one in times:
        demand_meter.record_ttft(one)
    exact = sorted(times)[max(0, -int(-share * len(times) // 1) - 1)]
    found = percentile_ms(demand_meter.ttft_counts, share)
    assert found is not None and exact <= found * 1.0001 and found <= exact * 1.16


def test_there_is_no_percentile_without_times() -> None:
    assert percentile_ms(array("q", [0, 0]), 0.9) is None


# Capacity.


def test_half_the_fleet_has_twice_the_load_per_node_and_less_cache() -> None:
    reuse = {"reuse_within": lambda age_s: min(0.8, age_s / 1000.0)}
    more: dict[str, Any] = {"nodes": nodes(4, held_blocks=10_000, oldest_age_s=600.0), **reuse}
    observed = view(0.0, 4, 4.0, **more)
    speeds = GpuSpeeds(observed.nodes)
    demand, whole = Demand(observed, observed.stable, speeds), size_of(observed.nodes, speeds)
    half = FleetSize(whole.weight / 2, whole.blocks / 2)
    assert demand.retention_s(whole) == pytest.approx(600.0) and demand.retention_s(half) == pytest.approx(300.0)
    assert demand.hit_ratio(whole) == pytest.approx(0.8) and demand.hit_ratio(half) == pytest.approx(0.4)
    assert demand.utilisation(half) == pytest.approx(2 * 3 * demand.utilisation(whole))


def test_unique_traffic_has_the_same_load_on_any_fleet() -> None:
    observed = view(0.0, 4, 4.0, nodes=nodes(4, held_blocks=10_000), stable={"hit_ratio": 0.0})
    speeds = GpuSpeeds(observed.nodes)
    demand, whole = Demand(observed, observed.stable, speeds), size_of(observed.nodes, speeds)
    assert demand.load(FleetSize(2.0, 20_000)) == pytest.approx(demand.load(whole))


@settings(max_examples=100, deadline=None)
@given(weight=st.floats(1.0, 50.0), arrivals=st.floats(0.01, 50.0), variation=st.floats(0.0, 100.0))
def test_more_nodes_never_wait_longer(weight: float, arrivals: float, variation: float) -> None:
    observed = view(0.0, 4, arrivals, stable={"variation": variation})
    demand = Demand(observed, observed.stable, GpuSpeeds(observed.nodes))
    less, more = demand.wait_ms(FleetSize(weight, 1e4)), demand.wait_ms(FleetSize(weight + 1.0, 1e4))
    assert more <= less


def test_an_unknown_gpu_has_the_usual_speed() -> None:
    speeds = GpuSpeeds((node("a", gpu="L4", ms_per_token=0.1), node("b", gpu="L4", ms_per_token=0.1)))
    assert speeds.weight("B200") == 1.0 and speeds.ms_per_token("B200") is None
    assert GpuSpeeds(()).weight("L4") == 1.0
    assert window(1.0).prefill_work is not None


# Schedule.


@pytest.mark.parametrize(
    ("day", "clock", "least"),
    [(0, "08:59", 0), (0, "09:00", 4), (0, "17:59", 4), (0, "18:00", 0), (5, "12:00", 0), (4, "23:30", 6),
     (5, "01:00", 6), (5, "02:00", 0), (0, "01:00", 0)],
)  # fmt: skip
def test_the_schedule_applies_by_day_and_time(day: int, clock: str, least: int) -> None:
    hours = (
        Hours(start="09:00", end="18:00", days=("mon", "tue", "wed", "thu", "fri"), min_nodes=4),
        Hours(start="22:00", end="02:00", days=("fri",), min_nodes=6),
    )
    monday_s = 4 * 86_400  # 1970-01-05
    hour, minute = clock.split(":")
    assert scheduled_min_nodes(hours, monday_s + day * 86_400 + int(hour) * 3600 + int(minute) * 60) == least


# The configuration.


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"min_nodes": 9, "max_nodes": 8}, "above scaling.max_nodes"),
        ({"max_queue_per_node": 1.0}, "scaling.max_queue_per_node: expected a number > 1.0"),
        ({"target_utilisation": 0.3}, "scaling.target_utilisation: expected a number >= 0.45"),
        ({"islands": [{"island": "a"}, {"island": "a"}]}, "is defined twice"),
        ({"islands": [{"island": "a", "min_nodes": 9}]}, "above scaling.max_nodes"),
        ({"hours": [{"start": "9", "end": "10:00", "min_nodes": 1}]}, "scaling.hours"),
        ({"hours": [{"start": "09:00", "end": "10:00", "min_nodes": 99}]}, "above scaling.max_nodes"),
        ({"islands": [{"islnd": "a"}]}, "unknown key scaling.islands.islnd; did you mean scaling.islands.island?"),
    ],
)
def test_contradicting_settings_are_rejected(table: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        from_table({"scaling": table}, experiment=True)
    assert words in str(error.value)
