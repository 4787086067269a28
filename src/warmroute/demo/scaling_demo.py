"""Part 2 of the demo: a load that rises and falls, and a fleet that follows it.

    low     a low rate for the smallest fleet
    rise    the rate rises; the router adds engines up to the largest fleet
    peak    the largest fleet at the highest rate
    fall    almost no requests; the router removes engines down to the smallest fleet

`rise` and `fall` end when the fleet has its size, or after a timeout. How long that takes depends on the machine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Literal

import msgspec

from warmroute.config import ConfigError
from warmroute.demo.autoscaled_fleet import POLL_S, AutoscaledFleet, FleetStatus, ScalingChange
from warmroute.demo.variable_load import VariableLoad

STATUS_TRIES = 3
"""A busy machine may miss a status request. The demo fails after this many in a row."""

Phase = Literal["low", "rise", "peak", "fall"]


class LoadPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The phases of the load. Rates are requests per second."""

    low_rate: float = 2.0
    peak_rate: float = 14.0
    idle_rate: float = 1.0
    """The rate of the phase `fall`."""
    low_s: float = 4.0
    ramp_s: float = 8.0
    """Time in which the rate rises to its peak."""
    peak_s: float = 5.0
    timeout_s: float = 60.0
    """Maximum duration of `rise` and of `fall`."""


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """The state of the load and the fleet at one time."""

    at_s: float
    phase: Phase
    rate: float
    fleet: FleetStatus
    in_flight: int
    ttft_ms: float | None


class ScalingResult(msgspec.Struct, kw_only=True):
    samples: list[Sample] = msgspec.field(default_factory=list)
    changes: list[ScalingChange] = msgspec.field(default_factory=list)
    requests_at_stop: dict[str, int] = msgspec.field(default_factory=dict)
    """How many requests each removed engine still had when it was stopped."""

    @property
    def max_serving(self) -> int:
        return max((sample.fleet.serving for sample in self.samples), default=0)

    @property
    def final_serving(self) -> int:
        return self.samples[-1].fleet.serving if self.samples else 0

    @property
    def duration_s(self) -> float:
        return self.samples[-1].at_s if self.samples else 0.0


class ScalingDemo:
    def __init__(
        self,
        fleet: AutoscaledFleet,
        load: VariableLoad,
        plan: LoadPlan,
        show: Callable[[Sample], None] = lambda _sample: None,
    ) -> None:
        self._fleet = fleet
        self._load = load
        self._plan = plan
        self._show = show
        self._started_s = 0.0
        self._result = ScalingResult()

    async def run(self) -> ScalingResult:
        """Run all phases and wait for all responses. Raises ConfigError if the router ends."""
        self._started_s = asyncio.get_running_loop().time()
        sending = asyncio.get_running_loop().create_task(self._load.run())
        try:
            await self._run_phases()
            self._load.stopped = True
            await sending
        finally:
            sending.cancel()
        self._result.changes = self._fleet.changes()
        self._result.requests_at_stop = self._fleet.requests_at_stop()
        return self._result

    async def _run_phases(self) -> None:
        plan, options = self._plan, self._fleet.options
        await self._run_phase("low", lambda _s: plan.low_rate, plan.low_s)
        await self._run_phase("rise", self._rising_rate, plan.timeout_s, lambda f: f.serving == options.max_nodes)
        await self._run_phase("peak", lambda _s: plan.peak_rate, plan.peak_s)
        await self._run_phase(
            "fall", lambda _s: plan.idle_rate, plan.timeout_s, lambda f: f.serving == options.min_nodes and f.is_stable
        )

    def _rising_rate(self, phase_s: float) -> float:
        plan = self._plan
        return plan.low_rate + (plan.peak_rate - plan.low_rate) * min(1.0, phase_s / plan.ramp_s)

    async def _run_phase(
        self,
        phase: Phase,
        rate: Callable[[float], float],
        limit_s: float,
        is_over: Callable[[FleetStatus], bool] = lambda _fleet: False,
    ) -> None:
        """`rate`: takes the seconds since the phase began. `is_over`: ends the phase before its limit."""
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        while (phase_s := loop.time() - started_s) < limit_s:
            self._load.rate = rate(phase_s)
            fleet = await self._fleet_status()
            sample = Sample(
                at_s=loop.time() - self._started_s,
                phase=phase,
                rate=self._load.rate,
                fleet=fleet,
                in_flight=self._load.in_flight,
                ttft_ms=self._load.recent_ttft_ms(),
            )
            self._result.samples.append(sample)
            self._show(sample)
            if is_over(fleet):
                return
            await asyncio.sleep(POLL_S)

    async def _fleet_status(self) -> FleetStatus:
        for _ in range(STATUS_TRIES - 1):
            try:
                return await self._fleet.status()
            except ConfigError:
                await asyncio.sleep(POLL_S)
        return await self._fleet.status()
