"""Adds the hit rates, their baselines and drops, and what the prompt doctor found, to the metrics page."""

from __future__ import annotations

from warmroute.prompt_doctor.prompt_doctor import PromptDoctor
from warmroute.telemetry import metric_definitions as metrics
from warmroute.telemetry.exposition import Page, format_labels
from warmroute.telemetry.hit_rate_alerts import HitRateAlerts


class HitRateMetrics:
    def __init__(self, alerts: HitRateAlerts, doctor: PromptDoctor) -> None:
        self._alerts = alerts
        self._doctor = doctor

    def __call__(self, page: Page) -> None:
        alerts = self._alerts
        for key, rate in sorted(alerts.rates.copy().items()):
            labels = format_labels(model=key[0], route=key[1])
            if rate.window is not None:
                page[metrics.HIT_RATIO].add(rate.window.hit_ratio, labels)
            if rate.baseline.is_mature:
                page[metrics.HIT_RATIO_BASELINE].add(rate.baseline.hit_ratio, labels)
            page[metrics.HIT_RATIO_LOST].add(alerts.lost_gpu_s(key), labels)
        for (model, route), cause in sorted(alerts.causes.copy().items()):
            page[metrics.HIT_RATIO_DROPPED].add(1, format_labels(model=model, route=route, cause=cause.kind))
        for (model, route, kind), count in sorted(alerts.drops.copy().items()):
            page[metrics.HIT_RATIO_DROPS].add(count, format_labels(model=model, route=route, cause=kind))
        lost: dict[tuple[str, str, str], float] = {}
        for finding in self._doctor.findings:
            of_kind = (finding.model, finding.route, finding.kind)
            lost[of_kind] = lost.get(of_kind, 0.0) + finding.gpus
        for (model, route, difference), gpus in sorted(lost.items()):
            page[metrics.PROMPTS_LOST].add(gpus, format_labels(model=model, route=route, kind=difference))
