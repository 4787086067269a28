"""One decision in each interval, for one workload or for pools of prefill and other nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from math import isfinite
from typing import Final

import msgspec

from warmroute.config import Config, Scaling
from warmroute.config.scaling import Pool, RoleLimits
from warmroute.core.cache_view import CacheView
from warmroute.core.demand import DemandMeter
from warmroute.core.fleet import Fleet
from warmroute.core.health import HealthState
from warmroute.core.hot_prefixes import HotPrefix, HotPrefixes
from warmroute.core.node import Node
from warmroute.scaling.capacity import Demand, GpuSpeeds, ScalingInputs, size_of
from warmroute.scaling.fleet_plan import FleetPlan, plan_request
from warmroute.scaling.node_lifecycle import LifecycleState, ManagedNodes
from warmroute.scaling.observer import FleetObserver, FleetView, MetricWindows, pool_of, sanitize
from warmroute.scaling.offer_selection import OfferSelector
from warmroute.scaling.offers import Offer
from warmroute.scaling.replay_planner import PlanRunner, ReplayPlanner
from warmroute.scaling.scaler import Scaler, scheduled_min_nodes
from warmroute.scaling.scaling_decision import (
    PaidNode,
    PoolDecision,
    ScalingDecision,
    SwitchRole,
    count_of_nodes,
    paid_for,
)
from warmroute.scaling.thresholds import paid_node, removable_nodes

# Scales the prefill nodes and the nodes that serve requests separately, each by what it lacks. No I/O.
#
#     pool      nodes with the role      what makes it grow, beside its utilisation
#     -------   ----------------------   ---------------------------------------------------------------
#     prefill   prefill                  prompts that wait for it, TTFT
#     decode    decode, mixed            KV memory of running requests, inter-token time, TTFT, rejections
#
# Each pool has a scaler of its own (scaler.py), with its own cooldowns, that sees only the pool's nodes, its offers and
# the work that was sent to it. Limits of the fleet (`max_nodes`, the budget, the maximum of an island) are reduced by
# what the other pool takes. Requests that wait at the router count for the pool that is busier.
#
# A pool keeps at least one node while the other one has nodes. Searches by replay do not know roles: thresholds decide.

POOLS: Final[tuple[Pool, ...]] = ("prefill", "decode")
COUNTED: Final = (HealthState.UP, HealthState.UNKNOWN)
"""Nodes in these states serve, or will after their first health check."""
NO_BUDGET: Final = 1e-9
"""What is left of a budget that the other pool has used up. 0 would be no limit."""


class RolePools:
    """The scalers of both pools."""

    def __init__(self, config: Scaling, offers: OfferSelector) -> None:
        self.scalers = {pool: Scaler(config, offers) for pool in POOLS}
        self._switched_s = float("-inf")
        self._switched_to: Pool | None = None

    def decide(
        self, view: FleetView, windows: MetricWindows, config: Scaling, offers: OfferSelector,
        pending: Sequence[PaidNode], wall_s: float, terminating: Sequence[PaidNode],
    ) -> ScalingDecision:  # fmt: skip
        pools = [pool for pool in POOLS if _exists(pool, view, pending, offers)]
        views = _split(view, windows, pools)
        current = [paid_node(node) for node in view.nodes]
        paid = {pool: _of_pool((*current, *pending, *terminating), pool) for pool in POOLS}
        decisions: dict[Pool, ScalingDecision] = {}
        removed = 0
        limits_of: dict[Pool, Scaling] = {}
        # The pool that lacks more comes first; of two equal ones that which serves requests.
        for pool in sorted(pools, key=lambda one: (-_utilisation(views[one]), one)):
            other = other_pool(pool)
            # The busier pool comes first and could take all of `max_nodes`. What the other pool needs at least stays
            # free.
            reserved = _role_limits(config, other).min_nodes if other in pools and other not in decisions else 0
            limits = limits_of[pool] = _limits(config, pool, paid[pool], paid[other], reserved, removed, view, wall_s)
            by_fleet = limits.max_nodes < _role_limits(config, pool).max_nodes
            scaler = self.scalers[pool]
            scaler.limit(
                limits, offers.for_pool(limits, pool, paid[other]),
                f"{count_of_nodes(config.max_nodes)} for both pools" if by_fleet else "",
            )  # fmt: skip
            decision = decisions[pool] = scaler.decide(
                views[pool], _of_pool(pending, pool), wall_s, _of_pool(terminating, pool)
            )
            paid[pool] += [paid_for(one.offer) for one in decision.additions]
            removed += len(decision.removals)
        switches = self._switches(config, limits_of, views, decisions, pending)
        return _combined([(pool, decisions[pool]) for pool in pools], offers.problems, switches)

    def _switches(
        self, config: Scaling, limits: dict[Pool, Scaling], views: dict[Pool, FleetView],
        decisions: dict[Pool, ScalingDecision], pending: Sequence[PaidNode],
    ) -> list[SwitchRole]:  # fmt: skip
        """Let nodes change sides instead of adding nodes to one pool, where the other one has nodes to spare. A switch
        in the opposite direction has to wait for `cooldown_down_s`."""
        if not config.switch_roles or len(views) < len(POOLS):
            return []
        to = max(POOLS, key=lambda pool: decisions[pool].needed)
        other = other_pool(to)
        lacking, sparing, now_s = decisions[to], decisions[other], views[to].now_s
        # A node that goes one way and back at once helps neither pool.
        wait_s = config.cooldown_up_s if self._switched_to == to else config.cooldown_down_s
        if not lacking.needed or sparing.needed or now_s - self._switched_s < wait_s:
            return []
        inputs = ScalingInputs(limits[other], sanitize(views[other], []), _of_pool(pending, other), 1.0)
        inputs.panicking = sparing.panicking
        candidates, _ = removable_nodes(inputs, _role_limits(config, other).min_nodes, any_node=True)
        room = _role_limits(config, to).max_nodes - lacking.nodes
        # A mixed node serves both kinds of requests already: it has no side to leave.
        names = [one.node.name for one in candidates if one.node.switchable and one.node.role != "mixed"]
        chosen = names[: max(0, min(lacking.needed, room))]
        if not chosen:
            return []
        self._switched_s, self._switched_to = now_s, to
        # A switch counts as a change of both pools, so that neither adds or removes nodes before its effect is
        # measured.
        self.scalers[to].changed_s = (now_s, self.scalers[to].changed_s[1])
        self.scalers[other].changed_s = (self.scalers[other].changed_s[0], now_s)
        kept = max(0, len(lacking.additions) - len(chosen))
        lacking.additions = lacking.additions[:kept]
        sparing.removals = tuple(one for one in sparing.removals if one.node not in chosen)
        lacking.desired_nodes = lacking.nodes + len(chosen) + kept
        sparing.desired_nodes = sparing.nodes - len(chosen) - len(sparing.removals)
        self.scalers[other].hold_desired(sparing.desired_nodes)
        lacking.reasons = (*lacking.reasons, f"{count_of_nodes(len(chosen))} of the {other} pool become {to} nodes")
        return [SwitchRole(name, to, f"the {other} pool can spare it") for name in chosen]

    def request_failed(self, pool: Pool) -> None:
        self.scalers[pool].request_failed()

    @property
    def changed_s(self) -> tuple[float, float]:
        """When nodes of any pool were last added and removed."""
        times_s = [scaler.changed_s for scaler in self.scalers.values()]
        return max(added_s for added_s, _ in times_s), max(removed_s for _, removed_s in times_s)

    @changed_s.setter
    def changed_s(self, times_s: tuple[float, float]) -> None:
        for scaler in self.scalers.values():
            scaler.changed_s = times_s


def has_pools(view: FleetView, offers: OfferSelector) -> bool:
    """Return whether nodes have roles, or could have one."""
    return any(node.role != "mixed" for node in view.nodes) or any(offer.role != "mixed" for offer in offers.offers)


def desired_in_workload(last: ScalingDecision | None, config: Scaling, pool: Pool, nodes: Iterable[Node]) -> int:
    """Return how many nodes somebody else (KEDA) should run with the configured role of a pool. Nodes whose role
    changed at run time belong to the workload that started them, and serve in the other pool:

        desired nodes of the pool − its nodes of the other workload + this workload's nodes in the other pool

    Before the first decision: the nodes that the workload has."""
    if last is None:
        return sum(pool_of(node.config.role) == pool for node in nodes)
    if not last.desired_nodes:
        return 0  # scaled to zero
    minimum = _role_limits(config, pool).min_nodes
    desired = minimum
    if pool in last.pools:
        desired = last.pools[pool].desired_nodes
    elif not last.pools and pool == "decode":  # no node has a role
        desired = last.desired_nodes
    # KEDA sets replicas of a Deployment by its own role. A decode node that plays prefill still runs in the decode
    # Deployment.
    counted = [node for node in nodes if not node.draining and node.health.state in COUNTED]
    changed = [node for node in counted if pool_of(node.role) != pool_of(node.config.role)]
    away = sum(pool_of(node.config.role) == pool for node in changed)
    return max(minimum, desired - (len(changed) - away) + away)


def other_pool(pool: Pool) -> Pool:
    return POOLS[1 - POOLS.index(pool)]


def _exists(pool: Pool, view: FleetView, pending: Iterable[PaidNode], offers: OfferSelector) -> bool:
    """Return whether the pool has nodes, or could have some."""
    roles = [*(one.role for one in view.nodes), *(one.role for one in pending), *(one.role for one in offers.offers)]
    return any(pool_of(role) == pool for role in roles)


def _of_pool(paid: Iterable[PaidNode], pool: Pool) -> list[PaidNode]:
    return [one for one in paid if pool_of(one.role) == pool]


def _split(view: FleetView, windows: MetricWindows, pools: Sequence[Pool]) -> dict[Pool, FleetView]:
    """Return the view of each pool. The busier one has the requests that wait at the router."""
    views = {}
    for pool in pools:
        stable, panic = windows.of_pool(pool)
        nodes = tuple(node for node in view.nodes if pool_of(node.role) == pool)
        views[pool] = msgspec.structs.replace(view, stable=stable, panic=panic, nodes=nodes, waiting=0)
    busier = pools  # requests that wait for the first node need one of each pool
    if all(any(node.serving for node in views[pool].nodes) for pool in pools):
        busier = (max(pools, key=lambda pool: _utilisation(views[pool])),)
    for pool in busier:
        views[pool].waiting = view.waiting
        for window in (views[pool].stable, views[pool].panic):
            window.waiting += view.waiting
    return views


def _utilisation(view: FleetView) -> float:
    speeds = GpuSpeeds(view.nodes)
    serving = [node for node in view.nodes if node.serving]
    demand = Demand(view, view.stable, speeds)
    used = demand.utilisation(size_of(serving, speeds))
    # A pool with load and without nodes has infinite utilisation. Two such pools must still have an order.
    return used if isfinite(used) else 1e9


def _role_limits(config: Scaling, pool: Pool) -> RoleLimits:
    return next((one for one in config.roles if one.role == pool), RoleLimits(role=pool))


def _limits(
    config: Scaling, pool: Pool, own: Sequence[PaidNode], elsewhere: Sequence[PaidNode], reserved: int, removed: int,
    view: FleetView, wall_s: float,
) -> Scaling:  # fmt: skip
    """Return the settings of one pool. `own`, `elsewhere`: the machines of this pool and of the other one, of which
    `removed` will be removed. `reserved`: how many of the fleet's `max_nodes` the other pool gets in any case."""
    limits = _role_limits(config, pool)
    taken, here = (sum(one.counts_toward_limit for one in paid) for paid in (elsewhere, own))
    minimum = limits.min_nodes
    idle = 0 < config.scale_to_zero_after_s <= view.idle_s and not view.waiting
    if config.min_nodes == 0 and ((idle and taken <= 1) or not (view.nodes or elsewhere)):
        # A prefill node without a decode node serves nothing, and costs as much.
        minimum = reserved = 0  # both go together
    elif pool == "decode":
        minimum = max(minimum, max(config.min_nodes, scheduled_min_nodes(config.hours, wall_s)) - taken)
    # Above the maximum, each pool would remove the whole excess: what the first pool removes is not removed again.
    excess = max(0, taken + here - removed - config.max_nodes)
    room = config.max_nodes - taken
    least = min(max(minimum, 1), max(here, room))  # a minimum adds no machine above the fleet's maximum
    free = room - max(0, reserved - taken)
    maximum = max(0, least, min(limits.max_nodes, max(free, here - excess)))
    budget = config.budget_usd_per_hour
    if budget:
        usd = sum(one.usd_per_hour for one in elsewhere if isfinite(one.usd_per_hour))
        budget = max(NO_BUDGET, budget - usd)
    on_island = Counter(one.island for one in elsewhere if one.counts_toward_limit)
    islands = tuple(
        msgspec.structs.replace(
            one,
            min_nodes=one.min_nodes if pool == "decode" else 0,
            max_nodes=max(0, one.max_nodes - on_island[one.island]),
        )
        for one in config.islands
    )
    return msgspec.structs.replace(
        config, min_nodes=minimum, max_nodes=maximum, budget_usd_per_hour=budget, islands=islands, hours=()
    )


def _combined(
    of_pools: Sequence[tuple[Pool, ScalingDecision]], problems: tuple[str, ...], switches: Sequence[SwitchRole]
) -> ScalingDecision:
    def told(pool: Pool, texts: Iterable[str]) -> list[str]:
        return [f"{pool} pool: {text}" for text in texts]

    return ScalingDecision(
        at_s=of_pools[0][1].at_s,
        desired_nodes=sum(one.desired_nodes for _, one in of_pools),
        nodes=sum(one.nodes for _, one in of_pools),
        additions=tuple(
            msgspec.structs.replace(addition, reason=f"{pool} pool: {addition.reason}")
            for pool, one in of_pools
            for addition in one.additions
        ),
        removals=tuple(removal for _, one in of_pools for removal in one.removals),
        switches=tuple(switches),
        needed=sum(one.needed for _, one in of_pools),
        reasons=tuple(text for pool, one in of_pools for text in told(pool, one.reasons)),
        obstacles=tuple(text for pool, one in of_pools for text in told(pool, one.obstacles)),
        invalid_inputs=tuple(dict.fromkeys((*problems, *(text for _, one in of_pools for text in one.invalid_inputs)))),
        panicking=any(one.panicking for _, one in of_pools),
        dry_run=of_pools[0][1].dry_run,
        utilisation=max(one.utilisation for _, one in of_pools),
        pools={pool: PoolDecision(one.nodes, one.desired_nodes, one.utilisation) for pool, one in of_pools},
    )


# The autoscaler without I/O: observes the fleet, decides, and selects the prefixes to prefill. node_controller.py
# carries out its decisions, for the service in real time and for replay in virtual time.

HOT_PREFIXES_CHECKED: Final = 64
"""The hottest prefixes that are looked up when a node leaves. A colder one costs less to prefill again than to move."""
MAX_PREFIXES_MOVED: Final = 8
"""A node that leaves prefills them one after the other on other nodes, within PREWARM_TIMEOUT_S, while it is paid
for."""


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
        """Return how many nodes the workload with this configured role should have; those of the whole fleet for an
        empty role. Raises ValueError for any role but `prefill` and `decode`."""
        if not role:
            return self.desired_nodes
        pool = next((one for one in POOLS if one == role), None)
        if pool is None:
            raise ValueError(f"the role {role!r} is unknown: use {' or '.join(POOLS)}, or none for the whole fleet")
        return desired_in_workload(self.last_decision, self.config, pool, self._fleet)

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
        # A machine that left the fleet runs until its provider has ended it. It has to count towards `max_nodes` and
        # the budget for that long, or an outage would buy twice.
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
        # Two nodes that drain together may each hold a copy: neither copy will be there.
        leaving = {name, *self.draining_names}
        staying = {node.name for node in self._fleet if node.name not in leaving and not node.draining}
        found = []
        for prefix in self._hot.hottest(HOT_PREFIXES_CHECKED, now_s):
            holders = self._cache_view.holders(prefix.chain)
            if name in holders and not holders & staying:
                found.append(prefix)
        return found[:MAX_PREFIXES_MOVED]
