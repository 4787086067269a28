"""Several routers scale one fleet in turn: a leader stores what it intends to do, and its successor goes on."""

from __future__ import annotations

import pytest
from scripted_provisioner import Clock, Harness, ScriptedProvisioner

from warmroute.scaling.node_lifecycle import LifecycleEvent
from warmroute.scaling.provisioner import MachineState

pytestmark = pytest.mark.usefixtures("no_retry_delay")


class Store:
    """What the server has: the leader and its state."""

    def __init__(self) -> None:
        self.leader = ""
        self.state = b""
        self.reachable = True


class StoredLease:
    def __init__(self, store: Store, name: str) -> None:
        self._store = store
        self._name = name
        self.believes = False
        """It was suspended, and does not know yet that another one leads."""
        self.dies_with_a_request = False
        """It ends as soon as it has stored a request for a machine."""
        self.stored_last = b""

    @property
    def state(self) -> bytes:
        return self._store.state

    def is_leader(self) -> bool:
        return self.believes or (self._store.reachable and self._store.leader == self._name)

    async def commit(self, state: bytes) -> bool:
        if not self._store.reachable or self._store.leader != self._name:
            return False
        self._store.state = self.stored_last = state
        if self.dies_with_a_request and b'"requested"' in state:
            self._store.leader = "b"
            return False
        return True


def router(provisioner: ScriptedProvisioner, store: Store, name: str, clock: Clock) -> tuple[Harness, StoredLease]:
    lease = StoredLease(store, name)
    harness = Harness(provisioner, clock=clock, is_leader=lease.is_leader, lease=lease, min_nodes=1, max_nodes=4)
    return harness, lease


async def tick(*harnesses: Harness, count: int = 1) -> None:
    for _ in range(count):
        harnesses[0].clock.now_s += 1.0
        for harness in harnesses:
            await harness.tick(0.0)


async def test_a_new_leader_goes_on_with_what_the_old_one_requested() -> None:
    provisioner, store, clock = ScriptedProvisioner(), Store(), Clock()
    provisioner.first_state = MachineState.PENDING
    (a, _), (b, _) = router(provisioner, store, "a", clock), router(provisioner, store, "b", clock)
    store.leader = "a"
    await tick(a, b, count=4)
    assert len(provisioner.requested) == 1 and a.states == ["booting"] and not b.managed
    provisioner.reported = []  # the cloud does not list the machine yet
    store.leader = "b"
    await tick(a, b, count=5)
    assert not a.managed and b.states == ["booting"]
    assert len(provisioner.requested) == 1, "the new leader knows of the machine that is not listed"
    provisioner.reported = None
    (machine,) = provisioner.running
    provisioner.change(machine, state=MachineState.RUNNING, url="http://10.0.0.1:8000")
    await tick(a, b, count=6)
    assert b.states == ["serving"] and len(provisioner.requested) == 1
    store.leader = "a"  # the first one has no such node in its fleet yet
    await tick(a, b, count=6)
    assert a.states == ["serving"] and not provisioner.terminated and len(provisioner.requested) == 1


async def test_a_request_that_was_stored_and_not_sent_is_sent_by_the_new_leader() -> None:
    provisioner, store, clock = ScriptedProvisioner(), Store(), Clock()
    (a, lease), (b, _) = router(provisioner, store, "a", clock), router(provisioner, store, "b", clock)
    store.leader = "a"
    lease.dies_with_a_request = True
    await tick(a, b, count=8)
    assert store.leader == "b" and b"requested" in lease.stored_last
    assert len(provisioner.requested) == len(provisioner.machines) == 1
    assert provisioner.requested[0][1].encode() in lease.stored_last
    assert b.states == ["serving"] and not a.managed


async def test_a_suspended_leader_cannot_act_any_more() -> None:
    provisioner, store, clock = ScriptedProvisioner(), Store(), Clock()
    (a, lease), (b, _) = router(provisioner, store, "a", clock), router(provisioner, store, "b", clock)
    store.leader = "a"
    await tick(a, b, count=8)
    assert a.states == ["serving"]
    store.leader, lease.believes = "b", True  # a was suspended, and wakes up
    await tick(b, count=6)
    a.waiting = 10_000
    requested, terminated = len(provisioner.requested), len(provisioner.terminated)
    managed = a.autoscaler.managed.named(a.managed[0].name)
    assert managed is not None
    await tick(a, count=40)
    a.controller.apply(managed, LifecycleEvent.REMOVE, "a test removes it")
    await tick(a, count=3)
    assert (len(provisioner.requested), len(provisioner.terminated)) == (requested, terminated)
    lease.believes = False
    await tick(a, b, count=2)
    assert not a.managed and b.states == ["serving"]


async def test_without_the_server_nobody_scales_and_nothing_is_lost() -> None:
    provisioner, store, clock = ScriptedProvisioner(), Store(), Clock()
    a, _ = router(provisioner, store, "a", clock)
    store.leader = "a"
    await tick(a, count=8)
    store.reachable = False
    a.waiting = 10_000
    await tick(a, count=60)
    assert len(provisioner.requested) == 1 and not provisioner.terminated and len(a.fleet) == 1
    store.reachable, a.waiting = True, 0
    await tick(a, count=4)
    assert a.states == ["serving"] and len(provisioner.requested) == 1
