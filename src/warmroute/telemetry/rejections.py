"""Requests that admission rejects although a node could serve them (429, 503): a line in the log, and an alert.

Both are made now and then from the counters, so a rejection costs nothing here. Each reason with rejections is a line
in the log, at most one a minute, and names the setting that limits.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from math import inf
from typing import Final

from warmroute.event_log import EventLog
from warmroute.telemetry.alerts import Alert
from warmroute.telemetry.counters import Counters

log = EventLog("warmroute.requests")

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
    "Raise the limit if the engines have room, turn on admission.queue_at_router, or add nodes.",
    "queue_threshold": "Every engine's own queue is at the limit admission.queue_threshold; low-priority requests may "
    "take half of it. Raise the limit if clients may wait longer, or add nodes.",
    "would_queue": "No node had room (admission.max_node_backlog_ms, nodes.max_inflight), and the clients asked not to "
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
"""By the reasons of routing/routing_errors.py."""
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
                log.info("requests_rejected", advice, **fields)
            else:
                log.warning("requests_rejected", advice, **fields)
