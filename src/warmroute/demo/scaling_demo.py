"""The second act: a load that rises and falls, and a fleet that follows it.

    calm    a little to do for the fewest engines
    rise    the rate goes up; more engines come, until all that there may be serve
    busy    the most engines have the most to do
    fall    hardly anybody asks any more; engines go, until the fewest are left

Each part ends when the fleet is where it should be, or when its time is over: how long that takes is the machine's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from warmroute.config import ConfigError
from warmroute.demo.variable_load import VariableLoad
from warmroute.demo.autoscaled_fleet import LOOK_S, ScalingChange, FleetStatus, AutoscaledFleet

PATIENCE = 3
"""Looks at the router's account that may fail in a row, on a machine that is busy with other things."""


class LoadPlan(msgspec.Struct, frozen=True, kw_only=True):
    """How it goes. Rates are requests a second, as they are sent."""

    calm_rate: float = 2.0
    peak_rate: float = 14.0
    quiet_rate: float = 1.0
    calm_s: float = 4.0
    ramp_s: float = 8.0
    """In which the rate rises to its peak."""
    busy_s: float = 5.0
    limit_s: float = 60.0
    """For engines to come, and again for them to go."""


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """What could be seen at one time."""

    at_s: float
    part: str
    rate: float
    look: FleetStatus
    under_way: int
    ttft_ms: float | None


class ScalingResult(msgspec.Struct, kw_only=True):
    """What came of it."""

    moments: list[Sample] = msgspec.field(default_factory=list)
    changes: list[ScalingChange] = msgspec.field(default_factory=list)
    endings: dict[str, int] = msgspec.field(default_factory=dict)
    """Requests under way on each engine that was given back, when it was told to end."""

    @property
    def most(self) -> int:
        return max((moment.look.serving for moment in self.moments), default=0)

    @property
    def last(self) -> int:
        return self.moments[-1].look.serving if self.moments else 0

    @property
    def seconds(self) -> float:
        return self.moments[-1].at_s if self.moments else 0.0


class ScalingDemo:
    def __init__(
        self, fleet: AutoscaledFleet, load: VariableLoad, plot: LoadPlan, show: Callable[[Sample], None] = lambda _moment: None
    ) -> None:
        self._fleet = fleet
        self._load = load
        self._plot = plot
        self._show = show
        self._began_s = 0.0
        self.story = ScalingResult()

    async def run(self) -> ScalingResult:
        """Returns when everything that was sent is answered. Raises ConfigError where the router has ended."""
        self._began_s = asyncio.get_running_loop().time()
        sending = asyncio.get_running_loop().create_task(self._load.run())
        try:
            await self._parts()
            self._load.ending = True
            await sending
        finally:
            sending.cancel()
        self.story.changes = self._fleet.changes()
        self.story.endings = self._fleet.endings()
        return self.story

    async def _parts(self) -> None:
        plot, least, most = self._plot, self._fleet.shape.least, self._fleet.shape.most
        await self._part("calm", lambda _s: plot.calm_rate, plot.calm_s)
        await self._part("rise", self._rising, plot.limit_s, lambda look: look.serving == most)
        await self._part("busy", lambda _s: plot.peak_rate, plot.busy_s)
        await self._part(
            "fall", lambda _s: plot.quiet_rate, plot.limit_s, lambda look: look.serving == least and look.settled
        )

    def _rising(self, since_s: float) -> float:
        plot = self._plot
        return plot.calm_rate + (plot.peak_rate - plot.calm_rate) * min(1.0, since_s / plot.ramp_s)

    async def _part(
        self,
        name: str,
        rate: Callable[[float], float],
        limit_s: float,
        ends: Callable[[FleetStatus], bool] = lambda _look: False,
    ) -> None:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        while (since_s := loop.time() - began_s) < limit_s:
            self._load.rate = rate(since_s)
            look = await self._look()
            moment = Sample(
                at_s=loop.time() - self._began_s,
                part=name,
                rate=self._load.rate,
                look=look,
                under_way=self._load.under_way,
                ttft_ms=self._load.recent_ttft_ms(),
            )
            self.story.moments.append(moment)
            self._show(moment)
            if ends(look):
                return
            await asyncio.sleep(LOOK_S)

    async def _look(self) -> FleetStatus:
        for _ in range(PATIENCE - 1):
            try:
                return await self._fleet.look()
            except ConfigError:
                await asyncio.sleep(LOOK_S)
        return await self._fleet.look()
