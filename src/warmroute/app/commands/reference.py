"""warmroute monitoring: writes Grafana's dashboard and Prometheus' alert rules, and a page about the rules."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from warmroute.cli.arguments import number

GRAFANA_FILE = "grafana/warmroute.json"
RULES_FILE = "prometheus/alerts.yaml"
MOST_SHARE = 0.99999


def add_to(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "monitoring",
        help="write Grafana's dashboard and Prometheus' alert rules",
        description="Write Grafana's dashboard and Prometheus' alert rules into a directory.",
    )
    parser.add_argument("directory", type=Path, metavar="DIR", help=f"for {GRAFANA_FILE} and {RULES_FILE}")
    parser.add_argument(
        "--ttft-seconds",
        type=number(above=0),
        metavar="S",
        help="TTFT objective, one of the histogram's buckets (default: 2.5)",
    )
    parser.add_argument(
        "--queue-wait-seconds", type=number(above=0), metavar="S", help="p90 of the queue wait that alerts (default: 1)"
    )
    parser.add_argument(
        "--ttft-share", type=number(0.5, MOST_SHARE), metavar="SHARE",
        help="share of the streamed responses that has to meet the TTFT objective (default: 0.95)",
    )  # fmt: skip
    parser.add_argument(
        "--availability", type=number(0.5, MOST_SHARE), metavar="SHARE",
        help="share of the requests that has to be served in 30 days (default: 0.999)",
    )  # fmt: skip
    parser.add_argument("--reference", type=Path, metavar="FILE", help="also write the page that explains the alerts")
    parser.add_argument("--check", action="store_true", help="write nothing, fail if a file is not up to date")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from warmroute.monitoring.alert_rules import Thresholds, alert_rules
    from warmroute.monitoring.grafana import render_dashboard
    from warmroute.monitoring.rule_file import render_reference, render_rules
    from warmroute.telemetry.traffic_metrics import WAIT_BUCKETS

    thresholds = Thresholds()
    if args.ttft_seconds is not None:
        if args.ttft_seconds not in WAIT_BUCKETS.bounds_s:
            choices = ", ".join(f"{bound:g}" for bound in WAIT_BUCKETS.bounds_s)
            print(f"warmroute: --ttft-seconds has to be a bucket of the TTFT histogram: {choices}", file=sys.stderr)
            return 2
        thresholds = thresholds._replace(ttft_s=args.ttft_seconds)
    if args.queue_wait_seconds is not None:
        thresholds = thresholds._replace(queue_wait_s=args.queue_wait_seconds)
    if args.ttft_share is not None:
        thresholds = thresholds._replace(ttft_share=args.ttft_share)
    if args.availability is not None:
        thresholds = thresholds._replace(availability=args.availability)
    rules = alert_rules(thresholds)
    files = {
        args.directory / GRAFANA_FILE: render_dashboard(thresholds),
        args.directory / RULES_FILE: render_rules(rules),
    }
    if args.reference is not None:
        files[args.reference] = render_reference(rules)
    if args.check:
        return _check(files)
    for path, text in files.items():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        except OSError as error:
            print(f"warmroute: cannot write {path}: {error.strerror}", file=sys.stderr)
            return 2
        print(path)
    return 0


def _check(files: dict[Path, str]) -> int:
    old = [path for path, text in files.items() if not path.exists() or path.read_text() != text]
    for path in old:
        print(f"{path} is not up to date: run `make monitoring`")
    if not old:
        print("monitoring: dashboard and alert rules are up to date")
    return 1 if old else 0
