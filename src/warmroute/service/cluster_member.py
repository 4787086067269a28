"""Drives the cluster state of this process in its event loop: publishes when something changed, and regularly."""

from __future__ import annotations

import asyncio
import time

from warmroute.cluster.cluster_state import ClusterState
from warmroute.cluster.messages import FULL_S
from warmroute.cluster.publish_timing import PublishTiming
from warmroute.cluster.transport import Transport
from warmroute.event_log import EventLog
from warmroute.index.cache_view import CacheView
from warmroute.routing.dispatcher import Dispatcher
from warmroute.routing.rate_limits import RateLimits

log = EventLog("warmroute.cluster")


class ClusterMember:
    def __init__(
        self, sender: str, dispatcher: Dispatcher, cache_view: CacheView, limits: RateLimits, transport: Transport
    ) -> None:
        loop = asyncio.get_running_loop()
        self._transport = transport
        self._timing = PublishTiming(time.monotonic, lambda delay_s: loop.call_later(delay_s, self._publish))
        self.state = ClusterState(sender, dispatcher, cache_view, self._timing.changed, limits)
        self._task = loop.create_task(self._publish_regularly())

    def _publish(self) -> None:
        self._timing.published()
        try:
            self.state.publish(self._transport, time.monotonic())
        except Exception:
            log.exception("publish_failed", "The process tries again.")

    async def _publish_regularly(self) -> None:
        while True:
            self._timing.changed()
            await asyncio.sleep(FULL_S)

    def receive(self, message: bytes) -> None:
        """Take a message of another process. Never raises."""
        try:
            self.state.receive(message, time.monotonic())
        except Exception:
            log.exception("receive_failed", "The process ignores the message.")

    def close(self) -> None:
        self._task.cancel()
        self.state.close()
