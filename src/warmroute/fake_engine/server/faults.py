"""Faults that a running simulated engine has on command. POST /_sim/fail takes one of:

    {"mode": "die"}                          the process exits at once, as with kill -9
    {"mode": "hang"}                         the engine answers nothing and running responses stop, as in a deadlock
    {"mode": "hang", "health": true}         the same, but /health and /metrics answer, as when only the GPU hangs
    {"mode": "error500", "share": 0.5}       this fraction of new generations fails with 500 (default: 1)
    {"mode": "busy503", "share": 0.5}        this fraction of new generations fails with 503 (default: 1)
    {"mode": "slow", "factor": 4}            the engine runs at a quarter of its speed
    {"mode": "drop_events", "share": 0.1}    this fraction of event batches is lost; replay still has them
    {"mode": "restart"}                      restart in place: empty cache, event sequence from 0, new process start
                                             time, counters at zero, running responses broken off
    {"mode": "early_role"}                   streams send a chunk with only a role at once, long before the first token
    {"mode": "early_comment"}                streams send a comment (`: ping`) at once
    {"mode": "none"}                         no fault; responses that hung continue

A new mode replaces the previous one. `restart` ends by itself. GET /_sim/fail returns the current mode. /_sim answers
in every mode.
"""

from __future__ import annotations

import asyncio
import os
from random import Random
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Mode = Literal["none", "die", "hang", "error500", "busy503", "slow", "drop_events", "restart", "early_role", "early_comment"]


class Fault(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    mode: Mode
    share: Annotated[float, Meta(ge=0, le=1)] = 1.0
    factor: Annotated[float, Meta(gt=0)] = 1.0
    health: bool = False


NO_FAULT = Fault("none")


class Faults:
    """The current fault of one engine."""

    def __init__(self, seed: int) -> None:
        self.fault = NO_FAULT
        self._random = Random(seed)
        self._not_hanging = asyncio.Event()
        self._not_hanging.set()

    def set(self, fault: Fault) -> None:
        if fault.mode == "die":
            os._exit(137)
        self.fault = NO_FAULT if fault.mode == "restart" else fault
        if self.fault.mode == "hang":
            self._not_hanging.clear()
        else:
            self._not_hanging.set()

    def drops_event(self) -> bool:
        """Return whether the next event batch is lost."""
        return self.fault.mode == "drop_events" and self._random.random() < self.fault.share

    def next_error(self) -> Literal["error500", "busy503"] | None:
        """Return how the next generation fails, or None."""
        mode = self.fault.mode
        if (mode == "error500" or mode == "busy503") and self._random.random() < self.fault.share:
            return mode
        return None

    @property
    def early_event(self) -> Literal["early_role", "early_comment"] | None:
        """Return what a stream sends before its first token, or None."""
        mode = self.fault.mode
        return mode if mode == "early_role" or mode == "early_comment" else None

    async def wait_while_hanging(self, path: str) -> None:
        while not self._not_hanging.is_set() and not (self.fault.health and path in ("/health", "/metrics")):
            await self._not_hanging.wait()

    @property
    def slowdown(self) -> float:
        return self.fault.factor if self.fault.mode == "slow" else 1.0
