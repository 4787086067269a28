"""One run: a workload, a fleet, a policy; and the single cache that no fleet can beat."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from math import inf
from random import Random

import msgspec

from warmroute.lab.replay_setup import ORACLE, PolicySpec
from warmroute.lab.simulated_node import Conditions, NodeSpec
from warmroute.lab.simulated_router import QueueThresholdPolicy
from warmroute.lab.simulated_scaling import ScalingSetup, SimulatedScaling
from warmroute.lab.summary import Run, over_ttft_limit, rounded, scaling_summary, summary
from warmroute.lab.workloads import BadWorkload, Workload, follow_daily_curve, with_follow_ups, with_warm_up
from warmroute.lab.workloads.workload_prompt import WorkloadPrompt
from warmroute.lab.world import ScheduledFault, World, schedule_fault

# `oracle`: the hit rate of one cache as large as all caches of the fleet together.
#
# Requests are served instantly, in the order of arrival, and blocks of prompts and answers are evicted least recently
# used first. This is a practical upper bound, not a proof: several small caches can by chance keep a block that one
# large cache evicts, and a request that waits in a queue is matched later.


def single_cache_hit_rate(
    prompts: Iterator[WorkloadPrompt],
    capacity_blocks: int,
    block_size: int,
    limit: int | None = None,
    duration_s: float | None = None,
    warm_up: int = 0,
    warm_up_s: float = 0.0,
) -> tuple[float, int]:
    """Return the fraction of prompt tokens that hit, and the number of requests; both without the first `warm_up`, or
    without those of the first `warm_up_s`."""
    cache: OrderedDict[int, None] = OrderedDict()
    queried = hit = count = unmeasured = 0
    is_measuring = False
    end_ms = inf
    for at_ms, prompt in with_follow_ups(prompts):
        if not is_measuring and count >= warm_up and at_ms >= 1000.0 * warm_up_s:
            is_measuring = True
            queried = hit = 0
            unmeasured = count
            end_ms = inf if duration_s is None else at_ms + duration_s * 1000.0
        if is_measuring and ((limit is not None and count == limit + unmeasured) or at_ms >= end_ms):
            break
        count += 1
        content = prompt.blocks.content(block_size)
        chain = content.hashes(0, (prompt.prompt_tokens + prompt.output_tokens) // block_size)
        reusable = (prompt.prompt_tokens - 1) // block_size
        depth = 0
        while depth < reusable and chain[depth] in cache:
            depth += 1
        queried += prompt.prompt_tokens
        hit += depth * block_size
        for block in reversed(chain):  # engines free the tail of a prompt first
            cache[block] = None
            cache.move_to_end(block)
        for _ in range(len(cache) - capacity_blocks):
            cache.popitem(last=False)
    return (hit / queried if queried else 0.0), count - unmeasured if is_measuring else 0


# One run of a replay: a workload through a simulated fleet under one policy.

Progress = Callable[[int], object]
"""Called now and then with the number of requests that have ended."""

PROGRESS_EVERY = 50
DEFAULT_WARM_RATE = 4.0
"""Requests per second of the warm-up, if neither a warm-up rate nor a rate is given."""


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that determines a run's results."""

    workload: Workload
    nodes: tuple[NodeSpec, ...]
    policy: PolicySpec
    conditions: Conditions = Conditions()
    rate: float | None = None
    """Requests per second; None for the workload's own rate."""
    burst: int = 1
    concurrency: int | None = None
    """Number of clients that send one request after the other; None for the workload's arrival times."""
    open_loop: bool = False
    """Whether turns of a trace are sent at their times, even if the turn before them is not answered."""
    limit: int | None = None
    """Number of measured requests."""
    duration_s: float | None = None
    warm_up: int = 0
    """Requests before the measured ones, sent at `warm_rate`."""
    warm_rate: float | None = None
    warm_up_s: float = 0.0
    """Seconds before the measured requests, if their number is not given. Requests in them keep their times."""
    queue_threshold: int | None = None
    faults: tuple[ScheduledFault, ...] = ()
    day_s: float | None = None
    """Length of a day, if arrivals follow a daily curve."""
    autoscale: ScalingSetup | None = None
    ceiling_ms: float | None = None
    """The report states for how long the TTFT was over this ceiling."""
    scaler: str = ""
    """Name of the scaler, for the report."""
    fleet_usd_per_hour: float = 0.0
    """Price of the whole fleet, if it is not scaled."""

    @property
    def requests(self) -> int | None:
        """Number of measured requests; None if unknown in advance."""
        if self.limit is not None or self.duration_s is not None:
            return self.limit
        return self.workload.requests

    def arrivals(self) -> Iterator[WorkloadPrompt]:
        seed = self.conditions.seed
        prompts = self.workload.arrivals(seed, self.rate, self.burst, self.limit)
        if self.day_s is not None:
            prompts = follow_daily_curve(prompts, self.day_s)
        if not self.warm_up:
            return prompts
        return with_warm_up(
            prompts, self.warm_up, self.warm_rate or self.rate or DEFAULT_WARM_RATE, Random(f"{seed} warm up")
        )

    def describe(self) -> Run:
        """Return the columns of the report that identify the run."""
        profiles = list(dict.fromkeys(spec.profile.name for spec in self.nodes))
        return {
            "policy": f"{self.policy.text}, {self.scaler}" if self.scaler else self.policy.text,
            "workload": self.workload.name,
            "profile": ", ".join(profiles),
            "node_count": len(self.nodes),
            "rate": self.rate,
            "concurrency": self.concurrency,
            "queue_threshold": self.queue_threshold,
            "seed": self.conditions.seed,
            **({"tenants": self.conditions.tenants} if self.conditions.tenants is not None else {}),
            **({"replicas": self.conditions.replicas} if self.conditions.replicas > 1 else {}),
        }


def replay(setup: Setup, progress: Progress | None = None) -> Run:
    if setup.policy.name == ORACLE:
        return oracle_run(setup)
    world = build_world(setup)
    scaling = SimulatedScaling(world, setup.autoscale) if setup.autoscale is not None else None
    if setup.ceiling_ms is not None:
        world.results.ceiling_ms = setup.ceiling_ms
    prompts = setup.arrivals()
    if progress is not None:
        prompts = _with_progress(prompts, world, progress)
    world.run(
        prompts,
        concurrency=setup.concurrency,
        limit=setup.requests,
        duration_s=setup.duration_s,
        warm_up=setup.warm_up,
        warm_up_s=setup.warm_up_s,
        waits=not setup.open_loop,
    )
    if not world.is_measuring or not world.results.total("arrived"):
        raise _nothing_measured(setup)
    run = {**setup.describe(), "loop": world.loop, **summary(world)}
    if setup.ceiling_ms is not None:
        run["ceiling"] = over_ttft_limit(world)
    if scaling is not None:
        run["scaling"] = scaling_summary(world, scaling)
    elif setup.fleet_usd_per_hour:
        hours = run["gpu_seconds_held"] / sum(spec.profile.gpus for spec in setup.nodes) / 3600.0
        run["usd"] = rounded(hours * setup.fleet_usd_per_hour)
    return run


def build_world(setup: Setup) -> World:
    """Return the simulation before its first request."""
    conditions = setup.conditions
    peer = setup.policy.peer(conditions.seed)
    if peer is not None and peer.poll_interval_s is not None:
        conditions = msgspec.structs.replace(conditions, poll_interval_s=peer.poll_interval_s)
    more_peers = [setup.policy.peer(conditions.seed + 1000 * at) for at in range(1, conditions.replicas)]
    world = World(
        setup.nodes, conditions, setup.policy.config(), policy=peer, listener=peer, more_peers=more_peers,
        queue_order=setup.policy.queue_order,
    )  # fmt: skip
    if setup.queue_threshold is not None:
        for replica in world.replicas:
            replica.router.policy = QueueThresholdPolicy(replica.router.policy, setup.queue_threshold)
    for fault in setup.faults:
        schedule_fault(world, fault, setup.nodes[0])
    return world


def oracle_run(setup: Setup) -> Run:
    """Return the hit rate of one cache as large as the fleet's. It has no times."""
    blocks = sum(spec.engine().num_blocks - 1 for spec in setup.nodes)
    hit_rate, count = single_cache_hit_rate(
        setup.arrivals(), blocks, setup.nodes[0].block_size, setup.requests, setup.duration_s, setup.warm_up,
        setup.warm_up_s,
    )  # fmt: skip
    if count < 1:
        raise _nothing_measured(setup)
    nothing = {"p50": None, "p90": None, "p99": None, "mean": None}
    return {**setup.describe(), "requests": count, "hit_rate": rounded(hit_rate), "ttft_ms": nothing}


def _nothing_measured(setup: Setup) -> BadWorkload:
    where = "all its requests are in the warm-up" if setup.warm_up or setup.warm_up_s else "it has no requests"
    return BadWorkload(f"{setup.workload.name}: {where}")


def _with_progress(prompts: Iterator[WorkloadPrompt], world: World, progress: Progress) -> Iterator[WorkloadPrompt]:
    for number, prompt in enumerate(prompts):
        if number % PROGRESS_EVERY == 0:
            progress(world.results.ended)
        yield prompt
