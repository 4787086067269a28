"""Why a request went where it went, in a sentence: every situation has its own, and it is true."""

from __future__ import annotations

import gc
import weakref
from array import array
from heapq import nsmallest
from random import Random
from typing import Any

import pytest
from priced import MODEL, PendingRequest, World, prompt

from warmroute.config import Admission as AdmissionConfig
from warmroute.config import Health, Index, NodeConfig, Pricing, Routing
from warmroute.fleet.fleet import Fleet
from warmroute.fleet.node import Outcome
from warmroute.fleet.ticket import Ticket
from warmroute.index.cache_view import CacheView
from warmroute.index.lookup import Lookup
from warmroute.prompt.routing_request import HIGH, LOW, RoutingRequest
from warmroute.routing import reasons
from warmroute.routing.price import TERMS, Price
from warmroute.routing.reasons import WHOLE, Grounds, ms, sentence
from warmroute.routing.refusals import Shed, Undecided
from warmroute.routing.router import Router

TIED = "fewer requests, then chance, decided"


def why(world: World, lookup: Lookup | None = None) -> str:
    return world.decide(lookup).sentence()


# By price.


def test_a_warm_node_says_what_it_saves_and_who_lost() -> None:
    world = World(2)
    world.warm(world.nodes[1], prompt(6144, 1))
    assert why(world, prompt(8210, 1)) == "n1: 6,144 of 8,210 tokens warm, saves 345 ms; n0 is free but cold"


def test_the_rival_that_has_less_of_it() -> None:
    world = World(3)
    world.warm(world.nodes[1], prompt(6144, 1))
    world.warm(world.nodes[2], prompt(2048, 1))
    assert why(world, prompt(8210, 1)).endswith("; n2 is free but has only 2,048 of them warm")


def test_a_warm_node_that_is_too_busy_loses_and_is_named() -> None:
    world = World(3)
    world.warm(world.nodes[1], prompt(6144, 1))
    world.busy(world.nodes[1], 16_000)
    world.busy(world.nodes[2], 4000)
    assert why(world, prompt(8210, 1)) == (
        "n0: cold, 8,210 tokens to prefill; n1 has 6,144 tokens warm but 1,056 ms of prefill queued"
    )


def test_a_cold_fleet_says_that_load_decided() -> None:
    world = World(3)
    said = why(world, prompt(8210, 1))
    name, _, rest = said.partition(": ")
    first = next(node.name for node in world.nodes if node.name != name)
    assert rest == f"none of its 8,210 tokens is warm anywhere; {first} and 1 other cost the same: {TIED}"
    two = World(2)
    said = why(two, prompt(8210, 1))
    other = "n1" if said.startswith("n0") else "n0"
    assert said.endswith(f"; {other} costs the same: {TIED}")


def test_a_tie_of_the_cold_still_names_the_warm_one() -> None:
    world = World(3)
    world.warm(world.nodes[1], prompt(6144, 1))
    world.busy(world.nodes[1], 16_000)
    assert f"costs the same: {TIED}; n1 has 6,144 tokens warm but" in why(world, prompt(8210, 1))


def test_a_prompt_that_was_not_read() -> None:
    world = World(2)
    world.busy(world.nodes[1], 4000)
    assert why(world) == (
        "n0: its prompt was not read, so load decides: nothing is queued there; n1 has 216 ms of prefill queued"
    )


def test_the_only_node() -> None:
    world = World(1)
    assert why(world) == "n0: the only node that can take it"
    assert why(world, prompt(8210, 1)) == "n0: the only node that can take it; cold, 8,210 tokens to prefill"
    world.warm(world.nodes[0], prompt(8210, 1))
    assert why(world, prompt(8210, 1)) == "n0: the only node that can take it; 8,208 of 8,210 tokens warm, saves 478 ms"


def test_a_second_home() -> None:
    world = World(3, pricing=Pricing(second_home_ms=600.0))
    world.warm(world.nodes[0], prompt(8210, 1))
    for _ in range(9):
        Ticket(world.nodes[0], 0.0)
    decision = world.decide(prompt(8210, 1))
    assert decision.reason == "second home" and decision.price is not None
    at_home = Price(*decision.prices[0])  # type: ignore[index]
    more = ms(decision.price.total - at_home.total)
    assert decision.sentence() == (
        f"{decision.node.name}: a second home for 8,208 tokens that crowd n0; costs {more} more this time"
    )


def test_another_island() -> None:
    world = World(2)
    world.nodes[0].island, world.nodes[1].island = "aws/eu", "gcp/us"
    world.nodes[1].distance_ms = 140.0
    assert why(world, prompt(8210, 1)).endswith("; n1 is free but 140 ms away")
    world.warm(world.nodes[1], prompt(8210, 1))
    assert why(world, prompt(8210, 1)) == (
        "n1: 8,208 of 8,210 tokens warm, saves 478 ms; crosses to gcp/us, 140 ms away; n0 is free but cold"
    )


@pytest.mark.parametrize(
    ("term", "words"),
    [
        ("wait", "n1 has 300 ms of prefill queued"),
        ("prefill", "n1 is free but takes 300 ms longer to prefill"),
        ("room", "n1 is free but short of KV memory (300 ms until there is room)"),
        ("contention", "n1 is free but has a larger batch, beside which the answer would flow slower"),
        ("distance", "n1 is free but 300 ms away"),
        ("adapter", "n1 is free but would have to load the adapter first (300 ms)"),
        ("risk", "n1 is free but would more likely miss the deadline"),
        ("memory", "n1 is free but would push out what others will likely need (300 ms)"),
        ("congestion", "n1 is free but would keep others waiting 300 ms longer"),
    ],
)
def test_each_term_has_its_own_words(term: str, words: str) -> None:
    world = World(2)
    free = dict.fromkeys(Price._fields, 0.0)
    cheap = Price(**{**free, "total": 50.0, "new": 1000.0, "output": 100.0})
    dear = cheap._replace(total=350.0, **{term: 300.0})
    a, b = world.nodes
    a.island, b.island = "here", "there"
    grounds = Grounds(a, "price", "cheapest", 1000, 0.0, 0, ([cheap, dear], (a, b)), 2, a.speed.ms_per_token)
    assert sentence(grounds) == f"n0: none of its 1,000 tokens is warm anywhere; {words}"


def test_every_term_of_a_price_has_words() -> None:
    from warmroute.routing.reasons import _LOST

    assert set(_LOST) == set(TERMS)


def test_what_follows_from_a_term_is_not_taken_for_the_cause() -> None:
    """A cold node's prefill keeps others waiting for longer than it takes itself: it lost since it is cold."""
    world = World(2)
    world.warm(world.nodes[0], prompt(8210, 1))
    for _ in range(200):
        world.nodes[1].saw_arrival(world.now_s)
    decision = world.decide(prompt(8210, 1))
    dear = Price(*decision.prices[1])  # type: ignore[index]
    assert dear.congestion > dear.prefill
    assert decision.sentence().endswith("n1 is free but cold")


def test_held_here_and_failed_over() -> None:
    world = World(3)
    world.warm(world.nodes[1], prompt(6144, 1))
    grounds = world.decide(prompt(8210, 1)).grounds()
    plain = sentence(grounds)
    assert sentence(grounds, held_ms=0.4) == plain
    assert sentence(grounds, held_ms=1140.0) == f"{plain}; it waited here for 1,140 ms first"
    n0, n2 = world.nodes[0], world.nodes[2]
    assert sentence(grounds, tried=2, last=n0) == f"n0: stands in for n1, which failed; chosen was {plain}"
    assert sentence(grounds, tried=2, last=n0, failed=True) == f"no node answered, 2 tried; chosen was {plain}"
    assert sentence(grounds, tried=3, last=n2).startswith("n2: stands in for n1, which failed, as did 1 other; chosen")


def test_on_trial() -> None:
    world = World(3)
    world.warm(world.nodes[0], prompt(6144, 1))
    node = world.nodes[2]
    for _ in range(10):
        world.fleet.close_ticket(Ticket(node, world.now_s), Outcome.FAILED, world.now_s, "no")
    world.later(3600.0)
    world.warm(world.nodes[0], prompt(6144, 1))
    world.fleet.check_passed(node, world.now_s)
    decision = world.decide(prompt(8210, 1))
    assert decision.policy == "trial" and decision.price is None
    assert decision.sentence() == (
        "n2: on trial after failures: it takes one request at a time until one succeeds; by price it would have been n0"
    )


def test_what_was_known_stays_known() -> None:
    """Nodes change after a decision; what was decided on does not."""
    world = World(2)
    world.warm(world.nodes[1], prompt(6144, 1))
    grounds = world.decide(prompt(8210, 1)).grounds()
    before = sentence(grounds)
    world.nodes[1].speed.ms_per_token = 3.0
    world.busy(world.nodes[0], 30_000)
    world.busy(world.nodes[1], 30_000)
    assert sentence(grounds) == before


# By others than the policy.


@pytest.mark.parametrize("count", [2, 3])
def test_what_admission_passed_over_is_said(count: int) -> None:
    world = World(count, admission=AdmissionConfig(queue_threshold=4))
    world.warm(world.nodes[0], prompt(6144, 1))
    world.nodes[0].saw_load(8, 6, 0.1, world.now_s)
    guest = PendingRequest(world, prompt(8210, 1))
    guest.enter()
    said = guest.decision.sentence()
    assert guest.node is not world.nodes[0]
    assert said.startswith(f"{guest.node.name}: cold, 8,210 tokens to prefill; others have too long a queue")
    guest.finish()
    decision, waits = world.admission.rehearse(RoutingRequest(MODEL), prompt(8210, 1), world.now_s)
    assert decision.reason == "others have too long a queue" and not waits


def test_a_rehearsal_says_whether_it_would_wait() -> None:
    world = World(1)
    world.busy(world.nodes[0], 16_000)
    before = world.nodes[0].rate(world.now_s)
    decision, waits = world.admission.rehearse(RoutingRequest(MODEL), prompt(8210, 1), world.now_s)
    assert decision.node is world.nodes[0] and waits
    assert world.admission.waiting == world.admission.held == 0
    assert world.nodes[0].rate(world.now_s) == before
    hurried = RoutingRequest(MODEL)
    hurried.may_queue = False
    with pytest.raises(Undecided):
        world.admission.rehearse(hurried, prompt(8210, 1), world.now_s)


def test_a_rehearsal_is_refused_where_the_request_would_be() -> None:
    world = World(1, admission=AdmissionConfig(max_waiting=2))
    world.busy(world.nodes[0], 16_000)
    world.enter()
    low, high = RoutingRequest(MODEL), RoutingRequest(MODEL)
    low.priority, high.priority = LOW, HIGH
    with pytest.raises(Shed):
        world.admission.rehearse(low, prompt(800), world.now_s)
    assert world.admission.rehearse(RoutingRequest(MODEL), prompt(800), world.now_s)[1]
    world.enter()
    with pytest.raises(Shed):
        world.admission.rehearse(RoutingRequest(MODEL), prompt(800), world.now_s)
    assert world.admission.rehearse(high, prompt(800), world.now_s)[1]
    assert world.admission.waiting == world.admission.held == 2


def on_islands(*islands: str) -> World:
    world = World(0)
    for number, island in enumerate(islands):
        node = world.fleet.add(NodeConfig(url=f"http://n{number}:1", name=f"n{number}", models=(MODEL,), island=island))
        world.fleet.check_passed(node, 0.0)
        world.cache_view.join(node.name, [MODEL]).describe(16, 0)
    return world


def test_a_conversation_that_stays_and_one_that_has_to_leave() -> None:
    world = on_islands("aws", "aws", "gcp")
    first = world.decide(prompt(8210, 1))
    world.close(world.router.dispatch(first, world.nodes[0], world.now_s))
    staying = world.decide(prompt(9000, 1))
    assert staying.node.island == "aws"
    assert "; stays on aws, its conversation's home; " in staying.sentence()
    for node in world.nodes[:2]:
        world.fleet.check_refused(node, world.now_s, "gone")
    assert "; crossed to gcp: no node of its home aws is up" in world.decide(prompt(9000, 1)).sentence()


# By other policies.


@pytest.mark.parametrize(
    ("policy", "wanted", "words"),
    [
        ("round_robin", RoutingRequest(MODEL), "it is its turn (round_robin)"),
        ("random", RoutingRequest(MODEL), "picked by chance (random)"),
        ("least_loaded", RoutingRequest(MODEL), "none has fewer requests"),
        ("power_of_two", RoutingRequest(MODEL), "no more requests than the other of two picked by chance"),
        ("latency", RoutingRequest(MODEL), "the lowest (requests there + 1) × average latency"),
        ("session", RoutingRequest(MODEL, session=b"7"), "the home of its session"),
        ("session", RoutingRequest(MODEL), "none has fewer requests"),
        ("prefix_hash", RoutingRequest(MODEL, b"system", b"user"), "the home of prompts that begin like it"),
        (
            "overlap",
            RoutingRequest(MODEL),
            "holds the most of its prompt, 6,144 of 8,210 tokens, among nodes with room",
        ),
        (
            "approximate",
            RoutingRequest(MODEL),
            "holds the most of its prompt, 6,144 of 8,210 tokens, among nodes with room",
        ),
    ],
)
def test_other_policies(policy: str, wanted: RoutingRequest, words: str) -> None:
    world = World(3)
    world.warm(world.nodes[1], prompt(6144, 1))
    router = Router(world.fleet, world.cache_view, Routing(policy=policy, seed=5))  # type: ignore[arg-type]
    lookup = prompt(8210, 1) if policy in ("overlap", "approximate") else None
    decision = router.decide(wanted, world.now_s, lookup)
    assert decision.sentence() == f"{decision.node.name}: {words}"
    assert decision.grounds().considered == 3
    if policy in ("session", "prefix_hash") and "home" in words:
        for _ in range(9):
            Ticket(decision.node, 0.0)
        assert ": next in line: the home of " in router.decide(wanted, world.now_s).sentence()


def test_asking_what_would_be_takes_nobodys_turn() -> None:
    world = World(3)
    router = Router(world.fleet, world.cache_view, Routing(policy="round_robin"))
    assert [router.aside().decide(RoutingRequest(MODEL), 1.0).node.name for _ in range(3)] == ["n0"] * 3
    assert [router.decide(RoutingRequest(MODEL), 1.0).node.name for _ in range(3)] == ["n0", "n1", "n2"]
    assert router.aside().decide(RoutingRequest(MODEL), 1.0).node.name == "n0"


# What is kept.


def test_grounds_keep_nothing_of_the_request() -> None:
    class Noted(Lookup):
        __slots__ = ("__weakref__",)

    world = World(3)
    tokens = array("I", range(8000)).tobytes()
    lookup = Noted(tokens, 8000, 0)
    decision = world.decide(lookup)
    grounds, gone = decision.grounds(), weakref.ref(lookup)
    query = decision.query
    assert query is not None
    held = gc.get_referrers(query.request)
    del decision, lookup, query, held
    gc.collect()
    assert gone() is None, "the tokens of its prompt are kept alive"
    assert sentence(grounds).startswith(grounds.node.name)


def large(count: int) -> tuple[Fleet, CacheView]:
    fleet, cache_view, random = Fleet(Health()), CacheView(Index()), Random(1)
    for number in range(count):
        node = fleet.add(NodeConfig(url=f"http://n{number}:1", name=f"n{number}", models=(MODEL,)))
        fleet.check_passed(node, 0.0)
        node.speed.ms_per_token = random.uniform(0.03, 0.2)
        cache_view.join(node.name, [MODEL])
    return fleet, cache_view


@pytest.mark.parametrize("tied", [False, True])
def test_of_very_many_candidates_the_best_are_kept(tied: bool) -> None:
    fleet, cache_view = large(1000)
    if tied:
        for node in fleet:
            node.speed.ms_per_token = 0.05
    decision = Router(fleet, cache_view, Routing(policy="price", seed=1)).decide(
        RoutingRequest(MODEL), 1000.0, prompt(8000)
    )
    grounds = decision.grounds()
    all_of_them, before = grounds.ranked(), sentence(grounds)
    assert len(all_of_them) == grounds.considered == 1000 > WHOLE
    assert [price.total for _, price in all_of_them] == sorted(price.total for _, price in all_of_them)
    grounds.cut(8)
    kept = grounds.ranked()
    assert len(kept) == 8 and grounds.considered == 1000
    assert grounds.node in [node for node, _ in kept]
    if not tied:
        assert kept == all_of_them[:8]
    said = sentence(grounds)
    assert said == before or tied
    assert not tied or "and 998 others cost the same" in said
    assert len(grounds.prices or ()) == 8


def test_who_reads_it_while_the_request_ends_reads_one_or_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet, cache_view = large(200)
    decision = Router(fleet, cache_view, Routing(policy="price", seed=1)).decide(
        RoutingRequest(MODEL), 1000.0, prompt(8000)
    )
    grounds = decision.grounds()
    whole = grounds.ranked()

    def ends_meanwhile(*given: Any, **more: Any) -> list[Any]:
        monkeypatch.undo()
        grounds.cut(8)
        return nsmallest(*given, **more)

    monkeypatch.setattr(reasons, "nsmallest", ends_meanwhile)
    assert grounds.ranked() == whole
    assert grounds.ranked() == whole[:8]


def test_a_small_fleet_keeps_all_of_them_by_reference() -> None:
    world = World(4)
    decision = world.decide(prompt(8000))
    grounds = decision.grounds()
    grounds.cut(2)
    assert grounds.prices is decision.prices and len(grounds.ranked()) == 4
    assert len(grounds.ranked(2)) == 2


def test_the_chosen_one_is_always_among_the_best() -> None:
    world = World(5)
    decision = world.decide(prompt(8000))
    for at, node in enumerate(world.nodes):
        grounds = decision.grounds()
        grounds.node = node
        for most in (1, 2, 5):
            ranked = [one for one, _ in grounds.ranked(most)]
            assert node in ranked and len(ranked) == most, at


def test_where_caches_do_not_count_nothing_is_said_of_them() -> None:
    world = World(2, pricing=Pricing(locality=0.0))
    world.warm(world.nodes[1], prompt(6144, 1))
    said = why(world, prompt(8210, 1))
    assert "caches do not count here (locality = 0), so load decides: nothing is queued there" in said
    assert "warm" not in said and "cold" not in said
    alone = World(1, pricing=Pricing(locality=0.0))
    assert "the only node that can take it; caches do not count here" in why(alone, prompt(8210, 1))
