"""Measures the delay of the event loop: how late it runs a timer."""

from __future__ import annotations

import asyncio
import time

from warmroute.telemetry.counters import Counters

INTERVAL_S = 0.1


async def watch_loop_delay(counters: Counters) -> None:
    while True:
        before_s = time.monotonic()
        await asyncio.sleep(INTERVAL_S)
        delay_s = time.monotonic() - before_s - INTERVAL_S
        if delay_s > counters.loop_delay_max_s:
            counters.loop_delay_max_s = delay_s
