"""Islands: a conversation stays on its own, and leaves it only when it can't be served there in time."""

from __future__ import annotations

from array import array

import pytest

from warmroute.config import Admission as AdmissionConfig
from warmroute.config import Crossing, Health, Index, IslandConfig, NodeConfig, Pricing, Routing
from warmroute.fleet.fleet import Fleet
from warmroute.fleet.node import Node, Outcome
from warmroute.index.cache_view import CacheView
from warmroute.index.lookup import Lookup
from warmroute.prompt.routing_request import RoutingRequest
from warmroute.routing.admission import Admission
from warmroute.routing.conversation_affinity import MOST, Stays, ends_at
from warmroute.routing.decision import Decision
from warmroute.routing.islands import DEADLINE, DOWN, PASSED_OVER, SLOW, STOOD_IN
from warmroute.routing.router import Router

MODEL = "m"
SYSTEM = list(range(1, 801))


class Clouds:
    """Two nodes on each of two islands, a (20 ms away) and b (200 ms away)."""

    def __init__(self, policy: str = "price", **crossing: object) -> None:
        self.now_s = 1000.0
        self.fleet = Fleet(Health(slow_start_s=0.0))
        self.fleet.islands.reconfigure(
            [IslandConfig(name="a", round_trip_ms=20.0), IslandConfig(name="b", round_trip_ms=200.0)],
            Crossing(**crossing),  # type: ignore[arg-type]
        )
        self.cache_view = CacheView(Index())
        self.nodes: dict[str, Node] = {}
        for name in ("a0", "a1", "b0", "b1"):
            node = self.fleet.add(NodeConfig(url=f"http://{name}:1", name=name, models=(MODEL,), island=name[0]))
            self.fleet.check_passed(node, 0.0)
            self.cache_view.join(name, [MODEL]).describe(16, 0)
            self.nodes[name] = node
        self.router = Router(self.fleet, self.cache_view, Routing(policy=policy, seed=3), Pricing())  # type: ignore[arg-type]
        self.books = self.fleet.islands.books

    def say(self, tokens: list[int], *, session: bytes = b"", deadline_s: float = 0.0, to: str = "") -> Decision:
        """A turn is decided, sent (or sent `to` another node than that) and answered."""
        request = RoutingRequest(MODEL)
        request.session_header, request.deadline_s = session, deadline_s
        decision = self.router.decide(request, self.now_s, Lookup(array("I", tokens).tobytes(), len(tokens), 0))
        node = self.nodes[to] if to else decision.node
        ticket = self.router.dispatch(decision, node, self.now_s)
        ticket.close(Outcome.LEFT, self.now_s)
        self.now_s += 1.0
        return decision

    def busy(self, island: str, tokens: float) -> None:
        for node in self.nodes.values():
            if node.island == island:
                node.pending_work, node.inflight = tokens, 1 if tokens else 0

    def down(self, island: str, down: bool = True) -> None:
        for node in self.nodes.values():
            if node.island == island:
                if down:
                    self.fleet.check_refused(node, self.now_s, "gone")
                else:
                    self.fleet.check_passed(node, self.now_s)


def turns(number: int, count: int) -> list[list[int]]:
    """The prompts of a conversation: the same beginning for everybody, then a message and an answer for each turn."""
    prompts, said = [], list(SYSTEM)
    for turn in range(count):
        said = [*said, *range((number << 16) + (turn << 12), (number << 16) + (turn << 12) + 100)]
        prompts.append(said)
        said = [*said, *range((number << 16) + (turn << 12) + 2000, (number << 16) + (turn << 12) + 2200)]
    return prompts


def test_a_new_conversation_goes_to_the_nearest_island_by_price() -> None:
    clouds = Clouds()
    assert clouds.say(turns(1, 1)[0]).node.island == "a"
    clouds.busy("a", 20_000)  # a second of prefill: more than the way to b
    assert clouds.say(turns(2, 1)[0]).node.island == "b"
    assert clouds.books.fresh == {"a": 1, "b": 1} and not clouds.books.crossed


def test_a_conversation_stays_where_it_is_though_another_island_is_cheaper() -> None:
    clouds = Clouds()
    first, second, third = turns(1, 3)
    clouds.busy("a", 20_000)
    assert clouds.say(first).node.island == "b"
    clouds.busy("a", 0)
    clouds.busy("b", 10_000)  # half a second of prefill at home, and nothing to do at the nearer one
    for turn in (second, third):
        decision = clouds.say(turn)
        assert decision.node.island == "b"
        assert all(node.island == "b" for node in decision.candidates)
    assert clouds.books.stayed == {"b": 2} and not clouds.books.crossed


def test_prompts_that_only_begin_alike_are_no_conversation() -> None:
    clouds = Clouds()
    assert clouds.say(turns(1, 1)[0]).node.island == "a"
    clouds.busy("a", 20_000)
    for number in (2, 3, 4):  # the same system prompt, which a holds
        assert clouds.say(turns(number, 1)[0]).node.island == "b"
    assert clouds.books.fresh["b"] == 3


def test_the_same_prompt_again_does_not_bind_to_an_island() -> None:
    clouds = Clouds()
    prompt = turns(1, 1)[0]
    assert clouds.say(prompt).node.island == "a"
    clouds.busy("a", 40_000)
    assert clouds.say(prompt).node.island == "b"


def test_it_leaves_a_home_that_is_slower_by_more_than_spill_ms_and_says_so() -> None:
    clouds = Clouds(spill_ms=1000.0)
    first, second, third = turns(1, 3)
    assert clouds.say(first).node.island == "a"
    clouds.busy("a", 18_000)  # 900 ms
    assert clouds.say(second).node.island == "a"
    clouds.busy("a", 60_000)  # 3 s
    decision = clouds.say(third)
    assert decision.node.island == "b"
    assert decision.reason.startswith("crossed to b: a would take ")
    assert clouds.books.crossed == {("a", "b", SLOW): 1} and clouds.books.away == {"a": 1}


def test_it_leaves_a_home_that_is_down_and_stays_where_it_went_until_home_is_cheaper() -> None:
    clouds = Clouds()
    one, two, three, four = turns(1, 4)
    assert clouds.say(one).node.island == "a"
    clouds.down("a")
    assert "no node of its home a is up" in clouds.say(two).reason
    assert clouds.say(three).node.island == "b"
    assert clouds.books.crossed == {("a", "b", DOWN): 1} and clouds.books.away == {"a": 2}
    clouds.down("a", False)
    assert clouds.say(four).node.island == "a"  # 100 tokens more to prefill are less than the way to b
    assert clouds.books.came_home == {"a": 1} and clouds.books.stayed == {"a": 1}


def test_it_does_not_come_home_to_an_empty_cache() -> None:
    clouds = Clouds()
    one, two, three = turns(1, 3)
    one, two, three = ([*range(500_000, 512_000), *turn] for turn in (one, two, three))
    assert clouds.say(one).node.island == "a"
    clouds.down("a")
    clouds.say(two)
    for name in ("a0", "a1"):
        cache = clouds.cache_view.cache(name)
        assert cache is not None
        cache.restarted()
    clouds.down("a", False)
    for node in clouds.nodes.values():  # so quick a card that 12,000 tokens are 600 ms
        assert node.speed.ms_per_token == pytest.approx(0.05)
    sent = clouds.cache_view.sent(MODEL, Lookup(array("I", two).tobytes(), len(two), 0), "b0", None, clouds.now_s)
    assert sent is not None
    clouds.cache_view.first_token(sent, clouds.now_s)
    assert clouds.say(three).node.name == "b0"
    assert not clouds.books.came_home


def test_a_deadline_that_home_would_miss_is_met_elsewhere() -> None:
    clouds = Clouds()
    first, second, third = turns(1, 3)
    assert clouds.say(first).node.island == "a"
    clouds.busy("a", 16_000)  # 800 ms
    assert clouds.say(second, deadline_s=clouds.now_s + 5.0).node.island == "a"
    decision = clouds.say(third, deadline_s=clouds.now_s + 0.5)
    assert decision.node.island == "b" and "deadline" in decision.reason
    assert clouds.books.crossed == {("a", "b", DEADLINE): 1}


def test_a_deadline_that_every_island_would_miss_is_no_reason_to_leave() -> None:
    clouds = Clouds()
    first, second = turns(1, 2)
    clouds.say(first)
    clouds.busy("a", 8_000)  # 400 ms, and b is 200 away
    assert clouds.say(second, deadline_s=clouds.now_s + 0.1).node.island == "a"
    assert not clouds.books.crossed


def test_others_stand_in_at_need_those_of_other_islands_last() -> None:
    clouds = Clouds()
    first, second, third = turns(1, 3)
    clouds.say(first)
    decision = clouds.say(second)
    assert [node.island for node in (decision.node, *decision.fallbacks())] == ["a", "a", "b", "b"]
    clouds.say(third, to="b1")
    assert clouds.books.crossed == {("a", "b", STOOD_IN): 1}


@pytest.mark.parametrize("home_is_down", [False, True])
def test_a_home_whose_nodes_are_passed_over_is_not_down(home_is_down: bool) -> None:
    clouds = Clouds()
    first, second = turns(1, 2)
    clouds.say(first)
    lookup = Lookup(array("I", second).tobytes(), len(second), 0)
    before = clouds.router.decide(RoutingRequest(MODEL), clouds.now_s, lookup)
    assert before.query is not None and before.node.island == "a"
    if home_is_down:
        clouds.down("a")
    others = [clouds.nodes["b0"], clouds.nodes["b1"]]
    decision = clouds.router.decide_among(others, before.query)  # the others' queues are too long
    clouds.router.dispatch(decision, decision.node, clouds.now_s).close(Outcome.LEFT, clouds.now_s)
    assert clouds.books.crossed == {("a", "b", DOWN if home_is_down else PASSED_OVER): 1}


def test_a_crowded_beginning_gets_a_second_home_on_its_own_island_only() -> None:
    clouds = Clouds()
    lookup = Lookup(array("I", SYSTEM).tobytes(), len(SYSTEM), 0)
    sent = clouds.cache_view.sent(MODEL, lookup, "a0", None, clouds.now_s)
    assert sent is not None
    clouds.cache_view.first_token(sent, clouds.now_s)
    clouds.nodes["a0"].inflight = clouds.nodes["a1"].inflight = 9
    assert clouds.say(turns(1, 1)[0]).node.name == "a0"
    clouds.nodes["a1"].inflight = 0
    assert clouds.say(turns(2, 1)[0]).node.name == "a1"


def test_a_named_conversation_is_known_by_its_name() -> None:
    clouds = Clouds()
    clouds.busy("a", 20_000)
    assert clouds.say(turns(1, 1)[0], session=b"s1").node.island == "b"
    clouds.busy("a", 0)
    assert clouds.say(turns(7, 1)[0], session=b"s1").node.island == "b"
    assert clouds.say(turns(8, 1)[0], session=b"s2").node.island == "a"


def test_a_guest_that_waits_is_decided_anew_at_home() -> None:
    clouds = Clouds()
    first, second = turns(1, 2)
    clouds.say(first)
    clouds.busy("a", 10_000)
    lookup = Lookup(array("I", second).tobytes(), len(second), 0)
    decision = clouds.router.decide(RoutingRequest(MODEL), clouds.now_s, lookup)
    assert decision.query is not None and decision.node.island == "a"
    again = clouds.router.decide_again(decision.query, clouds.now_s + 0.1)
    assert again.node.island == "a" and again.query is not None and again.query.stay is not None


@pytest.mark.parametrize("way", [{"policy": "least_loaded"}, {"sticky": False}])
def test_other_policies_and_loose_conversations_mind_no_home(way: dict[str, object]) -> None:
    clouds = Clouds(**way)  # type: ignore[arg-type]
    first, second = turns(1, 2)
    clouds.say(first, to="b0")
    clouds.busy("b", 20_000)
    assert clouds.say(second).node.island == "a"
    assert not clouds.books.stayed and not clouds.books.fresh


def test_tenants_do_not_find_each_others_homes() -> None:
    stays, chain = Stays(3600.0), bytes(range(80))
    stays.keep_prompt(chain, 4, "only x", ("a", "a"), 0.0)
    longer = chain + bytes(80)
    assert stays.by_prompt(longer, 20, "only x") == ("a", "a")
    assert stays.by_prompt(longer, 20, "only y") is None and stays.by_prompt(longer, 20, "") is None


def test_what_is_remembered_is_bounded_and_forgotten() -> None:
    stays = Stays(100.0)
    for number in range(MOST * 3):
        stays.keep_prompt(number.to_bytes(8, "little"), 1, "", ("a", "a"), 0.0)
    assert len(stays) <= 2 * MOST
    stays.keep_name("", MODEL, b"one", ("a", "b"), 60.0)
    stays.keep_name("", MODEL, b"two", ("a", "b"), 120.0)
    assert stays.by_name("", MODEL, b"one") == ("a", "b")
    stays.keep_name("", MODEL, b"three", ("a", "b"), 180.0)
    assert stays.by_name("", MODEL, b"one") is None


def test_the_tokens_that_open_an_answer_do_not_end_a_prompt() -> None:
    assert ends_at(100, 16) == 5 and ends_at(5, 16) == 0


def test_a_named_conversation_lives_where_its_model_is_served() -> None:
    clouds = Clouds()
    only = clouds.fleet.add(NodeConfig(url="http://c:1", name="c0", models=("other",), island="b"))
    twin = clouds.fleet.add(NodeConfig(url="http://d:1", name="c1", models=("other",), island="c"))
    for node in (only, twin):
        clouds.fleet.check_passed(node, 0.0)
        clouds.cache_view.join(node.name, ["other"])
    assert clouds.say(turns(1, 1)[0], session=b"one").node.island == "a"
    request = RoutingRequest("other")
    request.session_header = b"one"
    decision = clouds.router.decide(request, clouds.now_s)
    clouds.router.dispatch(decision, decision.node, clouds.now_s).close(Outcome.LEFT, clouds.now_s)
    assert not clouds.books.crossed and "home" not in decision.reason, "it never lived on a: nobody serves it there"


def test_it_leaves_a_home_that_is_too_slow_for_its_whole_answer() -> None:
    clouds = Clouds(spill_ms=10_000.0)
    first, second = turns(1, 2)
    assert clouds.say(first).node.island == "a"
    for node in clouds.nodes.values():
        node.speed.answers = 5
    clouds.busy("a", 40_000)  # two seconds of prefill at home
    request = RoutingRequest(MODEL)
    request.total_deadline_s = clouds.now_s + 1.5
    lookup = Lookup(array("I", second).tobytes(), len(second), 0)
    decision = clouds.router.decide(request, clouds.now_s, lookup)
    assert decision.node.island == "b" and "deadline" in decision.reason
    guest_decision, _ = Admission(clouds.router, AdmissionConfig()).rehearse(request, lookup, clouds.now_s)
    assert guest_decision.node.island == "b", "it is not refused where another island makes it"


def test_those_who_waited_for_an_island_are_forgotten_though_it_becomes_the_only_one() -> None:
    clouds = Clouds()
    admission = Admission(clouds.router, AdmissionConfig())
    clouds.fleet.islands.saw_waiting({"a": 50_000.0})
    a0 = clouds.nodes["a0"]
    assert a0.distance_ms > 1000.0
    clouds.fleet.remove("b0")
    clouds.fleet.remove("b1")
    for _ in range(200):
        clouds.now_s += 0.05
        admission.tick(list(clouds.fleet), clouds.now_s)
    assert a0.distance_ms == a0.round_trip_ms == 20.0
