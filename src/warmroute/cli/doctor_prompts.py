"""warmroute doctor prompts: what prevents the prompts of a running router from sharing the KV cache."""

from __future__ import annotations

import argparse
import json
import textwrap
from typing import TYPE_CHECKING, Any

from warmroute.cli.admin_client import call_admin
from warmroute.cli.terminal import console
from warmroute.config import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

Row = dict[str, Any]
"""A route or finding, as the admin API describes it."""


def run_prompts(args: argparse.Namespace) -> int:
    if args.node:
        raise ConfigError("doctor prompts asks a running router: use --admin URL or --config FILE instead of --node")
    found = call_admin(args, f"/admin/prompts{'?show_text=1' if args.show_text else ''}", expect="findings")
    if args.json:
        print(json.dumps(found, indent=2, ensure_ascii=False))
    else:
        _print(console(), found)
    return 1 if found["findings"] else 0


def _print(out: Console, found: Row) -> None:
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
