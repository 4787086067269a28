"""One run of a replay: a workload through a world with one policy, and what came of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random

import msgspec

from warmroute.replay.contenders import ORACLE, Contender
from warmroute.replay.peers import oracle
from warmroute.replay.scaled import over_ceiling, paid_for_all, scaling_summary
from warmroute.replay.summary import Run, rounded, summary
from warmroute.replay.workloads.arrivals import warmed
from warmroute.replay.workloads.choose import Workload
from warmroute.replay.workloads.day import day_shaped
from warmroute.replay.workloads.prompt import Prompt
from warmroute.replay.world.conditions import Conditions, NodeSpec
from warmroute.replay.world.fault_schedule import Happening, enter
from warmroute.replay.world.gate import QueueGate
from warmroute.replay.world.scaling import Autoscale, Autoscaling
from warmroute.replay.world.world import World

Progress = Callable[[int], object]
"""Told the number of requests that have ended, now and then."""

PROGRESS_EVERY = 50
WARM_RATE = 4.0
"""Requests a second while warming up, where neither the run nor the user says."""


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """All that decides a run's outcome."""

    workload: Workload
    nodes: tuple[NodeSpec, ...]
    contender: Contender
    conditions: Conditions = Conditions()
    rate: float | None = None
    """Requests a second; None for the workload's own."""
    burst: int = 1
    concurrency: int | None = None
    """Clients of the closed loop; None for open arrivals."""
    limit: int | None = None
    """Requests that are measured."""
    duration_s: float | None = None
    warm_up: int = 0
    """Requests before those that are measured, at `warm_rate` (the workload's own where there is none)."""
    warm_rate: float | None = None
    queue_threshold: int | None = None
    happenings: tuple[Happening, ...] = ()
    day_s: float | None = None
    """Arrivals follow the shape of a day that is so long."""
    autoscale: Autoscale | None = None
    ceiling_ms: float | None = None
    """Time to first token that is too long; time over it is told."""
    scaler: str = ""
    """What scales it, for the report."""
    fleet_usd_per_hour: float = 0.0
    """What all of its nodes cost, where nothing scales them."""

    @property
    def requests(self) -> int | None:
        """How many there will be, as far as one can know."""
        if self.limit is not None or self.duration_s is not None:
            return self.limit
        return self.workload.requests

    def arrivals(self) -> Iterator[Prompt]:
        seed = self.conditions.seed
        prompts = self.workload.arrive(seed, self.rate, self.burst, self.limit)
        if self.day_s is not None:
            prompts = day_shaped(prompts, self.day_s)
        if not self.warm_up:
            return prompts
        return warmed(prompts, self.warm_up, self.warm_rate or self.rate or WARM_RATE, Random(f"{seed} warm up"))

    def said(self) -> Run:
        """What the run was, for its report."""
        profiles = list(dict.fromkeys(spec.profile.name for spec in self.nodes))
        return {
            "policy": f"{self.contender.text}, {self.scaler}" if self.scaler else self.contender.text,
            "workload": self.workload.name,
            "profile": ", ".join(profiles),
            "node_count": len(self.nodes),
            "rate": self.rate,
            "concurrency": self.concurrency,
            "queue_threshold": self.queue_threshold,
            "seed": self.conditions.seed,
        }


def replay(setup: Setup, progress: Progress | None = None) -> Run:
    if setup.contender.name == ORACLE:
        return ceiling(setup)
    world = world_of(setup)
    scaling = Autoscaling(world, setup.autoscale) if setup.autoscale is not None else None
    if setup.ceiling_ms is not None:
        world.tally.ceiling_ms = setup.ceiling_ms
    prompts = setup.arrivals()
    if progress is not None:
        prompts = _watched(prompts, world, progress)
    limit = setup.requests
    world.run(
        prompts,
        concurrency=setup.concurrency,
        limit=None if limit is None else limit + setup.warm_up,
        duration_s=setup.duration_s,
        warm_up=setup.warm_up,
    )
    told = {**setup.said(), **summary(world)}
    if setup.ceiling_ms is not None:
        told["ceiling"] = over_ceiling(world)
    if scaling is not None:
        told["scaling"] = scaling_summary(world, scaling)
    elif setup.fleet_usd_per_hour:
        gpus = sum(spec.profile.gpus for spec in setup.nodes)
        told["usd"] = paid_for_all(told, gpus, setup.fleet_usd_per_hour)
    return told


def world_of(setup: Setup) -> World:
    """The world before its first request."""
    conditions = setup.conditions
    peer = setup.contender.peer(conditions.seed)
    if peer is not None and peer.poll_interval_s is not None:
        conditions = msgspec.structs.replace(conditions, poll_interval_s=peer.poll_interval_s)
    world = World(setup.nodes, conditions, setup.contender.config(), policy=peer, listener=peer)
    if setup.queue_threshold is not None:
        world.router.policy = QueueGate(world.router.policy, setup.queue_threshold)
    for happening in setup.happenings:
        enter(world, happening, setup.nodes[0])
    return world


def ceiling(setup: Setup) -> Run:
    """The oracle's run: a hit rate and no times."""
    blocks = sum(spec.engine().num_blocks - 1 for spec in setup.nodes)
    share, count = oracle.hit_rate(
        setup.arrivals(), blocks, setup.nodes[0].block_size, setup.requests, setup.duration_s, setup.warm_up
    )
    nothing = {"p50": None, "p90": None, "p99": None, "mean": None}
    return {**setup.said(), "requests": count, "hit_rate": rounded(share), "ttft_ms": nothing}


def _watched(prompts: Iterator[Prompt], world: World, progress: Progress) -> Iterator[Prompt]:
    for number, prompt in enumerate(prompts):
        if number % PROGRESS_EVERY == 0:
            progress(world.tally.ended)
        yield prompt
