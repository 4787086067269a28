"""What each policy promises."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from policy_harness import POLICIES, PolicyHarness

from warmroute.config import Health as HealthConfig
from warmroute.config import Index, NodeConfig, Routing
from warmroute.core.cache_view import CacheView
from warmroute.core.fleet import Fleet
from warmroute.core.messages import Outcome, RoutingRequest
from warmroute.core.node import Ticket
from warmroute.core.router import Router


@pytest.mark.parametrize("policy", POLICIES)
def test_the_fallbacks_of_every_policy_are_all_other_nodes(policy: str) -> None:
    harness = PolicyHarness(policy, 5)
    for number in range(20):
        decision = harness.decide(str(number), user=f"u{number}")
        order = [decision.node, *decision.fallbacks()]
        assert len(order) == 5 and set(order) == set(harness.nodes)
        assert decision.reason


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_works_with_one_node(policy: str) -> None:
    harness = PolicyHarness(policy, 1)
    decision = harness.decide(user="u")
    assert decision.node is harness.nodes[0] and decision.fallbacks() == []


@pytest.mark.parametrize("policy", POLICIES)
def test_a_cold_fleet_spreads(policy: str) -> None:
    harness = PolicyHarness(policy, 4)
    chosen = Counter(harness.decide(f"{number} question", user=f"u{number}").node.name for number in range(400))
    assert len(chosen) == 4 and max(chosen.values()) < 200


@pytest.mark.parametrize("policy", POLICIES)
def test_no_policy_piles_all_requests_on_one_node(policy: str) -> None:
    """The same prompt again and again, and no request ends: it spreads once its node costs more."""
    harness = PolicyHarness(policy, 4)
    for _ in range(100):
        harness.send("the same")
    loads = [node.inflight for node in harness.nodes]
    assert max(loads) <= 60 and min(loads) >= 5, loads


def test_round_robin_chooses_each_node_in_turn() -> None:
    harness = PolicyHarness("round_robin", 3)
    names = [harness.decide().node.name for _ in range(6)]
    assert names == ["n0:1", "n1:1", "n2:1"] * 2


def test_the_fallbacks_of_round_robin_are_the_next_in_turn() -> None:
    harness = PolicyHarness("round_robin", 4)
    harness.decide()
    decision = harness.decide()
    assert [node.name for node in [decision.node, *decision.fallbacks()]] == ["n1:1", "n2:1", "n3:1", "n0:1"]


def test_random_chooses_every_node_equally_often() -> None:
    harness = PolicyHarness("random", 4)
    chosen = Counter(harness.decide().node.name for _ in range(4000))
    assert all(850 < count < 1150 for count in chosen.values())


def test_least_loaded_chooses_the_node_with_the_fewest_requests_of_any_client() -> None:
    harness = PolicyHarness("least_loaded", 3)
    a, b, c = harness.nodes
    tickets = [Ticket(a, 0), Ticket(a, 0), Ticket(b, 0)]
    c.update_load(running=4, waiting=1, kv_usage=0, now_s=0)
    decision = harness.decide()
    assert decision.node is b and decision.fallbacks() == [a, c]
    tickets[0].close(Outcome.OK, 1)
    tickets[1].close(Outcome.OK, 1)
    assert harness.decide().node is a


@given(st.lists(st.integers(0, 5), min_size=2, max_size=8))
def test_least_loaded_never_chooses_a_busier_node(loads: list[int]) -> None:
    harness = PolicyHarness("least_loaded", len(loads))
    for node, load in zip(harness.nodes, loads, strict=True):
        node.other_load = load
    for _ in range(10):
        decision = harness.decide()
        assert decision.node.load == min(loads)
        rest = [node.load for node in decision.fallbacks()]
        assert rest == sorted(rest)


def test_ties_of_the_least_loaded_spread() -> None:
    harness = PolicyHarness("least_loaded", 4)
    for node in harness.nodes[:2]:
        node.other_load = 3
    chosen = Counter(harness.decide().node.name for _ in range(400))
    assert set(chosen) == {"n2:1", "n3:1"} and min(chosen.values()) > 60


def test_ties_of_the_least_loaded_spread_evenly() -> None:
    harness = PolicyHarness("least_loaded", 8)
    for node in harness.nodes[1:7]:
        node.other_load = 3
    chosen = Counter(harness.decide().node.name for _ in range(1000))
    assert min(chosen.values()) > 350


def test_power_of_two_never_chooses_the_busiest_node() -> None:
    harness = PolicyHarness("power_of_two", 5)
    harness.nodes[2].other_load = 100
    assert "n2:1" not in {harness.decide().node.name for _ in range(300)}


def test_power_of_two_balances_nearly_as_well_as_least_loaded() -> None:
    harness = PolicyHarness("power_of_two", 10)
    for _ in range(1000):
        harness.send()
    assert max(node.inflight for node in harness.nodes) <= 110


def test_latency_prefers_the_fast_node_until_its_queue_is_longer() -> None:
    harness = PolicyHarness("latency", 2)
    fast, slow = harness.nodes
    fast.latency_ms, slow.latency_ms = 100, 300
    assert harness.decide().node is fast
    fast.other_load = 2
    slow.other_load = 0
    harness.decide()
    fast.other_load = 3
    assert harness.decide().node is slow


def test_latency_tries_a_node_without_an_average() -> None:
    harness = PolicyHarness("latency", 3)
    for node in harness.nodes[:2]:
        node.latency_ms, node.other_load = 100, 1
    assert harness.decide().node is harness.nodes[2]


# Sessions.


def test_latency_tries_a_slow_node_again() -> None:
    fleet = Fleet(HealthConfig())
    slow, fast = (fleet.add(NodeConfig(url=f"http://n{number}:1", models=("m",))) for number in range(2))
    for node, took_ms in ((slow, 1000.0), (fast, 10.0)):
        fleet.check_passed(node, 0.0)
        node.record_latency(took_ms)
    router = Router(fleet, CacheView(Index()), Routing(policy="latency", seed=1))
    assert router.decide(RoutingRequest("m"), 1.0).node is fast
    for second in range(60):
        slow.decay_latency(float(second))
    assert router.decide(RoutingRequest("m"), 61.0).node is slow
