"""Compares the machines that a provisioner reports with the managed nodes, and applies the differences.

A machine with an address joins the fleet. A machine with the deployment's name that this process did not request comes
from an earlier router: it is adopted. A machine that disappears, or that another one replaced, is gone. In a dry run no
machine is adopted or terminated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from warmroute.config import ConfigError, NodeConfig
from warmroute.event_log import EventLog
from warmroute.fleet.fleet import Fleet, NameTaken
from warmroute.fleet.node import Node
from warmroute.scaling.node_controller import IN_FLEET, NodeController
from warmroute.scaling.node_lifecycle import LifecycleEvent, LifecycleState, ManagedNode
from warmroute.scaling.offer import Offer
from warmroute.scaling.provisioner import Machine, MachineState
from warmroute.scaling.provisioner_client import TERMINATED_STATES, ProvisionerClient

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
            elif client.status_s - managed.missing_since_s > CONSISTENCY_S:
                self._controller.apply(managed, LifecycleEvent.GONE, "the provisioner does not report it any more")
        for (name, token), terminated_s in list(self.terminated_s.items()):
            if name == client.name and token not in client.machines and client.status_s - terminated_s > CONSISTENCY_S:
                del self.terminated_s[name, token]
