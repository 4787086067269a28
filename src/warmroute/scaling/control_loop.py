"""The controller in real time: compares machines, sends orders, prewarms prefixes.

`_provision` says what follows if a provisioner refuses, fails or does not answer in time; `MachineReconciler` adopts or
terminates a machine that appears late.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, Final, Protocol

import msgspec

from warmroute.config import ConfigError, NodeConfig
from warmroute.config.nodes import Role
from warmroute.core.fleet import Fleet
from warmroute.core.hot_prefixes import HotPrefix
from warmroute.core.node import Node
from warmroute.core.rejections import NameTaken
from warmroute.event_log import EventLog
from warmroute.scaling.autoscaler import Autoscaler
from warmroute.scaling.node_controller import IN_FLEET, NodeController, encode_state, restore_state
from warmroute.scaling.node_lifecycle import PREWARM_TIMEOUT_S, LifecycleEvent, LifecycleState, ManagedNode
from warmroute.scaling.offers import Offer
from warmroute.scaling.provisioner import (
    TERMINATED_STATES,
    Machine,
    MachineState,
    NoCapacity,
    ProvisionerClient,
    ProvisionerError,
)
from warmroute.scaling.scaling_decision import DecisionLog

# Compares the machines that a provisioner reports with the managed nodes, and applies the differences.
#
# A machine with an address joins the fleet. A machine with the deployment's name that this process did not request
# comes from an earlier router: it is adopted. A machine that disappears, or that another one replaced, is gone. In a
# dry run no machine is adopted or terminated.

log = EventLog("warmroute.scaling")

CONSISTENCY_S: Final = 30.0
"""For this time a provisioner may omit a machine that exists, or report one that was terminated."""


class MachineReconciler:
    def __init__(
        self, controller: NodeController, clients: Mapping[str, ProvisionerClient], fleet: Fleet,
        add_node: Callable[[NodeConfig], Node], update_node: Callable[[str, NodeConfig], object],
        now: Callable[[], float],
    ) -> None:  # fmt: skip
        """`add_node`, `update_node`: also in other processes."""
        self._controller = controller
        self._managed = controller.autoscaler.managed
        self._clients = clients
        self._fleet = fleet
        self._add_node = add_node
        self._update_node = update_node
        self._now = now
        self.terminated_s: dict[tuple[str, str], float] = {}
        """By provisioner and token: when a machine was terminated that may still be reported."""

    def update_offers(self, client: ProvisionerClient) -> None:
        self._controller.autoscaler.offers.update_offers(
            offer for one in self._clients.values() for offer in one.offers
        )
        for managed in self._managed:
            if not managed.offer_known and managed.offer.provisioner == client.name:
                offer = client.offer(managed.offer.name)
                if offer is not None:
                    self._set_offer(managed, offer, client.machines.get(managed.token))

    def _set_offer(self, managed: ManagedNode, offer: Offer, machine: Machine | None) -> None:
        """An adopted machine's offer is known now: give its node the GPU and the price."""
        managed.offer, managed.offer_known = offer, True
        node = self._controller.fleet_node(managed)
        if node is not None and not node.config.gpu and not node.config.usd_per_hour:
            island = (machine.island if machine is not None else "") or offer.island
            known = {
                "island": island, "gpu": offer.gpu, "usd_per_hour": offer.usd_per_hour, "role": offer.role,
                "bootstrap_port": offer.bootstrap_port,
            }  # fmt: skip
            self._update_node(node.name, msgspec.structs.replace(node.config, **known))

    def reconcile(self, client: ProvisionerClient) -> None:
        """Apply the last status of a provisioner."""
        # Terminated machines first: another one may have got their address.
        for machine in sorted(client.machines.values(), key=lambda one: one.state not in TERMINATED_STATES):
            self._reconcile(client, machine)
        self._check_missing(client)

    def machine_terminated(self, provisioner: str, token: str) -> None:
        self.terminated_s[provisioner, token] = self._now()

    def _reconcile(self, client: ProvisionerClient, machine: Machine) -> None:
        controller = self._controller
        managed = self._managed.get(machine.token) or self._adopt(client, machine)
        if managed is None or managed.offer.provisioner != client.name:
            return
        managed.removable = machine.removable
        state, gone = managed.state, machine.state in TERMINATED_STATES
        if machine.state is MachineState.TERMINATED or (gone and state is not LifecycleState.TERMINATING):
            controller.apply(managed, LifecycleEvent.GONE, machine.reason or "the provisioner terminated it")
        elif machine.reclaimed:
            self._reclaim(managed, machine.reason or "the cloud reclaims it")
        elif (
            machine.state is MachineState.RUNNING
            and machine.url
            and state in (LifecycleState.REQUESTED, LifecycleState.BOOTING)
        ):
            self._join(managed, machine)
        elif state in IN_FLEET and machine.url and machine.url != managed.url:
            controller.apply(managed, LifecycleEvent.GONE, f"another machine replaced it, {machine.url}")
            self._reconcile(client, machine)
        else:
            controller.apply(managed, LifecycleEvent.ACCEPTED)

    def _reclaim(self, managed: ManagedNode, reason: str) -> None:
        """The cloud takes the machine back soon: stop routing at once."""
        managed.reclaimed = True
        if managed.state is LifecycleState.DRAINING:
            self._controller.stop_routing(managed)
            return
        if managed.pending:
            self._controller.offer_failed(managed, reason)
        self._controller.apply(managed, LifecycleEvent.REMOVE, reason)

    def _adopt(self, client: ProvisionerClient, machine: Machine) -> ManagedNode | None:
        """Return a managed node for a machine that an earlier router requested; None if it is not to be adopted."""
        assert client.status_s is not None
        terminated_s = self.terminated_s.get((client.name, machine.token))
        # Providers list a machine for seconds after they accepted its termination. Adopted again, it would be
        # terminated and adopted in turns.
        may_be_stale = terminated_s is not None and client.status_s - terminated_s <= CONSISTENCY_S
        if machine.state in TERMINATED_STATES or self._controller.autoscaler.config.dry_run or may_be_stale:
            return None
        offer = client.offer(machine.offer)
        managed = self._managed.add(machine.token, offer or client.unknown_offer(machine), self._now())
        managed.adopted, managed.offer_known = True, offer is not None
        log.info(
            "node_adopted",
            "An earlier router requested this machine.",
            node=managed.log_name,
            provisioner=client.name,
            machine=machine.id,
        )
        if terminated_s is not None:
            self._controller.apply(managed, LifecycleEvent.REMOVE, "it was terminated, but still runs")
        return managed

    def _join(self, managed: ManagedNode, machine: Machine) -> None:
        """Add the node to the fleet, which checks its health. It gets no requests before it is prewarmed."""
        node = next((node for node in self._fleet if node.url == machine.url.rstrip("/")), None)
        if node is None:
            offer = managed.offer
            name = managed.log_name
            # The short name has eight characters of the token. With the whole token it is unique.
            if any(other.name == name for other in self._fleet):
                name = f"{offer.provisioner}-{managed.token}"
            try:
                node = self._add_node(
                    NodeConfig(
                        url=machine.url,
                        name=name,
                        island=machine.island or offer.island,
                        role=offer.role,
                        bootstrap_port=offer.bootstrap_port,
                        gpu=offer.gpu,
                        gpus=offer.gpus,
                        usd_per_hour=offer.usd_per_hour,
                        api_key_env=self._clients[offer.provisioner].api_key_env,
                        max_inflight=self._clients[offer.provisioner].max_inflight,
                    )
                )
            except (ConfigError, NameTaken) as error:
                reason = f"it cannot join the fleet: {error}"
                self._controller.offer_failed(managed, reason)
                self._controller.apply(managed, LifecycleEvent.REMOVE, reason)
                return
            # The node is in the fleet so that its health is checked, and drained so that no request meets its cold
            # cache.
            self._controller.set_draining(node.name, True)
        elif self._managed.named(node.name) is not None:
            self._controller.apply(managed, LifecycleEvent.ACCEPTED)
            return  # another managed node still has this address
        self._controller.join(managed, node, machine.url)

    def _check_missing(self, client: ProvisionerClient) -> None:
        """A managed node that the provisioner has not reported for a while is gone."""
        assert client.status_s is not None
        for managed in self._managed:
            if managed.offer.provisioner != client.name:
                continue
            if managed.token in client.machines or managed.state is LifecycleState.REQUESTED:
                managed.missing_since_s = None
            elif managed.missing_since_s is None:
                managed.missing_since_s = client.status_s
            # Providers' lists are eventually consistent. A node that serves must not leave the fleet because one list
            # lacks it.
            elif client.status_s - managed.missing_since_s > CONSISTENCY_S:
                self._controller.apply(managed, LifecycleEvent.GONE, "the provisioner does not report it any more")
        for (name, token), terminated_s in list(self.terminated_s.items()):
            if name == client.name and token not in client.machines and client.status_s - terminated_s > CONSISTENCY_S:
                del self.terminated_s[name, token]


# Prefills a hot prefix on a node, so that its cache has it before requests need it: a completion request with the
# prefix's tokens and a response of one token. Prefixes whose tokens are not exactly the engine's cannot be prefilled,
# because the router keeps no text.

Post = Callable[[Node, str, bytes, float], Awaitable[tuple[int, bytes]]]
PREFILL_TIMEOUT_S: Final = 30.0
"""Time for one prefix. The next one follows, so a hung engine costs no more than this."""


class PrefixPrefiller:
    def __init__(self, post: Post) -> None:
        self._post = post
        self.prefilled = 0
        """Prefixes that were prefilled."""

    async def prefill(self, node: Node, prefix: HotPrefix) -> bool:
        """Return whether the node has the prefix now."""
        body = completion_body(prefix)
        if body is None:
            return False
        try:
            status, _ = await self._post(node, "/v1/completions", body, PREFILL_TIMEOUT_S)
        except (OSError, TimeoutError) as error:
            log.info("prefill_failed", node=node.name, reason=str(error) or "timeout")
            return False
        self.prefilled += status == 200
        return status == 200


def completion_body(prefix: HotPrefix) -> bytes | None:
    """Return the request body that prefills the prefix; None if its tokens are not known exactly."""
    lookup = prefix.example
    if prefix.tokens > lookup.exact_tokens:
        return None
    model = lookup.model_of(prefix.chain)
    if model is None:
        return None
    body = {"model": model, "prompt": lookup.first_tokens(prefix.tokens), "max_tokens": 1, "temperature": 0}
    if lookup.salt:
        body["cache_salt"] = lookup.salt
    return msgspec.json.encode(body)


# Runs the node controller in real time, with real provisioners.
#
#     every second    refresh the provisioners' reports; apply what changed to the managed nodes
#     every interval  decide, and request or remove nodes
#
# No turn waits for a provisioner: each call is a task with a time limit. A crash loses nothing: machines carry the
# deployment's name, and the next router adopts them.

TURN_S: Final = 1.0
"""How often the loop looks at reports and time limits. Decisions come every `scaling.interval_s`."""
STANDBY_S: Final = 0.1
"""Time between two looks at the lease of a router that does not lead. It is short, so that a crash of the leader stops
scaling for a moment only."""
RETRY_S: Final = 1.0
"""Pause after the first failed termination. It doubles up to MAX_RETRY_S."""
MAX_RETRY_S: Final = 60.0
"""Longest pause between two terminations of one machine. The router tries until it succeeds: a machine that runs is
paid for."""


class ScalingNodes(Protocol):
    """The service's nodes: added, removed, drained and given roles, in all processes."""

    def add_node(self, config: NodeConfig) -> Node: ...
    def remove_node(self, name: str) -> Node: ...
    def update_node(self, name: str, config: NodeConfig) -> object: ...
    def drain(self, name: str, draining: bool) -> object: ...
    def set_role(self, name: str, role: Role) -> object: ...


class LeaderLease(Protocol):
    """Decides which one of several routers scales the fleet, and keeps its state for the next one."""

    @property
    def state(self) -> bytes:
        """What the previous leader stored; empty if it stored nothing."""

    async def commit(self, state: bytes) -> bool:
        """Store the state before an action. Return whether this process leads, and may act."""


class ControllerLoop:
    """Starts what the controller decides: provisioners' calls, prefills, drains. It is the controller's Actuator."""

    def __init__(
        self,
        autoscaler: Autoscaler,
        clients: Sequence[ProvisionerClient],
        fleet: Fleet,
        nodes: ScalingNodes,
        prefiller: PrefixPrefiller,
        now: Callable[[], float] = time.monotonic,
        is_leader: Callable[[], bool] = lambda: True,
        on_leader_change: Callable[[], None] = lambda: None,
        lease: LeaderLease | None = None,
    ) -> None:
        """`is_leader`: whether this process scales the fleet. `lease`: if routers on several machines do."""
        self.autoscaler = autoscaler
        self.clients = {client.name: client for client in clients}
        self.controller = NodeController(
            autoscaler, fleet, self, now, drain=self._set_draining, set_role=self._set_role
        )
        self._reconciler = MachineReconciler(
            self.controller, self.clients, fleet, nodes.add_node, self._update_node, now
        )
        self._nodes = nodes
        self._prefiller = prefiller
        self._now = now
        self._is_leader = is_leader
        self._on_leader_change = on_leader_change
        self._lease = lease
        self._storing = False
        self.leading = False
        self._decided_s = float("-inf")
        self._tasks: set[asyncio.Task[None]] = set()
        self._refreshing: set[str] = set()
        """Provisioners whose report is being refreshed."""
        self._duplicates: set[tuple[str, str]] = set()
        """Duplicate machines that are being terminated."""
        self._decision_log = DecisionLog()

    async def run(self) -> None:
        while True:
            try:
                self.turn()
            except Exception:
                log.exception("scaling_turn_failed", "The autoscaler tries again.")
            waits = self._lease is not None and not self.leading
            await asyncio.sleep(min(STANDBY_S if waits else TURN_S, self.autoscaler.config.interval_s))

    def turn(self) -> None:
        now_s = self._now()
        leading = self._is_leader()
        if leading != self.leading:
            self.leading = leading
            sentence = "This process scales the fleet." if leading else "Another process scales the fleet."
            log.info("scaling_leader_changed", sentence, leading=leading)
            if self.autoscaler.planner is not None:
                self.autoscaler.planner.forget()
            if self._lease is not None:
                self._take_over(self._lease) if leading else self._step_down()
            self._on_leader_change()
        if not leading:
            return
        # The state is stored each turn, also without a decision: states and backoffs of nodes change by
        # themselves.
        if self._lease is not None and not self._storing:
            self._storing = True
            self._start(self._store())
        for client in self.clients.values():
            if client.name not in self._refreshing and now_s >= client.next_refresh_s:
                self._refreshing.add(client.name)
                self._start(self._refresh(client))
        self.controller.check_timeouts(now_s)
        self.controller.check_nodes(now_s)
        # Until every provisioner has answered or failed once, the machines of an earlier router are unknown: a decision
        # would buy them again.
        due = now_s - self._decided_s >= self.autoscaler.config.interval_s
        if due and all(client.answered for client in self.clients.values()):
            self._decided_s = now_s
            decision = self.autoscaler.decide(now_s, time.time())
            self._decision_log.log(decision, now_s, has_provisioners=bool(self.clients))
            self.controller.execute(decision)

    # Several routers.

    def _take_over(self, lease: LeaderLease) -> None:
        """Go on where the router stopped that led before."""
        if not lease.state:
            return
        try:
            terminated = self._reconciler.terminated_s
            restored = restore_state(self.autoscaler, terminated, lease.state, self._now(), time.time())
        except ValueError as error:
            log.warning("scaling_state_ignored", "The router adopts the machines that it finds.", reason=error)
            return
        for managed, name in restored:
            self.controller.resume(managed, name)
        log.info("scaling_state_restored", nodes=len(restored))

    def _step_down(self) -> None:
        """Another router leads: stop all actions, and manage nothing."""
        for task in self._tasks:
            task.cancel()
        self.autoscaler.managed.clear()

    # The intent is stored before the action. If this process dies between the two, the next leader knows the token and
    # finds the machine.
    async def _may_act(self) -> bool:
        """Return whether this process still leads, after it has stored what it intends to do."""
        if self._lease is None:
            return True
        terminated = self._reconciler.terminated_s
        return await self._lease.commit(encode_state(self.autoscaler, terminated, self._now(), time.time()))

    async def _store(self) -> None:
        try:
            await self._may_act()
        finally:
            self._storing = False

    def _set_draining(self, name: str, draining: bool) -> None:
        if self._lease is None or self._is_leader():
            self._nodes.drain(name, draining)

    def _set_role(self, name: str, role: Role) -> None:
        if self._lease is None or self._is_leader():
            self._nodes.set_role(name, role)

    def _update_node(self, name: str, config: NodeConfig) -> None:
        if self._lease is None or self._is_leader():
            self._nodes.update_node(name, config)

    async def close(self) -> None:
        """Leave all machines as they are: the next router adopts them."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for client in self.clients.values():
            await client.close()

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(_logged(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # Reports.

    async def _refresh(self, client: ProvisionerClient) -> None:
        try:
            succeeded = await client.refresh()
        finally:
            self._refreshing.discard(client.name)
        self._reconciler.update_offers(client)
        if succeeded:
            self._reconciler.reconcile(client)
            if not self.autoscaler.config.dry_run:
                self._terminate_duplicates(client)

    def _terminate_duplicates(self, client: ProvisionerClient) -> None:
        for machine in client.duplicates:
            key = client.name, machine.id
            if key not in self._duplicates:
                self._duplicates.add(key)
                log.warning(
                    "duplicate_machine",
                    "Another machine has the same token. The router terminates this one.",
                    provisioner=client.name,
                    machine=machine.id,
                )
                self._start(self._terminate_duplicate(client, machine, key))

    async def _terminate_duplicate(self, client: ProvisionerClient, machine: Machine, key: tuple[str, str]) -> None:
        try:
            if await self._may_act():
                await client.terminate(machine)
        finally:
            self._duplicates.discard(key)

    # Actions.

    def request_machine(self, managed: ManagedNode, reason: str) -> None:
        log.info("node_requested", node=managed.log_name, reason=reason)
        self._start(self._provision(self.clients[managed.offer.provisioner], managed))

    async def _provision(self, client: ProvisionerClient, managed: ManagedNode) -> None:
        if not await self._may_act():
            self.autoscaler.managed.discard(managed)
            return
        try:
            await client.provision(managed.offer, managed.token)
        except NoCapacity as error:
            if managed.state is LifecycleState.REQUESTED:
                self.controller.apply(managed, LifecycleEvent.GONE, str(error))
        except TimeoutError:
            log.warning(
                "provision_timeout",
                "The provisioner's next report shows whether the machine was created.",
                node=managed.log_name,
                provisioner=client.name,
            )
            # The node stays REQUESTED: the machine may exist. Only the offer is not asked again for a while.
            self.autoscaler.offers.back_off(managed.offer.key, "no response in time", self._now())
        except Exception as error:  # the machine may have been created all the same, so it is terminated
            reason = str(error) if isinstance(error, ProvisionerError) else f"{type(error).__name__}: {error}"
            if managed.state is LifecycleState.REQUESTED:
                self.controller.offer_failed(managed, reason)
                self.controller.apply(managed, LifecycleEvent.REMOVE, reason)
        else:
            self.controller.apply(managed, LifecycleEvent.ACCEPTED)

    def prewarm(self, managed: ManagedNode) -> None:
        self._start(self._prewarm(managed))

    async def _prewarm(self, managed: ManagedNode) -> None:
        for node, prefix in self.controller.prewarm_prefills(managed):
            await self._prefiller.prefill(node, prefix)
        self.controller.apply(managed, LifecycleEvent.PREWARMED)

    def drain(self, managed: ManagedNode) -> None:
        self._start(self._drain(managed))

    async def _drain(self, managed: ManagedNode) -> None:
        try:
            async with asyncio.timeout(PREWARM_TIMEOUT_S):
                for node, prefix in self.controller.drain_prefills(managed):
                    await self._prefiller.prefill(node, prefix)
        except TimeoutError:
            log.info("prefix_move_timeout", "The node drains without moving all its prefixes.", node=managed.log_name)
        finally:
            self.controller.stop_routing(managed)

    def terminate(self, managed: ManagedNode) -> None:
        self._start(self._terminate(managed))

    async def _terminate(self, managed: ManagedNode) -> None:
        """Try until the machine is terminated, or its provisioner does not report it."""
        client = self.clients.get(managed.offer.provisioner)
        retry_s = RETRY_S
        while client is not None and managed.state is LifecycleState.TERMINATING:
            machine = client.machines.get(managed.token)
            if machine is not None and await self._may_act() and await client.terminate(machine):
                self._reconciler.machine_terminated(client.name, managed.token)
                break
            reported_after_s = client.status_s - managed.state_since_s if client.status_s is not None else 0.0
            if machine is None and reported_after_s > CONSISTENCY_S:
                break
            await asyncio.sleep(retry_s)
            retry_s = min(MAX_RETRY_S, 2.0 * retry_s) if machine is not None else RETRY_S
        self.controller.apply(managed, LifecycleEvent.GONE)

    def remove_node(self, name: str) -> None:
        if self._lease is None or self._is_leader():
            self._nodes.remove_node(name)

    # Events.

    def state_changed(self, managed: ManagedNode, before: LifecycleState, event: LifecycleEvent) -> None:
        fields = {"node": managed.log_name, "state": managed.state.value, "previous_state": before.value}
        if event is LifecycleEvent.TIMED_OUT:
            log.warning("node_state_timeout", **fields, reason=managed.reason)
        elif event is LifecycleEvent.GONE and before in (LifecycleState.SERVING, LifecycleState.DRAINING):
            log.warning("node_lost", "The autoscaler did not remove it.", **fields, reason=managed.reason)
        else:
            log.info("node_state_changed", **fields, reason=managed.reason)

    def offer_failed(self, managed: ManagedNode, reason: str) -> None:
        offer = f"{managed.offer.provisioner}/{managed.offer.name}"
        log.warning("offer_failed", "The autoscaler does not use it for a while.", offer=offer, reason=reason)


async def _logged(work: Coroutine[Any, Any, None]) -> None:
    try:
        await work
    except Exception:
        log.exception("scaling_task_failed")
