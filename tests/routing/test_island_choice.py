"""Island affinity: a conversation affinity on its island unless that cannot serve it in time."""

from __future__ import annotations

from array import array

import pytest

from warmroute.config import Admission, Health, Index, IslandAffinity, IslandConfig, NodeConfig, Pricing, Routing
from warmroute.core.admission import Admitter
from warmroute.core.cache_view import CacheView
from warmroute.core.decision import Decision
from warmroute.core.fleet import Fleet
from warmroute.core.island_choice import DEADLINE, DOWN, FALLBACK, NOT_ELIGIBLE, SLOW
from warmroute.core.islands import MAX_ENTRIES, REMEMBERED_S, ConversationAffinity, stable_blocks
from warmroute.core.messages import Lookup, Outcome, RoutingRequest
from warmroute.core.node import Node
from warmroute.core.router import Router

MODEL = "m"
SYSTEM = list(range(1, 801))


class TwoIslands:
    """Two nodes on each of two islands, a (20 ms away) and b (200 ms away)."""

    def __init__(self, policy: str = "price", **affinity: object) -> None:
        self.now_s = 1000.0
        self.fleet = Fleet(Health(slow_start_s=0.0))
        self.fleet.islands.reconfigure(
            [IslandConfig(name="a", round_trip_ms=20.0), IslandConfig(name="b", round_trip_ms=200.0)],
            IslandAffinity(**affinity),  # type: ignore[arg-type]
        )
        self.cache_view = CacheView(Index())
        self.nodes: dict[str, Node] = {}
        for name in ("a0", "a1", "b0", "b1"):
            node = self.fleet.add(NodeConfig(url=f"http://{name}:1", name=name, models=(MODEL,), island=name[0]))
            self.fleet.check_passed(node, 0.0)
            self.cache_view.add_node(name, [MODEL]).set_size(16, 0)
            self.nodes[name] = node
        self.router = Router(self.fleet, self.cache_view, Routing(policy=policy, seed=3), Pricing())  # type: ignore[arg-type]
        self.conversations = self.fleet.islands.conversations

    def send(self, tokens: list[int], *, session: bytes = b"", deadline_s: float = 0.0, to: str = "") -> Decision:
        """Decide for a turn, send it (to the fallback `to`, if given), and end it."""
        request = RoutingRequest(MODEL, session_header=session, deadline_s=deadline_s)
        decision = self.router.decide(request, self.now_s, Lookup(array("I", tokens).tobytes(), len(tokens), 0))
        node = self.nodes[to] if to else decision.node
        ticket = self.router.open_ticket(decision, node, self.now_s)
        ticket.close(Outcome.CANCELLED, self.now_s)
        self.now_s += 1.0
        return decision

    def set_busy(self, island: str, tokens: float) -> None:
        for node in self.nodes.values():
            if node.island == island:
                node.pending_work, node.inflight = tokens, 1 if tokens else 0

    def set_down(self, island: str, down: bool = True) -> None:
        for node in self.nodes.values():
            if node.island == island:
                if down:
                    self.fleet.check_failed(node, self.now_s, "gone")
                else:
                    self.fleet.check_passed(node, self.now_s)


def turns(number: int, count: int) -> list[list[int]]:
    """Return the prompts of a conversation: a system prompt that all share, then a message and a response per turn."""
    prompts, history = [], list(SYSTEM)
    for turn in range(count):
        history = [*history, *range((number << 16) + (turn << 12), (number << 16) + (turn << 12) + 100)]
        prompts.append(history)
        history = [*history, *range((number << 16) + (turn << 12) + 2000, (number << 16) + (turn << 12) + 2200)]
    return prompts


def test_a_new_conversation_goes_to_the_cheapest_island() -> None:
    islands = TwoIslands()
    assert islands.send(turns(1, 1)[0]).node.island == "a"
    islands.set_busy("a", 20_000)  # a second of prefill: more than the distance to b
    assert islands.send(turns(2, 1)[0]).node.island == "b"
    assert islands.conversations.started == {"a": 1, "b": 1} and not islands.conversations.moved


def test_a_conversation_stays_on_its_island_though_another_is_cheaper() -> None:
    islands = TwoIslands()
    first, second, third = turns(1, 3)
    islands.set_busy("a", 20_000)
    assert islands.send(first).node.island == "b"
    islands.set_busy("a", 0)
    islands.set_busy("b", 10_000)  # half a second of prefill at home, none on the nearer island
    for turn in (second, third):
        decision = islands.send(turn)
        assert decision.node.island == "b"
        assert all(node.island == "b" for node in decision.candidates)
    assert islands.conversations.served_at_home == {"b": 2} and not islands.conversations.moved


def test_prompts_that_only_share_a_prefix_are_different_conversations() -> None:
    islands = TwoIslands()
    assert islands.send(turns(1, 1)[0]).node.island == "a"
    islands.set_busy("a", 20_000)
    for number in (2, 3, 4):  # the same system prompt, which is cached on a
        assert islands.send(turns(number, 1)[0]).node.island == "b"
    assert islands.conversations.started["b"] == 3


def test_the_same_prompt_again_is_a_new_conversation() -> None:
    islands = TwoIslands()
    prompt = turns(1, 1)[0]
    assert islands.send(prompt).node.island == "a"
    islands.set_busy("a", 40_000)
    assert islands.send(prompt).node.island == "b"


def test_a_conversation_moves_if_its_home_is_slower_by_more_than_max_delay_ms() -> None:
    islands = TwoIslands(max_delay_ms=1000.0)
    first, second, third = turns(1, 3)
    assert islands.send(first).node.island == "a"
    islands.set_busy("a", 18_000)  # 900 ms
    assert islands.send(second).node.island == "a"
    islands.set_busy("a", 60_000)  # 3 s
    decision = islands.send(third)
    assert decision.node.island == "b"
    assert decision.reason.startswith("moves to b: a would take ")
    assert islands.conversations.moved == {("a", "b", SLOW): 1} and islands.conversations.served_away == {"a": 1}


def test_a_conversation_moves_if_its_home_is_down_and_returns_when_home_is_cheaper() -> None:
    islands = TwoIslands()
    one, two, three, four = turns(1, 4)
    assert islands.send(one).node.island == "a"
    islands.set_down("a")
    assert "no node of its island a is up" in islands.send(two).reason
    assert islands.send(three).node.island == "b"
    assert islands.conversations.moved == {("a", "b", DOWN): 1} and islands.conversations.served_away == {"a": 2}
    islands.set_down("a", False)
    assert islands.send(four).node.island == "a"  # 100 more tokens to prefill cost less than the distance to b
    assert islands.conversations.returned == {"a": 1} and islands.conversations.served_at_home == {"a": 1}


def test_a_conversation_does_not_return_to_an_empty_cache() -> None:
    islands = TwoIslands()
    one, two, three = turns(1, 3)
    one, two, three = ([*range(500_000, 512_000), *turn] for turn in (one, two, three))
    assert islands.send(one).node.island == "a"
    islands.set_down("a")
    islands.send(two)
    for name in ("a0", "a1"):
        cache = islands.cache_view.cache(name)
        assert cache is not None
        cache.restarted()
    islands.set_down("a", False)
    for node in islands.nodes.values():  # 12,000 tokens take 600 ms
        assert node.speed.ms_per_token == pytest.approx(0.05)
    prediction = islands.cache_view.record_routed(
        MODEL, Lookup(array("I", two).tobytes(), len(two), 0), "b0", None, islands.now_s
    )
    assert prediction is not None
    islands.cache_view.first_token(prediction, islands.now_s)
    assert islands.send(three).node.name == "b0"
    assert not islands.conversations.returned


def test_a_request_moves_if_its_home_would_miss_the_deadline() -> None:
    islands = TwoIslands()
    first, second, third = turns(1, 3)
    assert islands.send(first).node.island == "a"
    islands.set_busy("a", 16_000)  # 800 ms
    assert islands.send(second, deadline_s=islands.now_s + 5.0).node.island == "a"
    decision = islands.send(third, deadline_s=islands.now_s + 0.5)
    assert decision.node.island == "b" and "deadline" in decision.reason
    assert islands.conversations.moved == {("a", "b", DEADLINE): 1}


def test_a_deadline_that_every_island_would_miss_is_no_reason_to_move() -> None:
    islands = TwoIslands()
    first, second = turns(1, 2)
    islands.send(first)
    islands.set_busy("a", 8_000)  # 400 ms, and b is 200 ms away
    assert islands.send(second, deadline_s=islands.now_s + 0.1).node.island == "a"
    assert not islands.conversations.moved


def test_nodes_of_other_islands_are_the_last_fallbacks() -> None:
    islands = TwoIslands()
    first, second, third = turns(1, 3)
    islands.send(first)
    decision = islands.send(second)
    assert [node.island for node in (decision.node, *decision.fallbacks())] == ["a", "a", "b", "b"]
    islands.send(third, to="b1")
    assert islands.conversations.moved == {("a", "b", FALLBACK): 1}


@pytest.mark.parametrize("home_is_down", [False, True])
def test_a_home_whose_nodes_are_not_eligible_is_not_down(home_is_down: bool) -> None:
    islands = TwoIslands()
    first, second = turns(1, 2)
    islands.send(first)
    lookup = Lookup(array("I", second).tobytes(), len(second), 0)
    before = islands.router.decide(RoutingRequest(MODEL), islands.now_s, lookup)
    assert before.query is not None and before.node.island == "a"
    if home_is_down:
        islands.set_down("a")
    others = [islands.nodes["b0"], islands.nodes["b1"]]
    decision = islands.router.decide_among(others, before.query)  # the queues of the others are too long
    islands.router.open_ticket(decision, decision.node, islands.now_s).close(Outcome.CANCELLED, islands.now_s)
    assert islands.conversations.moved == {("a", "b", DOWN if home_is_down else NOT_ELIGIBLE): 1}


def test_a_hot_prefix_gets_a_second_home_on_its_own_island_only() -> None:
    islands = TwoIslands()
    lookup = Lookup(array("I", SYSTEM).tobytes(), len(SYSTEM), 0)
    prediction = islands.cache_view.record_routed(MODEL, lookup, "a0", None, islands.now_s)
    assert prediction is not None
    islands.cache_view.first_token(prediction, islands.now_s)
    islands.nodes["a0"].inflight = islands.nodes["a1"].inflight = 9
    assert islands.send(turns(1, 1)[0]).node.name == "a0"
    islands.nodes["a1"].inflight = 0
    assert islands.send(turns(2, 1)[0]).node.name == "a1"


def test_a_session_header_identifies_a_conversation() -> None:
    islands = TwoIslands()
    islands.set_busy("a", 20_000)
    assert islands.send(turns(1, 1)[0], session=b"s1").node.island == "b"
    islands.set_busy("a", 0)
    assert islands.send(turns(7, 1)[0], session=b"s1").node.island == "b"
    assert islands.send(turns(8, 1)[0], session=b"s2").node.island == "a"


def test_a_queued_request_is_decided_again_for_its_home() -> None:
    islands = TwoIslands()
    first, second = turns(1, 2)
    islands.send(first)
    islands.set_busy("a", 10_000)
    lookup = Lookup(array("I", second).tobytes(), len(second), 0)
    decision = islands.router.decide(RoutingRequest(MODEL), islands.now_s, lookup)
    assert decision.query is not None and decision.node.island == "a"
    again = islands.router.decide_again(decision.query, islands.now_s + 0.1)
    assert again.node.island == "a" and again.query is not None and again.query.conversation is not None


@pytest.mark.parametrize("settings", [{"policy": "least_loaded"}, {"enabled": False}])
def test_without_affinity_conversations_have_no_home(settings: dict[str, object]) -> None:
    islands = TwoIslands(**settings)  # type: ignore[arg-type]
    first, second = turns(1, 2)
    islands.send(first, to="b0")
    islands.set_busy("b", 20_000)
    assert islands.send(second).node.island == "a"
    assert not islands.conversations.served_at_home and not islands.conversations.started


def test_tenants_do_not_share_affinity() -> None:
    affinity, chain = ConversationAffinity(), bytes(range(80))
    affinity.remember_prompt(chain, 4, "only x", ("a", "a"), 0.0)
    longer = chain + bytes(80)
    assert affinity.by_prompt(longer, 20, "only x") == ("a", "a")
    assert affinity.by_prompt(longer, 20, "only y") is None and affinity.by_prompt(longer, 20, "") is None


def test_affinity_is_bounded_and_expires() -> None:
    affinity = ConversationAffinity()
    for number in range(MAX_ENTRIES * 3):
        affinity.remember_prompt(number.to_bytes(8, "little"), 1, "", ("a", "a"), 0.0)
    assert len(affinity) <= 2 * MAX_ENTRIES
    affinity.remember_session("", MODEL, b"one", ("a", "b"), 0.6 * REMEMBERED_S)
    affinity.remember_session("", MODEL, b"two", ("a", "b"), 1.2 * REMEMBERED_S)
    assert affinity.by_session("", MODEL, b"one") == ("a", "b")
    affinity.remember_session("", MODEL, b"three", ("a", "b"), 1.8 * REMEMBERED_S)
    assert affinity.by_session("", MODEL, b"one") is None


def test_the_last_tokens_of_a_prompt_are_not_stable() -> None:
    assert stable_blocks(100, 16) == 5 and stable_blocks(5, 16) == 0


def test_a_session_has_a_home_for_each_model() -> None:
    islands = TwoIslands()
    only = islands.fleet.add(NodeConfig(url="http://c:1", name="c0", models=("other",), island="b"))
    twin = islands.fleet.add(NodeConfig(url="http://d:1", name="c1", models=("other",), island="c"))
    for node in (only, twin):
        islands.fleet.check_passed(node, 0.0)
        islands.cache_view.add_node(node.name, ["other"])
    assert islands.send(turns(1, 1)[0], session=b"one").node.island == "a"
    request = RoutingRequest("other", session_header=b"one")
    decision = islands.router.decide(request, islands.now_s)
    islands.router.open_ticket(decision, decision.node, islands.now_s).close(Outcome.CANCELLED, islands.now_s)
    assert not islands.conversations.moved and "home" not in decision.reason, "its home for the other model is not a"


def test_a_request_moves_if_its_home_would_miss_the_deadline_of_the_whole_response() -> None:
    islands = TwoIslands(max_delay_ms=10_000.0)
    first, second = turns(1, 2)
    assert islands.send(first).node.island == "a"
    for node in islands.nodes.values():
        node.speed.answers = 5
    islands.set_busy("a", 40_000)  # two seconds of prefill at home
    request = RoutingRequest(MODEL, total_deadline_s=islands.now_s + 1.5)
    lookup = Lookup(array("I", second).tobytes(), len(second), 0)
    decision = islands.router.decide(request, islands.now_s, lookup)
    assert decision.node.island == "b" and "deadline" in decision.reason
    admitted, _ = Admitter(islands.router, Admission()).dry_run(request, lookup, islands.now_s)
    assert admitted.node.island == "b", "it is not rejected if another island meets the deadline"


def test_the_queue_of_an_island_decays_after_it_became_the_only_one() -> None:
    islands = TwoIslands()
    admission = Admitter(islands.router, Admission())
    islands.fleet.islands.update_queues({"a": 50_000.0})
    a0 = islands.nodes["a0"]
    assert a0.distance_ms > 1000.0
    islands.fleet.remove("b0")
    islands.fleet.remove("b1")
    for _ in range(200):
        islands.now_s += 0.05
        assert not list(admission.tick(dict.fromkeys(islands.fleet), islands.now_s))
    assert a0.distance_ms == a0.round_trip_ms == 20.0
