"""A cloud that does as it is told, and a fleet that is driven by hand: time is a number, and nothing waits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from warmroute.config import Config, NodeConfig, Scaling
from warmroute.fleet.demand import DemandMeter
from warmroute.fleet.fleet import Fleet
from warmroute.fleet.node import Node
from warmroute.index.cache_view import CacheView
from warmroute.index.hot import HotPrefixes
from warmroute.scaling.cloud import Cloud
from warmroute.scaling.core import Core
from warmroute.scaling.driver import Driver
from warmroute.scaling.node_lifecycle import NodeLife, State
from warmroute.scaling.offer import Offer
from warmroute.scaling.provisioner import Machine, MachineState
from warmroute.scaling.warm import Post, Warmer

SETTLES = 30
"""Turns of the loop in which all that need not wait is done."""


class ScriptedCloud:
    """Speaks the Provisioner protocol."""

    def __init__(self, name: str = "cloud", *offers: str, usd_per_hour: float = 1.0) -> None:
        self.name = name
        self.on_offer = [self._offer(each, usd_per_hour + at) for at, each in enumerate(offers or ("small",))]
        self.machines: dict[str, Machine] = {}
        """By id, as they are; what the status tells may be older."""
        self.told: list[Machine] | None = None
        """What the status tells instead."""
        self.begins = MachineState.RUNNING
        """What a new machine begins as."""
        self.asked: list[tuple[str, str]] = []
        """Offer and token of each call of provision."""
        self.ended: list[str] = []
        """Tokens, in the order in which their machines were ended."""
        self.fails: dict[str, Exception] = {}
        """By call, or by offer: what it raises."""
        self.hangs: set[str] = set()
        """Calls that do not come back as long as they are in here. A machine is made before it hangs."""
        self.calls: list[str] = []
        self.closed = False
        self._made = 0

    def _offer(self, name: str, usd_per_hour: float) -> Offer:
        return Offer(provisioner=self.name, name=name, island="here", gpu="L4", usd_per_hour=usd_per_hour, start_s=60.0)

    @property
    def running(self) -> list[Machine]:
        return [one for one in self.machines.values() if one.state in (MachineState.PENDING, MachineState.RUNNING)]

    def make(self, token: str, offer: str = "small", **more: Any) -> Machine:
        """A machine, as if it had been asked for."""
        self._made += 1
        told: dict[str, Any] = {
            "state": self.begins,
            "url": f"http://10.0.0.{self._made}:8000" if self.begins is MachineState.RUNNING else "",
            **more,
        }
        made = self.machines[f"m{self._made}"] = Machine(id=f"m{self._made}", token=token, offer=offer, **told)
        return made

    def change(self, machine: Machine, **changes: Any) -> Machine:
        changed = self.machines[machine.id] = msgspec.structs.replace(self.machines[machine.id], **changes)
        return changed

    async def _called(self, call: str, *about: str) -> None:
        self.calls.append(call)
        for each in (call, *about):
            if each in self.fails:
                raise self.fails[each]

    async def _hang(self, call: str) -> None:
        while call in self.hangs:  # noqa: ASYNC110 (a test takes it out again)
            await asyncio.sleep(0.001)

    async def offers(self) -> list[Offer]:
        await self._called("offers")
        await self._hang("offers")
        return list(self.on_offer)

    async def provision(self, offer: Offer, token: str) -> None:
        self.asked.append((offer.name, token))
        await self._called("provision", offer.name)
        if not any(machine.token == token for machine in self.machines.values()):
            self.make(token, offer.name)
        await self._hang("provision")

    async def status(self) -> list[Machine]:
        await self._called("status")
        told = list(self.machines.values()) if self.told is None else self.told
        await self._hang("status")
        return told

    async def terminate(self, machine: Machine) -> None:
        await self._called("terminate")
        await self._hang("terminate")
        if machine.id in self.machines and self.machines[machine.id].state is not MachineState.ENDED:
            self.ended.append(machine.token)
            self.change(machine, state=MachineState.ENDED)

    async def close(self) -> None:
        self.closed = True
        await self._called("close")
        await self._hang("close")


async def nothing_posted(_node: Node, _path: str, _body: bytes, _timeout_s: float) -> tuple[int, bytes]:
    return 200, b"{}"


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class World:
    """A driver over scripted clouds, with a real core, fleet and beliefs. Nodes answer their checks unless `ill`."""

    def __init__(
        self,
        *clouds: ScriptedCloud,
        timeout_s: float = 30.0,
        clock: Clock | None = None,
        post: Post = nothing_posted,
        leads: Callable[[], bool] = lambda: True,
        **scaling: Any,
    ) -> None:
        self.scaling = {"interval_s": 1.0, "cooldown_up_s": 30.0, "cooldown_down_s": 2.0, **scaling}
        config = Scaling(enabled=True, **self.scaling)
        self.clock = clock or Clock()
        self.fleet = Fleet(Config().health)
        self.cache_view = CacheView(Config().index)
        self.hot = HotPrefixes()
        self.demand_meter, self.waiting = DemandMeter(), 0
        self.core = Core(config, self.fleet, self.cache_view, self.demand_meter, self.hot, lambda: self.waiting)
        self.clouds = [Cloud(cloud, timeout_s, self.clock) for cloud in clouds]
        self.driver = Driver(self.core, self.clouds, self.fleet, self, Warmer(post), self.clock, leads)
        self.ill: set[str] = set()

    # The fleet's door.

    def add_node(self, config: NodeConfig) -> Node:
        node = self.fleet.add(config)
        self.cache_view.join(node.name, ["m"])
        return node

    def remove_node(self, name: str) -> Node:
        self.cache_view.leave(name)
        return self.fleet.remove(name)

    # Time.

    async def tick(self, seconds: float = 1.0) -> None:
        self.clock.now_s += seconds
        self.driver.turn()
        for _ in range(SETTLES):
            await asyncio.sleep(0)
        for node in self.fleet:
            if node.name not in self.ill and node.url not in self.ill:
                self.fleet.saw_models(node, ["m"], [])
                self.fleet.check_passed(node, self.clock.now_s)

    async def ticks(self, count: int, seconds: float = 1.0) -> None:
        for _ in range(count):
            await self.tick(seconds)

    async def until(self, condition: Callable[[], Any], most: int = 60, seconds: float = 1.0) -> None:
        for _ in range(most):
            if condition():
                return
            await self.tick(seconds)
        assert condition(), f"it did not come about: {self.states}"

    def want(self, count: int, **scaling: Any) -> None:
        """So many nodes from now on."""
        self.scaling.update({"min_nodes": count, "max_nodes": max(1, count), **scaling})
        self.core.reconfigure(Scaling(enabled=True, **self.scaling))

    # What there is.

    @property
    def lives(self) -> list[NodeLife]:
        return list(self.core.lives)

    @property
    def states(self) -> list[str]:
        return sorted(life.state.value for life in self.core.lives)

    def serving(self) -> list[Node]:
        return [
            self.fleet.node(life.name)
            for life in self.core.lives
            if life.state is State.SERVING and not self.fleet.node(life.name).draining
        ]

    def takes_requests(self) -> Sequence[str]:
        group = self.fleet.group("m")
        return sorted(node.name for node in group.up.nodes) if group is not None else []


@asynccontextmanager
async def world(*clouds: ScriptedCloud, **more: Any) -> AsyncIterator[World]:
    made = World(*clouds, **more)
    try:
        yield made
    finally:
        await made.driver.close()


async def serving(made: World, count: int) -> list[Node]:
    made.want(count)
    await made.until(lambda: len(made.serving()) == count and len(made.lives) == count)
    return made.serving()
