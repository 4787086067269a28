"""A fleet that grows and shrinks in virtual time, with production's autoscaler and node controller. Only the
provisioner is simulated: nodes take time to start, quotas run out, and machines are paid for from the request to their
termination.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random
from typing import Protocol

import msgspec

from warmroute.config import Scaling
from warmroute.core.demand import DemandMeter
from warmroute.core.hot_prefixes import HotPrefix, HotPrefixes
from warmroute.core.node import Node
from warmroute.lab.engine.timing import Profile
from warmroute.lab.request_flow import SimulatedLookup
from warmroute.lab.simulated_node import NodeSpec
from warmroute.lab.world import World
from warmroute.scaling.autoscaler import Autoscaler
from warmroute.scaling.fleet_plan import router_settings
from warmroute.scaling.node_controller import NodeController
from warmroute.scaling.node_lifecycle import LifecycleEvent, LifecycleState, ManagedNode
from warmroute.scaling.observer import FleetView
from warmroute.scaling.offer_selection import OfferSelector
from warmroute.scaling.offers import Offer
from warmroute.scaling.replay_planner import PlanRunner
from warmroute.scaling.scaling_decision import PaidNode, ScalingDecision

DRAIN_POLL_MS = 100.0


class SimulatedOffer(msgspec.Struct, frozen=True, kw_only=True):
    offer: Offer
    profile: Profile
    start_jitter: float = 0.2
    """A start takes between start_s · (1 − this) and start_s · (1 + this)."""
    quota: int | None = None
    """Maximum number of nodes at a time, which the autoscaler learns only from a refusal."""


class DecisionMaker(Protocol):
    """Decides instead of production's scaler, for comparisons."""

    def decide(self, view: FleetView, pending: list[PaidNode], wall_s: float) -> ScalingDecision: ...


BusyShares = Callable[[], dict[str, float]]
"""Returns the fraction of time that each node's engine was busy since the last call."""
CreateDecisionMaker = Callable[[Scaling, OfferSelector, BusyShares], DecisionMaker]


CreatePlanRunner = Callable[[World, float, float], PlanRunner]
"""Creates it from the simulation, `window_s` and `cpu_share`."""


class ScalingSetup(msgspec.Struct, frozen=True, kw_only=True):
    """How a simulated fleet is scaled."""

    config: Scaling
    offers: tuple[SimulatedOffer, ...]
    """The fleet's first nodes come from the first of them, or the first with their role."""
    decision_maker: CreateDecisionMaker | None = None
    """Creates one to compare with; None for production's scaler."""
    planning: CreatePlanRunner | None = None
    """Creates what searches by replay run in, with the router's settings; None for thresholds only."""
    moves_prefixes: bool = True
    """Whether hot prefixes are prefilled on new nodes, and moved before a node leaves."""


class _Bill(msgspec.Struct):
    gpus: int
    usd_per_hour: float
    from_ms: float
    to_ms: float | None = None


class SimulatedScaling:
    """The controller's Actuator in virtual time."""

    def __init__(self, world: World, setup: ScalingSetup) -> None:
        self._world = world
        config = setup.config
        self._interval_ms = config.interval_s * 1000.0
        self._random = Random(f"{world.conditions.seed} scaling")
        self._offers = {one.offer.key: one for one in setup.offers}
        demand_meter = DemandMeter()
        hot = HotPrefixes() if world.router.policy.wants_tokens and setup.moves_prefixes else None
        world.router.demand_meter, world.router.hot = demand_meter, hot
        world.admission.without_node.first_node_wait_s = config.first_node_wait_s
        planning = None
        if setup.planning is not None and config.replay.enabled and world.is_own_policy:
            replay = config.replay
            planning = setup.planning(world, replay.window_s, replay.cpu_share), router_settings(world.config)
        self.autoscaler = Autoscaler(
            config, world.fleet, world.cache_view, demand_meter, hot, lambda: world.admission.queue.waiting, planning
        )
        self.autoscaler.offers.update_offers(one.offer for one in setup.offers)
        self.controller = NodeController(
            self.autoscaler,
            world.fleet,
            self,
            lambda: world.calendar.now_s,
            lambda: f"scaled-{self._started + 1}",
        )
        self._busy_ms: dict[str, tuple[float, float]] = {}
        self._decision_maker: DecisionMaker | None = None
        if setup.decision_maker is not None:
            self._decision_maker = setup.decision_maker(config, self.autoscaler.offers, self.busy_shares)
        self._started = 0
        self._bills: dict[str, _Bill] = {}
        self.decisions: list[ScalingDecision] = []
        """The decisions that changed the fleet."""
        self.counts: list[tuple[float, int, int]] = []
        """Time [s], serving nodes and pending nodes, whenever that changed."""
        for name, sim in world.nodes.items():
            same_role = [one.offer for one in setup.offers if one.offer.role == sim.spec.role]
            first = (same_role or [setup.offers[0].offer])[0]
            managed = self.autoscaler.managed.add(name, first, 0.0)
            managed.state, managed.node, managed.serving_since_s = LifecycleState.SERVING, sim.node, 0.0
            self._bills[name] = _Bill(sim.spec.profile.gpus, sim.spec.usd_per_hour or first.usd_per_hour, 0.0)
        self._count()
        world.calendar.after(self._interval_ms, self._turn)

    def _turn(self) -> None:
        autoscaler, calendar = self.autoscaler, self._world.calendar
        now_s = calendar.now_s
        self.controller.check_timeouts(now_s)
        if self._decision_maker is None:
            decision = autoscaler.decide(now_s)
        else:
            decision = self._decision_maker.decide(autoscaler.observe(now_s), autoscaler.pending, now_s)
        if decision.changes:
            self.decisions.append(decision)
        self.controller.execute(decision)
        self._count()
        calendar.after(self._interval_ms, self._turn)

    def busy_shares(self) -> dict[str, float]:
        now_ms = self._world.calendar.now_ms
        shares = {}
        for name, sim in self._world.nodes.items():
            if sim.tries:
                self._world.advance(sim)
            busy_ms = sum(stats.busy_ms for stats in sim.incarnation_stats)
            at_ms, before_ms = self._busy_ms.get(name, (sim.joined_ms, 0.0))
            self._busy_ms[name] = (now_ms, busy_ms)
            if not sim.node.draining and now_ms > at_ms:
                shares[name] = min(1.0, (busy_ms - before_ms) / (now_ms - at_ms))
        return shares

    # The simulated provisioner.

    def request_machine(self, managed: ManagedNode, reason: str) -> None:
        sim_offer, calendar = self._offers[managed.offer.key], self._world.calendar
        same_offer = sum(one.offer.key == managed.offer.key for one in self.autoscaler.managed)
        if sim_offer.quota is not None and same_offer > sim_offer.quota:
            self.controller.apply(managed, LifecycleEvent.GONE, "quota exceeded")
            return
        self._started += 1
        self.controller.apply(managed, LifecycleEvent.ACCEPTED)
        self._bills[managed.token] = _Bill(sim_offer.profile.gpus, managed.offer.usd_per_hour, calendar.now_ms)
        jitter = sim_offer.start_jitter
        start_s = managed.offer.start_s * (1.0 - jitter + 2.0 * jitter * self._random.random())
        calendar.after(start_s * 1000.0, self._join, managed)

    def _join(self, managed: ManagedNode) -> None:
        world = self._world
        if not managed.pending:  # removed before it has started
            self._machine_gone(managed)
            return
        offer = managed.offer
        spec = NodeSpec(managed.token, self._offers[offer.key].profile, offer.island, usd_per_hour=offer.usd_per_hour)
        spec = msgspec.structs.replace(spec, role=offer.role)
        nodes = [*world.nodes.values(), *reversed(world.departed)]
        like = next((sim for sim in nodes if sim.spec.role == offer.role), nodes[0] if nodes else None)
        if like is not None:
            spec = msgspec.structs.replace(
                spec,
                block_size=like.spec.block_size,
                blocks=like.spec.blocks,
                cpu_blocks=like.spec.cpu_blocks,
                kv_connector=like.spec.kv_connector,
            )
        sim = world.add(spec)
        world.fleet.drain(managed.token)
        self.controller.join(managed, sim.node, sim.node.url)
        self.controller.apply(managed, LifecycleEvent.CHECK_PASSED)

    def terminate(self, managed: ManagedNode) -> None:
        """A simulated machine first finishes its start or its requests (see `_join` and `_wait_until_drained`)."""
        node = self.controller.fleet_node(managed)
        if node is not None and not node.inflight:
            self._machine_gone(managed)

    def _machine_gone(self, managed: ManagedNode) -> None:
        self._bills[managed.token].to_ms = self._world.calendar.now_ms
        self.controller.apply(managed, LifecycleEvent.GONE)
        self._count()

    def remove_node(self, name: str) -> None:
        self._world.remove(name)

    # Prefills and drains in virtual time.

    def prewarm(self, managed: ManagedNode) -> None:
        self._prefill_each(self.controller.prewarm_prefills(managed), lambda: self._serve(managed))

    def _serve(self, managed: ManagedNode) -> None:
        world = self._world
        self.controller.apply(managed, LifecycleEvent.PREWARMED)
        node = self.controller.fleet_node(managed)
        if node is None or managed.state is not LifecycleState.SERVING:
            return
        world.fleet.check_passed(node, world.calendar.now_s)
        self._count()
        world.requests.brain.node_freed(node)
        world.requests.fleet_changed()

    def drain(self, managed: ManagedNode) -> None:
        self._prefill_each(self.controller.drain_prefills(managed), lambda: self._stop_routing(managed))

    def _stop_routing(self, managed: ManagedNode) -> None:
        self.controller.stop_routing(managed)
        self._wait_until_drained(managed)
        self._count()

    def _wait_until_drained(self, managed: ManagedNode) -> None:
        if managed.node is not None and managed.node.inflight:
            self._world.calendar.after(DRAIN_POLL_MS, self._wait_until_drained, managed)
            return
        self.controller.apply(managed, LifecycleEvent.DRAINED)
        if managed.state is LifecycleState.TERMINATING:  # it was terminated while requests ran
            self._machine_gone(managed)

    def _prefill_each(self, prefills: Iterator[tuple[Node, HotPrefix]], then: Callable[[], object]) -> None:
        """Prefill one after the other."""
        prefill = next(prefills, None)
        if prefill is None:
            then()
            return
        node, prefix = prefill
        assert isinstance(prefix.example, SimulatedLookup)
        self._world.prefill(
            self._world.nodes[node.name],
            prefix.example.prompt,
            prefix.tokens,
            lambda: self._prefill_each(prefills, then),
        )

    def state_changed(self, managed: ManagedNode, before: LifecycleState, event: LifecycleEvent) -> None:
        pass

    def offer_failed(self, managed: ManagedNode, reason: str) -> None:
        pass

    # Results.

    def _count(self) -> None:
        serving = sum(managed.state is LifecycleState.SERVING for managed in self.autoscaler.managed)
        pending = sum(managed.pending for managed in self.autoscaler.managed)
        if not self.counts or self.counts[-1][1:] != (serving, pending):
            self.counts.append((self._world.calendar.now_s, serving, pending))

    def totals(self) -> dict[str, float]:
        """Return what was paid for, from each machine's request to its termination."""
        now_ms = self._world.calendar.now_ms
        hours = gpu_hours = usd = 0.0
        for bill in self._bills.values():
            paid_hours = ((bill.to_ms if bill.to_ms is not None else now_ms) - bill.from_ms) / 3_600_000.0
            hours += paid_hours
            gpu_hours += paid_hours * bill.gpus
            usd += paid_hours * bill.usd_per_hour
        return {"node_hours": hours, "gpu_hours": gpu_hours, "usd": usd}
