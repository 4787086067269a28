"""warmroute plan: the number of GPUs that a workload needs, for several policies."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from warmroute.app.commands import (
    TableColumn,
    add_warm_up_option,
    console,
    fit_tables,
    number,
    output_file,
    progress_bar,
    whole,
    write_json,
)
from warmroute.config import ConfigError, Objective, ScalingReplay

if TYPE_CHECKING:
    from rich.table import Table

    from warmroute.lab.run import Setup
    from warmroute.lab.sizing import LatencyLimits, LoadMargin, NodesNeeded


EPILOG = """\
WORKLOAD is a trace (.jsonl or .jsonl.gz in Mooncake's format) or a generator, as in `warmroute replay`.
Example: warmroute plan trace.jsonl.gz --ttft-p90 500ms --profile 2xh100-32b --usd 5
"""
POLICIES = ("price", "round_robin")
RISING_LOAD = (
    "The load still rises while it is measured: conversations go on while others begin. A longer --warm-up, such as "
    "3600s, sizes the fleet for the steady load."
)
WITH_ROLES = " (prefill + decode)"


def add_to(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "plan",
        help="find the number of GPUs that a workload needs, with price and with round robin",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("workload", nargs="+", metavar="WORKLOAD", help="trace or generator, then key=value …")
    for percent in (50, 90, 99):
        default = " (default: 2s if no limit is given, as scaling.objective)" if percent == 90 else ""
        parser.add_argument(
            f"--ttft-p{percent}",
            type=parse_duration_ms,
            metavar="T",
            help=f"limit for the p{percent} of the time to first token, such as 500ms or 2s{default}",
        )
    parser.add_argument(
        "--inter-token-p90",
        type=parse_duration_ms,
        metavar="T",
        help="limit for the p90, over requests, of the mean time between tokens",
    )
    parser.add_argument(
        "--policy",
        action="append",
        metavar="P",
        help="policy; repeatable (default: price and round_robin; with --roles only price)",
    )
    parser.add_argument(
        "--roles",
        action="store_true",
        help="find also how many prefill and how many decode nodes a fleet with roles needs, with price",
    )
    parser.add_argument("--profile", default="2xh100-32b", metavar="NAME", help="GPU and model (default: 2xh100-32b)")
    parser.add_argument("--usd", type=number(0.0), default=0.0, metavar="X", help="USD per hour of a node")
    parser.add_argument(
        "--max-nodes", type=whole(1, 100_000), default=256, metavar="N", help="maximum fleet size (default: 256)"
    )
    parser.add_argument(
        "--rate", type=number(above=0), metavar="R", help="requests per second (default: that of the workload)"
    )
    parser.add_argument(
        "--scale-rate",
        type=number(above=0),
        default=1.0,
        metavar="X",
        help="replay a trace X times as fast (default: 1)",
    )
    parser.add_argument(
        "--margin",
        type=number(0.0, 10.0),
        metavar="X",
        help="find a fleet that holds this fraction more load, and what chance adds in ten minutes, as the autoscaler "
        f"does with its margin ({ScalingReplay().margin:g}); default: the load as it is",
    )
    parser.add_argument(
        "--limit", type=whole(1), metavar="N", help="stop after N requests (default: the whole trace, or 2000)"
    )
    add_warm_up_option(parser)
    parser.add_argument("--seed", type=whole(), default=1, help="seed of all random choices (default: 1)")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write all results as JSON")
    parser.add_argument("--quiet", action="store_true", help="print no progress bar")
    parser.set_defaults(run=run)


def parse_duration_ms(text: str) -> float:
    """Parse `500ms`, `2s` or `0.5 s`. A number alone is in milliseconds."""
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*(ms|s|)\s*", text)
    if match is None or float(match[1]) <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a duration such as 500ms or 2s")
    return float(match[1]) * (1000.0 if match[2] == "s" else 1.0)


def run(args: argparse.Namespace) -> int:
    from warmroute.lab.replay_setup import BadPolicy
    from warmroute.lab.sizing import load_rises
    from warmroute.lab.workloads import BadWorkload
    from warmroute.lab.workloads.trace import BadTrace

    try:
        results, limits, margin = plan(args)
    except (BadWorkload, BadTrace, BadPolicy) as error:
        raise ConfigError(str(error)) from None
    if args.json:
        rows = [
            {
                "policy": one.policy,
                "nodes": one.nodes,
                "prefill_nodes": one.prefill_nodes.get(one.nodes or 0),
                "runs": list(one.runs.values()),
            }
            for one in results
        ]
        write_json(args.json, {"plan": rows})
    out = console()
    for table in result_tables(results, args, limits, out.width):
        out.print(table)
    for line in summary_lines(results, args, limits, margin):
        out.print(line, highlight=False)
    if load_rises(_setup(args)):
        out.print(RISING_LOAD, highlight=False)
    return 0 if all(one.nodes is not None for one in results) else 1


def plan(args: argparse.Namespace) -> tuple[list[NodesNeeded], LatencyLimits, LoadMargin | None]:
    """Find the nodes that each policy needs. Raises ConfigError, BadWorkload, BadTrace or BadPolicy."""
    from warmroute.lab.replay_setup import parse_policy
    from warmroute.lab.sizing import LatencyLimits, load_margin, nodes_needed, with_load

    p50, p90, p99, inter_token = args.ttft_p50, args.ttft_p90, args.ttft_p99, args.inter_token_p90
    given = p50 or p90 or p99 or inter_token
    limits = LatencyLimits(p50, p90, p99, inter_token) if given else LatencyLimits.of(Objective())
    policies = [parse_policy(text) for text in args.policy or POLICIES[: 1 if args.roles else None]]
    if any(one.name == "oracle" for one in policies):
        raise ConfigError("--policy oracle: the oracle serves no requests, so it needs no nodes")
    if args.roles and all(one.name != "price" for one in policies):
        raise ConfigError("--roles: only the policy price uses prefill and decode nodes. Add --policy price")
    setup = _setup(args)
    margin = load_margin(setup, args.margin) if args.margin is not None else None
    if margin is not None:
        setup = with_load(setup, margin.load)
    results: list[NodesNeeded] = []
    with progress_bar(args.quiet) as bar:
        for one in policies:
            task = bar.add_task(one.text, total=setup.requests)

            def start_run(nodes: int, task: Any = task, name: str = one.text) -> Any:
                bar.update(task, description=f"{name} on {nodes} nodes", completed=0)
                return lambda ended: bar.update(task, completed=ended)

            results.append(nodes_needed(setup, one, limits, args.max_nodes, start_run))
            if args.roles and one.name == "price":
                with_roles = nodes_needed(setup, one, limits, max(2, args.max_nodes), start_run, with_roles=True)
                with_roles.policy += WITH_ROLES
                results.append(with_roles)
            bar.remove_task(task)
    return results, limits, margin


def _setup(args: argparse.Namespace) -> Setup:
    from warmroute.lab.engine.timing import profile
    from warmroute.lab.replay_setup import parse_policy
    from warmroute.lab.run import Setup
    from warmroute.lab.simulated_node import Conditions, NodeSpec
    from warmroute.lab.workloads import parse_workload

    try:
        node = NodeSpec("node-0", profile(args.profile))
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return Setup(
        workload=parse_workload(args.workload, args.scale_rate),
        nodes=(node,),
        policy=parse_policy(POLICIES[0]),
        conditions=Conditions(seed=args.seed),
        rate=args.rate,
        limit=args.limit,
        warm_up=args.warm_up.requests,
        warm_up_s=args.warm_up.seconds,
    )


def result_tables(
    results: list[NodesNeeded], args: argparse.Namespace, limits: LatencyLimits, width: int
) -> Iterator[Table]:
    from rich.text import Text

    from warmroute.lab.engine.timing import profile
    from warmroute.lab.report import ms, number

    targets = ", ".join(f"TTFT {key} within {ms(limit)}" for key, limit in limits.given)
    if limits.inter_token_p90_ms:
        targets += f"{', ' if targets else ''}inter-token p90 within {ms(limits.inter_token_p90_ms)}"
    heads = ["policy", "nodes", "GPUs", *(["USD/h"] if args.usd else []), "hit rate", "TTFT p50", "p90", "p99"]
    gpus = profile(args.profile).gpus
    rows: list[list[str]] = []
    for one in results:
        if one.nodes is None:
            largest = max(one.runs)
            run = one.runs[largest]
            cells = [one.policy, f"over {largest}", f"over {largest * gpus}", *(["–"] if args.usd else [])]
            one_less = "–"
        else:
            run, smaller = one.runs[one.nodes], one.runs.get(one.nodes - 1)
            prefill = one.prefill_nodes.get(one.nodes)
            parts = f" ({prefill} + {one.nodes - prefill})" if prefill else ""
            cells = [one.policy, f"{one.nodes}{parts}", str(one.nodes * gpus)]
            cells += [number(one.nodes * args.usd)] if args.usd else []
            one_less = ms(smaller["ttft_ms"]["p90"]) if smaller is not None else "–"
        times = run["ttft_ms"]
        rows.append([*cells, f"{run['hit_rate']:.1%}", *(ms(times[key]) for key in ("p50", "p90", "p99")), one_less])
    policy, *others = (
        TableColumn(head, [Text(row[at]) for row in rows], "right" if at else "left")
        for at, head in enumerate([*heads, "p90 with one node less"])
    )
    title = f"{Path(args.workload[0]).name} on {args.profile}: {targets}"
    return fit_tables([policy], others, width, title)


def summary_lines(
    results: list[NodesNeeded], args: argparse.Namespace, limits: LatencyLimits, margin: LoadMargin | None
) -> list[str]:
    from warmroute.lab.engine.timing import profile

    gpus = profile(args.profile).gpus
    first, *others = results
    if first.nodes is None:
        return [_failure(first, args, limits)]
    lines = [f"This workload needs {_count_of_gpus(first.nodes * gpus)} with {first.policy}."]
    for one in others:
        if one.nodes is None:
            lines.append(f"With {one.policy} it would need more than {max(one.runs) * gpus}.")
        else:
            times = "the same number" if one.nodes == first.nodes else f"{one.nodes / first.nodes:.2g} × as many"
            lines.append(f"With {one.policy} it would need {one.nodes * gpus}: {times}.")
    if margin is not None:
        lines.append(
            f"Replayed with {margin.load:.0%} of the load: margin {margin.margin:.0%}, chance {margin.chance:.0%}."
        )
    return lines


def _count_of_gpus(count: int) -> str:
    return "1 GPU" if count == 1 else f"{count} GPUs"


def _failure(one: NodesNeeded, args: argparse.Namespace, limits: LatencyLimits) -> str:
    from warmroute.lab.report import ms

    limit = one.unreachable_limit(limits)
    if limit is None:
        return f"{one.policy} needs more than {max(one.runs)} nodes: use a larger --max-nodes or a higher TTFT limit."
    return (
        f"No number of nodes is enough: with {one.policy}, TTFT {limit.percent} is {ms(limit.measured_ms)} on "
        f"{limit.most} nodes, and about the same on {limit.fewer}. A single prompt on {args.profile} takes longer than "
        f"{ms(limit.limit_ms)}: use a higher TTFT limit or a faster --profile."
    )
