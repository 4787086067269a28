"""A fleet that grows and shrinks in virtual time, under the very scaling core of production. What clouds do is
simulated: nodes take their time to start, quotas are used up, prices add up from the request to the end.

The life of a node here: asked for → (`start_s`, give or take) → joins, takes no requests yet → what is hot is prefilled
there → serves → what only it has of hot prefixes is put elsewhere → drains → leaves.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Protocol

import msgspec

from warmroute.config import Scaling
from warmroute.fake_engine.profiles import Profile
from warmroute.fleet.demand import DemandMeter
from warmroute.index.hot import HotPrefix, HotPrefixes
from warmroute.replay.world.conditions import NodeSpec
from warmroute.replay.world.node import SimNode
from warmroute.replay.world.simulated_request import SimLookup
from warmroute.replay.world.world import World
from warmroute.scaling.choose_up import Market
from warmroute.scaling.core import Core
from warmroute.scaling.loop import Coming, Step, Up
from warmroute.scaling.node_lifecycle import Event, State
from warmroute.scaling.observe import FleetView
from warmroute.scaling.offer import Offer

TIMELINE_SPANS = 240


class SimOffer(msgspec.Struct, frozen=True, kw_only=True):
    """An offer, and what stands behind it."""

    offer: Offer
    profile: Profile
    start_jitter: float = 0.2
    """A start takes start_s × 1 ± this."""
    quota: int | None = None
    """Most nodes that it gives at a time, which it does not say before it is asked."""


class Decider(Protocol):
    """The production loop, or one to compare it with."""

    def step(self, view: FleetView, coming: list[Coming], wall_s: float) -> Step: ...


class Autoscale(msgspec.Struct, frozen=True, kw_only=True):
    """How a simulated fleet is scaled."""

    config: Scaling
    offers: tuple[SimOffer, ...]
    """The fleet's first nodes are taken to come from the first of them."""
    decider: Callable[[Scaling, Market, Callable[[], dict[str, float]]], Decider] | None = None
    """Makes a loop to compare with: of the configuration, the market, and each node's share of busy time since it was
    last asked. None for the production loop."""
    warms: bool = True
    """Whether new nodes are given what is hot, and what only one node holds is moved before it goes."""


class _Bill(msgspec.Struct):
    gpus: int
    usd_per_hour: float
    from_ms: float
    to_ms: float | None = None


class Autoscaling:
    def __init__(self, world: World, setup: Autoscale) -> None:
        self._world = world
        self._setup = setup
        config = setup.config
        self._interval_ms = config.interval_s * 1000.0
        self._random = Random(f"{world.conditions.seed} scaling")
        self._offers = {one.offer.key: one for one in setup.offers}
        demand_meter = DemandMeter()
        hot = HotPrefixes() if world.router.policy.wants_tokens and setup.warms else None
        world.router.demand_meter, world.router.hot = demand_meter, hot
        world.admission.node_wait_s = config.hold_s
        self.core = core = Core(
            config, world.fleet, world.cache_view, demand_meter, hot, lambda: world.admission.waiting
        )
        core.market.offered(one.offer for one in setup.offers)
        self._busy_ms: dict[str, tuple[float, float]] = {}
        self._decider: Decider | None = setup.decider(config, core.market, self.busy) if setup.decider else None
        self._numbers = 0
        self._bills: dict[str, _Bill] = {}
        self.decisions: list[Step] = []
        """Those that changed something."""
        self.counts: list[tuple[float, int, int]] = []
        """Moment [s], nodes that serve, nodes that are coming: whenever that changed."""
        self.refusals = 0
        first = setup.offers[0]
        for name, sim in world.nodes.items():
            life = core.lives.ask(name, first.offer, 0.0)
            life.state, life.name, life.serving_s = State.SERVING, name, 0.0
            self._bills[name] = _Bill(sim.spec.profile.gpus, sim.spec.usd_per_hour or first.offer.usd_per_hour, 0.0)
        self._count()
        world.calendar.after(self._interval_ms, self._step)

    # The loop.

    def _step(self) -> None:
        world, core = self._world, self.core
        now_s = world.calendar.now_s
        for life in core.lives.overdue(now_s):
            core.lives.take(life.token, Event.LIMIT, now_s)
        step = core.step(now_s) if self._decider is None else self._decider.step(core.look(now_s), core.coming, now_s)
        if step.changes:
            self.decisions.append(step)
        if not step.dry_run:
            for up in step.ups:
                self._request(up)
            for down in step.downs:
                self._give_back(down.node)
        self._count()
        world.calendar.after(self._interval_ms, self._step)

    def busy(self) -> dict[str, float]:
        """Of each serving node: the share of time since it was last asked in which its engine ran."""
        now_ms = self._world.calendar.now_ms
        found = {}
        for name, sim in self._world.nodes.items():
            if sim.flights:
                self._world.advance(sim)
            busy_ms = sum(stats.busy_ms for stats in sim.past)
            at_ms, before_ms = self._busy_ms.get(name, (sim.joined_ms, 0.0))
            self._busy_ms[name] = (now_ms, busy_ms)
            if not sim.node.draining and now_ms > at_ms:
                found[name] = min(1.0, (busy_ms - before_ms) / (now_ms - at_ms))
        return found

    # Up.

    def _request(self, up: Up) -> None:
        core, world = self.core, self._world
        sim_offer = self._offers[up.offer.key]
        now_s = world.calendar.now_s
        there = sum(life.offer.key == up.offer.key for life in core.lives)
        if sim_offer.quota is not None and there >= sim_offer.quota:
            self.refusals += 1
            core.market.refused(up.offer.key, "the quota is used up", now_s)
            return
        self._numbers += 1
        token = f"scaled-{self._numbers}"
        core.lives.ask(token, up.offer, now_s)
        core.lives.take(token, Event.ACCEPTED, now_s)
        self._bills[token] = _Bill(sim_offer.profile.gpus, up.offer.usd_per_hour, world.calendar.now_ms)
        jitter = sim_offer.start_jitter
        start_s = up.offer.start_s * (1.0 - jitter + 2.0 * jitter * self._random.random())
        world.calendar.after(start_s * 1000.0, self._join, token)

    def _join(self, token: str) -> None:
        core, world = self.core, self._world
        life = core.lives.get(token)
        now_s = world.calendar.now_s
        if life is None or not life.coming:  # given up meanwhile
            self._ended(token)
            return
        sim_offer = self._offers[life.offer.key]
        like = next(iter(world.nodes.values()), None) or (world.gone[-1] if world.gone else None)
        spec = NodeSpec(token, sim_offer.profile, life.offer.island, usd_per_hour=life.offer.usd_per_hour)
        if like is not None:
            spec = msgspec.structs.replace(
                spec, block_size=like.spec.block_size, blocks=like.spec.blocks, cpu_blocks=like.spec.cpu_blocks
            )
        sim = world.add(spec)
        world.fleet.drain(token)
        life.name = token
        core.lives.take(token, Event.HAS_ADDRESS, now_s)
        core.lives.take(token, Event.CHECK_PASSED, now_s)
        self._put(sim, core.to_warm(now_s) if self._setup.warms else [], lambda: self._serve(token))

    def _put(self, sim: SimNode, prefixes: list[HotPrefix], then: Callable[[], object]) -> None:
        """Prefills these on a node, one after the other."""
        if not prefixes:
            then()
            return
        prefix, *others = prefixes
        assert isinstance(prefix.example, SimLookup)
        self._world.prefill(sim, prefix.example.prompt, prefix.tokens, lambda: self._put(sim, others, then))

    def _serve(self, token: str) -> None:
        core, world = self.core, self._world
        now_s = world.calendar.now_s
        life = core.lives.take(token, Event.WARM, now_s)
        if life is None or token not in world.nodes:
            return
        node = world.fleet.drain(token, False)
        world.fleet.check_passed(node, now_s)
        core.market.came_up(life.offer.key, now_s - life.asked_s)
        self._count()
        if world.admission.waiting:
            world.admission.tick([node], now_s)

    # Down.

    def _give_back(self, name: str) -> None:
        core, world = self.core, self._world
        now_s = world.calendar.now_s
        life = core.lives.named(name)
        if life is None or core.lives.take(life.token, Event.GIVE_BACK, now_s) is None:
            return
        moves = core.to_move(name, now_s) if self._setup.warms else ()
        others = [sim for sim in world.nodes.values() if sim.node.name != name and not sim.node.draining]
        if moves and others:
            least = min(others, key=lambda sim: sim.node.pending_work)
            self._put(least, list(moves), lambda: self._drain(name))
        else:
            self._drain(name)

    def _drain(self, name: str) -> None:
        if name in self._world.nodes:
            self._world.drain(name, lambda _sim: self._ended(name))
            self._count()

    def _ended(self, name: str) -> None:
        core, now_s = self.core, self._world.calendar.now_s
        life = core.lives.named(name) or core.lives.get(name)
        if life is not None:
            core.lives.take(life.token, Event.EMPTY, now_s)
            core.lives.take(life.token, Event.ENDED, now_s)
        bill = self._bills.get(name)
        if bill is not None and bill.to_ms is None:
            bill.to_ms = self._world.calendar.now_ms
        self._count()

    # What came of it.

    def _count(self) -> None:
        serving = sum(life.state is State.SERVING for life in self.core.lives)
        coming = sum(life.coming for life in self.core.lives)
        if not self.counts or self.counts[-1][1:] != (serving, coming):
            self.counts.append((self._world.calendar.now_s, serving, coming))

    def totals(self) -> dict[str, float]:
        """Paid for, from each node's request to its end."""
        now_ms = self._world.calendar.now_ms
        hours = gpu_hours = usd = 0.0
        for bill in self._bills.values():
            paid_h = ((bill.to_ms if bill.to_ms is not None else now_ms) - bill.from_ms) / 3_600_000.0
            hours += paid_h
            gpu_hours += paid_h * bill.gpus
            usd += paid_h * bill.usd_per_hour
        return {"node_hours": hours, "gpu_hours": gpu_hours, "usd": usd}
