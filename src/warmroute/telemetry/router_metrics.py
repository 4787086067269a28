"""Adds the state of the router itself to the metrics page: reloads, event loop, decisions by reason, current alerts."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping

from warmroute.telemetry import metric_definitions as metrics
from warmroute.telemetry.alert_webhook import OUTCOMES, AlertWebhook
from warmroute.telemetry.alerts import Alerts
from warmroute.telemetry.exposition import Page, format_labels
from warmroute.telemetry.loop_delay import LoopDelay
from warmroute.telemetry.traffic_metrics import WAIT_BUCKETS


class Reloads:
    """How reloads of the configuration and of certificates ended."""

    def __init__(self, unix_time_s: Callable[[], float] = time.time) -> None:
        self._unix_time_s = unix_time_s
        self.succeeded = self.failed = 0
        self.last_succeeded = True
        self.last_success_s = unix_time_s()

    def record(self, success: bool) -> None:
        self.last_succeeded = success
        if success:
            self.succeeded += 1
            self.last_success_s = self._unix_time_s()
        else:
            self.failed += 1


class RouterMetrics:
    def __init__(
        self, reloads: Reloads, loop_delay: LoopDelay, alerts: Alerts, decisions: Mapping[tuple[str, str], int],
        webhook: AlertWebhook | None,
    ) -> None:  # fmt: skip
        """`decisions`: by policy and reason."""
        self._reloads = reloads
        self._loop_delay = loop_delay
        self._alerts = alerts
        self._decisions = decisions
        self._webhook = webhook

    def __call__(self, page: Page) -> None:
        reloads, delay = self._reloads, self._loop_delay
        page[metrics.CONFIG_RELOADS].add(reloads.succeeded, 'result="success"')
        page[metrics.CONFIG_RELOADS].add(reloads.failed, 'result="failure"')
        page[metrics.CONFIG_RELOAD_OK].add(reloads.last_succeeded)
        page[metrics.CONFIG_RELOADED].add(reloads.last_success_s)
        page[metrics.LOOP_DELAY].add_histogram(
            WAIT_BUCKETS.labels, WAIT_BUCKETS.merge(delay.histogram.counts), delay.histogram.sum_ms / 1000.0
        )
        page[metrics.LOOP_DELAY_MAX].add(delay.max_s)
        for (policy, reason), count in sorted(dict(self._decisions).items()):
            page[metrics.DECISIONS].add(count, format_labels(policy=policy, reason=reason))
        alerts = Counter((alert.name, alert.severity) for alert in self._alerts.current)
        for (name, severity), count in sorted(alerts.items()):
            page[metrics.ALERTS].add(count, format_labels(alert=name, severity=severity))
        if self._webhook is not None:
            for outcome in OUTCOMES:
                page[metrics.ALERTS_SENT].add(self._webhook.counts[outcome], format_labels(outcome=outcome))
