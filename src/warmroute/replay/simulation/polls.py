"""Polls the simulated nodes' health and load in virtual time. engines/node_updates.py decides what the responses do.

One poll covers health and load here. A response is as old as the way back, and older if the conditions say so.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

import msgspec

from warmroute.config import Health
from warmroute.engines.load_report import LoadReport
from warmroute.engines.node_updates import apply_health_pass, apply_load_report
from warmroute.fake_engine.core.engine_stats import EngineStats
from warmroute.fleet.engine_rates import EngineCounters
from warmroute.replay.simulation.conditions import Conditions
from warmroute.replay.simulation.simulated_node import ProcessState, SimulatedNode

if TYPE_CHECKING:
    from warmroute.replay.simulation.replica import Replica
    from warmroute.replay.simulation.world import World


class Polls:
    def __init__(self, world: World, replica: Replica, conditions: Conditions, health: Health) -> None:
        self._world = world
        self._replica = replica
        self._conditions = conditions
        self._timeout_ms = health.timeout_s * 1000.0
        self._random = Random(f"{conditions.seed} polls" + (f" {replica.index}" if replica.index else ""))

    def begin(self, sim: SimulatedNode) -> None:
        """Schedule the first poll somewhere within the first interval, so that nodes are not polled in step."""
        self._world.calendar.after(self._random.random() * self._conditions.poll_interval_s * 1000.0, self._poll, sim)

    def _poll(self, sim: SimulatedNode) -> None:
        world, conditions = self._world, self._conditions
        if sim.node.name not in world.nodes:
            return
        calendar, fleet, node = world.calendar, self._replica.fleet, sim.views[self._replica.index]
        waited_ms = 0.0
        if sim.state is ProcessState.SERVING:
            if not conditions.poll_loss or self._random.random() >= conditions.poll_loss:
                if sim.flights:
                    world.advance(sim)
                calendar.after(
                    sim.one_way_ms + conditions.poll_lag_ms, self._respond, sim, _load_report(sim, conditions.streams)
                )
        elif sim.state is ProcessState.DEAD:
            refused = "connection refused"
            calendar.after(sim.one_way_ms, lambda: fleet.check_failed(node, calendar.now_s, refused))
        else:
            waited_ms = self._timeout_ms
            calendar.after(waited_ms, lambda: fleet.check_timed_out(node, calendar.now_s))
        node.drop_stale_load(conditions.stale_s, calendar.now_s)
        jitter = conditions.poll_jitter
        pause_s = conditions.poll_interval_s * (1.0 - jitter + 2.0 * jitter * self._random.random())
        calendar.after(waited_ms + pause_s * 1000.0, self._poll, sim)

    def _respond(self, sim: SimulatedNode, report: LoadReport) -> None:
        replica, now_s = self._replica, self._world.calendar.now_s
        node = sim.views[replica.index]
        apply_health_pass(replica.fleet, node, 2.0 * sim.one_way_ms, now_s)
        apply_load_report(node, report, replica.listener.node_kv_events(node), now_s)


def _load_report(sim: SimulatedNode, streams: bool) -> LoadReport:
    """What the node's metrics page would say now. Times of prefills count only where nothing else shows its speed."""
    engine, spec = sim.engine, sim.spec
    idle = "load" in spec.misreports
    counters = EngineCounters() if idle else _counters(engine.stats)
    if not streams and not idle:
        counters = msgspec.structs.replace(
            counters, prefill_time_s=engine.stats.prefill_time_ms / 1000.0, prefills=engine.stats.prefills,
            prefilled_tokens=engine.stats.prefilled_tokens,
        )  # fmt: skip
    return LoadReport(
        running=0 if idle else engine.num_running,
        waiting=0 if idle else engine.num_waiting,
        kv_usage=0.0 if idle else engine.kv_usage,
        incarnation=float(sim.incarnation),
        block_size=spec.block_size,
        capacity_tokens=(engine.config.num_blocks - 1) * spec.block_size,
        adapters=tuple(engine.running_loras) if spec.adapters else (),
        adapter_slots=spec.max_loras if spec.adapters else 0,
        counters=counters,
    )


def _counters(stats: EngineStats) -> EngineCounters:
    return EngineCounters(
        queried_tokens=stats.prefix_cache_queries,
        hit_tokens=stats.prefix_cache_hits,
        preemptions=stats.preemptions,
        queue_time_s=stats.queue_time_ms / 1000.0,
        queue_times=stats.queue_times,
    )
