"""Deadlines: what can't make it is refused early rather than served late, and what is not known may try."""

from __future__ import annotations

import pytest
from priced import PendingRequest, World, prompt

from warmroute.config import Admission as AdmissionConfig
from warmroute.config import Pricing, Routing
from warmroute.fleet.group import Group
from warmroute.fleet.node import Node, Outcome
from warmroute.prompt.routing_request import HIGH, LOW, NORMAL
from warmroute.routing.refusals import TooLate


def knows_speed(world: World, node: Node, ms_per_token: float = 0.05, token_ms: float = 20.0) -> None:
    """It has answered often enough to be known."""
    node.speed.guess(ms_per_token)
    node.speed.answers = 10
    pace = node.groups[0].pace
    for _ in range(50):
        pace.saw_answer(token_ms, 0.0)


def known(count: int = 1, **admission: object) -> World:
    world = World(count, admission=AdmissionConfig(**admission))  # type: ignore[arg-type]
    for node in world.nodes:
        knows_speed(world, node)
    return world


def guest(world: World, tokens: int = 8000, ttft_ms: float = 0.0, total_ms: float = 0.0) -> PendingRequest:
    made = PendingRequest(world, prompt(tokens))
    if ttft_ms:
        made.request.deadline_s = world.now_s + ttft_ms / 1000.0
    if total_ms:
        made.request.total_deadline_s = world.now_s + total_ms / 1000.0
    return made


def test_what_makes_it_goes() -> None:
    world = known()
    world.busy(world.nodes[0], 2000)
    made = guest(world, ttft_ms=1500)
    made.enter()
    assert made.fates == ["went"]


def test_what_cannot_make_it_is_refused_at_once_with_what_was_expected() -> None:
    world = known()
    world.busy(world.nodes[0], 2000)
    with pytest.raises(TooLate) as refused:
        guest(world, 40_000, ttft_ms=1500).enter()
    late = refused.value
    assert late.first_token and late.left_ms == pytest.approx(1500)
    assert 3000 < late.expected_ms < 5000 and 2 <= late.retry_after_s <= 4
    assert late.reason == "deadline_ttft"
    assert world.admission.waiting == 0 and world.nodes[0].inflight == 1


def test_the_whole_answer_has_its_own_deadline() -> None:
    """256 tokens at 20 ms are some 5 s."""
    world = known()
    world.busy(world.nodes[0], 300)
    with pytest.raises(TooLate) as refused:
        guest(world, 300, total_ms=3000).enter()
    assert not refused.value.first_token and refused.value.expected_ms > 5000
    assert refused.value.reason == "deadline_total"
    short = guest(world, 300, total_ms=3000)
    short.request.max_output_tokens = 50
    short.enter()
    assert short.fates == ["went"], "what it may have at most counts"
    slow = guest(world, 300, ttft_ms=2000, total_ms=60_000)
    slow.enter()
    assert slow.fates == ["went"]


def test_an_idle_node_may_try() -> None:
    world = known()
    made = guest(world, 200_000, ttft_ms=100, total_ms=200)
    made.enter()
    assert made.fates == ["went"]


def test_a_node_whose_speed_nobody_has_seen_may_try() -> None:
    world = World(1, admission=AdmissionConfig(hold=False))
    world.busy(world.nodes[0], 4000)
    made = guest(world, 200_000, ttft_ms=100, total_ms=200)
    made.enter()
    assert made.fates == ["went"]


def test_it_goes_where_it_makes_it_though_another_node_would_be_cheaper() -> None:
    world = World(2, admission=AdmissionConfig(hold=False), pricing=Pricing(late_ms=0.0))
    for node in world.nodes:
        knows_speed(world, node)
    warm, cold = world.nodes
    mine = prompt(40_000, 1)
    world.warm(warm, mine)
    world.busy(warm, 40_000)  # 3.6 s
    world.busy(cold, 300)
    assert world.decide(mine).node is warm or world.decide(mine).price is not None
    made = PendingRequest(world, mine)
    expected = world.price(warm, mine).own, world.price(cold, mine).own
    made.request.deadline_s = world.now_s + (min(expected) + max(expected)) / 2000.0
    quickest = warm if expected[0] < expected[1] else cold
    made.enter()
    assert made.node is quickest


def test_another_policy_has_no_prices_and_refuses_only_what_is_past() -> None:
    world = known()
    world.router.reconfigure(Routing(policy="round_robin"), Pricing())
    world.busy(world.nodes[0], 60_000)
    made = guest(world, 60_000, ttft_ms=100)
    made.enter()
    assert made.fates == ["went"]
    late = guest(world, 300, ttft_ms=100)
    world.later(0.2)
    with pytest.raises(TooLate):
        late.enter()


# While it waits.


def test_who_waits_is_refused_as_soon_as_it_cannot_make_it_and_before_it_is_due() -> None:
    world = known()
    running = world.busy(world.nodes[0], 8000)
    made, patient = guest(world, 8000, ttft_ms=2000), guest(world, 8000, ttft_ms=60_000)
    made.enter()
    patient.enter()
    assert made.waits and patient.waits
    for _ in range(100):
        world.later(0.05)
        world.tick()
        if not made.waits:
            break
    assert made.fates == ["refused"] and isinstance(made.why, TooLate)
    waited_ms = (world.now_s - made.arrived_s) * 1000.0
    assert 900 < waited_ms < 1600, "its own prefill and what is ahead of it take a second"
    assert patient.waits and world.admission.waiting == world.group.waiting == 1
    world.free(running)
    assert patient.fates == ["went"]


def test_who_waits_for_a_node_of_unknown_speed_is_refused_just_before_it_is_due() -> None:
    world = World(1)
    world.busy(world.nodes[0], 8000)
    made = guest(world, 8000, ttft_ms=2000)
    made.enter()
    while made.waits:
        world.later(0.05)
        world.tick()
    waited_s = world.now_s - made.arrived_s
    assert 1.9 <= waited_s < 2.0 and isinstance(made.why, TooLate)


def test_who_could_only_be_late_does_not_take_a_turn() -> None:
    world = known()
    running = world.busy(world.nodes[0], 8000)
    hurried, other = guest(world, 6000, ttft_ms=1200), guest(world, 8000)
    hurried.enter()
    other.enter()
    world.later(1.1)
    busy = world.busy(world.nodes[0], 300)  # so that it is not idle
    world.free(running)
    assert hurried.fates == ["refused"] and other.fates == ["went"]
    world.close(busy)
    other.finish()
    world.books_are_closed()


def test_who_waits_for_its_whole_answer_is_refused_likewise() -> None:
    world = known()
    world.busy(world.nodes[0], 8000)
    made = guest(world, 8000, total_ms=8000)
    made.enter()
    assert made.waits
    while made.waits:
        world.later(0.05)
        world.tick()
    assert isinstance(made.why, TooLate) and not made.why.first_token
    assert world.now_s - made.arrived_s < 4.0, "its answer alone takes 5 s"


def test_first_tokens_that_came_are_those_that_were_promised() -> None:
    """A node serves one after the other; those with a deadline of 3 s are served within it, or refused before."""
    world = known()
    guests = [guest(world, 6000, ttft_ms=3000) for _ in range(30)]
    for made in guests:
        try:
            made.enter()
        except TooLate as late:  # behind those who came before
            made.refuse(late)
    while any(made.waits or (made.fates == ["went"] and made.ticket._open) for made in guests):
        world.later(0.35)  # a prefill of 6,000 tokens
        world.tick()
        for made in guests:
            if made.fates == ["went"] and made.ticket._open:
                made.ticket.first_byte(world.now_s)
                world.fleet.close_ticket(made.ticket, Outcome.OK, world.now_s)
                assert world.now_s <= made.request.deadline_s + 0.1
                world.admission.freed(world.nodes[0], world.now_s)
                break
    served = [made for made in guests if made.fates == ["went"]]
    assert 5 <= len(served) <= 10 and len(served) + sum(made.fates == ["refused"] for made in guests) == 30
    world.books_are_closed()


# Those who wait already.


def crowd(world: World, count: int, tenant: str = "", priority: int = NORMAL) -> list[PendingRequest]:
    """So many who wait, each with 8,000 tokens."""
    made = [PendingRequest(world, prompt(8000), tenant=tenant, priority=priority) for _ in range(count)]
    for one in made:
        one.enter()
    assert all(one.waits for one in made)
    return made


def hurried(world: World, tenant: str = "", priority: int = NORMAL, tokens: int = 8000) -> PendingRequest:
    """Alone, it would make it."""
    made = PendingRequest(world, prompt(tokens), tenant=tenant, priority=priority)
    made.request.deadline_s = world.now_s + 3.0
    return made


def test_who_cannot_make_it_behind_those_who_wait_is_refused_at_once() -> None:
    world = known(2)
    for node in world.nodes:
        world.busy(node, 8000)
    first = hurried(world)
    first.enter()
    assert first.waits, "nobody is before it"
    first.leave()
    crowd(world, 40)
    with pytest.raises(TooLate) as refused:
        hurried(world).enter()
    late = refused.value
    assert late.reason == "deadline_ttft" and 8000 < late.expected_ms < 13_000, "40 × 0.5 s on two nodes, and its own"
    assert 5 <= late.retry_after_s <= 10
    assert world.admission.waiting == 40
    with pytest.raises(TooLate):
        world.admission.rehearse(hurried(world).request, prompt(8000), world.now_s)


def test_those_who_go_after_it_do_not_count() -> None:
    world = known()
    world.busy(world.nodes[0], 8000)
    crowd(world, 40, "a")
    for made in (hurried(world, "b"), hurried(world, "a", HIGH), hurried(world, "a", tokens=2000)):
        made.enter()
        assert made.waits, "another tenant, a higher priority, less work: each goes first"
        made.leave()
    with pytest.raises(TooLate):
        hurried(world, "b", LOW).enter()


def test_those_who_wait_for_another_model_do_not_count() -> None:
    world = known()
    world.busy(world.nodes[0], 8000)
    for one in crowd(world, 40):
        waiting = world.admission.room.tenants[NORMAL, ""].waiting[id(one)]
        waiting.group = Group("other")
    made = hurried(world)
    made.enter()
    assert made.waits


def test_behind_those_who_wait_for_a_node_of_unknown_speed_it_may_try() -> None:
    world = World(1)
    world.busy(world.nodes[0], 8000)
    crowd(world, 40)
    made = hurried(world)
    made.enter()
    assert made.waits
