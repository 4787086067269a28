"""Alerts: what is wrong now, since when, the likely cause, and what to do. The live page shows them as a banner.

A source is a function that returns the problems that it sees now. A problem is an alert once it has lasted `after_s`,
and until no source reports it any more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, Literal

import msgspec

from warmroute.event_log import EventLog

log = EventLog("warmroute.telemetry")

Severity = Literal["critical", "warning", "info"]
SEVERITIES: Final[tuple[Severity, ...]] = ("critical", "warning", "info")
"""The most severe first."""


class Alert(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    """Stable while the problem lasts, such as `node_down`."""
    severity: Severity
    title: str
    cause: str
    what_to_do: str
    nodes: tuple[str, ...] = ()
    """The nodes that it is about."""
    after_s: float = 0.0
    """For how long the problem must last before it is shown."""
    since_s: float = 0.0
    """Set by `Alerts`, on the router's clock."""


AlertSource = Callable[[float], Iterable[Alert]]
"""Takes the current time."""


class Alerts:
    def __init__(self, *sources: AlertSource) -> None:
        self.sources = list(sources)
        self.current: tuple[Alert, ...] = ()
        """The most severe first, then the oldest."""
        self._since_s: dict[str, float] = {}
        self._failed = False

    def update(self, now_s: float) -> None:
        """Ask all sources."""
        problems: dict[str, Alert] = {}
        for source in self.sources:
            try:
                problems.update({alert.id: alert for alert in source(now_s)})
            except Exception:
                if not self._failed:
                    self._failed = True
                    log.exception("alert_source_failed", "Its alerts are missing until it works again.")
        self._since_s = {id: self._since_s.get(id, now_s) for id in problems}
        found = [
            msgspec.structs.replace(alert, since_s=self._since_s[id])
            for id, alert in problems.items()
            if now_s - self._since_s[id] >= alert.after_s
        ]
        found.sort(key=lambda alert: (SEVERITIES.index(alert.severity), alert.since_s, alert.id))
        self.current = tuple(found)
