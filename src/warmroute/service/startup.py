"""The start of the router: /ready answers 503 and requests wait until the router knows its nodes.

Right after the start no node is checked, and the caches of nodes are unknown until their KV events are replayed. The
first requests would get 503 or go to the wrong node. `startup.max_wait_s` bounds the wait.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Final

from warmroute.event_log import EventLog

if TYPE_CHECKING:
    from warmroute.service.service import Service

log = EventLog("warmroute.service")
CHECK_S: Final = 0.02


async def hold_until_started(service: Service) -> None:
    """Hold requests back, and release them once the router knows its nodes or the time is over."""
    started_s, max_wait_s = time.monotonic(), service.config.startup.max_wait_s
    missing: list[str] = []
    try:
        while missing := unknown_nodes(service):
            if time.monotonic() - started_s >= max_wait_s:
                break
            await asyncio.sleep(CHECK_S)
    finally:
        service.proxy.own_endpoints.starting = False
        service.proxy.release_requests()
    duration_ms = round((time.monotonic() - started_s) * 1000.0, 1)
    if missing:
        log.warning(
            "startup_timed_out",
            "The router serves requests although it does not know these nodes yet.",
            nodes=",".join(missing[:8]),
            duration_ms=duration_ms,
        )
    else:
        log.info("startup_complete", nodes=len(service.fleet), duration_ms=duration_ms)


def unknown_nodes(service: Service) -> list[str]:
    """Return the names of sources that have not listed their nodes yet, and of nodes whose health or earlier KV events
    are not known, or whose tokenizer is being loaded."""
    unknown = service.discovery.pending or [node.name for node in service.fleet if not service.watcher.is_settled(node)]
    if not unknown and service.tokenizer_registry.is_loading:
        unknown = [node.name for node in service.fleet]
    return unknown
