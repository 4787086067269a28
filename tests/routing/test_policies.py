"""Each policy's promise, without I/O."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from warmroute.config import Health as HealthConfig
from warmroute.config import Index, NodeConfig, Routing
from warmroute.fleet.fleet import Fleet
from warmroute.fleet.node import Node, Outcome
from warmroute.fleet.ticket import Ticket
from warmroute.index.cache_view import CacheView
from warmroute.prompt.routing_request import RoutingRequest, read_json
from warmroute.routing.decision import Decision
from warmroute.routing.refusals import MissingModel, NobodyCanServe, UnknownModel
from warmroute.routing.router import Router

POLICIES = ["round_robin", "random", "least_loaded", "power_of_two", "latency", "session", "prefix_hash"]


class World:
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

    def decide(self, text: str = "hi", now_s: float = 0.0, **more: object) -> Decision:
        return self.router.decide(request(text, **more), now_s)

    def send(self, text: str = "hi") -> Ticket:
        return Ticket(self.decide(text).node, 0)


def request(text: str = "hi", model: str = "m", system: str = "", **more: object) -> RoutingRequest:
    import json

    messages = [{"role": "system", "content": system}] if system else []
    return read_json(
        json.dumps({"model": model, "messages": [*messages, {"role": "user", "content": text}], **more}).encode()
    )


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_names_each_other_node_once_as_a_fallback(policy: str) -> None:
    world = World(policy, 5)
    for number in range(20):
        decision = world.decide(str(number), user=f"u{number}")
        order = [decision.node, *decision.fallbacks()]
        assert len(order) == 5 and set(order) == set(world.nodes)
        assert decision.reason


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_serves_with_one_node(policy: str) -> None:
    world = World(policy, 1)
    decision = world.decide(user="u")
    assert decision.node is world.nodes[0] and decision.fallbacks() == []


@pytest.mark.parametrize("policy", POLICIES)
def test_a_cold_fleet_spreads(policy: str) -> None:
    world = World(policy, 4)
    chosen = Counter(world.decide(f"{number} question", user=f"u{number}").node.name for number in range(400))
    assert len(chosen) == 4 and max(chosen.values()) < 200


@pytest.mark.parametrize("policy", POLICIES)
def test_no_policy_piles_running_requests_on_one_node_without_end(policy: str) -> None:
    """One hot prompt, nothing finishing: it spreads once its node is the dearer choice."""
    world = World(policy, 4)
    for _ in range(100):
        world.send("the same")
    loads = [node.inflight for node in world.nodes]
    assert max(loads) <= 60 and min(loads) >= 5, loads


def test_round_robin_takes_turns_for_each_model() -> None:
    world = World("round_robin", 3)
    names = [world.decide().node.name for _ in range(6)]
    assert names == ["n0:1", "n1:1", "n2:1"] * 2


def test_round_robin_goes_on_in_order_to_the_fallbacks() -> None:
    world = World("round_robin", 4)
    world.decide()
    decision = world.decide()
    assert [node.name for node in [decision.node, *decision.fallbacks()]] == ["n1:1", "n2:1", "n3:1", "n0:1"]


def test_random_gives_every_node_the_same_chance() -> None:
    world = World("random", 4)
    chosen = Counter(world.decide().node.name for _ in range(4000))
    assert all(850 < count < 1150 for count in chosen.values())


def test_least_loaded_takes_the_node_with_the_fewest_and_counts_those_of_others() -> None:
    world = World("least_loaded", 3)
    a, b, c = world.nodes
    tickets = [Ticket(a, 0), Ticket(a, 0), Ticket(b, 0)]
    c.saw_load(running=4, waiting=1, kv_usage=0, now_s=0)
    decision = world.decide()
    assert decision.node is b and decision.fallbacks() == [a, c]
    tickets[0].close(Outcome.OK, 1)
    tickets[1].close(Outcome.OK, 1)
    assert world.decide().node is a


@given(st.lists(st.integers(0, 5), min_size=2, max_size=8))
def test_least_loaded_never_takes_a_busier_node(loads: list[int]) -> None:
    world = World("least_loaded", len(loads))
    for node, load in zip(world.nodes, loads, strict=True):
        node.other_load = load
    for _ in range(10):
        decision = world.decide()
        assert decision.node.load == min(loads)
        rest = [node.load for node in decision.fallbacks()]
        assert rest == sorted(rest)


def test_ties_of_the_least_loaded_spread() -> None:
    world = World("least_loaded", 4)
    for node in world.nodes[:2]:
        node.other_load = 3
    chosen = Counter(world.decide().node.name for _ in range(400))
    assert set(chosen) == {"n2:1", "n3:1"} and min(chosen.values()) > 60


def test_ties_of_the_least_loaded_spread_evenly() -> None:
    world = World("least_loaded", 8)
    for node in world.nodes[1:7]:
        node.other_load = 3
    chosen = Counter(world.decide().node.name for _ in range(1000))
    assert min(chosen.values()) > 350


def test_power_of_two_never_takes_the_busiest_of_many() -> None:
    world = World("power_of_two", 5)
    world.nodes[2].other_load = 100
    assert "n2:1" not in {world.decide().node.name for _ in range(300)}


def test_power_of_two_balances_nearly_as_well_as_least_loaded() -> None:
    world = World("power_of_two", 10)
    for _ in range(1000):
        world.send()
    assert max(node.inflight for node in world.nodes) <= 110


def test_latency_prefers_the_quick_node_until_its_queue_is_longer() -> None:
    world = World("latency", 2)
    quick, slow = world.nodes
    quick.latency_ms, slow.latency_ms = 100, 300
    assert world.decide().node is quick
    quick.other_load = 2
    slow.other_load = 0
    world.decide()
    quick.other_load = 3
    assert world.decide().node is slow


def test_latency_tries_a_node_it_knows_nothing_of() -> None:
    world = World("latency", 3)
    for node in world.nodes[:2]:
        node.latency_ms, node.other_load = 100, 1
    assert world.decide().node is world.nodes[2]


# Sessions.


def test_a_session_stays_on_its_node_whatever_it_says() -> None:
    world = World("session", 6)
    for number in range(30):
        nodes = {world.decide(f"turn {turn}", user=f"user-{number}").node for turn in range(5)}
        assert len(nodes) == 1


@pytest.mark.parametrize("field", ["session_id", "conversation_id", "prompt_cache_key", "user"])
def test_any_of_these_fields_names_a_session(field: str) -> None:
    world = World("session", 6)
    homes = {world.decide("x", **{field: f"s{number}"}).node for number in range(40)}
    assert len(homes) == 6
    assert {world.decide(str(turn), **{field: "same"}).node for turn in range(20)} == {
        world.decide("x", user="same").node
    }


def test_a_session_header_is_stronger_than_the_body() -> None:
    world = World("session", 6)
    for number in range(20):
        with_header = request("x", user=f"u{number}")
        with_header.session_header = b"one"
        assert world.router.decide(with_header, 0).node is world.decide("y", user="one").node


def test_without_a_session_the_least_loaded_node_is_taken() -> None:
    world = World("session", 3)
    world.nodes[0].other_load = world.nodes[2].other_load = 5
    assert world.decide().node is world.nodes[1]


# Prefixes.


def test_requests_that_begin_alike_go_to_the_same_node() -> None:
    world = World("prefix_hash", 6)
    for number in range(30):
        system = f"You are {number}. " + "x" * 300
        same = {world.decide("y" * 256 + tail, system=system + tail).node for tail in ("", "a", "b" * 500)}
        assert len(same) == 1


def test_requests_that_differ_at_the_beginning_spread() -> None:
    world = World("prefix_hash", 6)
    assert len({world.decide(f"{number}").node for number in range(100)}) == 6
    assert len({world.decide("x", system=f"{number}").node for number in range(100)}) == 6


def test_the_fallbacks_are_in_the_hashs_order_so_that_traffic_flows_home() -> None:
    world = World("prefix_hash", 6)
    for number in range(30):
        decision = world.decide(str(number))
        order = [decision.node, *decision.fallbacks()]
        world.fleet.drain(order[0].name)
        assert world.decide(str(number)).node is order[1]
        world.fleet.drain(order[1].name)
        assert world.decide(str(number)).node is order[2]
        world.fleet.drain(order[0].name, False)
        assert world.decide(str(number)).node is order[0]
        world.fleet.drain(order[1].name, False)


@pytest.mark.parametrize("policy", ["prefix_hash", "session"])
def test_no_node_has_much_more_than_its_share_in_flight(policy: str) -> None:
    world = World(policy, 4)
    tickets = []
    random = Random(5)
    for number in range(500):
        hot = random.random() < 0.7
        decision = world.decide("hot" if hot else str(number), user="hot" if hot else str(number))
        tickets.append(Ticket(decision.node, 0))
        total = len(tickets)
        assert max(node.inflight for node in world.nodes) <= 1.25 * total / 4 + 1
        if random.random() < 0.4:
            tickets.pop(random.randrange(total)).close(Outcome.OK, 0)


def test_a_full_home_is_passed_over_in_the_hashs_order_and_taken_again_when_it_has_room() -> None:
    world = World("prefix_hash", 4)
    first = world.decide("k")
    order = [first.node, *first.fallbacks()]
    tickets = [Ticket(order[0], 0) for _ in range(8)]
    decision = world.decide("k")
    assert decision.node is order[1] and decision.reason == "home is full"
    assert decision.fallbacks() == [order[0], *order[2:]]
    for ticket in tickets:
        ticket.close(Outcome.OK, 0)
    assert world.decide("k").node is order[0]


def test_without_a_prompt_the_least_loaded_node_is_taken() -> None:
    world = World("prefix_hash", 3)
    world.nodes[0].other_load = world.nodes[2].other_load = 5
    assert world.router.decide(read_json(b'{"model":"m"}'), 0).node is world.nodes[1]


# The router.


def test_an_unknown_model_is_unknown_only_when_every_node_has_spoken() -> None:
    world = World("random")
    with pytest.raises(UnknownModel):
        world.decide(model="none")
    world.fleet.add(NodeConfig(url="http://silent:1"))
    with pytest.raises(NobodyCanServe):
        world.decide(model="none")


def test_no_model_is_the_only_model_or_missing() -> None:
    assert World("random").router.decide(read_json(b"{}"), 0)
    with pytest.raises(MissingModel):
        World("random", models=("a", "b")).router.decide(read_json(b"{}"), 0)
    with pytest.raises(NobodyCanServe):
        World("random", count=0).router.decide(read_json(b"{}"), 0)


def test_suspected_nodes_are_used_only_where_none_is_up() -> None:
    world = World("random", 3)
    for node in world.nodes[:2]:
        for second in (100, 110, 120):
            world.fleet.check_slow(node, second)
    assert {world.decide().node for _ in range(50)} == {world.nodes[2]}
    world.fleet.check_refused(world.nodes[2], 130, "gone")
    assert {world.decide().node for _ in range(50)} == set(world.nodes[:2])
    for node in world.nodes[:2]:
        world.fleet.check_refused(node, 140, "gone")
    with pytest.raises(NobodyCanServe):
        world.decide()


def broken_then_checked(world: World, node: Node) -> None:
    for _ in range(5):
        world.fleet.close_ticket(Ticket(node, 0), Outcome.FAILED, 0, "x")
    world.fleet.check_passed(node, 10)


def test_a_node_on_trial_takes_one_request_at_a_time() -> None:
    world = World("round_robin", 3)
    node = world.nodes[0]
    broken_then_checked(world, node)
    decision = world.decide(now_s=10)
    assert decision.node is node and decision.policy == "trial"
    assert set(decision.fallbacks()) == set(world.nodes[1:])
    trial = Ticket(node, 10)
    assert node not in {world.decide(now_s=10).node for _ in range(20)}
    trial.close(Outcome.LEFT, 11)
    assert world.decide(now_s=11).node is node


@pytest.mark.parametrize("policy", POLICIES)
def test_a_node_that_came_back_takes_less_at_first(policy: str) -> None:
    world = World(policy, 2, slow_start_s=10.0)
    node = world.nodes[0]
    world.fleet.check_refused(node, 0, "gone")
    world.fleet.check_passed(node, 1000)
    shares = []
    for now_s in (1000.5, 1005.0, 1010.0):
        chosen = [world.decide(f"{n}", now_s, user=f"u{n}").node is node for n in range(400)]
        shares.append(sum(chosen) / 400)
    assert shares[0] < 0.15 and shares[0] < shares[1] < 0.45 and shares[2] > 0.4


def test_a_node_that_came_back_lately_is_still_a_fallback() -> None:
    world = World("round_robin", 2, slow_start_s=10.0)
    world.fleet.check_refused(world.nodes[0], 0, "gone")
    world.fleet.check_passed(world.nodes[0], 1000)
    for _ in range(50):
        decision = world.decide(now_s=1000.1)
        assert {decision.node, *decision.fallbacks()} == set(world.nodes)


def test_a_seed_makes_chance_the_same_again() -> None:
    chosen = [[world.decide().node.name for _ in range(50)] for world in (World("random", 5), World("random", 5))]
    assert chosen[0] == chosen[1]


def test_a_draining_node_does_not_lift_the_bound_of_the_others() -> None:
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


def test_a_node_that_was_slow_once_is_tried_again() -> None:
    fleet = Fleet(HealthConfig())
    slow, fast = (fleet.add(NodeConfig(url=f"http://n{number}:1", models=("m",))) for number in range(2))
    for node, took_ms in ((slow, 1000.0), (fast, 10.0)):
        fleet.check_passed(node, 0.0)
        node.saw_latency(took_ms)
    router = Router(fleet, CacheView(Index()), Routing(policy="latency", seed=1))
    assert router.decide(RoutingRequest("m"), 1.0).node is fast
    for second in range(60):
        slow.age_latency(float(second))
    assert router.decide(RoutingRequest("m"), 61.0).node is slow
