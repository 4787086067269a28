"""Requests that wait for a first node, where the fleet is scaled from nothing: they leave, are late, make room and go
as those do who wait for room on a node."""

from __future__ import annotations

import pytest
from priced import MODEL, PendingRequest, World, prompt

from warmroute.config import Admission as AdmissionConfig
from warmroute.config import Scaling
from warmroute.prompt.routing_request import HIGH, LOW, NORMAL
from warmroute.routing.refusals import Displaced, NobodyCanServe, Shed, TooLate, WaitedTooLong


def nobody(**admission: object) -> World:
    world = World(0, admission=AdmissionConfig(**admission))  # type: ignore[arg-type]
    world.admission.node_wait_s = Scaling().hold_s or 60.0
    return world


def guest_of(world: World, tokens: int = 8000, priority: int = NORMAL, tenant: str = "") -> PendingRequest:
    guest = PendingRequest(world, prompt(tokens), tenant, priority)
    guest.enter()
    return guest


def test_it_goes_when_a_first_node_comes_and_others_after_it() -> None:
    world = nobody()
    first, second = guest_of(world), guest_of(world)
    world.tick()
    assert first.waits and second.waits and world.admission.waiting == world.admission.held == 2
    node = world.add("n0")
    world.group = node.groups[0]
    world.tick()
    assert first.node is node and second.waits
    assert world.admission.waiting == world.group.waiting == 1 and world.admission.held == 2
    first.finish()
    assert second.node is node
    second.finish()
    world.books_are_closed()


def test_without_scaling_nobody_waits_for_a_node() -> None:
    world = nobody()
    world.admission.node_wait_s = 0.0
    with pytest.raises(NobodyCanServe):
        guest_of(world)


def test_who_would_rather_not_wait_does_not() -> None:
    world = nobody()
    guest = PendingRequest(world, prompt(100))
    guest.request.may_queue = False
    with pytest.raises(NobodyCanServe):
        guest.enter()
    assert world.admission.waiting == 0


def test_who_leaves_is_gone() -> None:
    world = nobody()
    guest = guest_of(world)
    guest.leave()
    assert world.admission.waiting == 0
    world.add("n0")
    world.tick()
    assert guest.fates == ["left"]


def test_who_has_waited_too_long_is_refused() -> None:
    world = nobody()
    guest = guest_of(world)
    world.later(world.admission.node_wait_s + 1.0)
    world.tick()
    assert isinstance(guest.why, WaitedTooLong) and world.admission.waiting == 0


def test_a_node_that_comes_too_late_for_the_deadline_is_not_kept_busy_with_it() -> None:
    world = nobody()
    late, early = PendingRequest(world, prompt(8000)), PendingRequest(world, prompt(8000))
    late.request.deadline_s, early.request.total_deadline_s = world.now_s + 5.0, world.now_s + 500.0
    late.enter()
    early.enter()
    world.later(5.5)
    world.add("n0")
    world.tick()
    assert late.fates == ["refused"] and isinstance(late.why, TooLate)
    assert early.fates == ["went"] and world.admission.waiting == 0


def test_a_low_one_makes_room() -> None:
    world = nobody(max_waiting=2)
    low = guest_of(world, priority=LOW)
    normal = guest_of(world)
    another = guest_of(world)
    assert isinstance(low.why, Displaced), "nobody is refused for the sake of a low one"
    assert normal.waits and another.waits and world.admission.waiting == 2
    with pytest.raises(Shed):
        guest_of(world)
    assert guest_of(world, priority=HIGH).waits, "high passes"


def test_the_last_node_goes_and_those_who_wait_wait_on() -> None:
    world = World(1)
    world.admission.node_wait_s = 60.0
    ticket = world.busy(world.nodes[0], 16_000)
    guest = guest_of(world)
    group = world.group
    world.fleet.remove("n0")
    world.tick()
    world.close(ticket)
    assert guest.waits and world.admission.waiting == 1 and group.waiting == 0
    node = world.add("n1")
    world.tick()
    assert guest.node is node and world.fleet.group(MODEL) is not group
    guest.finish()
    assert world.admission.waiting == 0 and world.admission.held == 1


def test_who_waits_counts_for_the_group_that_there_is() -> None:
    world = World(1)
    world.busy(world.nodes[0], 16_000)
    guest = guest_of(world)
    before = world.group
    world.fleet.remove("n0")
    node = world.add("n1")  # before anybody looked
    world.busy(node, 16_000)
    world.tick()
    group = world.fleet.group(MODEL)
    assert guest.waits and group is not None and group is not before
    assert (before.waiting, group.waiting) == (0, 1)
    guest.leave()
    assert (before.waiting, group.waiting, world.admission.waiting) == (0, 0, 0)
