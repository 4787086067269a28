"""The autoscaler without I/O: observes the fleet, decides, and selects the prefixes to prefill. node_controller.py
carries out its decisions, for the service in real time and for replay in virtual time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from warmroute.config import Config, Scaling
from warmroute.fleet.demand import DemandMeter
from warmroute.fleet.fleet import Fleet
from warmroute.index.cache_view import CacheView
from warmroute.index.hot_prefixes import HotPrefix, HotPrefixes
from warmroute.scaling.capacity import ScalingInputs
from warmroute.scaling.fleet_observer import FleetObserver, FleetView, pool_of
from warmroute.scaling.fleet_plan import FleetPlan
from warmroute.scaling.metric_windows import MetricWindows
from warmroute.scaling.node_lifecycle import LifecycleState, ManagedNodes
from warmroute.scaling.offer import Offer
from warmroute.scaling.offer_selection import OfferSelector
from warmroute.scaling.plan_request import plan_request
from warmroute.scaling.replay_planner import PlanRunner, ReplayPlanner
from warmroute.scaling.role_pools import RolePools, has_pools
from warmroute.scaling.scaler import Scaler
from warmroute.scaling.scaling_decision import PaidNode, ScalingDecision, paid_for

HOT_PREFIXES_CHECKED: Final = 64
MAX_PREFIXES_MOVED: Final = 8


class Autoscaler:
    def __init__(
        self, config: Scaling, fleet: Fleet, cache_view: CacheView, demand_meter: DemandMeter,
        hot: HotPrefixes | None, waiting: Callable[[], int], planning: tuple[PlanRunner, Config] | None = None,
    ) -> None:  # fmt: skip
        """`waiting` returns the number of requests that wait at the router. `planning`: runs searches by replay, with
        the router's settings; None for thresholds only."""
        self._fleet = fleet
        self._cache_view = cache_view
        self._hot = hot
        self.config = config
        self.offers = OfferSelector(config, fleet.islands.round_trip_ms)
        self.managed = ManagedNodes(config)
        self.scaler = Scaler(config, self.offers)
        self.pools = RolePools(config, self.offers)
        """Decides instead of `scaler` where nodes have roles."""
        self._windows = MetricWindows(config)
        self._observer = FleetObserver(fleet, cache_view, demand_meter, waiting)
        self.last_decision: ScalingDecision | None = None
        self.planner = ReplayPlanner(config, demand_meter, planning[0]) if planning is not None else None
        self.router_settings = planning[1] if planning is not None else Config()

    def reconfigure(self, config: Scaling) -> None:
        self.config = self.managed.config = self.offers.config = self.scaler.config = self._windows.config = config
        if self.planner is not None:
            self.planner.reconfigure(config)

    @property
    def desired_nodes(self) -> int:
        return self.last_decision.desired_nodes if self.last_decision is not None else len(self._fleet)

    def desired_in_pool(self, role: str) -> int:
        """Return how many nodes a pool should have; those of the whole fleet if there is no such pool."""
        pools = self.last_decision.pools if self.last_decision is not None else {}
        for pool, decision in pools.items():
            if pool == role:
                return decision.desired_nodes
        return self.desired_nodes

    def request_failed(self, offer: Offer) -> None:
        """A requested node does not come: the next request need not wait for the cooldown."""
        self.scaler.request_failed()
        self.pools.request_failed(pool_of(offer.role))

    @property
    def changed_s(self) -> tuple[float, float]:
        """When nodes were last added and removed."""
        (added_s, removed_s), (pool_added_s, pool_removed_s) = self.scaler.changed_s, self.pools.changed_s
        return max(added_s, pool_added_s), max(removed_s, pool_removed_s)

    @changed_s.setter
    def changed_s(self, times_s: tuple[float, float]) -> None:
        self.scaler.changed_s = self.pools.changed_s = times_s

    def observe(self, now_s: float) -> FleetView:
        """Take a sample, and return the fleet's current state."""
        windows = self._windows
        windows.add(self._observer.sample(now_s))
        return self._observer.view(now_s, windows.stable, windows.panic, windows.growth_per_s, self.managed)

    @property
    def pending(self) -> list[PaidNode]:
        return [paid_for(managed.offer) for managed in self.managed if managed.pending]

    @property
    def terminating(self) -> list[PaidNode]:
        """Machines that are still paid for and are not in the fleet any more, or never were."""
        in_fleet = {node.name for node in self._fleet}
        outside = [managed for managed in self.managed if not managed.pending and managed.name not in in_fleet]
        return [paid_for(managed.offer) for managed in outside]

    def decide(self, now_s: float, wall_s: float = 0.0) -> ScalingDecision:
        view = self.observe(now_s)
        if has_pools(view, self.offers):
            self.last_decision = self.pools.decide(
                view, self._windows, self.config, self.offers, self.pending, wall_s, self.terminating
            )
            return self.last_decision
        planned = self._planned if self.planner is not None and self.config.replay.enabled else None
        self.last_decision = self.scaler.decide(view, self.pending, wall_s, self.terminating, planned)
        return self.last_decision

    def _planned(self, inputs: ScalingInputs) -> FleetPlan | None:
        """Start a search if it is time, and return the last plan if it counts."""
        planner, now_s = self.planner, inputs.view.now_s
        assert planner is not None
        planner.turn(
            now_s,
            len(inputs.serving) if not inputs.pending else -1,
            lambda: plan_request(inputs, self.offers, self.terminating, self.router_settings),
        )
        return planner.plan(now_s)

    @property
    def draining_names(self) -> set[str]:
        return {managed.name for managed in self.managed if managed.state is LifecycleState.DRAINING}

    def prefixes_to_prewarm(self, now_s: float) -> list[HotPrefix]:
        """Return the prefixes that a new node prefills before it serves, the hottest first."""
        count = self.config.prewarm_prefixes
        return self._hot.hottest(count, now_s) if self._hot is not None and count else []

    def prefixes_to_move(self, name: str, now_s: float) -> list[HotPrefix]:
        """Return the hot prefixes that only this node holds, which another node prefills before this one leaves."""
        if self._hot is None:
            return []
        leaving = {name, *self.draining_names}
        staying = {node.name for node in self._fleet if node.name not in leaving and not node.draining}
        found = []
        for prefix in self._hot.hottest(HOT_PREFIXES_CHECKED, now_s):
            holders = self._cache_view.holders(prefix.chain)
            if name in holders and not holders & staying:
                found.append(prefix)
        return found[:MAX_PREFIXES_MOVED]
