"""warmroute metrics-reference: prints the metrics reference, generated from telemetry/metric_definitions.py."""

from __future__ import annotations

import argparse
from typing import Any

INTRODUCTION = """\
# Metrics

The admin listener exports these metrics at `/metrics`, in the text format of Prometheus. `warmroute metrics-reference`
generates this page. A dashboard and alert rules use them: [Dashboards and alerts](../guides/dashboards-and-alerts.md).

Counters are totals since the start. Tokens, times and savings count complete responses with a status below 400, when
they end. Labels are bounded: the router counts up to 256 pairs of model and route, 2,048 of model and tenant and 4,096
of model and node apart, and all others as model `(other)`. It forgets the counters of a node that leaves the fleet.
"""


def add_to(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser("metrics-reference")
    parser.set_defaults(run=run)


def run(_args: argparse.Namespace) -> int:
    print(reference(), end="")
    return 0


def reference() -> str:
    from warmroute.telemetry.metric_definitions import LABELS, METRICS

    lines = [INTRODUCTION, "| metric | type | labels | |", "| --- | --- | --- | --- |"]
    for metric in METRICS:
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        lines.append(f"| `{metric.name}` | {metric.kind} | {labels} | {metric.help} |")
    lines += ["", "## Labels", "", "| label | value |", "| --- | --- |"]
    lines += [f"| `{label}` | {text} |" for label, text in LABELS.items()]
    return "\n".join(lines) + "\n"
