"""Which nodes the router offers to every policy, and in which states of their health."""

from __future__ import annotations

from collections import Counter

import pytest
from policy_harness import POLICIES, PolicyHarness

from warmroute.config import NodeConfig
from warmroute.core.messages import Outcome, RoutingRequest
from warmroute.core.node import Node, Ticket
from warmroute.core.rejections import MissingModel, NoNodeAvailable, UnknownModel


def test_a_model_is_unknown_only_if_every_node_has_reported_its_models() -> None:
    harness = PolicyHarness("random")
    with pytest.raises(UnknownModel):
        harness.decide(model="none")
    harness.fleet.add(NodeConfig(url="http://silent:1"))
    with pytest.raises(NoNodeAvailable):
        harness.decide(model="none")


def test_a_request_without_a_model_needs_a_fleet_with_one_model() -> None:
    assert PolicyHarness("random").router.decide(RoutingRequest(""), 0)
    with pytest.raises(MissingModel):
        PolicyHarness("random", models=("a", "b")).router.decide(RoutingRequest(""), 0)
    with pytest.raises(NoNodeAvailable):
        PolicyHarness("random", count=0).router.decide(RoutingRequest(""), 0)


def test_suspected_nodes_are_used_only_while_none_is_up() -> None:
    harness = PolicyHarness("random", 3)
    for node in harness.nodes[:2]:
        for second in (100, 110, 120):
            harness.fleet.check_timed_out(node, second)
    assert {harness.decide().node for _ in range(50)} == {harness.nodes[2]}
    harness.fleet.check_failed(harness.nodes[2], 130, "gone")
    assert {harness.decide().node for _ in range(50)} == set(harness.nodes[:2])
    for node in harness.nodes[:2]:
        harness.fleet.check_failed(node, 140, "gone")
    with pytest.raises(NoNodeAvailable):
        harness.decide()


def make_half_open(harness: PolicyHarness, node: Node) -> None:
    for _ in range(5):
        harness.fleet.close_ticket(Ticket(node, 0), Outcome.FAILED, 0, "x")
    harness.fleet.check_passed(node, 10)


def test_a_half_open_node_gets_one_trial_request_at_a_time() -> None:
    harness = PolicyHarness("round_robin", 3)
    node = harness.nodes[0]
    make_half_open(harness, node)
    decision = harness.decide(now_s=10)
    assert decision.node is node and decision.policy == "half_open"
    assert set(decision.fallbacks()) == set(harness.nodes[1:])
    trial = Ticket(node, 10)
    assert node not in {harness.decide(now_s=10).node for _ in range(20)}
    trial.close(Outcome.CANCELLED, 11)
    assert harness.decide(now_s=11).node is node


@pytest.mark.parametrize("policy", POLICIES)
def test_a_recovered_node_starts_slowly(policy: str) -> None:
    harness = PolicyHarness(policy, 2, slow_start_s=10.0)
    node = harness.nodes[0]
    harness.fleet.check_failed(node, 0, "gone")
    harness.fleet.check_passed(node, 1000)
    shares = []
    for now_s in (1000.5, 1005.0, 1010.0):
        chosen = [harness.decide(f"{n}", now_s, user=f"u{n}").node is node for n in range(400)]
        shares.append(sum(chosen) / 400)
    assert shares[0] < 0.15 and shares[0] < shares[1] < 0.45 and shares[2] > 0.4


def test_nodes_that_started_together_have_no_slow_start() -> None:
    """For example all engines of a fleet that started after the router: no node needs protection from its share."""
    harness = PolicyHarness("round_robin", 3, slow_start_s=10.0)
    for node in harness.nodes:
        harness.fleet.check_failed(node, 0, "gone")
    for node in harness.nodes[:2]:
        harness.fleet.check_passed(node, 1000)
    counts = Counter(harness.decide(now_s=1005.0).node for _ in range(100))
    assert counts[harness.nodes[0]] == counts[harness.nodes[1]] == 50  # in turn: neither was left out
    harness.fleet.check_passed(harness.nodes[2], 1004.5)
    counts = Counter(harness.decide(now_s=1005.0).node for _ in range(400))
    assert 0 < counts[harness.nodes[2]] < 100


def test_a_node_in_slow_start_is_still_a_fallback() -> None:
    harness = PolicyHarness("round_robin", 2, slow_start_s=10.0)
    harness.fleet.check_failed(harness.nodes[0], 0, "gone")
    harness.fleet.check_passed(harness.nodes[0], 1000)
    for _ in range(50):
        decision = harness.decide(now_s=1000.1)
        assert {decision.node, *decision.fallbacks()} == set(harness.nodes)


def test_the_same_seed_gives_the_same_choices() -> None:
    chosen = [
        [harness.decide().node.name for _ in range(50)]
        for harness in (PolicyHarness("random", 5), PolicyHarness("random", 5))
    ]
    assert chosen[0] == chosen[1]
