"""Looks at each node every second or so, as engines/watch.py does in production: health and metrics, which are as old
as the way back when they arrive, and older where the conditions say so. Health and metrics share one look here.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from warmroute.config import Health
from warmroute.replay.world.conditions import Conditions
from warmroute.replay.world.node import Life, SimNode

if TYPE_CHECKING:
    from warmroute.replay.world.world import World

IDLE = (0, 0, 0.0)


class Polls:
    def __init__(self, world: World, conditions: Conditions, health: Health) -> None:
        self._world = world
        self._conditions = conditions
        self._timeout_ms = health.timeout_s * 1000.0
        self._random = Random(f"{conditions.seed} polls")

    def begin(self, sim: SimNode) -> None:
        """The first look is somewhere within the first interval: a fleet is not polled in step."""
        self._world.calendar.after(self._random.random() * self._conditions.poll_interval_s * 1000.0, self._look, sim)

    def _look(self, sim: SimNode) -> None:
        world, conditions = self._world, self._conditions
        if sim.node.name not in world.nodes:
            return
        calendar = world.calendar
        waited_ms = 0.0
        if sim.life is Life.SERVING:
            if not conditions.poll_loss or self._random.random() >= conditions.poll_loss:
                if sim.flights:
                    world.advance(sim)
                engine = sim.engine
                load = (engine.num_running, engine.num_waiting, engine.kv_usage)
                seen = IDLE if "load" in sim.spec.lies else load
                calendar.after(sim.one_way_ms + conditions.poll_lag_ms, self._heard, sim, *seen, sim.incarnation)
                if sim.spec.adapters:
                    sim.node.loaded.running(engine.running_loras, sim.spec.max_loras)
        elif sim.life is Life.DEAD:
            calendar.after(sim.one_way_ms, self._refused, sim)
        else:
            waited_ms = self._timeout_ms
            calendar.after(waited_ms, self._slow, sim)
        if calendar.now_s - sim.node.polled_s > conditions.stale_s:
            sim.node.lost_sight_of_load()
        jitter = conditions.poll_jitter
        pause_s = conditions.poll_interval_s * (1.0 - jitter + 2.0 * jitter * self._random.random())
        calendar.after(waited_ms + pause_s * 1000.0, self._look, sim)

    def _heard(self, sim: SimNode, running: int, waiting: int, kv_usage: float, incarnation: int) -> None:
        world = self._world
        now_s = world.calendar.now_s
        world.fleet.islands.answered(sim.node, 2.0 * sim.one_way_ms, now_s)
        world.fleet.check_passed(sim.node, now_s)
        world.polled(sim.node, float(incarnation), now_s)
        sim.node.saw_load(running, waiting, kv_usage, now_s)
        sim.node.incarnation = float(incarnation)

    def _refused(self, sim: SimNode) -> None:
        self._world.fleet.check_refused(sim.node, self._world.calendar.now_s, "connection refused")

    def _slow(self, sim: SimNode) -> None:
        self._world.fleet.check_slow(sim.node, self._world.calendar.now_s)
