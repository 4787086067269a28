"""Writes alert rules as a rule file of Prometheus, in YAML."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Final

from warmroute.monitoring.alert_rules import GROUP, AlertRule
from warmroute.monitoring.promql import check

_HEAD: Final = """\
# Alert rules for Prometheus. `warmroute monitoring` generates this file; docs/reference/alerts.md explains each rule.
"""


def render_rules(rules: Iterable[AlertRule]) -> str:
    """Raises QueryError if a rule names a metric that the router does not export."""
    lines = [_HEAD + "groups:", f"  - name: {GROUP}", "    rules:"]
    for rule in rules:
        check(rule.expression)
        lines += [
            f"      - alert: {rule.name}",
            f"        expr: {_quoted(rule.expression)}",
            f"        for: {rule.lasts}",
            "        labels:",
            f"          severity: {rule.severity}",
            "        annotations:",
            f"          summary: {_quoted(rule.summary)}",
            f"          description: {_quoted(f'{rule.meaning} {rule.what_to_do}')}",
        ]
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    """A JSON string is a YAML string."""
    return json.dumps(text, ensure_ascii=False)


def render_reference(rules: Iterable[AlertRule]) -> str:
    """Return the page docs/reference/alerts.md."""
    lines = [
        "# Alerts",
        "",
        "The rules in `deploy/prometheus/alerts.yaml`. `make monitoring` generates the rules and this page;",
        "[dashboards and alerts](../guides/dashboards-and-alerts.md) tells how to install them. The live page has",
        "alerts of its own, which need no Prometheus; `warmroute_alerts` exports them.",
    ]
    for rule in rules:
        lasts = "at once" if rule.lasts == "0s" else f"after {rule.lasts}"
        lines += [
            "", f"## {rule.name}", "", f"Severity {rule.severity}, fires {lasts}.", "", f"    {rule.expression}", "",
            f"**Meaning.** {rule.meaning}", "", f"**What to do.** {rule.what_to_do}",
        ]  # fmt: skip
    return "\n".join(lines) + "\n"
