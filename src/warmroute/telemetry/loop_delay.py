"""How late the event loop runs what is due: the first sign that something holds it."""

from __future__ import annotations

import asyncio
import time

from warmroute.telemetry.counters import Counters

INTERVAL_S = 0.1


async def watch_loop_delay(counters: Counters) -> None:
    while True:
        before_s = time.monotonic()
        await asyncio.sleep(INTERVAL_S)
        late_s = time.monotonic() - before_s - INTERVAL_S
        if late_s > counters.loop_delay_max_s:
            counters.loop_delay_max_s = late_s
