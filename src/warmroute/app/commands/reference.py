"""Generated pages and files: warmroute config-reference, metrics-reference and monitoring."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from warmroute.app.commands import number
from warmroute.config import describe_keys, tables
from warmroute.config.file import BASIC_KEYS, RESTART_KEYS
from warmroute.config.section import REMOVED_IN, Key, toml_value

# warmroute config-reference: prints the configuration reference (docs/reference/configuration.md).

CONFIG_INTRODUCTION = """\
# Configuration

`warmroute serve --config FILE` reads one TOML file; `warmroute check-config FILE` checks it. An unknown key is an error
that names the nearest known key. A key that was removed in {removed_in} is a warning that names the value in use now;
the version after {removed_in} rejects it.

The router reloads the file when it changes and on SIGHUP. Running requests continue. If the file is invalid, the router
logs the error and keeps the previous configuration. These tables and keys take effect only after a restart: {restart}.

`warmroute config-reference` generates this page.

## The keys that most operators set

`warmroute init` writes them. [All tables](#listen) follow.
"""


def add_config_reference(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser("config-reference")
    parser.set_defaults(run=run_config_reference)


def run_config_reference(_args: argparse.Namespace) -> int:
    print(config_reference(), end="")
    return 0


def config_reference() -> str:
    return "\n".join(_lines())


def _lines() -> Iterator[str]:
    headings = {name: f"[[{name}]]" if repeatable else f"[{name}]" for name, _section, repeatable in tables()}
    restart = ", ".join(f"`{headings.get(name, name)}`" for name in RESTART_KEYS)
    yield CONFIG_INTRODUCTION.format(restart=restart, removed_in=REMOVED_IN)
    yield "| key | default | |"
    yield "| --- | --- | --- |"
    known = {f"{name}.{key.name}": key for name, section, _ in tables() for key in describe_keys(section)}
    for path in BASIC_KEYS:
        table, _, name = path.rpartition(".")
        yield f"| `{headings[table]}` `{name}` | {_default(known[path])} | {known[path].description} |"
    yield ""
    for name, section, repeatable in tables():
        keys = list(describe_keys(section))
        if not keys:
            continue
        yield f"## `{headings[name]}`"
        yield ""
        yield " ".join((section.__doc__ or "").split()) + (" Repeatable." if repeatable else "")
        yield ""
        yield "| key | type | default | |"
        yield "| --- | --- | --- | --- |"
        for key in keys:
            yield f"| `{key.name}` | {key.type_name} | {_default(key)} | {key.description} |"
        yield ""


def _default(key: Key) -> str:
    if key.default is msgspec.NODEFAULT:
        return "required"
    return "unset" if key.default is None else f"`{toml_value(key.default)}`"


# warmroute metrics-reference: prints the metrics reference, from what app/metrics/ declares.

METRICS_INTRODUCTION = """\
# Metrics

The admin listener exports these metrics at `/metrics`, in the text format of Prometheus.
[Dashboards and alerts](../guides/dashboards-and-alerts.md) use them. `warmroute metrics-reference` generates this page.

A name that ends in `_total` is a counter since the start. A meaning that begins with "Histogram" is one; all others are
gauges. Tokens, times and savings count complete responses with a status below 400, when they end. Labels are bounded:
beyond 256 pairs of model and route, 2,048 of model and tenant, and 4,096 of model and node, the model is `(other)`.
"""


def add_metrics_reference(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser("metrics-reference")
    parser.set_defaults(run=run_metrics_reference)


def run_metrics_reference(_args: argparse.Namespace) -> int:
    print(metrics_reference(), end="")
    return 0


def metrics_reference() -> str:
    from warmroute.app.metrics import LABELS
    from warmroute.app.metrics.page import METRICS

    lines = [METRICS_INTRODUCTION, "| metric and labels | meaning |", "| --- | --- |"]
    for metric in METRICS:
        labels = f" `{{{','.join(metric.labels)}}}`" if metric.labels else ""
        kind = "Histogram. " if metric.kind == "histogram" else ""
        lines.append(f"| `{metric.name}`{labels} | {kind}{metric.help} |")
    lines += ["", "## Labels", "", "| label | value |", "| --- | --- |"]
    lines += [f"| `{label}` | {text} |" for label, text in LABELS.items()]
    return "\n".join(lines) + "\n"


# warmroute monitoring: writes Grafana's dashboard and Prometheus' alert rules, and a page about the rules.

GRAFANA_FILE = "grafana/warmroute.json"
RULES_FILE = "prometheus/alerts.yaml"
MOST_SHARE = 0.99999


def add_monitoring(commands: Any) -> None:
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
    parser.set_defaults(run=run_monitoring)


def run_monitoring(args: argparse.Namespace) -> int:
    from warmroute.app.metrics.page import WAIT_BUCKETS
    from warmroute.app.monitoring import ALERT_RULES, DASHBOARD, Objectives, reference, render

    objectives = Objectives()
    if args.ttft_seconds is not None:
        if args.ttft_seconds not in WAIT_BUCKETS.bounds_s:
            choices = ", ".join(f"{bound:g}" for bound in WAIT_BUCKETS.bounds_s)
            print(f"warmroute: --ttft-seconds has to be a bucket of the TTFT histogram: {choices}", file=sys.stderr)
            return 2
        objectives = objectives._replace(ttft_s=args.ttft_seconds)
    if args.queue_wait_seconds is not None:
        objectives = objectives._replace(queue_wait_s=args.queue_wait_seconds)
    if args.ttft_share is not None:
        objectives = objectives._replace(ttft_share=args.ttft_share)
    if args.availability is not None:
        objectives = objectives._replace(availability=args.availability)
    rules = render(ALERT_RULES, objectives)
    files = {args.directory / GRAFANA_FILE: render(DASHBOARD, objectives), args.directory / RULES_FILE: rules}
    if args.reference is not None:
        files[args.reference] = reference(rules)
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
