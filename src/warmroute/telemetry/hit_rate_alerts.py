"""Alerts about the hit rate: a drop below a route's baseline, with its likely cause, and prompts that prevent reuse."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import Final

from warmroute.event_log import EventLog
from warmroute.prompt_doctor.findings import Finding
from warmroute.telemetry.alerts import Alert
from warmroute.telemetry.cache_changes import CacheChanges, names_of
from warmroute.telemetry.hit_rate import CHECK_S, HitRate, totals_of
from warmroute.telemetry.hit_rate_causes import Cause, CauseKind, Causes, events_lost, listed
from warmroute.telemetry.traffic import Traffic

log = EventLog("warmroute.telemetry")

LOG_AFTER_S: Final = 15.0
"""Time after a drop was noticed before it is logged: the prompt doctor needs some prompts to see the cause."""
CHANGED_CAUSE_S: Final = 60.0
"""Least time before another cause of the same drop is logged."""
MIN_LOST_SHARE: Final = 0.2
"""Of a route's prompt tokens. Prompts that cost more reuse than this are an alert, also without a drop."""

QUIET_S: Final = 60.0
"""After this time without prompts a drop's alert says so."""
LOST_EVENTS_S: Final = 60.0
"""For how long lost KV events are an alert."""

RouteKey = tuple[str, str]


class _Logged:
    """What was logged of a drop."""

    def __init__(self, noticed_s: float) -> None:
        self.at_s = noticed_s
        """When it was noticed, or last logged."""
        self.kind: CauseKind | None = None
        """The cause that was logged; None before."""


class HitRateAlerts:
    def __init__(
        self,
        traffic: Traffic,
        changes: CacheChanges,
        causes: Causes,
        findings: Callable[[], list[Finding]],
    ) -> None:
        self._traffic = traffic
        self._changes = changes
        self._causes = causes
        self._findings = findings
        self.rates: dict[RouteKey, HitRate] = {}
        """By model and route."""
        self.causes: dict[RouteKey, Cause] = {}
        """Of the drops that last."""
        self.drops: Counter[tuple[str, str, CauseKind]] = Counter()
        """Drops that were logged, by model, route and cause."""
        self.lost_s: defaultdict[RouteKey, float] = defaultdict(float)
        """GPU seconds of drops that have ended."""
        self._logged: dict[RouteKey, _Logged] = {}
        self._next_s = -1e9

    def __call__(self, now_s: float) -> Iterator[Alert]:
        if now_s >= self._next_s:
            self._next_s = now_s + CHECK_S - 0.5
            self._check(now_s)
        for key, cause in self.causes.items():
            yield self._drop_alert(key, cause, now_s)
        yield from self._lost_events(now_s)
        for finding in self._findings():
            key = (finding.model, finding.route)
            rate = self.rates.get(key)
            if key in self.causes or rate is None or rate.hit_ratio is None:
                continue
            if finding.could_share - finding.cached_share >= MIN_LOST_SHARE:
                yield _finding_alert(finding)

    def _lost_events(self, now_s: float) -> Iterator[Alert]:
        """Yield an alert while KV events are being lost, unless a drop names them as its cause."""
        names = names_of(self._changes.since(now_s - LOST_EVENTS_S, "", "kv_events_lost"))
        explained = {node for cause in self.causes.values() if cause.kind == "kv_events_lost" for node in cause.nodes}
        if names and not explained.issuperset(names):
            cause = events_lost(names)
            yield Alert(
                id="kv_events_lost", severity="warning", nodes=names, title=f"{listed(names)}: KV events are lost",
                cause=cause.sentence, what_to_do=cause.what_to_do,
            )  # fmt: skip

    def lost_gpu_s(self, key: RouteKey) -> float:
        """Return the GPU seconds that all drops of a route have cost."""
        rate = self.rates.get(key)
        current = rate.drop.lost_ms / 1000.0 if rate is not None and rate.drop is not None else 0.0
        return self.lost_s[key] + max(0.0, current)

    def _check(self, now_s: float) -> None:
        self._changes.update(now_s)
        for key, traffic in self._traffic.by_route.items():
            rate = self.rates.get(key)
            if rate is None:
                rate = self.rates[key] = HitRate()
            drop = rate.drop
            if drop is None and rate.prompts == traffic.counted_prompts:
                continue  # nothing new
            rate.update(totals_of(traffic, now_s))
            if rate.drop is not None:
                self._follow(key, rate, now_s)
            elif rate.ended is not None and drop is not None:
                self.causes.pop(key, None)
                logged = self._logged.pop(key)
                self.lost_s[key] += max(0.0, drop.lost_ms / 1000.0)
                if logged.kind is None:
                    continue
                log.info(
                    "hit_rate_recovered",
                    "The rate is near its baseline again."
                    if rate.ended == "recovered"
                    else "The rate has not recovered in an hour of traffic. It is the new baseline.",
                    model=key[0], route=key[1], reason=rate.ended, hit_ratio=round(drop.hit_ratio, 3),
                    duration_s=round(now_s - drop.since_s), lost_gpu_s=round(drop.lost_ms / 1000.0, 1),
                )  # fmt: skip

    def _follow(self, key: RouteKey, rate: HitRate, now_s: float) -> None:
        """Update the cause of a drop, and log it once; again if the router finds another cause."""
        cause = self.causes[key] = self._causes.find(key, rate, now_s)
        logged = self._logged.setdefault(key, _Logged(now_s))
        known = logged.kind
        drop = rate.drop
        assert drop is not None
        if known is None and (cause.kind == "prompts_changed" or now_s - logged.at_s >= LOG_AFTER_S):
            self.drops[key[0], key[1], cause.kind] += 1
            logged.kind, logged.at_s = cause.kind, now_s
            log.warning(
                "hit_rate_dropped", f"{cause.sentence} {cause.what_to_do}", model=key[0], route=key[1],
                reason=cause.kind, hit_ratio=round(drop.hit_ratio, 3), baseline=round(drop.baseline_ratio, 3),
            )  # fmt: skip
        elif known is not None and cause.kind not in (known, "unknown") and now_s - logged.at_s >= CHANGED_CAUSE_S:
            logged.kind, logged.at_s = cause.kind, now_s
            log.warning(
                "hit_rate_cause_changed", f"{cause.sentence} {cause.what_to_do}", model=key[0], route=key[1],
                reason=cause.kind,
            )  # fmt: skip

    def _drop_alert(self, key: RouteKey, cause: Cause, now_s: float) -> Alert:
        drop = self.rates[key].drop
        assert drop is not None
        lost_s = max(0.0, drop.lost_ms / 1000.0)
        quiet_s = now_s - drop.last_prompt_s
        quiet = (
            f" No prompts came in the last {quiet_s / 60.0:,.0f} min, so nothing shows whether it has recovered."
            if quiet_s >= QUIET_S
            else ""
        )
        return Alert(
            id=f"hit_rate_dropped {key[0]} {key[1]}", severity="warning", nodes=cause.nodes,
            title=f"{_route(key)}: hit rate fell from {drop.baseline_ratio:.0%} to {drop.hit_ratio:.0%}",
            cause=f"{cause.sentence} Cost so far: {lost_s:,.1f} GPU seconds.{quiet}",
            what_to_do=cause.what_to_do,
        )  # fmt: skip


def _finding_alert(finding: Finding) -> Alert:
    return Alert(
        id=f"prompts_prevent_reuse {finding.model} {finding.route} {finding.kind}", severity="warning",
        title=f"{_route((finding.model, finding.route))}: {finding.cached_share:.0%} of the prompt tokens are cached, "
        f"{finding.could_share:.0%} could be",
        cause=f"{finding.share:.0%} of the prompts differ by {finding.what_differs} at {finding.place} "
        f"(token {finding.token:,}), before text that they have in common. Cost so far: {finding.lost_gpu_s:,.1f} GPU "
        "seconds.",
        what_to_do=finding.what_to_do,
    )  # fmt: skip


def _route(key: RouteKey) -> str:
    return f"{key[0]}, route {key[1]}" if key[1] else key[0]
