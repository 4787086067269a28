"""The scaling core put together, for whoever drives it: the service in real time, the simulator in virtual time.

each interval   core.step(now) → Step          what to add and to give back, and why
the driver      asks clouds, and tells core.lives and core.market what came of it
before a drain  core.to_move(node)             hot prefixes that only this node holds
before serving  core.to_warm()                 what a new node is to have prefilled
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from warmroute.config import Scaling
from warmroute.fleet.demand import DemandMeter
from warmroute.fleet.fleet import Fleet
from warmroute.fleet.node import Node
from warmroute.index.cache_view import CacheView
from warmroute.index.hot import HotPrefix, HotPrefixes
from warmroute.scaling.choose_down import only_here
from warmroute.scaling.choose_up import Holding, Market
from warmroute.scaling.loop import Coming, Scaler, Step
from warmroute.scaling.node_lifecycle import Lives, State
from warmroute.scaling.observe import FleetView, Observer
from warmroute.scaling.windows import Windows


class Core:
    def __init__(
        self, config: Scaling, fleet: Fleet, cache_view: CacheView, demand_meter: DemandMeter, hot: HotPrefixes | None,
        waiting: Callable[[], int],
    ) -> None:  # fmt: skip
        """`waiting` tells how many requests wait at the router."""
        self._fleet = fleet
        self._cache_view = cache_view
        self._hot = hot
        self.config = config
        self.market = Market(config)
        self.lives = Lives(config)
        self.scaler = Scaler(config, self.market)
        self.windows = Windows(config)
        self._observer = Observer(fleet, cache_view, demand_meter, waiting)
        self.last: Step | None = None
        """What was last decided."""

    def reconfigure(self, config: Scaling) -> None:
        self.config = config
        self.lives.reconfigure(config)
        self.scaler.reconfigure(config)
        self.windows.reconfigure(config)

    @property
    def desired_nodes(self) -> int:
        return self.last.desired_nodes if self.last is not None else len(self._fleet)

    def look(self, now_s: float) -> FleetView:
        """Takes a sample, and sees the fleet as it is."""
        windows = self.windows
        windows.add(self._observer.sample(now_s))
        warming = {life.name for life in self.lives if life.coming and life.name}
        kept = {life.name for life in self.lives if not life.endable}
        view = self._observer.view(
            now_s, windows.stable, windows.panic, windows.growth_per_s, self._came_from, warming, kept
        )
        going = set(self.draining)  # also those that still take requests, while what they hold is moved
        leaving = {life.name for life in self.lives if life.reclaimed}
        if going or leaving:
            view.nodes = tuple(
                msgspec.structs.replace(
                    node,
                    serving=node.serving and node.name not in going,
                    draining=node.draining or node.name in going,
                    leaving=node.name in leaving,
                )
                for node in view.nodes
            )
        return view

    def _came_from(self, node: Node) -> tuple[str, str] | None:
        life = self.lives.named(node.name)
        return life.offer.key if life is not None else None

    @property
    def coming(self) -> list[Coming]:
        return [
            Coming(
                offer=life.offer.key, island=life.offer.island, gpu=life.offer.gpu, usd_per_hour=life.offer.usd_per_hour
            )
            for life in self.lives
            if life.coming
        ]

    @property
    def ending(self) -> list[Holding]:
        """Machines that are paid for still, and are in the fleet no more, or never were."""
        there = {node.name for node in self._fleet}
        return [
            Holding(life.offer.key, life.offer.island, life.offer.usd_per_hour)
            for life in self.lives
            if not life.coming and life.name not in there
        ]

    def step(self, now_s: float, wall_s: float = 0.0) -> Step:
        self.last = self.scaler.step(self.look(now_s), self.coming, wall_s, self.ending)
        return self.last

    def to_warm(self, now_s: float) -> list[HotPrefix]:
        """What a new node is to have before it takes traffic, the most important first."""
        most = self.config.warm_prefixes
        return self._hot.hottest(most, now_s) if self._hot is not None and most else []

    def to_move(self, name: str, now_s: float) -> tuple[HotPrefix, ...]:
        """What another node is to have before this one goes."""
        going = {name, *self.draining}
        others = [node.name for node in self._fleet if node.name not in going and not node.draining]
        return only_here(self._hot, self._cache_view, name, others, now_s)

    @property
    def draining(self) -> list[str]:
        return [life.name for life in self.lives if life.state is State.DRAINING]
