"""Grafana's dashboard and Prometheus' alert rules: two files, into which an operator's objectives are written.

Both files name metrics by hand. tests/monitoring checks that the router exports each of them, with the labels they use.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final, NamedTuple

DASHBOARD: Final = "dashboard.json"
ALERT_RULES: Final = "alerts.yaml"
MAX_LOST: Final = 0.9
"""A burn-rate rule fires at this share of bad requests at the latest."""

_PLACE: Final = re.compile(r"@(\w+)@")
_RULE: Final = re.compile(
    r"- alert: (\w+)\n +expr: \|-\n +.+\n +for: (\w+)\n +labels:\n +severity: (\w+)\n +annotations:\n"
    r" +summary: \|-\n +.+\n +description: \|-\n +(.+)\n +(.+)\n"
)


class Objectives(NamedTuple):
    """What an operator may want to change without editing the files."""

    ttft_s: float = 2.5
    """TTFT objective. It has to be a bucket of the TTFT histogram."""
    ttft_share: float = 0.95
    """Share of the streamed responses that has to meet `ttft_s`."""
    availability: float = 0.999
    """Share of the requests that has to be served."""
    queue_wait_s: float = 1.0
    """90th percentile of the wait in the router's queue above which an alert fires."""


def render(file: str, objectives: Objectives) -> str:
    """Return the dashboard or the alert rules with these objectives."""
    ttft_s, ttft_share, availability, queue_wait_s = objectives
    values = {
        "ttft_s": f"{ttft_s:g}",
        "ttft_bucket": str(float(ttft_s)),  # as the metrics page writes it
        "ttft_share": f"{ttft_share:.6g}",
        "ttft_percent": f"{ttft_share:.0%}",
        "availability": f"{availability:.6g}",
        "queue_wait_s": f"{queue_wait_s:g}",
    }
    for name, share in (("ttft", ttft_share), ("availability", availability)):
        values[f"{name}_budget"] = f"{1 - share:.6g}"
        for pace, burn_rate in (("fast", 14.4), ("slow", 6.0)):  # alerts.yaml explains the two rates
            values[f"{name}_{pace}"] = f"{min(MAX_LOST, burn_rate * (1 - share)):.6g}"
    return _PLACE.sub(lambda place: values[place[1]], (Path(__file__).parent / file).read_text())


def reference(rules: str) -> str:
    """Return the page docs/reference/alerts.md for a file of alert rules."""
    lines = [
        "# Alerts",
        "",
        "`make monitoring` generates this page and the rules in [alerts.yaml](../../deploy/prometheus/alerts.yaml).",
        "[Dashboards and alerts](../guides/dashboards-and-alerts.md) tells how to install them. The live page has",
        "alerts of its own, which need no Prometheus; `warmroute_alerts` exports them.",
    ]
    for name, lasts, severity, meaning, what_to_do in _RULE.findall(rules):
        fires = "at once" if lasts == "0s" else f"after {lasts}"
        lines += ["", f"## {name}", "", f"{severity.capitalize()}, {fires}. {meaning}", "", f"**Do**: {what_to_do}"]
    return "\n".join(lines) + "\n"
