"""Alerts: what is wrong now, since when, why, and what to do. app/service.py names the sources."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import inf
from statistics import median
from typing import Any, Final, Literal

import msgspec

from warmroute.core.cache_view import CacheView
from warmroute.core.fleet import Fleet
from warmroute.core.health import HealthState
from warmroute.core.node import Node
from warmroute.core.traffic import Counters
from warmroute.edge.client_errors import NAME, ClientErrors
from warmroute.engines.discovery.sync import DiscoveryService
from warmroute.event_log import EventLog

# Alerts: what is wrong now or was until recently, since when, the likely cause, and what to do.
#
# A source is a function that returns the problems that it sees now. A problem is an alert once it has lasted `after_s`,
# and until no source reports it any more. The live page shows alerts as a banner, `GET /admin/alerts` lists them.

log = EventLog("warmroute.telemetry")

Severity = Literal["critical", "warning", "info"]
SEVERITIES: Final[tuple[Severity, ...]] = ("critical", "warning", "info")
"""The most severe first."""
KEEP_ENDED_S: Final = 3600.0
"""Who looks at the page after an incident still sees what it was."""
MAX_ENDED: Final = 64
"""A fleet that flaps ends thousands of alerts within the hour."""


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
    """Set by `ActiveAlerts`, on the router's clock."""
    ended_s: float = 0.0
    """Set by `ActiveAlerts`, on the router's clock; 0 while the alert is active."""

    @property
    def name(self) -> str:
        return self.id.partition(" ")[0]


AlertSource = Callable[[float], Iterable[Alert]]
"""Takes the current time."""


class ActiveAlerts:
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


# Alerts about requests that clients have to change.

CLIENT_ERRORS: Final = NAME


def client_error_alerts(errors: ClientErrors, now_s: float) -> Iterator[Alert]:
    for storm in errors.storms(now_s):
        id = f"{CLIENT_ERRORS} {storm.status} {storm.code}"
        yield Alert(
            id=id, severity="warning", title=client_errors_title(id, storm.requests), cause=storm.cause,
            what_to_do=storm.advice, count=storm.requests, sources=tuple(storm.sources),
        )  # fmt: skip


def client_errors_title(id: str, count: int) -> str:
    """`id`: the alert's."""
    _, status, code = id.split(" ")
    return f"{count:,} {'request was' if count == 1 else 'requests were'} rejected with {status} ({code})"


# Alerts about the fleet: nodes that are down, slow, short of KV memory or without usable KV events.

SLOW_FACTOR: Final = 2.0
"""A node is slow if it prefills a token this many times as slowly as the median of its model's nodes."""
MIN_ANSWERS: Final = 50
"""First tokens from which a node's learned speed is compared, if too few nodes had long prompts."""
MIN_LONG_PREFILLS: Final = 5
"""Long prompts from which a node's speed with these is compared. It is the better measure: the time of a short prefill
is mostly that of one step."""
MIN_PEERS: Final = 3
"""A median of fewer nodes is one of them."""
FULL_KV: Final = 0.95
"""A KV memory above this fraction for LASTING_S is an alert."""
LASTING_S: Final = 30.0
"""A peak of load is no problem: what lasts is."""
FIRST_CHECK_S: Final = 10.0
"""How long nodes may stay unchecked after the start before it is an alert that none can serve."""
SHOWN_NAMES: Final = 4
"""Names that a sentence lists. The rest is a number."""
MAX_DOWN: Final = 16
"""Nodes that are down and have an alert each. Further ones share one, so that the list stays readable."""


class FleetAlerts:
    def __init__(self, fleet: Fleet, cache_view: CacheView) -> None:
        self._fleet = fleet
        self._cache_view = cache_view

    def __call__(self, _now_s: float) -> Iterator[Alert]:
        nodes = list(self._fleet)
        yield from self._health(nodes)
        yield from _slow(nodes)
        full = [node.name for node in nodes if node.kv_usage >= FULL_KV]
        if full:
            yield Alert(
                id="kv_memory_full", severity="warning", after_s=LASTING_S, nodes=tuple(full),
                title=f"{_names(full)}: KV memory is full",
                cause=f"Running requests use {FULL_KV:.0%} or more of the KV blocks. The engine preempts requests, and "
                "cached prefixes are evicted.",
                what_to_do="Add nodes, or lower the engine's maximum number of sequences. If only some nodes are full, "
                "check that they are not used by other clients.",
            )  # fmt: skip
        yield from self._caches()

    def _health(self, nodes: Sequence[Node]) -> Iterator[Alert]:
        down = [node for node in nodes if node.health.state in (HealthState.DOWN, HealthState.HALF_OPEN)]
        if nodes and not self._fleet.can_serve:
            unchecked = all(node.health.state is HealthState.UNKNOWN for node in nodes)
            yield Alert(
                id="no_node", severity="critical", title="No node can serve requests",
                after_s=FIRST_CHECK_S if unchecked else 0.0,
                cause="All nodes are down, draining or not yet checked. Clients receive 503.",
                what_to_do="Start the engines or end the drains. The router notices within a second.",
            )  # fmt: skip
        unhealthy = [node for node in down if node.health.state is HealthState.DOWN]
        severity: Severity = "critical" if 2 * len(unhealthy) >= len(nodes) else "warning"
        yield from (_down(node, severity) for node in down[:MAX_DOWN])
        if more := down[MAX_DOWN:]:
            names = tuple(node.name for node in more)
            yield Alert(
                id="node_down", severity=severity, nodes=names, title=f"{_names(names)}: down, too",
                cause=_sentence("; ".join(list(dict.fromkeys(node.health.failure for node in more))[:SHOWN_NAMES])),
                what_to_do=_RESTART,
            )  # fmt: skip

        ejected = [node for node in nodes if node.health.state is HealthState.EJECTED]
        if ejected:
            names = tuple(node.name for node in ejected)
            yield Alert(
                id="node_ejected", severity="warning", nodes=names,
                title=f"{_names(names)} {'is' if len(ejected) == 1 else 'are'} ejected",
                cause=_sentence("; ".join(dict.fromkeys(node.health.reason for node in ejected))),
                what_to_do="Look at the engine's log and its GPU. The router sends it requests again after a while.",
            )  # fmt: skip

    def _caches(self) -> Iterator[Alert]:
        caches = list(self._cache_view)
        missing = [cache.name for cache in caches if cache.events_missing]
        if missing:
            yield Alert(
                id="kv_events_missing", severity="warning", nodes=tuple(missing),
                title=f"{_names(missing)}: no KV events",
                cause="The engine prefilled prompts and sent no KV events. The router infers its cache from routed "
                "requests, and does not see evictions.",
                what_to_do="Start the engine with KV events enabled, and check that the router reaches their port.",
            )  # fmt: skip
        differ = [cache.name for cache in caches if cache.token_mismatch]
        if differ:
            yield Alert(
                id="token_mismatch", severity="warning", nodes=tuple(differ),
                title=f"{_names(differ)}: the engine's tokens differ from the router's",
                cause="The engine uses another tokenizer or chat template, so its KV events match no prompt.",
                what_to_do="Set tokenizer and chat_template in [[models]] to those of the engine.",
            )  # fmt: skip


_RESTART: Final = (
    "Look at the engine's log and restart it. The router sends requests again, slowly at first, once its health check "
    "passes."
)


def _down(node: Node, severity: Severity) -> Alert:
    health, name = node.health, node.name
    if health.state is HealthState.HALF_OPEN:
        return Alert(
            id=f"node_down {name}", severity="warning", nodes=(name,), title=f"{name} waits for a trial request",
            cause=_sentence(health.failure),
            what_to_do="Its health check passes. Look at the engine's log. If a trial request succeeds, the router "
            "sends the node more of them, slowly at first.",
        )  # fmt: skip
    return Alert(
        id=f"node_down {name}", severity=severity, nodes=(name,), title=f"{name} is down",
        cause=_sentence(health.reason), what_to_do=_RESTART,
    )  # fmt: skip


def _slow(nodes: Sequence[Node]) -> Iterator[Alert]:
    by_model: dict[str, list[Node]] = {}
    for node in nodes:
        if node.groups:
            by_model.setdefault(node.groups[0].model, []).append(node)
    slow: list[str] = []
    worst = 0.0
    for peers in by_model.values():
        measured = [node for node in peers if node.speed.long_prefills >= MIN_LONG_PREFILLS]
        speeds = {node.name: node.speed.long_ms_per_token for node in measured}
        if len(speeds) < MIN_PEERS:
            speeds = {node.name: node.speed.ms_per_token for node in peers if node.speed.answers >= MIN_ANSWERS}
        if len(speeds) < MIN_PEERS:
            continue
        usual = median(speeds.values())
        for name, ms_per_token in speeds.items():
            factor = ms_per_token / usual if usual > 0 else 0.0
            if factor >= SLOW_FACTOR:
                slow.append(name)
                worst = max(worst, factor)
    if slow:
        yield Alert(
            id="slow_node", severity="warning", after_s=LASTING_S, nodes=tuple(slow),
            title=f"{_names(slow)}: prefill is up to {worst:.1f} times as slow as on other nodes",
            cause="The GPU is throttled, shared with another process, or of another type.",
            what_to_do="Compare clocks and processes with nvidia-smi. Drain the node if it stays slow: the router "
            "already sends it less.",
        )  # fmt: skip


def _names(names: Sequence[str]) -> str:
    shown = ", ".join(names[:SHOWN_NAMES])
    return shown if len(names) <= SHOWN_NAMES else f"{shown} and {len(names) - SHOWN_NAMES} more nodes"


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


# Requests that admission rejects although a node could serve them (429, 503): a line in the log, and an alert.
#
# Both are made now and then from the counters, so a rejection costs nothing here. Each reason with rejections is a line
# in the log, at most one a minute, and names the setting that limits.

requests_log = EventLog("warmroute.requests")

WINDOW_S: Final = 60.0
"""Time between two lines of a reason in the log, and the time that the alert counts."""
SHOWN_TENANTS: Final = 4
_ADVICE: Final = {
    "queue_full": "The router's queue is at its limit admission.max_waiting; low-priority requests may take half of "
    "it. Raise the limit if clients may wait longer, add nodes, or let clients send fewer requests.",
    "displaced": "The router's queue is at its limit admission.max_waiting, and requests with a higher priority, or of "
    "tenants with fewer waiting requests, took the places of these. Raise the limit if clients may wait longer, or add "
    "nodes.",
    "queue_timeout": "No node had room within admission.max_wait_s, or no first node came within "
    "scaling.first_node_wait_s. Raise the limit if clients may wait longer, or add nodes.",
    "max_inflight": "Every node is at its limit nodes.max_inflight, and these requests may not wait at the router. "
    "Raise the limit if the engines have room, or add nodes.",
    "queue_threshold": "Every engine's own queue is at the limit admission.queue_threshold; low-priority requests may "
    "take half of it. Raise the limit if clients may wait longer, or add nodes.",
    "would_queue": "No node had room (250 ms of prefill work, nodes.max_inflight), and the clients asked not to "
    "wait (`X-Queue: no`). Let these requests wait, or add nodes.",
    "deadline_ttft": "No node can meet the clients' TTFT deadlines (routes.ttft_deadline_ms, or the header "
    "X-Deadline-Ttft-Ms). Relax the deadlines, or add nodes.",
    "deadline_total": "No node can meet the clients' deadlines (routes.total_deadline_ms, or the header "
    "X-Deadline-Ms). Relax the deadlines, or add nodes.",
    "nodes_busy": "Every engine that the router tried answered that it is busy (429, or 503 with Retry-After): a limit "
    "of the engine rejects the requests. Raise that limit, set nodes.max_inflight below it so that requests wait at "
    "the router, or add nodes.",
    "envoy_timeout": "No node had room for low-priority requests within Envoy's timeout (message_timeout). Raise it in "
    "Envoy and in picker.message_timeout_s, or add nodes.",
    "requests_per_min": "The tenant sends more than its limit keys.requests_per_min. Raise requests_per_min in "
    "[[keys]] if it may.",
    "tokens_per_min": "The tenant sends more than its limit keys.tokens_per_min. Raise tokens_per_min in [[keys]] if "
    "it may.",
}
"""What to do about each reason of core/rejections.py."""
_DEFAULT_ADVICE: Final = "Add nodes, or let clients send fewer requests."
_WANTED: Final = frozenset({"requests_per_min", "tokens_per_min", "would_queue"})
"""Rejections that the operator or the client asked for: they are no warnings."""


class Rejections:
    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._recent: deque[tuple[float, Counter[str], Counter[str]]] = deque()
        """Rejections by reason and by tenant, as of the last WINDOW_S."""
        self._logged: dict[str, tuple[float, int, Counter[str]]] = {}
        """By reason: when its next line may be written, and how many rejections, also by tenant, its lines contain."""

    def __call__(self, now_s: float) -> Iterator[Alert]:
        """Write the log, and yield the alert."""
        reasons = self._by_reason()
        self._log(reasons, now_s)
        tenants: Counter[str] = Counter()
        for (tenant, _, _), count in self._counters.rejected_by_tenant.items():
            tenants[tenant] += count
        self._recent.append((now_s, reasons, tenants))
        while len(self._recent) > 1 and self._recent[1][0] <= now_s - WINDOW_S:
            self._recent.popleft()
        before_s, reasons_before, tenants_before = self._recent[0]
        recent = reasons - reasons_before
        if recent:
            worst = [reason for reason, _ in recent.most_common()]
            named = [(name, count) for name, count in (tenants - tenants_before).most_common(SHOWN_TENANTS) if name]
            senders = ", ".join(f"{name} ({count:,})" for name, count in named)
            yield Alert(
                id="rejections", severity="warning",
                title=f"{sum(recent.values()):,} requests rejected in the last {max(1.0, now_s - before_s):.0f} s",
                cause="Reasons: " + ", ".join(f"{reason} ({recent[reason]:,})" for reason in worst)
                + (f". {'Tenant' if len(named) == 1 else 'Tenants'}: {senders}." if named else "."),
                what_to_do=_ADVICE.get(worst[0], _DEFAULT_ADVICE),
            )  # fmt: skip

    def log_rest(self) -> None:
        """Write the log of what was rejected since the last lines: the router stops."""
        self._log(self._by_reason(), inf)

    def _by_reason(self) -> Counter[str]:
        reasons: Counter[str] = Counter()
        for (reason, _), count in self._counters.rejected.items():
            reasons[reason] += count
        return reasons

    def _log(self, reasons: Counter[str], now_s: float) -> None:
        for reason, count in reasons.items():
            next_s, count_before, tenants_before = self._logged.get(reason, (-inf, 0, Counter()))
            if count == count_before or now_s < next_s:
                continue
            tenants: Counter[str] = Counter()
            for (tenant, _, why), rejected in self._counters.rejected_by_tenant.items():
                if why == reason:
                    tenants[tenant] += rejected
            self._logged[reason] = now_s + WINDOW_S, count, tenants
            fields: dict[str, object] = {"reason": reason, "count": count - count_before}
            [(tenant, most)] = (tenants - tenants_before).most_common(1) or [("", 0)]
            if tenant:
                fields["tenant"], fields["tenant_count"] = tenant, most
            advice = _ADVICE.get(reason, _DEFAULT_ADVICE)
            if reason in _WANTED:
                requests_log.info("requests_rejected", advice, **fields)
            else:
                requests_log.warning("requests_rejected", advice, **fields)


# Alerts about sources of nodes that fail or list nothing.


def discovery_alerts(discovery: DiscoveryService) -> Iterator[Alert]:
    failing = [status for status in discovery.sources.values() if status.error]
    if failing:
        names = ", ".join(status.name for status in failing[:4])
        yield Alert(
            id="discovery_failing", severity="warning", after_s=LASTING_S,
            title=f"Discovery cannot read {names}",
            cause=f"{failing[0].name}: {failing[0].error[:300]}.",
            what_to_do="The router keeps the nodes that it knows, and new nodes do not join. Repair the source; "
            "GET /admin/discovery shows its state.",
        )  # fmt: skip
    empty = [status.name for status in discovery.sources.values() if status.empty]
    if empty:
        yield Alert(
            id="discovery_empty", severity="warning", after_s=LASTING_S,
            title=f"{', '.join(empty[:4])}: no nodes are listed any more",
            cause="The source answers, but lists no engine. The router keeps the nodes that it knew.",
            what_to_do="Check the file, the DNS name or the label selector. If the engines are gone on purpose, remove "
            "their nodes with DELETE /admin/nodes/NAME.",
        )  # fmt: skip
