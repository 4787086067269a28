"""Searches by replay inside a replay: the simulated router records what reaches it, and a search that begins now ends
when a process with its share of a core would have ended it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final
from zlib import crc32

from warmroute.replay.planning.fleet_search import plan_fleet
from warmroute.replay.planning.recorded_traffic import RecordedRequest, recorded_until
from warmroute.replay.simulation.world import World
from warmroute.replay.workloads.workload_prompt import WorkloadPrompt
from warmroute.scaling.fleet_plan import FleetPlan, PlanRequest

REQUEST_CPU_S: Final = 0.0006
"""CPU time of one replayed request, so that results do not depend on the machine."""
DURATIONS: Final = 500
"""Requests that have ended last, for the time that requests take."""


class SimulatedPlanning:
    def __init__(self, world: World, window_s: float, cpu_share: float) -> None:
        self._world = world
        self._calendar = world.calendar
        self._window_ms = 1000.0 * window_s
        self._cpu_share = cpu_share
        self._recorded: deque[RecordedRequest] = deque()
        self._count = 0
        world.on_arrival = self._record

    @property
    def recorded(self) -> int:
        return len(self._recorded)

    def _record(self, prompt: WorkloadPrompt) -> None:
        now_ms, recorded = self._calendar.now_ms, self._recorded
        self._count += 1
        conversation = crc32(prompt.session) if prompt.session else self._count
        recorded.append(RecordedRequest(prompt, now_ms, conversation))
        while recorded[0].at_ms < now_ms - self._window_ms:
            recorded.popleft()

    def start(self, request: PlanRequest, done: Callable[[FleetPlan | None, str], object]) -> None:
        now_ms = self._calendar.now_ms
        until_ms = recorded_until(now_ms, self._world.results.latency_ms[-DURATIONS:])
        request.lead_s += (now_ms - until_ms) / 1000.0
        since_ms = now_ms - self._window_ms
        plan = plan_fleet(request, [one for one in self._recorded if since_ms <= one.at_ms <= until_ms], until_ms)
        plan.cpu_s = REQUEST_CPU_S * plan.replayed_requests
        self._calendar.after(1000.0 * plan.cpu_s / self._cpu_share, done, plan, "")
