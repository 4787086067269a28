"""A provisioner that a test scripts, and a controller loop that a test steps: time is a number, and nothing waits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from warmroute.config import Config, NodeConfig, ProvisionerConfig, Scaling
from warmroute.core.cache_view import CacheView
from warmroute.core.demand import DemandMeter
from warmroute.core.fleet import Fleet
from warmroute.core.hot_prefixes import HotPrefixes
from warmroute.core.node import Node
from warmroute.scaling.autoscaler import Autoscaler
from warmroute.scaling.control_loop import ControllerLoop, LeaderLease, Post, PrefixPrefiller
from warmroute.scaling.node_lifecycle import LifecycleState, ManagedNode
from warmroute.scaling.offers import Offer
from warmroute.scaling.provisioner import Machine, MachineState, Provisioner, ProvisionerClient

LOOP_TURNS = 30
"""Turns of the event loop after which every task waits for something."""


class ScriptedProvisioner:
    """Implements the Provisioner protocol."""

    def __init__(self, name: str = "cloud", *offers: str, usd_per_hour: float = 1.0) -> None:
        self.name = name
        self.on_offer = [self._offer(each, usd_per_hour + at) for at, each in enumerate(offers or ("small",))]
        self.machines: dict[str, Machine] = {}
        """By id: their true state."""
        self.reported: list[Machine] | None = None
        """What the status reports instead of the true state."""
        self.first_state = MachineState.RUNNING
        """State of a new machine."""
        self.requested: list[tuple[str, str]] = []
        """Offer and token of each call of provision."""
        self.terminated: list[str] = []
        """Tokens in the order in which their machines were terminated."""
        self.fails: dict[str, Exception] = {}
        """By call, or by offer: what it raises."""
        self.hangs: set[str] = set()
        """Calls that hang while they are in this set. A machine is created before its call hangs."""
        self.calls: list[str] = []
        self.closed = False
        self._created = 0

    def _offer(self, name: str, usd_per_hour: float) -> Offer:
        return Offer(provisioner=self.name, name=name, island="here", gpu="L4", usd_per_hour=usd_per_hour, start_s=60.0)

    @property
    def running(self) -> list[Machine]:
        return [one for one in self.machines.values() if one.state in (MachineState.PENDING, MachineState.RUNNING)]

    def create(self, token: str, offer: str = "small", **more: Any) -> Machine:
        """Create a machine, as if it had been requested."""
        self._created += 1
        state = self.first_state
        url = f"http://10.0.0.{self._created}:8000" if state is MachineState.RUNNING else ""
        fields: dict[str, Any] = {"state": state, "url": url, **more}
        machine = Machine(id=f"m{self._created}", token=token, offer=offer, **fields)
        self.machines[machine.id] = machine
        return machine

    def change(self, machine: Machine, **changes: Any) -> Machine:
        changed = self.machines[machine.id] = msgspec.structs.replace(self.machines[machine.id], **changes)
        return changed

    async def _called(self, call: str, *about: str) -> None:
        self.calls.append(call)
        for each in (call, *about):
            if each in self.fails:
                raise self.fails[each]

    async def _hang(self, call: str) -> None:
        while call in self.hangs:  # noqa: ASYNC110 (a test removes it again)
            await asyncio.sleep(0.001)

    async def offers(self) -> list[Offer]:
        await self._called("offers")
        await self._hang("offers")
        return list(self.on_offer)

    async def provision(self, offer: Offer, token: str) -> None:
        self.requested.append((offer.name, token))
        await self._called("provision", offer.name)
        if not any(machine.token == token for machine in self.machines.values()):
            self.create(token, offer.name)
        await self._hang("provision")

    async def status(self) -> list[Machine]:
        await self._called("status")
        reported = list(self.machines.values()) if self.reported is None else self.reported
        await self._hang("status")
        return reported

    async def terminate(self, machine: Machine) -> None:
        await self._called("terminate")
        await self._hang("terminate")
        if machine.id in self.machines and self.machines[machine.id].state is not MachineState.TERMINATED:
            self.terminated.append(machine.token)
            self.change(machine, state=MachineState.TERMINATED)

    async def close(self) -> None:
        self.closed = True
        await self._called("close")
        await self._hang("close")


async def accept_prefill(_node: Node, _path: str, _body: bytes, _timeout_s: float) -> tuple[int, bytes]:
    return 200, b"{}"


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class Harness:
    """A controller loop over scripted provisioners, with a real autoscaler, fleet and cache view. Nodes pass their
    health checks unless their name or URL is in `unhealthy`."""

    def __init__(
        self,
        *provisioners: Provisioner,
        timeout_s: float = 30.0,
        clock: Clock | None = None,
        post: Post = accept_prefill,
        is_leader: Callable[[], bool] = lambda: True,
        lease: LeaderLease | None = None,
        configured: ProvisionerConfig | None = None,
        **scaling: Any,
    ) -> None:
        self.scaling = {"interval_s": 1.0, "cooldown_up_s": 30.0, "cooldown_down_s": 2.0, **scaling}
        config = Scaling(enabled=True, **self.scaling)
        self.clock = clock or Clock()
        self.fleet = Fleet(Config().health)
        self.cache_view = CacheView(Config().index)
        self.hot = HotPrefixes()
        self.demand_meter, self.waiting = DemandMeter(), 0
        self.autoscaler = Autoscaler(
            config, self.fleet, self.cache_view, self.demand_meter, self.hot, lambda: self.waiting
        )
        self.updated: list[NodeConfig] = []
        """Configurations that other processes get as well."""
        self.clients = [ProvisionerClient(one, timeout_s, self.clock, configured) for one in provisioners]
        self.loop = ControllerLoop(
            self.autoscaler, self.clients, self.fleet, self, PrefixPrefiller(post), self.clock, is_leader, lease=lease
        )
        self.controller = self.loop.controller
        self.unhealthy: set[str] = set()

    def add_node(self, config: NodeConfig) -> Node:
        node = self.fleet.add(config)
        self.cache_view.add_node(node.name, ["m"])
        return node

    def update_node(self, name: str, config: NodeConfig) -> None:
        self.updated.append(config)
        self.fleet.update_config(self.fleet.node(name), config)

    def remove_node(self, name: str) -> Node:
        self.cache_view.remove_node(name)
        return self.fleet.remove(name)

    def drain(self, name: str, draining: bool) -> Node:
        return self.fleet.drain(name, draining)

    def set_role(self, name: str, role: Any) -> Node:
        return self.fleet.set_role(name, role)

    async def tick(self, seconds: float = 1.0) -> None:
        self.clock.now_s += seconds
        self.loop.turn()
        for _ in range(LOOP_TURNS):
            await asyncio.sleep(0)
        for node in self.fleet:
            if node.name not in self.unhealthy and node.url not in self.unhealthy:
                self.fleet.update_models(node, ["m"], [])
                self.fleet.check_passed(node, self.clock.now_s)

    async def ticks(self, count: int, seconds: float = 1.0) -> None:
        for _ in range(count):
            await self.tick(seconds)

    async def until(self, condition: Callable[[], Any], max_ticks: int = 60, seconds: float = 1.0) -> None:
        for _ in range(max_ticks):
            if condition():
                return
            await self.tick(seconds)
        assert condition(), f"the condition did not become true: {self.states}"

    def want(self, count: int, **scaling: Any) -> None:
        """Set the number of nodes."""
        self.scaling.update({"min_nodes": count, "max_nodes": max(1, count), **scaling})
        self.autoscaler.reconfigure(Scaling(enabled=True, **self.scaling))

    async def want_serving(self, count: int) -> list[Node]:
        """Set the number of nodes, and wait until they all serve."""
        self.want(count)
        await self.until(lambda: len(self.serving()) == count and len(self.managed) == count)
        return self.serving()

    @property
    def managed(self) -> list[ManagedNode]:
        return list(self.autoscaler.managed)

    @property
    def states(self) -> list[str]:
        return sorted(managed.state.value for managed in self.managed)

    def serving(self) -> list[Node]:
        return [
            self.fleet.node(managed.name)
            for managed in self.managed
            if managed.state is LifecycleState.SERVING and not self.fleet.node(managed.name).draining
        ]

    def routable(self) -> Sequence[str]:
        """The names of the nodes that the router may send requests to."""
        group = self.fleet.group("m")
        return sorted(node.name for node in group.up.nodes) if group is not None else []


@asynccontextmanager
async def running(*provisioners: Provisioner, **more: Any) -> AsyncIterator[Harness]:
    harness = Harness(*provisioners, **more)
    try:
        yield harness
    finally:
        await harness.loop.close()
