"""Faults that a simulated engine is told to have while it runs: POST /_sim/fail with one of

    {"mode": "die"}                          the process ends at once, as by kill -9
    {"mode": "hang"}                         nothing is answered and running answers stand still, as in a deadlock
    {"mode": "hang", "health": true}         the same, but /health and /metrics answer, as when only the GPU hangs
    {"mode": "error500", "share": 0.5}       that share of new generations fails with 500 (1 where not given)
    {"mode": "busy503", "share": 0.5}        the same with 503
    {"mode": "slow", "factor": 4}            the engine runs at a quarter of its speed
    {"mode": "drop_events", "share": 0.1}    that share of event batches is lost; replay still has them
    {"mode": "restart"}                      in place: cache empty, sequence back to 0, new process start time, counters
                                             at zero, running requests cut
    {"mode": "none"}                         all well again; what hung goes on

One mode is in force at a time, and a new one ends the one before; `restart` is over once it is done. GET /_sim/fail
tells the one in force, and /_sim answers in every mode.
"""

from __future__ import annotations

import asyncio
import os
from random import Random
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Mode = Literal["none", "die", "hang", "error500", "busy503", "slow", "drop_events", "restart"]


class Fault(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    mode: Mode
    share: Annotated[float, Meta(ge=0, le=1)] = 1.0
    factor: Annotated[float, Meta(gt=0)] = 1.0
    health: bool = False


WELL = Fault("none")


class Faults:
    """The fault in force."""

    def __init__(self, seed: int) -> None:
        self.fault = WELL
        self._random = Random(seed)
        self._moving = asyncio.Event()
        self._moving.set()

    def set(self, fault: Fault) -> None:
        if fault.mode == "die":
            os._exit(137)
        self.fault = WELL if fault.mode == "restart" else fault
        if self.fault.mode == "hang":
            self._moving.clear()
        else:
            self._moving.set()

    def loses_event(self) -> bool:
        return self.fault.mode == "drop_events" and self._random.random() < self.fault.share

    def refuses(self) -> Literal["error500", "busy503"] | None:
        """Whether the next generation is refused, and how."""
        mode = self.fault.mode
        if (mode == "error500" or mode == "busy503") and self._random.random() < self.fault.share:
            return mode
        return None

    async def pass_by(self, path: str) -> None:
        """Waits while the engine hangs."""
        while not self._moving.is_set() and not (self.fault.health and path in ("/health", "/metrics")):
            await self._moving.wait()

    @property
    def slowness(self) -> float:
        return self.fault.factor if self.fault.mode == "slow" else 1.0
