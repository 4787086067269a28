"""Alerts: what is wrong now or was until recently, since when, the likely cause, and what to do.

A source is a function that returns the problems that it sees now. A problem is an alert once it has lasted `after_s`,
and until no source reports it any more. The live page shows alerts as a banner, `GET /admin/alerts` lists them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final, Literal

import msgspec

from warmroute.event_log import EventLog

log = EventLog("warmroute.telemetry")

Severity = Literal["critical", "warning", "info"]
SEVERITIES: Final[tuple[Severity, ...]] = ("critical", "warning", "info")
"""The most severe first."""
KEEP_ENDED_S: Final = 3600.0
MAX_ENDED: Final = 64
MAX_SOURCES: Final = 4
"""Sources that an alert names."""


class Alert(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    """Stable while the problem lasts: the alert's name, such as `node_down`, and after a space what it is about, if one
    name can have several alerts at a time."""
    severity: Severity
    title: str
    cause: str
    what_to_do: str
    nodes: tuple[str, ...] = ()
    """The nodes that it is about."""
    count: int = 0
    """Requests that it is about, since it began; 0 if it is not about requests."""
    sources: tuple[tuple[str, int], ...] = ()
    """Addresses of clients that caused it, with their counts; the largest first."""
    after_s: float = 0.0
    """For how long the problem must last before it is shown."""
    since_s: float = 0.0
    """Set by `Alerts`, on the router's clock."""
    ended_s: float = 0.0
    """Set by `Alerts`, on the router's clock; 0 while the alert is active."""

    @property
    def name(self) -> str:
        return self.id.partition(" ")[0]


AlertSource = Callable[[float], Iterable[Alert]]
"""Takes the current time."""


class Alerts:
    def __init__(self, *sources: AlertSource) -> None:
        self.sources = list(sources)
        self.current: tuple[Alert, ...] = ()
        """The most severe first, then the oldest."""
        self.ended: tuple[Alert, ...] = ()
        """At most MAX_ENDED alerts that ended in the last KEEP_ENDED_S, the latest first; one for each id."""
        self._problems: dict[int, dict[str, Alert]] = {}
        """What each source reported last, by its number."""
        self._since_s: dict[str, float] = {}
        self._failed = False

    def update(self, now_s: float) -> list[Alert]:
        """Ask all sources. Return the alerts that began or ended since the last update; `ended_s` tells which."""
        for number, source in enumerate(self.sources):
            try:
                self._problems[number] = {alert.id: alert for alert in source(now_s)}
            except Exception:
                if not self._failed:
                    self._failed = True
                    log.exception("alert_source_failed", "Its alerts stay as they were until it works again.")
        problems = {id: alert for found in self._problems.values() for id, alert in found.items()}
        self._since_s = {id: self._since_s.get(id, now_s) for id in problems}
        found = [
            msgspec.structs.replace(alert, since_s=self._since_s[id])
            for id, alert in problems.items()
            if now_s - self._since_s[id] >= alert.after_s
        ]
        found.sort(key=lambda alert: (SEVERITIES.index(alert.severity), alert.since_s, alert.id))
        active = {alert.id for alert in found}
        before = {alert.id for alert in self.current}
        ended = [msgspec.structs.replace(alert, ended_s=now_s) for alert in self.current if alert.id not in active]
        known = {alert.id for alert in ended}
        kept = [one for one in self.ended if one.id not in known and now_s - one.ended_s < KEEP_ENDED_S]
        self.ended = (*ended, *kept)[:MAX_ENDED]
        self.current = tuple(found)
        return [alert for alert in found if alert.id not in before] + ended


def describe_alert(alert: Alert, wall_s: float) -> dict[str, Any]:
    """Return an alert as JSON values. `wall_s`: the Unix time at which the router's clock was 0."""
    return {
        "id": alert.id,
        "name": alert.name,
        "severity": alert.severity,
        "since": round(wall_s + alert.since_s),
        "ended": round(wall_s + alert.ended_s) if alert.ended_s else None,
        "title": alert.title,
        "cause": alert.cause,
        "what_to_do": alert.what_to_do,
        "nodes": alert.nodes,
        "count": alert.count,
        "source": alert.sources[0][0] if alert.sources else "",
        "sources": [{"source": source, "count": count} for source, count in alert.sources],
    }
