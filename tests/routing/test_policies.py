"""What each policy promises."""

from __future__ import annotations

import json
from collections import Counter
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from warmroute.config import Health as HealthConfig
from warmroute.config import Index, NodeConfig, Pricing, RouteConfig, Routing
from warmroute.fleet.fleet import Fleet
from warmroute.fleet.node import Node, Outcome
from warmroute.fleet.ticket import Ticket
from warmroute.index.cache_view import CacheView
from warmroute.prompt.body_fields import read_json
from warmroute.prompt.routing_request import RoutingRequest
from warmroute.routing.decision import Decision
from warmroute.routing.router import Router
from warmroute.routing.routing_errors import MissingModel, NoNodeAvailable, UnknownModel

POLICIES = ["round_robin", "random", "least_loaded", "power_of_two", "latency", "session", "prefix_hash"]


class PolicyHarness:
    """A fleet of nodes that are up, and a router over it."""

    def __init__(self, policy: str, count: int = 4, models: tuple[str, ...] = ("m",), **health: float) -> None:
        self.fleet = Fleet(HealthConfig(**health))  # type: ignore[arg-type]
        for number in range(count):
            node = self.fleet.add(NodeConfig(url=f"http://n{number}:1", models=models))
            self.fleet.check_passed(node, 0)
        self.router = Router(self.fleet, CacheView(Index()), Routing(policy=policy, seed=3))  # type: ignore[arg-type]

    @property
    def nodes(self) -> list[Node]:
        return list(self.fleet)

    def decide(self, text: str = "hi", now_s: float = 0.0, **fields: Any) -> Decision:
        return self.router.decide(request(text, **fields), now_s)

    def send(self, text: str = "hi") -> Ticket:
        return Ticket(self.decide(text).node, 0)


def request(
    text: str = "hi", model: str = "m", system: str = "", session_header: bytes = b"", **fields: object
) -> RoutingRequest:
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": text})
    body = json.dumps({"model": model, "messages": messages, **fields}).encode()
    return RoutingRequest(*read_json(body)[:4], session_header=session_header)


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


# The router.


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
