"""Who goes at once, who waits, who goes next, who is refused. Without I/O, by a clock of our own."""

from __future__ import annotations

from collections import Counter, deque
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from priced import PendingRequest, World, prompt

from warmroute.config import Admission as AdmissionConfig
from warmroute.config import NodeConfig, Pricing, Routing
from warmroute.fleet.demand import DemandMeter
from warmroute.fleet.node import Outcome
from warmroute.prompt.routing_request import HIGH, LOW, NORMAL
from warmroute.routing.admission import LOOKED_AT, LOOKED_AT_IN_ALL
from warmroute.routing.decision import Decision
from warmroute.routing.query import Query
from warmroute.routing.refusals import (
    Displaced,
    NobodyCanServe,
    QueuesFull,
    Shed,
    Undecided,
    UnknownModel,
    WaitedTooLong,
    WouldWait,
)


def one_busy(**admission: object) -> World:
    """A fleet of one node, which prefills somebody's 8,000 tokens."""
    world = World(1, admission=AdmissionConfig(**admission))  # type: ignore[arg-type]
    world.running = world.busy(world.nodes[0])  # type: ignore[attr-defined]
    return world


def frees(world: World) -> None:
    world.free(world.running)  # type: ignore[attr-defined]


# Going and waiting.


def test_who_finds_room_goes_at_once() -> None:
    world = World(2)
    guests = [world.enter() for _ in range(2)]
    assert {guest.node.name for guest in guests} == {"n0", "n1"}
    assert world.admission.held == world.admission.waiting == 0


def test_an_idle_node_takes_a_prompt_of_any_length() -> None:
    world = World(1)
    assert world.enter(200_000).node is world.nodes[0]


def test_a_little_work_ahead_is_no_reason_to_wait() -> None:
    world = World(1)
    world.busy(world.nodes[0], 4000)  # 216 ms of 250
    assert world.enter().node is world.nodes[0]
    assert world.enter().waits


def test_who_finds_the_cheapest_node_busy_waits_until_it_is_free() -> None:
    world = one_busy()
    first, second = world.enter(), world.enter()
    assert first.waits and second.waits
    assert world.admission.waiting == world.group.waiting == world.admission.held == 2
    world.tick()
    assert first.waits and second.waits
    frees(world)
    assert first.node is world.nodes[0] and second.waits
    first.finish()
    assert second.node is world.nodes[0]
    second.finish()
    world.books_are_closed()
    assert world.admission.held == 2, "it counts them all, ever"


def test_a_first_byte_frees_the_node_for_the_next_prefill() -> None:
    world = one_busy()
    guest = world.enter()
    world.later(0.4)
    world.running.first_byte(world.now_s)  # type: ignore[attr-defined]
    world.admission.freed(world.nodes[0], world.now_s)
    assert guest.node is world.nodes[0] and world.nodes[0].inflight == 2


def test_where_room_came_by_itself_a_tick_finds_it() -> None:
    world = one_busy()
    guest = world.enter()
    world.close(world.running)  # type: ignore[attr-defined]
    assert guest.waits
    world.tick()
    assert guest.fates == ["went"]


def test_who_waits_for_a_warm_node_goes_to_another_that_is_free_before() -> None:
    world = World(2)
    warm, cold = world.nodes
    mine = prompt(8000, 1)
    world.warm(warm, mine)
    world.busy(warm, 30_000)
    elsewhere = world.busy(cold, 60_000)
    guest = PendingRequest(world, mine)
    guest.enter()
    assert guest.waits and world.decide(mine).node is warm
    world.free(elsewhere)
    assert guest.node is cold


def test_who_would_pay_more_elsewhere_goes_on_waiting() -> None:
    world = World(2)
    warm, cold = world.nodes
    mine = prompt(60_000, 1)
    world.warm(warm, mine)
    ahead, elsewhere = world.busy(warm, 8000), world.busy(cold, 8000)
    guest = PendingRequest(world, mine)
    guest.enter()
    world.free(elsewhere)
    assert guest.waits, "6 s of prefill there against 0.5 s of waiting here"
    world.free(ahead)
    assert guest.node is warm


def test_where_nothing_is_held_everybody_goes_at_once() -> None:
    world = one_busy(hold=False)
    assert [world.enter().fates for _ in range(5)] == [["went"]] * 5


def test_a_policy_that_does_not_hold_lets_everybody_through() -> None:
    world = one_busy()
    world.router.reconfigure(Routing(policy="least_loaded"), Pricing())
    assert [world.enter().fates for _ in range(5)] == [["went"]] * 5


@pytest.mark.parametrize("change", ["hold", "policy", "ahead_ms"])
def test_a_reload_that_makes_room_lets_those_through_who_wait(change: str) -> None:
    world = one_busy()
    guest = world.enter()
    if change == "policy":
        world.router.reconfigure(Routing(policy="round_robin"), Pricing())
    else:
        world.admission.reconfigure(
            AdmissionConfig(hold=False) if change == "hold" else AdmissionConfig(ahead_ms=1000.0)
        )
    world.tick()
    assert guest.fates == ["went"] and world.admission.waiting == 0


# Whose turn it is.


def test_higher_priorities_go_first() -> None:
    world = one_busy()
    low, normal, high = (world.enter(priority=priority) for priority in (LOW, NORMAL, HIGH))
    frees(world)
    order = []
    for _ in range(3):
        [gone] = [guest for guest in (low, normal, high) if not guest.waits and guest not in order]
        order.append(gone)
        gone.finish()
    assert order == [high, normal, low]


def test_the_least_work_goes_first() -> None:
    world = one_busy()
    large, small = world.enter(40_000), world.enter(6000)
    frees(world)
    assert large.waits and small.fates == ["went"]


def test_nobody_starves() -> None:
    """64,000 tokens are 7 s of work, and others always have less: it waits ten times that, no longer."""
    world = one_busy()
    large = world.enter(64_000)
    small = deque(world.enter() for _ in range(3))
    frees(world)
    for _ in range(300):
        if not large.waits:
            break
        world.later(0.46)
        small.append(world.enter())
        next(guest for guest in small if not guest.waits).finish()
        small = deque(guest for guest in small if guest.waits or guest.ticket._open)
    assert large.fates == ["went"]
    assert 50 < world.now_s - large.arrived_s < 90


def served_while_both_wait(world: World, guests: list[PendingRequest], rounds: int) -> Counter[str]:
    """Prefill work by tenant."""
    frees(world)
    had: Counter[str] = Counter()
    for _ in range(rounds):
        world.later(0.3)
        gone = next(guest for guest in guests if not guest.waits)
        guests.remove(gone)
        assert gone.decision.price is not None
        had[gone.request.tenant] += gone.decision.price.prefill
        gone.finish()
    return had


def test_a_tenant_that_floods_gets_no_more_than_the_other() -> None:
    world, random = one_busy(), Random(2)
    guests = [world.enter(random.randrange(6000, 20_000), tenant="flood") for _ in range(200)]
    guests += [world.enter(random.randrange(6000, 20_000), tenant="calm") for _ in range(50)]
    had = served_while_both_wait(world, guests, 90)
    assert {guest.request.tenant for guest in guests if guest.waits} == {"flood", "calm"}
    assert had["calm"] == pytest.approx(had["flood"], rel=0.1)


def test_turns_are_fair_by_work_and_not_by_requests() -> None:
    world = one_busy()
    guests = [world.enter(30_000, tenant="long") for _ in range(30)]
    guests += [world.enter(6000, tenant="short") for _ in range(300)]
    had = served_while_both_wait(world, guests, 100)
    assert had["long"] == pytest.approx(had["short"], rel=0.1)


def test_a_tenant_with_one_request_at_a_time_is_not_the_first_each_time() -> None:
    """Its large requests, each sent when the one before has gone, take their turns like those that stand in line."""
    world = one_busy()
    guests = [world.enter(6000, tenant="many") for _ in range(300)]
    single = world.enter(40_000, tenant="single")
    frees(world)
    had: Counter[str] = Counter()
    for _ in range(120):
        world.later(0.3)
        gone = next(guest for guest in (single, *guests) if not guest.waits)
        assert gone.decision.price is not None
        had[gone.request.tenant] += gone.decision.price.prefill
        if gone is single:
            single = world.enter(40_000, tenant="single")
        else:
            guests.remove(gone)
        gone.finish()
    assert had["single"] == pytest.approx(had["many"], rel=0.15)


def test_who_comes_later_does_not_have_to_catch_up() -> None:
    world = one_busy()
    early = [world.enter(tenant="early") for _ in range(60)]
    served_while_both_wait(world, early, 20)
    late = [world.enter(tenant="late") for _ in range(60)]
    running = next(guest for guest in early if not guest.waits)
    world.running = running.ticket  # type: ignore[attr-defined]
    early.remove(running)
    had = served_while_both_wait(world, early + late, 20)
    assert had["late"] == pytest.approx(had["early"], rel=0.1), "neither all its own turns, nor none"


# Leaving, being refused.


def test_who_leaves_is_gone() -> None:
    world = one_busy()
    leaving, staying = world.enter(tenant="a"), world.enter(tenant="b")
    leaving.leave()
    leaving.leave()
    assert world.admission.waiting == world.group.waiting == 1
    frees(world)
    assert leaving.fates == ["left", "left"] and staying.fates == ["went"]
    staying.finish()
    world.books_are_closed()


def test_who_has_gone_cannot_leave_what_it_does_not_wait_in() -> None:
    world = one_busy()
    gone, waiting = world.enter(), world.enter()
    frees(world)
    gone.leave()
    assert waiting.waits and world.admission.waiting == 1


def test_too_many_are_refused_the_low_before_and_the_high_never() -> None:
    world = one_busy(max_waiting=4)
    for _ in range(2):
        world.enter()
    with pytest.raises(Shed):
        world.enter(priority=LOW)
    for _ in range(2):
        world.enter()
    with pytest.raises(Shed) as refused:
        world.enter()
    assert refused.value.retry_after_s == 60, "nobody has been let through yet"
    assert world.enter(priority=HIGH).waits
    assert world.admission.waiting == world.admission.held == 5
    frees(world)
    with pytest.raises(Shed):
        world.enter()
    assert world.admission.waiting == 4


def test_when_to_come_back_is_told_by_how_fast_others_go() -> None:
    world = one_busy(max_waiting=40)
    waiting = deque(world.enter() for _ in range(40))
    frees(world)
    for _ in range(60):  # two a second, for half a minute
        world.later(0.5)
        gone = next(guest for guest in waiting if not guest.waits)
        waiting.remove(gone)
        waiting.append(world.enter())
        gone.finish()
    waiting.append(world.enter())
    with pytest.raises(Shed) as refused:
        world.enter()
    assert 15 <= refused.value.retry_after_s <= 25, "40 wait, and 2 go each second"


def test_who_has_waited_too_long_is_refused() -> None:
    world = one_busy(max_wait_s=5.0)
    early = world.enter()
    world.later(3.0)
    late = world.enter()
    world.later(2.5)
    world.tick()
    assert early.fates == ["refused"] and isinstance(early.why, WaitedTooLong)
    assert late.waits and world.admission.waiting == 1
    frees(world)
    assert late.fates == ["went"]


def test_without_a_limit_one_waits_as_long_as_it_takes() -> None:
    world = one_busy()
    guest = world.enter()
    world.later(100_000.0)
    world.tick()
    assert guest.waits


def test_who_is_refused_at_once_leaves_nothing_behind() -> None:
    world = World(0)
    with pytest.raises(NobodyCanServe):
        world.enter()
    world.add("n0")
    guest = PendingRequest(world, prompt(8000))
    guest.request.model = "another"
    with pytest.raises(UnknownModel):
        guest.enter()
    world.books_are_closed()


# Nodes that go and come.


@pytest.mark.parametrize("way", ["refuses", "removed", "drained"])
def test_who_waits_for_a_node_that_goes_is_sent_to_another(way: str) -> None:
    world = World(2)
    warm, other = world.nodes
    mine = prompt(60_000, 1)
    world.warm(warm, mine)
    world.busy(warm)
    guest = PendingRequest(world, mine)
    guest.enter()
    assert guest.waits
    if way == "refuses":
        world.fleet.check_refused(warm, world.now_s, "gone")
    elif way == "removed":
        world.fleet.remove(warm.name)
    else:
        world.fleet.drain(warm.name)
    world.tick()
    assert guest.node is other


@pytest.mark.parametrize("way", ["refuses", "removed"])
def test_who_waits_is_refused_when_no_node_is_left(way: str) -> None:
    """Even while the node's running requests have not ended: nobody waits for those any more."""
    world = one_busy()
    guests = [world.enter(tenant=tenant) for tenant in "aab"]
    if way == "refuses":
        world.fleet.check_refused(world.nodes[0], world.now_s, "gone")
    else:
        world.fleet.remove("n0")
    world.tick()
    assert [guest.fates for guest in guests] == [["refused"]] * 3
    assert all(isinstance(guest.why, NobodyCanServe) for guest in guests)
    assert world.admission.waiting == world.group.waiting == 0


def test_a_node_that_comes_takes_those_who_wait() -> None:
    world = one_busy()
    guest = world.enter()
    new = world.add("n1")
    world.tick()
    assert guest.node is new


def test_slow_start_does_not_keep_those_waiting_whom_another_node_has_room_for() -> None:
    world = World(2, slow_start_s=10.0)
    back, other = world.nodes
    world.fleet.check_refused(back, world.now_s, "gone")
    running = world.busy(other)
    guests = [world.enter(6000) for _ in range(5)]
    assert all(guest.waits for guest in guests)
    world.fleet.check_passed(back, world.now_s)
    world.busy(back)
    guests += [world.enter(6000) for _ in range(5)]
    assert all(guest.waits for guest in guests)
    world.free(running)
    assert [guest.node for guest in guests if not guest.waits] == [other]


def half_open(world: World) -> None:
    """The first node failed, its time has passed, and a check passed."""
    node = world.nodes[0]
    for _ in range(5):
        world.close(world.send(node), Outcome.FAILED)
    world.later(20.0)
    world.fleet.check_passed(node, world.now_s)
    world.later(0.1)
    assert node.health.standing.value == "half_open"


def test_one_of_those_who_wait_tries_out_a_node_on_trial() -> None:
    """Nobody new comes: they must do it themselves."""
    world = World(2)
    tickets = [world.busy(node) for node in world.nodes]
    guests = [world.enter() for _ in range(3)]
    assert all(guest.waits for guest in guests)
    world.close(tickets[0], Outcome.FAILED)
    half_open(world)
    world.tick()
    assert [guest.node for guest in guests if not guest.waits] == [world.nodes[0]]


def test_a_node_on_trial_where_old_requests_hang_does_not_stop_the_others() -> None:
    world = World(2)
    for _ in range(3):
        world.busy(world.nodes[0], 60_000)
    half_open(world)
    guests = [world.enter() for _ in range(3)]
    assert [guest.fates for guest in guests] == [["went"], ["went"], []]
    assert [guest.node.name for guest in guests[:2]] == ["n0", "n1"], "one to try, one where there is room"


# Coming back from within.


class Hasty(PendingRequest):
    """Is done as soon as it goes."""

    def go(self, decision: Decision) -> None:
        super().go(decision)
        self.finish()


def test_those_who_free_their_node_at_once_go_one_after_the_other() -> None:
    world = one_busy()
    guests = [Hasty(world, prompt(300)) for _ in range(500)]
    for guest in guests:
        guest.enter()
    assert world.admission.waiting == 500
    frees(world)
    assert all(guest.fates == ["went"] for guest in guests)
    world.books_are_closed()


def test_whoever_leaves_while_another_goes_does_not_go() -> None:
    world = one_busy()

    class Jealous(PendingRequest):
        def go(self, decision: Decision) -> None:
            super().go(decision)
            other.leave()
            self.finish()

        def refuse(self, why: Undecided) -> None:
            super().refuse(why)
            other.leave()

    first = Jealous(world, prompt(6000))
    first.enter()
    other = world.enter(7000)
    frees(world)
    assert first.fates == ["went"] and other.fates == ["left"]
    world.books_are_closed()

    for finds_out in (World.tick, frees):
        world = one_busy()
        first = Jealous(world, prompt(6000))
        first.enter()
        other = world.enter()
        world.fleet.check_refused(world.nodes[0], world.now_s, "gone")
        finds_out(world)
        assert first.fates == ["refused"] and other.fates == ["left"]
        assert world.admission.waiting == 0


def test_whoever_enters_while_another_goes_waits_its_turn() -> None:
    world = one_busy()
    entered: list[PendingRequest] = []

    class Chatty(PendingRequest):
        def go(self, decision: Decision) -> None:
            super().go(decision)
            entered.append(world.enter())

    Chatty(world, prompt(8000)).enter()
    frees(world)
    assert [guest.waits for guest in entered] == [True] and world.admission.waiting == 1


# Whatever happens.

EVENTS = st.one_of(
    st.tuples(
        st.just("arrive"), st.sampled_from(["a", "b", "c"]), st.sampled_from([HIGH, NORMAL, LOW]), st.integers(1, 30)
    ),
    st.tuples(st.sampled_from(["finish", "leave", "first byte"]), st.integers(0, 30)),
    st.tuples(st.just("tick"), st.floats(0.0, 3.0)),
    st.tuples(st.sampled_from(["down", "up"]), st.integers(0, 2)),
)


@settings(max_examples=60)
@given(st.lists(EVENTS, max_size=50))
def test_everybody_goes_or_is_refused_or_leaves_just_once_and_the_books_close(events: list[tuple[object, ...]]) -> None:
    world = World(3, admission=AdmissionConfig(max_waiting=8, max_wait_s=6.0, queue_threshold=6))
    guests: list[PendingRequest] = []
    open_: list[PendingRequest] = []
    for event in events:
        match event:
            case ("arrive", str(tenant), int(priority), int(thousands)):
                guest = PendingRequest(world, prompt(thousands * 1000), tenant, priority)
                guest.request.may_queue = thousands % 7 != 0
                if thousands % 3 == 0:
                    guest.request.deadline_s = world.now_s + 2.0
                if thousands % 5 == 0:
                    guest.request.total_deadline_s = world.now_s + 4.0
                guests.append(guest)
                try:
                    guest.enter()
                except Undecided as why:
                    guest.refuse(why)
            case ("finish", int(at)) if open_:
                open_.pop(at % len(open_)).finish()
            case ("first byte", int(at)) if open_:
                ticket = open_[at % len(open_)].ticket
                if not ticket.first_byte_s:
                    ticket.first_byte(world.now_s)
                    world.admission.freed(ticket.node, world.now_s)
            case ("leave", int(at)) if waiting := [guest for guest in guests if guest.waits]:
                waiting[at % len(waiting)].leave()
            case ("tick", float(seconds)):
                world.later(seconds)
                world.tick()
            case ("down", int(at)):
                world.fleet.check_refused(world.nodes[at], world.now_s, "gone")
            case ("up", int(at)):
                world.fleet.check_passed(world.nodes[at], world.now_s)
        known = {id(guest) for guest in open_}
        open_ += [
            guest for guest in guests if guest.fates == ["went"] and guest.ticket._open and id(guest) not in known
        ]
        assert world.admission.waiting == world.group.waiting == sum(guest.waits for guest in guests)
    for node in world.nodes:
        world.fleet.check_passed(node, world.now_s)
    for _ in range(len(guests) + 1):
        for guest in guests:
            if guest.fates == ["went"] and guest.ticket._open:
                guest.finish()
        world.tick()
    assert all(len(guest.fates) == 1 for guest in guests)
    world.books_are_closed()


# Room for the higher, whom the low make way for.


def test_when_it_is_full_a_low_one_that_waits_makes_room_for_others() -> None:
    world = one_busy(max_waiting=4)
    low = [world.enter(priority=LOW, tenant=tenant) for tenant in "ab"]
    for _ in range(2):
        world.enter()
    normal = world.enter()
    assert normal.waits and world.admission.waiting == world.group.waiting == 4
    assert [guest.fates for guest in low] == [[], ["refused"]] and isinstance(low[1].why, Displaced)
    high = world.enter(priority=HIGH)
    assert high.waits and low[0].fates == ["refused"] and world.admission.waiting == 4
    with pytest.raises(Shed):
        world.enter()
    assert world.enter(priority=HIGH).waits and world.admission.waiting == 5, "high passes"


def test_the_tenant_with_the_most_low_ones_makes_room_first_and_its_last_one() -> None:
    world = one_busy(max_waiting=6)
    low = [world.enter(priority=LOW, tenant=tenant) for tenant in ("many", "few", "many")]
    for _ in range(3):
        world.enter()
    world.enter()
    assert [guest.fates for guest in low] == [[], [], ["refused"]]


def test_whoever_is_displaced_may_come_back_from_within() -> None:
    world = one_busy(max_waiting=2)
    again: list[PendingRequest] = []

    class Stubborn(PendingRequest):
        def refuse(self, why: Undecided) -> None:
            super().refuse(why)
            with pytest.raises(Shed):
                again.append(world.enter(priority=LOW))

    first = Stubborn(world, prompt(8000), priority=LOW)
    first.enter()
    world.enter()
    world.enter()
    assert first.fates == ["refused"] and not again and world.admission.waiting == 2


# Nobody starves behind a higher priority.


@pytest.mark.parametrize("flooding", [HIGH, NORMAL])
def test_a_low_one_gets_its_turn_though_higher_ones_never_end(flooding: int) -> None:
    world = one_busy()
    low = world.enter(priority=LOW)
    others = deque(world.enter(priority=flooding) for _ in range(3))
    frees(world)
    gone = 0
    while low.waits and gone < 200:
        world.later(0.46)
        others.append(world.enter(priority=flooding))
        next(guest for guest in others if not guest.waits).finish()
        gone += 1
        others = deque(guest for guest in others if guest.waits or guest.ticket._open)
    assert low.fates == ["went"]
    waited_s = world.now_s - low.arrived_s
    assert 10.0 <= waited_s < 10.0 + 17 * 0.46, "after ten seconds, with the next of the turns that are kept for it"


def test_while_nobody_has_waited_long_turns_are_by_priority_alone() -> None:
    world = one_busy()
    low = world.enter(priority=LOW)
    others = deque(world.enter() for _ in range(3))
    frees(world)
    for _ in range(40):
        world.later(0.2)
        others.append(world.enter())
        next(guest for guest in others if not guest.waits).finish()
        others = deque(guest for guest in others if guest.waits or guest.ticket._open)
    assert low.waits


def test_who_goes_at_once_while_others_wait_counts_as_its_tenants_too() -> None:
    """Two nodes, one of them warm for a tenant whose requests find room there: they are of its share."""
    world = World(2)
    warm, cold = world.nodes
    mine = prompt(60_000, 1)
    world.warm(warm, mine)
    running = world.busy(cold, 40_000)
    ahead = world.busy(warm, 40_000)
    waiting = world.enter(60_000, tenant="other")
    assert waiting.waits
    world.close(ahead)
    guest = PendingRequest(world, mine, "lucky")
    guest.enter()
    assert guest.fates == ["went"] and world.admission.room.had[NORMAL, "lucky"] > 0
    waiting.leave()
    assert not world.admission.room.had
    world.close(running)


# Nodes' own queues.


def engine_queues(world: World, *waiting: int) -> None:
    for node, count in zip(world.nodes, waiting, strict=True):
        node.saw_load(4, count, 0.1, world.now_s)


@pytest.mark.parametrize("policy", ["price", "round_robin", "least_loaded", "power_of_two", "random", "latency"])
def test_over_the_threshold_everywhere_is_refused_the_low_before_and_the_high_never(policy: str) -> None:
    world = World(2, admission=AdmissionConfig(queue_threshold=8))
    world.router.reconfigure(Routing(policy=policy, seed=3), Pricing())  # type: ignore[arg-type]
    engine_queues(world, 8, 9)
    for priority in (NORMAL, LOW):
        with pytest.raises(QueuesFull):
            world.enter(300, priority=priority)
    world.enter(300, priority=HIGH).leave()
    engine_queues(world, 4, 5)
    with pytest.raises(QueuesFull):
        world.enter(300, priority=LOW)
    world.enter(300).leave()
    engine_queues(world, 3, 5)
    assert world.enter(300, priority=LOW).node is world.nodes[0]


@pytest.mark.parametrize("policy", ["price", "round_robin", "random"])
def test_nodes_over_the_threshold_are_passed_over(policy: str) -> None:
    world = World(3, admission=AdmissionConfig(queue_threshold=8))
    world.router.reconfigure(Routing(policy=policy, seed=3), Pricing())  # type: ignore[arg-type]
    engine_queues(world, 20, 7, 20)
    guest = world.enter(300)
    assert guest.node is world.nodes[1]
    assert {node.name for node in guest.decision.fallbacks()} == {"n0", "n2"}, "they stand in at need"


def test_what_was_sent_since_the_last_poll_counts_until_it_begins() -> None:
    world = World(1, admission=AdmissionConfig(queue_threshold=2))
    world.router.reconfigure(Routing(policy="round_robin"), Pricing())
    engine_queues(world, 0)
    first, second = world.enter(300), world.enter(300)
    assert world.nodes[0].queued == 2
    with pytest.raises(QueuesFull):
        world.enter(300)
    first.ticket.first_byte(world.now_s)
    assert world.nodes[0].queued == 1
    third = world.enter(300)
    second.finish()
    engine_queues(world, 1)
    assert world.nodes[0].queued == 1, "what the poll has seen is told by the poll"
    third.finish()
    assert world.nodes[0].queued == 1
    engine_queues(world, 0)
    first.finish()
    assert world.nodes[0].queued == 0
    world.books_are_closed()


def test_without_a_threshold_queues_do_not_matter() -> None:
    world = World(1)
    world.router.reconfigure(Routing(policy="round_robin"), Pricing())
    engine_queues(world, 1000)
    assert world.enter(300, priority=LOW).fates == ["went"]


# Rather not.


def test_who_does_not_want_to_wait_is_refused_at_once() -> None:
    world = one_busy()
    guest = PendingRequest(world, prompt(8000))
    guest.request.may_queue = False
    with pytest.raises(WouldWait):
        guest.enter()
    world.close(world.running)  # type: ignore[attr-defined]
    guest.enter()
    assert guest.fates == ["went"]
    guest.finish()
    world.books_are_closed()


def test_who_does_not_want_to_wait_does_not_want_to_wait_in_an_engine_either() -> None:
    world = World(2)
    world.router.reconfigure(Routing(policy="round_robin"), Pricing())
    engine_queues(world, 1, 0)
    for _ in range(4):
        guest = PendingRequest(world, prompt(300))
        guest.request.may_queue = False
        guest.enter()
        assert guest.node is world.nodes[1]
    engine_queues(world, 1, 2)
    guest = PendingRequest(world, prompt(300))
    guest.request.may_queue = False
    with pytest.raises(WouldWait):
        guest.enter()


# From half of it on.


def test_from_half_of_it_no_low_one_goes_before_others_though_a_node_has_room_for_it() -> None:
    world = World(2, admission=AdmissionConfig(max_waiting=4))
    full, other = world.nodes
    mine = prompt(60_000, 1)
    world.warm(full, mine)
    world.busy(full, 40_000)
    elsewhere = world.busy(other, 40_000)
    for _ in range(2):
        PendingRequest(world, mine).enter()
    assert world.admission.waiting == 2
    world.close(elsewhere)
    with pytest.raises(Shed):
        world.enter(300, priority=LOW)
    assert world.enter(300).node is other


def test_a_low_one_whose_turn_would_not_come_is_told_so() -> None:
    world = one_busy(max_waiting=4)
    low = world.enter(priority=LOW)
    for _ in range(2):
        world.enter()
    world.later(9.0)
    world.tick()
    assert low.waits
    world.later(2.0)
    world.tick()
    assert low.fates == ["refused"] and isinstance(low.why, Displaced) and world.admission.waiting == 2


def test_where_only_low_ones_wait_they_go() -> None:
    world = one_busy(max_waiting=2)
    low = world.enter(priority=LOW)
    frees(world)
    assert low.fates == ["went"]
    high = [world.enter(priority=HIGH) for _ in range(3)]
    assert all(guest.waits for guest in high)
    low.finish()
    assert [guest.fates for guest in high] == [["went"], [], []]


def test_a_full_queue_for_one_model_refuses_no_low_one_of_another() -> None:
    world = one_busy(max_waiting=2)
    for _ in range(2):
        world.enter()
    world.fleet.add(NodeConfig(url="http://b:1", name="b", models=("other",)))
    world.fleet.check_passed(world.fleet.node("b"), 0.0)
    guest = PendingRequest(world, prompt(300), priority=LOW)
    guest.request.model = "other"
    guest.enter()
    assert guest.node.name == "b"


def test_those_who_wait_for_other_models_hide_nobody() -> None:
    world = World(1)
    other = world.fleet.add(NodeConfig(url="http://other:1", models=("other",)))
    world.fleet.check_passed(other, 0.0)
    world.cache_view.join(other.name, ["other"]).describe(16, 0)

    def entered(model: str) -> PendingRequest:
        guest = PendingRequest(world, prompt(8000))
        guest.request.model = model
        guest.enter()
        return guest

    first, running = entered("m"), entered("other")
    many = [entered("m") for _ in range(LOOKED_AT)]
    hidden = entered("other")
    assert hidden.waits and all(guest.waits for guest in many)
    running.finish()
    assert not hidden.waits and hidden.decision.node is other
    assert not first.waits and all(guest.waits for guest in many)


def test_a_model_that_nobody_serves_is_no_work_for_the_fleet() -> None:
    world = World(1)
    world.router.demand_meter = demand_meter = DemandMeter()
    unknown = PendingRequest(world, prompt(100))
    unknown.request.model = "none"
    with pytest.raises(UnknownModel):
        unknown.enter()
    assert demand_meter.arrived == 0
    PendingRequest(world, prompt(100)).enter()
    assert demand_meter.arrived == 1


def test_who_waited_is_not_put_into_a_queue_that_has_grown_too_long() -> None:
    world = World(2, admission=AdmissionConfig(queue_threshold=4))
    one, two = world.nodes
    tickets = [world.busy(node, 16_000) for node in (one, two)]
    guests = [world.enter(), world.enter(priority=HIGH)]
    assert all(guest.waits for guest in guests)
    one.saw_load(8, 6, 0.1, world.now_s)
    two.saw_load(8, 6, 0.1, world.now_s)
    for ticket in tickets:
        world.free(ticket)
    world.tick()
    assert guests[0].waits and guests[1].fates == ["went"], "high passes"
    guests[1].finish()
    two.saw_load(8, 0, 0.1, world.now_s)
    world.tick()
    assert guests[0].node is two
    guests[0].finish()
    world.books_are_closed()


@pytest.mark.parametrize("tenants", [1, 3, 100])
def test_however_many_wait_a_free_node_costs_a_bounded_number_of_looks(tenants: int) -> None:
    world = World(2)
    wanted, slow = world.nodes
    world.busy(wanted, 16_000)
    running = world.busy(slow, 16_000)
    slow.speed.ms_per_token = 50.0
    guests = [world.enter(tenant=f"tenant {number % tenants}") for number in range(600)]
    before = world.router.decide_again
    thoughts = 0

    def counted(query: Query, now_s: float) -> Decision:
        nonlocal thoughts
        thoughts += 1
        return before(query, now_s)

    world.router.decide_again = counted  # type: ignore[method-assign]
    world.free(running)
    assert all(guest.waits for guest in guests), "nobody wants it"
    assert thoughts == min(LOOKED_AT * tenants, LOOKED_AT_IN_ALL // tenants * tenants)
