"""Requests that admission rejects: one line a minute for each reason, and an alert that names the limit."""

from __future__ import annotations

import re

import pytest

from warmroute.app.alerts import _ADVICE, ActiveAlerts, Rejections
from warmroute.config import tables
from warmroute.config.section import keys_of
from warmroute.core import rejections
from warmroute.core.rejections import NotAdmitted
from warmroute.core.traffic import Counters


def reject(counters: Counters, reason: str, count: int, tenant: str = "", priority: int = 1) -> None:
    counters.rejected[reason, priority] += count
    counters.rejected_by_tenant[tenant, priority, reason] += count


def test_rejections_are_an_alert_for_a_minute_with_their_reasons() -> None:
    counters = Counters()
    alerts = ActiveAlerts(Rejections(counters))
    alerts.update(0.0)
    reject(counters, "requests_per_min", 7, "batch", 2)
    alerts.update(2.0)
    [alert] = alerts.current
    assert alert.id == "rejections" and alert.cause == "Reasons: requests_per_min (7). Tenant: batch (7)."
    assert "Raise requests_per_min" in alert.what_to_do
    for second in range(4, 68, 2):
        alerts.update(float(second))
    assert not alerts.current


def test_the_alert_names_the_limit_before_it_advises_more_nodes() -> None:
    counters = Counters()
    reject(counters, "queue_timeout", 1)
    found = Rejections(counters)
    list(found(0.0))
    reject(counters, "queue_full", 11_039)
    [alert] = found(2.0)
    assert 0 < alert.what_to_do.index("admission.max_waiting") < alert.what_to_do.index("add nodes")


def test_the_log_has_at_most_one_line_a_minute_for_each_reason(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    counters = Counters()
    found = Rejections(counters)
    list(found(0.0))
    assert not caplog.records
    reject(counters, "queue_full", 3)
    reject(counters, "queue_full", 4, priority=2)
    reject(counters, "tokens_per_min", 5, "batch")
    list(found(2.0))
    first, second = caplog.records
    assert first.levelname == "WARNING" and second.levelname == "INFO"
    assert first.getMessage().startswith("requests_rejected reason=queue_full count=7: ")
    assert "admission.max_waiting" in first.getMessage()
    assert second.getMessage().startswith(
        "requests_rejected reason=tokens_per_min count=5 tenant=batch tenant_count=5: "
    )
    for second_s in range(4, 64, 2):
        reject(counters, "queue_full", 100, "chat")
        reject(counters, "queue_full", 50, "batch")
        list(found(float(second_s)))
    assert len(caplog.records) == 3
    assert "reason=queue_full count=4500 tenant=chat tenant_count=3000: " in caplog.records[2].getMessage()
    reject(counters, "queue_full", 150, "batch")
    found.log_rest()
    found.log_rest()
    assert len(caplog.records) == 4 and "reason=queue_full count=150 tenant=batch " in caplog.records[3].getMessage()
    for second_s in range(200, 600, 2):
        list(found(float(second_s)))
    assert len(caplog.records) == 4


def test_each_reason_has_a_sentence_that_names_a_setting_that_exists() -> None:
    kinds = [kind for kind in vars(rejections).values() if isinstance(kind, type) and issubclass(kind, NotAdmitted)]
    reasons = {kind.__dict__["reason"] for kind in kinds if kind.__dict__.get("reason")}
    reasons |= {"deadline_ttft", "deadline_total", "requests_per_min", "tokens_per_min"}
    assert set(_ADVICE) == reasons
    keys = {f"{name}.{key}" for name, section, _ in tables() for key in keys_of(section)}
    for reason, advice in _ADVICE.items():
        named = re.findall(r"\b[a-z]+\.[a-z_]+\b", advice)
        assert named and keys.issuperset(named), f"{reason}: {named}"
