"""When a process publishes: at once if something changed and the last message is PUBLISH_S ago, else when it is;
every FULL_S in any case.
"""

from __future__ import annotations

from collections.abc import Callable

from warmroute.core.cluster.messages import PUBLISH_S


class PublishTiming:
    def __init__(self, now: Callable[[], float], schedule: Callable[[float], object]) -> None:
        """`schedule(delay_s)` lets `published` and then the publication follow after this time."""
        self._now = now
        self._schedule = schedule
        self._published_s = -1e9
        self._scheduled = False

    def changed(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._schedule(max(0.0, self._published_s + PUBLISH_S - self._now()))

    def published(self) -> None:
        self._scheduled = False
        self._published_s = self._now()
