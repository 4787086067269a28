"""warmroute doctor and warmroute doctor prompts: examine nodes and prompts."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from warmroute import build_advice, version_and_build
from warmroute import config as configuration
from warmroute.app.commands import add_admin_options, call_admin, console, number
from warmroute.app.commands.init import check_key_env
from warmroute.config import Config, ConfigError, NodeConfig

if TYPE_CHECKING:
    from rich.console import Console

    from warmroute.app.doctor.checks import Check, Report


# warmroute doctor: examines the nodes of a configuration, or the prompts of a running router; says what to change.

EPILOG = """\
To each node, the doctor sends at most two completions of one output token each, to see whether responses report cached
tokens and whether KV events arrive. --no-requests leaves them out. Exit code 1 means that there is a problem.

`warmroute doctor prompts` asks a running router what prevents its prompts from sharing the KV cache. Letters and digits
of prompts are hidden; --show-text shows them, which requires an admin token.
"""


def add_to(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "doctor",
        help="examine the nodes of a configuration, or a router's prompts, and say what to change",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "subject", nargs="?", choices=("nodes", "prompts"), default="nodes", help="what to examine (default: nodes)"
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="configuration file of the router")
    parser.add_argument("--node", action="append", default=[], metavar="URL", help="node to examine; repeatable")
    parser.add_argument("--key-env", metavar="NAME", help="environment variable with the API key of the --node engines")
    parser.add_argument("--no-requests", action="store_true", help="send no completions to the nodes")
    parser.add_argument(
        "--timeout", type=number(above=0), default=5.0, metavar="S", help="timeout of each question (default: 5)"
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    prompts = parser.add_argument_group("prompts of a running router")
    add_admin_options(prompts, with_config=False)
    prompts.add_argument("--show-text", action="store_true", help="show the text around differences")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.subject == "prompts":
        return run_prompts(args)
    from warmroute.app.doctor import examine

    config = _read_config(args)
    logging.getLogger("warmroute").addHandler(logging.NullHandler())  # the report says it all
    if not args.json and not args.no_requests:
        print("Sending each node a completion of one output token (--no-requests: none) …", file=sys.stderr)
    report = asyncio.run(examine(config, args.timeout, not args.no_requests))
    if args.json:
        print(json.dumps(report.describe(), indent=2, ensure_ascii=False))
    else:
        _print(console(), report)
    return 1 if report.problems else 0


def _read_config(args: argparse.Namespace) -> Config:
    if not args.config and not args.node:
        raise ConfigError("doctor: give --config FILE, or --node URL")
    if args.key_env and not args.node:
        raise ConfigError("doctor: --key-env is for --node; nodes of the configuration have api_key_env")
    check_key_env("doctor", args.key_env)
    config = configuration.load(args.config) if args.config else Config()
    if args.node:
        nodes = (*config.nodes, *(NodeConfig(url=url, api_key_env=args.key_env or "") for url in args.node))
        config = msgspec.structs.replace(config, nodes=nodes)
        configuration.check(config)
    if not config.nodes:
        raise ConfigError("doctor: the configuration has no [[nodes]]; give --node URL")
    return config


_STYLES = {"ok": "green", "problem": "bold red", "note": "yellow"}


def _print(out: Console, report: Report) -> None:
    out.print(f"warmroute {version_and_build()}", markup=False, highlight=False)
    if advice := build_advice():
        out.print(advice, style=_STYLES["note"], markup=False, highlight=False)
    out.print()
    for subject in report.subjects:
        title = f"{subject.name}  {subject.url}" if subject.url else subject.name
        out.print(title, style="bold", markup=False, highlight=False)
        for check in subject.checks:
            _print_check(out, check)
        out.print()
    count = report.problems
    summary = f"{count} problem{'s' if count != 1 else ''}" if count else "no problems"
    out.print(summary, style="bold red" if count else "bold green", highlight=False)


def _print_check(out: Console, check: Check) -> None:
    from rich.text import Text

    first, *rest = textwrap.wrap(f"{check.name}: {check.found}", max(30, out.width - 11), break_on_hyphens=False)
    out.print(Text("  ").append(f"{check.state:<8}", _STYLES[check.state]).append(first), soft_wrap=True)
    for line in rest:
        out.print(f"          {line}", markup=False, highlight=False, soft_wrap=True)
    # lines to copy are not broken: a terminal breaks them without changing what is copied
    for text in check.change.splitlines():
        out.print(f"          {text}", style="cyan", markup=False, highlight=False, soft_wrap=True)


# warmroute doctor prompts: what prevents the prompts of a running router from sharing the KV cache.

Row = dict[str, Any]
"""A route or finding, as the admin API describes it."""


def run_prompts(args: argparse.Namespace) -> int:
    if args.node:
        raise ConfigError("doctor prompts asks a running router: use --admin URL or --config FILE instead of --node")
    found = call_admin(args, f"/admin/prompts{'?show_text=1' if args.show_text else ''}", expect="findings")
    if args.json:
        print(json.dumps(found, indent=2, ensure_ascii=False))
    else:
        _print_prompt_findings(console(), found)
    return 1 if found["findings"] else 0


def _print_prompt_findings(out: Console, found: Row) -> None:
    findings: list[Row] = found["findings"]
    for route in found["routes"]:
        out.print(_name(route), style="bold", markup=False, highlight=False)
        own = [one for one in findings if (one["model"], one["route"]) == (route["model"], route["route"])]
        for finding in own:
            _print_finding(out, finding)
        if not own and route["agrees_until"]:
            _write(
                out,
                f"ok: {route['samples']} prompts agree up to {route['agrees_until']}; {route['common_share']:.0%} of "
                "their text comes before that.",
            )
        elif not own:
            _write(out, route.get("unavailable") or "too few prompts to compare")
        out.print()
    if not found["routes"]:
        out.print("No prompt was sampled yet, or prompt_doctor.enabled is false.")
        return
    if all(route.get("unavailable") for route in found["routes"]):
        return
    count = len(findings)
    summary = f"{count} finding{'s' if count != 1 else ''}" if count else "nothing prevents reuse"
    out.print(summary, style="bold red" if count else "bold green", highlight=False)


def _print_finding(out: Console, finding: Row) -> None:
    more = finding["more_places"]
    _write(out, f"{finding['what_differs']} at {finding['place']} (token {finding['token']:,})", "bold red")
    _write(
        out,
        f"{finding['share']:.0%} of the prompts, {finding['values']} different values, before text that they have in "
        f"common{f'; {more} more places after it' if more else ''}",
    )
    _write(
        out,
        f"cost: {finding['lost_tokens_per_request']:,} tokens per request, {finding['lost_gpu_s']:,.1f} GPU seconds so "
        f"far, now the work of {_gpus(finding['gpus'])}. {finding['cached_share']:.0%} of the prompt tokens were "
        f"cached, {finding['could_share']:.0%} could be.",
    )
    excerpt = finding["excerpt"]
    for value in excerpt["values"]:
        _write(out, f"{excerpt['before']}[{value}]{excerpt['after']}".replace("\n", " "), "dim")
    _write(out, finding["what_to_do"], "cyan")


def _gpus(count: float) -> str:
    return f"{count:.0%} of a GPU" if count < 0.995 else f"{count:.2g} GPUs"


def _write(out: Console, text: str, style: str = "") -> None:
    for line in textwrap.wrap(text, max(30, out.width - 4), break_on_hyphens=False):
        out.print(f"  {line}", style=style, markup=False, highlight=False, soft_wrap=True)


def _name(route: Row) -> str:
    return f"{route['model']}, route {route['route']}" if route["route"] else str(route["model"])
