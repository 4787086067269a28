"""Decisions carried out without I/O, and the controller's state as bytes for the next process.

`apply` is the only code that changes a node's state. control_loop.py calls the provisioners and tells it what they say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import nan
from typing import Final, Protocol

import msgspec

from warmroute.config.nodes import Role
from warmroute.core.fleet import Fleet
from warmroute.core.health import HealthState
from warmroute.core.hot_prefixes import HotPrefix
from warmroute.core.node import Node
from warmroute.core.rejections import UnknownNode
from warmroute.scaling.autoscaler import Autoscaler
from warmroute.scaling.node_lifecycle import LifecycleEvent, LifecycleState, ManagedNode
from warmroute.scaling.observer import pool_of
from warmroute.scaling.offers import Offer
from warmroute.scaling.provisioner import new_token
from warmroute.scaling.scaling_decision import ScalingDecision

# Carries out scaling decisions without I/O: it moves each managed node through its lifecycle and starts the action of
# each state through an Actuator. The service (control_loop.py) and replay both drive it.
#
#     decision     add      request a machine                                       → REQUESTED
#                  remove                                                           → DRAINING, or TERMINATING
#     WARMING               prewarm: prefill the hot prefixes on the new node, then PREWARMED
#     SERVING               the router sends it requests
#     DRAINING              drain: prefill on other nodes what only this node holds, then stop routing, then DRAINED
#     TERMINATING           stop routing; terminate the machine, then GONE
#     TERMINATED            remove the node from the fleet

IN_FLEET = (LifecycleState.LOADING, LifecycleState.WARMING, LifecycleState.SERVING)


class Actuator(Protocol):
    """The actions that need I/O or virtual time. A method starts its action and returns at once."""

    def request_machine(self, managed: ManagedNode, reason: str) -> None:
        """Request the machine. Then apply ACCEPTED, or GONE if the provisioner refuses."""

    def prewarm(self, managed: ManagedNode) -> None:
        """Prefill what `prewarm_prefills` yields, one after the other, then apply PREWARMED."""

    def drain(self, managed: ManagedNode) -> None:
        """Prefill what `drain_prefills` yields, then call `stop_routing`, then apply DRAINED when the last request has
        ended."""

    def terminate(self, managed: ManagedNode) -> None:
        """End the machine, then apply GONE."""

    def remove_node(self, name: str) -> object:
        """Take the node out of the fleet."""

    def state_changed(self, managed: ManagedNode, before: LifecycleState, event: LifecycleEvent) -> None: ...

    def offer_failed(self, managed: ManagedNode, reason: str) -> None: ...


class NodeController:
    def __init__(
        self, autoscaler: Autoscaler, fleet: Fleet, actuator: Actuator, now: Callable[[], float],
        create_token: Callable[[], str] = new_token, drain: Callable[[str, bool], object] | None = None,
        set_role: Callable[[str, Role], object] | None = None,
    ) -> None:  # fmt: skip
        """`drain` begins or ends the drain of a node, in other processes too."""
        self.autoscaler = autoscaler
        self._fleet = fleet
        self._actuator = actuator
        self._now = now
        self._create_token = create_token
        self.set_draining = drain if drain is not None else fleet.drain
        self._set_role = set_role if set_role is not None else fleet.set_role
        self.added = self.removed = self.refused = self.lost = 0
        """Counts of nodes: those that began to serve, those that the autoscaler removed, those whose request failed,
        and those that vanished."""

    def execute(self, decision: ScalingDecision) -> None:
        if decision.dry_run:
            return
        for addition in decision.additions:
            self._request(addition.offer, addition.reason)
        for switch in decision.switches:
            try:
                self._set_role(switch.node, switch.role)
            except UnknownNode:  # somebody removed it meanwhile
                continue
        for removal in decision.removals:
            managed = self.autoscaler.managed.named(removal.node)
            if managed is not None:
                self.apply(managed, LifecycleEvent.REMOVE, removal.reason)

    def _request(self, offer: Offer, reason: str) -> None:
        managed = self.autoscaler.managed.add(self._create_token(), offer, self._now())
        self._actuator.request_machine(managed, reason)

    def apply(self, managed: ManagedNode, event: LifecycleEvent, reason: str = "") -> None:
        """Apply an event, and start what the new state requires. All state changes happen here."""
        before, failed_before = managed.state, managed.failed_to_start
        if not self.autoscaler.managed.apply(managed, event, self._now(), reason):
            return
        self._actuator.state_changed(managed, before, event)
        if managed.failed_to_start and not failed_before:
            refused = before is LifecycleState.REQUESTED
            self.offer_failed(managed, managed.reason if refused else f"its node did not start: {managed.reason}")
        match managed.state:
            case LifecycleState.WARMING:
                self._actuator.prewarm(managed)
            case LifecycleState.SERVING:
                self._start_routing(managed)
            case LifecycleState.DRAINING:
                self._actuator.drain(managed)
            case LifecycleState.TERMINATING:
                self.stop_routing(managed)
                self._actuator.terminate(managed)
            case LifecycleState.TERMINATED:
                self._remove(managed, before)

    def resume(self, managed: ManagedNode, name: str) -> None:
        """Continue with a node that another process managed before. `name`: the node's name in the fleet."""
        try:
            managed.node = self._fleet.node(name) if name else None
        except UnknownNode:
            managed.node = None
        # The other process had the node in its own fleet. Here its machine has to be found again before it can serve.
        if managed.node is None and managed.state in (*IN_FLEET, LifecycleState.DRAINING):
            managed.state, managed.state_since_s = LifecycleState.BOOTING, self._now()  # it joins again
        match managed.state:
            case LifecycleState.REQUESTED:  # a second call with the same token creates nothing
                self._actuator.request_machine(managed, managed.reason or "another process requested it")
            case LifecycleState.WARMING:
                self._actuator.prewarm(managed)
            case LifecycleState.DRAINING:
                self._actuator.drain(managed)
            case LifecycleState.TERMINATING:
                self._actuator.terminate(managed)

    def offer_failed(self, managed: ManagedNode, reason: str) -> None:
        """The request for this node failed: its offer backs off."""
        self.refused += 1
        self._actuator.offer_failed(managed, reason)
        self.autoscaler.offers.back_off(managed.offer.key, reason, self._now())
        self.autoscaler.request_failed(managed.offer)  # ends the cooldown: the next decision may request another node

    def join(self, managed: ManagedNode, node: Node, url: str) -> None:
        """The node has an address and is in the fleet, which checks its health from now on."""
        managed.node, managed.url = node, url
        self.apply(managed, LifecycleEvent.HAS_ADDRESS)

    def fleet_node(self, managed: ManagedNode) -> Node | None:
        """Return the managed node's entry in the fleet; None if somebody removed it there, or added another node of the
        same name."""
        try:
            node = self._fleet.node(managed.name)
        except UnknownNode:
            return None
        return node if node is managed.node else None

    # Prefills.

    def prewarm_prefills(self, managed: ManagedNode) -> Iterator[tuple[Node, HotPrefix]]:
        """Yield what to prefill before the node serves, one after the other."""
        node = self.fleet_node(managed)
        for prefix in self.autoscaler.prefixes_to_prewarm(self._now()):
            if node is None or managed.state is not LifecycleState.WARMING or not _serves_alone(node):
                return
            yield node, prefix

    def drain_prefills(self, managed: ManagedNode) -> Iterator[tuple[Node, HotPrefix]]:
        """Yield the hot prefixes that only this node holds, each with the least loaded node of its pool that stays. A
        machine that its cloud reclaims has no time for it."""
        leaving_node = self.fleet_node(managed)
        if managed.reclaimed or leaving_node is None:
            return
        pool = pool_of(leaving_node.role)
        for prefix in self.autoscaler.prefixes_to_move(managed.name, self._now()):
            leaving = self.autoscaler.draining_names
            staying = [
                node
                for node in self._fleet
                if not node.draining and node.health.state is HealthState.UP and node.name not in leaving
                if pool_of(node.role) == pool and _serves_alone(node)
            ]
            if staying:
                yield min(staying, key=lambda node: node.pending_work), prefix

    # Routing.

    def _start_routing(self, managed: ManagedNode) -> None:
        node = self.fleet_node(managed)
        if node is None:
            return  # check_nodes removes it
        self.set_draining(node.name, False)
        self.added += 1
        # An adopted machine was requested by another process, whose clock may differ.
        start_s = nan if managed.adopted else self._now() - managed.requested_s
        self.autoscaler.offers.node_started(managed.offer.key, start_s)

    def stop_routing(self, managed: ManagedNode) -> None:
        """Send the node no new requests; running ones finish."""
        node = self.fleet_node(managed)
        if node is not None and managed.state is not LifecycleState.TERMINATED and not node.draining:
            self.set_draining(node.name, True)
        managed.routing_stopped = True

    def _remove(self, managed: ManagedNode, before: LifecycleState) -> None:
        if self.fleet_node(managed) is not None:
            self._actuator.remove_node(managed.name)
        if before is LifecycleState.TERMINATING and managed.serving_since_s is not None:
            self.removed += 1
        elif before in (LifecycleState.SERVING, LifecycleState.DRAINING):
            self.lost += 1

    # Checks.

    def check_timeouts(self, now_s: float) -> None:
        for managed in self.autoscaler.managed.timed_out(now_s):
            self.apply(managed, LifecycleEvent.TIMED_OUT, f"it was {managed.state.value} for too long")

    def check_nodes(self, now_s: float) -> None:
        """Apply what the fleet shows of each node: loaded, unhealthy, drained, or removed by somebody."""
        for managed in self.autoscaler.managed:
            node = self.fleet_node(managed)
            drains = managed.state is LifecycleState.DRAINING and managed.routing_stopped
            if node is None:
                if managed.state in IN_FLEET:
                    self.apply(managed, LifecycleEvent.REMOVE, "somebody removed it from the fleet")
                # Its requests run on although the fleet does not list it any more: the machine has to live until they
                # end.
                elif drains and (managed.node is None or not managed.node.inflight):
                    self.apply(managed, LifecycleEvent.DRAINED)
            elif managed.state is LifecycleState.LOADING and node.health.state is HealthState.UP and node.models:
                self.apply(managed, LifecycleEvent.CHECK_PASSED)
            elif managed.state is LifecycleState.SERVING:
                self._check_health(managed, node, now_s)
            elif drains:
                if not node.draining:  # somebody ended the drain through the admin API
                    self.set_draining(node.name, True)
                if not node.load:
                    self.apply(managed, LifecycleEvent.DRAINED)

    def _check_health(self, managed: ManagedNode, node: Node, now_s: float) -> None:
        """Remove a node that has been down for as long as loading may take: its machine is paid for. A half-open node
        counts as down until its trial request passes, because an engine may pass all checks and fail all requests."""
        if node.health.state is HealthState.HALF_OPEN:
            return
        if node.health.state is not HealthState.DOWN:
            managed.unhealthy_since_s = None
            return
        if managed.unhealthy_since_s is None:
            managed.unhealthy_since_s = now_s
        if now_s - managed.unhealthy_since_s > self.autoscaler.config.load_timeout_s:
            self.apply(managed, LifecycleEvent.REMOVE, f"it does not answer any more: {node.health.reason}")


def _serves_alone(node: Node) -> bool:
    """Return whether the node can serve a completion without a node of the other role: a prefix is one."""
    return node.can_serve_alone if node.role == "prefill" else not node.needs_partner


# The autoscaler's state as bytes, for the process that scales the fleet next: which nodes were requested, drained and
# terminated, what was refused, and when the fleet last changed. Times are ages, since clocks of machines differ.

VERSION: Final = 1
"""The next leader ignores a state of another version, and adopts the machines that it finds."""
MAX_AGE_S: Final = 1e9
"""An age that JSON can carry: a fleet that never changed has an infinite one."""


class StoredNode(msgspec.Struct, frozen=True):
    token: str
    offer: Offer
    offer_known: bool
    state: LifecycleState
    state_age_s: float
    requested_age_s: float
    serving_age_s: float | None
    node: str
    """The node's name in the fleet; empty before it has joined."""
    url: str
    reason: str
    adopted: bool
    reclaimed: bool
    routing_stopped: bool


class StoredBackoff(msgspec.Struct, frozen=True):
    provisioner: str
    offer: str
    left_s: float
    duration_s: float
    reason: str


class StoredScaling(msgspec.Struct, frozen=True):
    version: int
    stored: float
    """When the state was stored, in Unix time."""
    added_age_s: float
    removed_age_s: float
    nodes: list[StoredNode]
    backoffs: list[StoredBackoff]
    terminated: list[tuple[str, str, float]]
    """Provisioner, token and age of machines that were terminated, and that a provisioner may still report."""


Terminated = dict[tuple[str, str], float]
"""By provisioner and token: when a machine was terminated."""


def encode_state(autoscaler: Autoscaler, terminated: Terminated, now_s: float, wall_s: float) -> bytes:
    added_s, removed_s = autoscaler.changed_s
    return msgspec.json.encode(
        StoredScaling(
            VERSION,
            wall_s,
            min(MAX_AGE_S, now_s - added_s),
            min(MAX_AGE_S, now_s - removed_s),
            [_stored(managed, now_s) for managed in autoscaler.managed],
            [StoredBackoff(*row) for row in autoscaler.offers.backoff_rows(now_s)],
            [(*key, now_s - terminated_s) for key, terminated_s in terminated.items()],
        )
    )


def _stored(managed: ManagedNode, now_s: float) -> StoredNode:
    serving_s = managed.serving_since_s
    return StoredNode(
        managed.token, managed.offer, managed.offer_known, managed.state, now_s - managed.state_since_s,
        now_s - managed.requested_s, None if serving_s is None else now_s - serving_s, managed.name, managed.url,
        managed.reason, managed.adopted, managed.reclaimed, managed.routing_stopped,
    )  # fmt: skip


def restore_state(
    autoscaler: Autoscaler, terminated: Terminated, stored: bytes, now_s: float, wall_s: float
) -> list[tuple[ManagedNode, str]]:
    """Take over the state of the process that led before. Return the managed nodes, each with its name in the fleet.
    Raises ValueError if the state cannot be read."""
    try:
        state = msgspec.json.decode(stored, type=StoredScaling)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(str(error)) from None
    if state.version != VERSION:
        raise ValueError(f"it has version {state.version}")
    # Monotonic clocks of two machines have nothing in common, and wall clocks are a little apart: never before now.
    then_s = now_s - max(0.0, wall_s - state.stored)
    autoscaler.changed_s = (then_s - state.added_age_s, then_s - state.removed_age_s)
    for backoff in state.backoffs:
        key = (backoff.provisioner, backoff.offer)
        autoscaler.offers.restore_backoff(key, then_s + backoff.left_s, backoff.duration_s, backoff.reason)
    terminated.update({(provisioner, token): then_s - age_s for provisioner, token, age_s in state.terminated})
    restored = []
    for one in state.nodes:
        if one.state is LifecycleState.TERMINATED:
            continue
        managed = autoscaler.managed.add(one.token, one.offer, then_s - one.requested_age_s)
        managed.state, managed.state_since_s = one.state, then_s - one.state_age_s
        managed.serving_since_s = None if one.serving_age_s is None else then_s - one.serving_age_s
        managed.reason, managed.url, managed.offer_known = one.reason, one.url, one.offer_known
        managed.adopted, managed.reclaimed = one.adopted, one.reclaimed
        managed.routing_stopped = one.routing_stopped
        restored.append((managed, one.node))
    return restored
