"""The distance of islands: measured or configured, with egress costs and queues."""

from __future__ import annotations

from array import array

import pytest

from warmroute.config import Health, Index, IslandAffinity, IslandConfig, NodeConfig, Routing
from warmroute.core.cache_view import CacheView
from warmroute.core.fleet import Fleet
from warmroute.core.islands import WINDOW_S
from warmroute.core.messages import Lookup, Outcome, RoutingRequest
from warmroute.core.node import Node
from warmroute.core.router import Router


def fleet_of(
    *places: str, islands: tuple[IslandConfig, ...] = (), usd_per_hour: float = 2.0
) -> tuple[Fleet, list[Node]]:
    fleet = Fleet(Health())
    fleet.islands.reconfigure(islands, IslandAffinity(gpu_usd_per_hour=usd_per_hour))
    nodes = [
        fleet.add(NodeConfig(url=f"http://n{at}:1", name=f"n{at}", models=("m",), island=place))
        for at, place in enumerate(places)
    ]
    for node in nodes:
        fleet.check_passed(node, 0.0)
    return fleet, nodes


def test_the_round_trip_is_the_fastest_recent_health_check_of_any_node() -> None:
    fleet, (one, two, other) = fleet_of("a", "a", "b")
    for at, (node, took_ms) in enumerate(((one, 900.0), (two, 41.0), (one, 350.0), (two, 44.0), (other, 7.0))):
        fleet.islands.record_round_trip(node, took_ms, float(at))
    assert one.round_trip_ms == two.round_trip_ms == 41.0
    assert one.distance_ms == 41.0 and other.distance_ms == 7.0


def test_a_longer_round_trip_is_noticed_within_two_windows() -> None:
    fleet, (node,) = fleet_of("a")
    for second in range(int(3 * WINDOW_S)):
        fleet.islands.record_round_trip(node, 40.0 if second < 10 else 90.0, float(second))
    assert node.round_trip_ms == 90.0


def test_a_configured_round_trip_overrides_the_measured_one() -> None:
    fleet, (node,) = fleet_of("a", islands=(IslandConfig(name="a", round_trip_ms=70.0),))
    fleet.islands.record_round_trip(node, 3.0, 1.0)
    assert node.distance_ms == 70.0
    fleet.islands.reconfigure((), IslandAffinity())
    assert node.distance_ms == 3.0


def test_egress_costs_are_converted_to_time() -> None:
    priced = IslandConfig(name="a", round_trip_ms=10.0, egress_usd_per_gb=0.1)
    fleet, (node, free) = fleet_of("a", "b", islands=(priced,), usd_per_hour=3.6)
    for _ in range(2000):
        fleet.islands.record_request_size(1_000_000.0)  # 0.0001 USD; an hour is 3.60, so a millisecond is 0.000001
    assert node.distance_ms == pytest.approx(10.0 + 100.0, rel=0.06)
    assert node.round_trip_ms == 10.0
    assert free.distance_ms == 0.0


def test_queued_requests_increase_the_distance_of_their_island() -> None:
    fleet, (one, two, other) = fleet_of("a", "a", "b")
    for _ in range(60):
        fleet.islands.update_queues({"a": 3000.0})
    assert one.distance_ms == two.distance_ms == pytest.approx(1500.0, rel=0.06)
    assert other.distance_ms == 0.0 and fleet.islands.has_queues
    for _ in range(60):
        fleet.islands.update_queues({})
    assert one.distance_ms == 0.0 and not fleet.islands.has_queues


def test_an_island_exists_while_it_has_nodes() -> None:
    fleet, _ = fleet_of("a", "b")
    assert [island.name for island in fleet.islands] == ["a", "b"]
    group = fleet.group("m")
    assert group is not None and group.spans_islands
    assert [node.name for node in group.on_islands("b").nodes] == ["n1"] and group.on_islands("b") is group.on_islands(
        "b"
    )
    assert group.on_islands("b").shared_by == 2 and not group.on_islands("c").nodes
    fleet.remove("n1")
    assert [island.name for island in fleet.islands] == ["a"] and not group.spans_islands
    moved = NodeConfig(url="http://n0:1", name="n0", models=("m",), island="c")
    fleet.reconfigure([NodeConfig(url="http://n0:1", name="n0", models=("m",), island="a")], Health())
    fleet.reconfigure([moved], Health())
    assert [island.name for island in fleet.islands] == ["c"]


def test_the_round_trip_does_not_count_as_prefill() -> None:
    speeds = []
    for round_trip_ms in (0.0, 280.0):
        far = IslandConfig(name="a", round_trip_ms=round_trip_ms)
        fleet, (node,) = fleet_of("a", islands=(far,))
        cache_view = CacheView(Index())
        cache_view.add_node(node.name, ["m"])
        router, now_s = Router(fleet, cache_view, Routing(seed=1)), 100.0
        for number in range(30):
            lookup = Lookup(bytes([number, 1, 0, 0]) * 1000, 1000, 0, salt=str(number))
            ticket = router.open_ticket(router.decide(RoutingRequest("m"), now_s, lookup), node, now_s)
            ticket.first_token(now_s + (round_trip_ms + 80.0) / 1000.0)
            fleet.close_ticket(ticket, Outcome.OK, now_s + 1.0)
            now_s += 5.0
        speeds.append(node.speed.ms_per_token)
    assert speeds[1] == pytest.approx(speeds[0], rel=0.02)


def test_a_measured_round_trip_survives_a_reload_of_other_settings() -> None:
    fleet, (one, _) = fleet_of("a", "b")
    fleet.islands.record_round_trip(one, 41.0, 1.0)
    nodes = [NodeConfig(url=f"http://n{at}:1", name=f"n{at}", models=("m",), island="ab"[at]) for at in range(2)]
    fleet.reconfigure(nodes, Health())
    changed = NodeConfig(url="http://n0:1", name="n0", models=("m", "another"), island="a")
    fleet.reconfigure([changed, nodes[1]], Health())
    assert one.round_trip_ms == one.distance_ms == 41.0
    moved = NodeConfig(url="http://n0:1", name="n0", models=("m",), island="c")
    fleet.reconfigure([moved, nodes[1]], Health())
    assert one.distance_ms == 0.0 and {island.name for island in fleet.islands} == {"b", "c"}, (
        "another island has its own round trip"
    )


def test_a_configured_round_trip_that_is_too_long_does_not_make_a_node_appear_fast() -> None:
    fleet, (node,) = fleet_of("a", islands=(IslandConfig(name="a", round_trip_ms=300.0),))
    cache_view = CacheView(Index())
    cache_view.add_node(node.name, ["m"]).set_size(16, 0)
    router = Router(fleet, cache_view, Routing(policy="price", seed=1))
    now_s = 100.0
    for number in range(60):
        tokens = array("I", range(number << 12, (number << 12) + 2000))
        decision = router.decide(RoutingRequest("m"), now_s, Lookup(tokens.tobytes(), 2000, 0))
        ticket = router.open_ticket(decision, node, now_s)
        now_s += 0.2  # 2,000 tokens in 200 ms: 0.1 ms per token
        ticket.first_token(now_s)
        ticket.close(Outcome.OK, now_s)
        now_s += 1.0
    assert node.speed.ms_per_token == pytest.approx(0.1, rel=0.3)
