"""Policies that hash: session and prefix_hash."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import pytest
from policy_harness import PolicyHarness, request

from warmroute.config import Health as HealthConfig
from warmroute.config import Index, NodeConfig, Pricing, RouteConfig, Routing
from warmroute.core.cache_view import CacheView
from warmroute.core.fleet import Fleet
from warmroute.core.messages import Outcome, RoutingRequest
from warmroute.core.node import Ticket
from warmroute.core.router import Router


def test_a_session_stays_on_its_node() -> None:
    harness = PolicyHarness("session", 6)
    for number in range(30):
        nodes = {harness.decide(f"turn {turn}", user=f"user-{number}").node for turn in range(5)}
        assert len(nodes) == 1


@pytest.mark.parametrize("field", ["session_id", "conversation_id", "prompt_cache_key", "user"])
def test_a_field_of_the_body_identifies_a_session(field: str) -> None:
    harness = PolicyHarness("session", 6)
    sessions: list[dict[str, Any]] = [{field: f"s{number}"} for number in range(40)]
    same: dict[str, Any] = {field: "same"}
    homes = {harness.decide("x", **session).node for session in sessions}
    assert len(homes) == 6
    assert {harness.decide(str(turn), **same).node for turn in range(20)} == {harness.decide("x", user="same").node}


def test_a_session_header_overrides_the_body() -> None:
    harness = PolicyHarness("session", 6)
    for number in range(20):
        with_header = request("x", user=f"u{number}", session_header=b"one")
        assert harness.router.decide(with_header, 0).node is harness.decide("y", user="one").node


def test_without_a_session_the_least_loaded_node_is_chosen() -> None:
    harness = PolicyHarness("session", 3)
    harness.nodes[0].other_load = harness.nodes[2].other_load = 5
    assert harness.decide().node is harness.nodes[1]


def test_without_a_session_a_configured_prefix_key_decides() -> None:
    harness, by_prefix = PolicyHarness("session", 4), PolicyHarness("prefix_hash", 4)
    for one, policy in ((harness, "session"), (by_prefix, "prefix_hash")):
        one.router.reconfigure(Routing(policy=policy, prefix_key="system"), Pricing())  # type: ignore[arg-type]
    for number in range(10):
        system = f"You are bank {number}."
        assert harness.decide(system=system).node.name == by_prefix.decide(system=system).node.name
    named = {harness.decide(system="You are a bank.", user=f"user {number}").node.name for number in range(12)}
    assert len(named) > 2, "sessions still have their own node"


# Prefix hash.


def homes(harness: PolicyHarness, users: int, system: str, start: int = 0, **fields: Any) -> set[str]:
    """Return the nodes that the users of an application get, one after the other."""
    found = set()
    for user in range(users):
        asked = request(f"I am user {user}", system=system, **fields)
        if start:
            asked.start = f'[{{"role":"system","content":"{system}"}},{{"content":"{user}"}}]'.encode()[:start]
        found.add(harness.router.decide(asked, 0.0).node.name)
    return found


def test_all_users_of_a_system_prompt_share_a_node_if_that_is_the_key() -> None:
    harness = PolicyHarness("prefix_hash", 4)
    assert len(homes(harness, 12, "You are a bank.")) > 2, "by default, each conversation has its own node"
    harness.router.reconfigure(Routing(policy="prefix_hash", prefix_key="system"), Pricing())
    assert len(homes(harness, 12, "You are a bank.")) == 1
    assert len(set().union(*(homes(harness, 1, f"You are bank {number}.") for number in range(20)))) > 2
    assert len(homes(harness, 12, "")) > 2, "without a system prompt, the first user message counts"


def test_a_shared_system_prompt_spills_to_other_nodes_under_load() -> None:
    harness = PolicyHarness("prefix_hash", 4)
    harness.router.reconfigure(Routing(policy="prefix_hash", prefix_key="system"), Pricing())
    sent = [Ticket(harness.decide(f"user {number}", system="You are a bank.").node, 0) for number in range(12)]
    by_node = Counter(ticket.node.name for ticket in sent)
    assert len(by_node) > 2 and max(by_node.values()) <= 5, "no node has more than 1.25 × the mean, rounded up"


def test_the_key_can_be_the_start_of_the_prompt_and_differ_by_route() -> None:
    harness = PolicyHarness("prefix_hash", 4)
    route = RouteConfig(name="bank", policy="prefix_hash", prefix_key="start", prefix_characters=40)
    harness.router.reconfigure(Routing(policy="prefix_hash"), Pricing(), (route,))
    system = "You are a bank of these people."
    assert len(homes(harness, 12, system, start=4096)) > 2, "only requests of the route have this key"
    for start, nodes in ((4096, 1), (40, 1)):
        found = set()
        for user in range(12):
            asked = request(f"I am {user}", system=system)
            asked.start, asked.route = f'[{{"content":"{system}"}},{{"content":"{user}"}}]'.encode()[:start], "bank"
            found.add(harness.router.decide(asked, 0.0).node.name)
        assert len(found) == nodes


@pytest.mark.parametrize("characters", [1, 3, 255])
def test_a_shorter_key_uses_fewer_characters_of_each_text(characters: int) -> None:
    harness = PolicyHarness("prefix_hash", 8)
    harness.router.reconfigure(Routing(policy="prefix_hash", prefix_characters=characters), Pricing())
    same = {harness.decide("é" * characters + str(number)).node.name for number in range(20)}
    assert len(same) == 1
    assert len({harness.decide(f"{number:0{characters}d}").node.name for number in range(9)}) > 1


def test_requests_with_the_same_prefix_go_to_the_same_node() -> None:
    harness = PolicyHarness("prefix_hash", 6)
    for number in range(30):
        system = f"You are {number}. " + "x" * 300
        same = {harness.decide("y" * 256 + tail, system=system + tail).node for tail in ("", "a", "b" * 500)}
        assert len(same) == 1


def test_requests_with_different_prefixes_spread() -> None:
    harness = PolicyHarness("prefix_hash", 6)
    assert len({harness.decide(f"{number}").node for number in range(100)}) == 6
    assert len({harness.decide("x", system=f"{number}").node for number in range(100)}) == 6


def test_fallbacks_follow_the_hash_and_traffic_returns_home() -> None:
    harness = PolicyHarness("prefix_hash", 6)
    for number in range(30):
        decision = harness.decide(str(number))
        order = [decision.node, *decision.fallbacks()]
        harness.fleet.drain(order[0].name)
        assert harness.decide(str(number)).node is order[1]
        harness.fleet.drain(order[1].name)
        assert harness.decide(str(number)).node is order[2]
        harness.fleet.drain(order[0].name, False)
        assert harness.decide(str(number)).node is order[0]
        harness.fleet.drain(order[1].name, False)


@pytest.mark.parametrize("policy", ["prefix_hash", "session"])
def test_no_node_gets_much_more_than_its_share(policy: str) -> None:
    harness = PolicyHarness(policy, 4)
    tickets = []
    random = Random(5)
    for number in range(500):
        hot = random.random() < 0.7
        decision = harness.decide("hot" if hot else str(number), user="hot" if hot else str(number))
        tickets.append(Ticket(decision.node, 0))
        total = len(tickets)
        assert max(node.inflight for node in harness.nodes) <= 1.25 * total / 4 + 1
        if random.random() < 0.4:
            tickets.pop(random.randrange(total)).close(Outcome.OK, 0)


def test_an_overloaded_home_is_skipped_until_it_has_room() -> None:
    harness = PolicyHarness("prefix_hash", 4)
    first = harness.decide("k")
    order = [first.node, *first.fallbacks()]
    tickets = [Ticket(order[0], 0) for _ in range(8)]
    decision = harness.decide("k")
    assert decision.node is order[1] and decision.reason == "home overloaded"
    assert decision.fallbacks() == [order[0], *order[2:]]
    for ticket in tickets:
        ticket.close(Outcome.OK, 0)
    assert harness.decide("k").node is order[0]


def test_without_a_prefix_the_least_loaded_node_is_chosen() -> None:
    harness = PolicyHarness("prefix_hash", 3)
    harness.nodes[0].other_load = harness.nodes[2].other_load = 5
    assert harness.router.decide(RoutingRequest("m"), 0).node is harness.nodes[1]


def test_a_draining_node_does_not_raise_the_limit_of_the_others() -> None:
    fleet = Fleet(HealthConfig())
    for number in range(3):
        fleet.check_passed(fleet.add(NodeConfig(url=f"http://n{number}:1", models=("m",))), 0.0)
    leaving = fleet.node("n2:1")
    for _ in range(60):
        Ticket(leaving, 0.0)
    fleet.drain("n2:1")
    router = Router(fleet, CacheView(Index()), Routing(policy="prefix_hash", seed=1))
    for _ in range(40):
        Ticket(router.decide(RoutingRequest("m", b"system", b"user"), 1.0).node, 1.0)
    assert max(fleet.node(f"n{number}:1").inflight for number in range(2)) <= 26
