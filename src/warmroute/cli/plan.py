"""warmroute plan: how many GPUs a workload needs, and how many it would need under another policy."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from warmroute.config import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from warmroute.replay import Run, Setup
    from warmroute.replay.sizing import Limits, Needed

EPILOG = """\
WORKLOAD is a trace (.jsonl or .jsonl.gz in Mooncake's format) or a generator, as in `warmroute replay`.
Example: warmroute plan trace.jsonl.gz --ttft-p90 500ms --profile 2xh100-32b --usd 5
"""
POLICIES = ("price", "round_robin")
USUAL_TTFT_P90_MS = 1000.0


def add_to(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "plan",
        help="how many GPUs a workload needs, and what round robin would have needed",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("workload", nargs="+", metavar="WORKLOAD", help="a trace or a generator, then key=value …")
    for percent in (50, 90, 99):
        usual = " (1s, where no limit is given)" if percent == 90 else ""
        parser.add_argument(
            f"--ttft-p{percent}", type=duration_ms, metavar="T", help=f"first tokens within 500ms, 2s …{usual}"
        )
    parser.add_argument("--policy", action="append", metavar="P", help="repeat to compare (price, round_robin)")
    parser.add_argument("--profile", default="2xh100-32b", metavar="NAME", help="GPU and model (2xh100-32b)")
    parser.add_argument("--usd", type=float, default=0.0, metavar="X", help="a node's price an hour")
    parser.add_argument("--max-nodes", type=int, default=256, metavar="N", help="no more than N nodes (256)")
    parser.add_argument("--rate", type=float, metavar="R", help="requests/s (the workload's own)")
    parser.add_argument("--scale-rate", type=float, default=1.0, metavar="X", help="runs a trace X times as fast (1)")
    parser.add_argument("--limit", type=int, metavar="N", help="stop after N requests (a trace: its end; else 2000)")
    parser.add_argument("--warm-up", type=int, default=0, metavar="N", help="N requests first that do not count (0)")
    parser.add_argument("--seed", type=int, default=1, help="of everything that is left to chance (1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="all numbers, as JSON")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    parser.set_defaults(run=run)


def duration_ms(text: str) -> float:
    """`500ms`, `2s`, `0.5 s`; a number alone is milliseconds."""
    found = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*(ms|s|)\s*", text)
    if found is None or float(found[1]) <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time like 500ms or 2s")
    return float(found[1]) * (1000.0 if found[2] == "s" else 1.0)


def run(args: argparse.Namespace) -> int:
    from warmroute.replay import BadPolicy
    from warmroute.replay.workloads import BadTrace, BadWorkload

    try:
        needed, limits = plan(args)
    except (BadWorkload, BadTrace, BadPolicy) as error:
        raise ConfigError(str(error)) from None
    if args.json:
        told = [{"policy": one.policy, "nodes": one.nodes, "runs": list(one.runs.values())} for one in needed]
        args.json.write_text(json.dumps({"plan": told}, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    from rich.console import Console

    console = Console()
    console = console if console.is_terminal else Console(width=160)
    console.print(table(needed, args, limits))
    for line in sentences(needed, args, limits):
        console.print(line, highlight=False)
    return 0 if all(one.nodes is not None for one in needed) else 1


def plan(args: argparse.Namespace) -> tuple[list[Needed], Limits]:
    """What each policy needs. Raises ConfigError, BadWorkload, BadTrace, BadPolicy."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from warmroute.replay import contender
    from warmroute.replay.sizing import Limits, nodes_needed

    if args.max_nodes < 1:
        raise ConfigError("--max-nodes: a fleet has one node at least")
    p50, p90, p99 = args.ttft_p50, args.ttft_p90, args.ttft_p99
    limits = Limits(p50, p90 if p90 or p50 or p99 else USUAL_TTFT_P90_MS, p99)
    contenders = [contender(text) for text in args.policy or POLICIES]
    if any(one.name == "oracle" for one in contenders):
        raise ConfigError("--policy oracle: it serves nothing, and needs no nodes")
    setup = _setup(args)
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=args.quiet,
    )
    needed: list[Needed] = []
    with bar:
        for one in contenders:
            task = bar.add_task(one.text, total=setup.requests)

            def tried(nodes: int, done: Run | None, task: Any = task, name: str = one.text) -> Any:
                if done is None:
                    bar.update(task, description=f"{name} on {nodes} nodes", completed=0)
                return lambda ended: bar.update(task, completed=ended)

            needed.append(nodes_needed(setup, one, limits, args.max_nodes, tried))
            bar.remove_task(task)
    return needed, limits


def _setup(args: argparse.Namespace) -> Setup:
    from warmroute.fake_engine.profiles import profile
    from warmroute.replay import Setup, contender
    from warmroute.replay.workloads import choose
    from warmroute.replay.world import Conditions, NodeSpec

    try:
        node = NodeSpec("node-0", profile(args.profile))
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return Setup(
        workload=choose(args.workload, args.scale_rate),
        nodes=(node,),
        contender=contender(POLICIES[0]),
        conditions=Conditions(seed=args.seed),
        rate=args.rate,
        limit=args.limit,
        warm_up=args.warm_up,
    )


def table(needed: list[Needed], args: argparse.Namespace, limits: Limits) -> Table:
    from rich.table import Table

    from warmroute.fake_engine.profiles import profile
    from warmroute.replay.report.table import ms, number

    wanted = (("p50", limits.ttft_p50_ms), ("p90", limits.ttft_p90_ms), ("p99", limits.ttft_p99_ms))
    words = ", ".join(f"TTFT {key} within {ms(limit)}" for key, limit in wanted if limit is not None)
    made = Table(title=f"{Path(args.workload[0]).name} on {args.profile}: {words}", title_justify="left")
    heads = ["policy", "nodes", "GPUs", *(["USD/h"] if args.usd else []), "hit rate", "TTFT p50", "p90", "p99"]
    for at, head in enumerate([*heads, "p90 with one less"]):
        made.add_column(head, justify="left" if at == 0 else "right", no_wrap=True)
    gpus = profile(args.profile).gpus
    for one in needed:
        if one.nodes is None:
            most = max(one.runs)
            last = one.runs[most]
            cells = [one.policy, f"over {most}", f"over {most * gpus}", *(["–"] if args.usd else [])]
            less = "–"
        else:
            last, below = one.runs[one.nodes], one.runs.get(one.nodes - 1)
            cells = [one.policy, str(one.nodes), str(one.nodes * gpus)]
            cells += [number(one.nodes * args.usd)] if args.usd else []
            less = ms(below["ttft_ms"]["p90"]) if below is not None else "–"
        times = last["ttft_ms"]
        made.add_row(*cells, f"{last['hit_rate']:.1%}", *(ms(times[key]) for key in ("p50", "p90", "p99")), less)
    return made


def sentences(needed: list[Needed], args: argparse.Namespace, limits: Limits) -> list[str]:
    """The answer, in words."""
    from warmroute.fake_engine.profiles import profile

    gpus = profile(args.profile).gpus
    first, *others = needed
    if first.nodes is None:
        return [_no_fleet(first, args, limits)]
    said = [f"This traffic needs {first.nodes * gpus} GPUs under {first.policy}."]
    for one in others:
        if one.nodes is None:
            said.append(f"{one.policy} would have needed more than {max(one.runs) * gpus}.")
        else:
            times = "" if one.nodes == first.nodes else f"{one.nodes / first.nodes:.3g} times "
            said.append(f"{one.policy} would have needed {one.nodes * gpus}: {times}as many.")
    return said


def _no_fleet(one: Needed, args: argparse.Namespace, limits: Limits) -> str:
    from warmroute.replay.report.table import ms

    beyond = one.without_help(limits)
    if beyond is None:
        return f"{one.policy} needs more than {max(one.runs)} nodes: try a larger --max-nodes, or more time."
    percent, took, limit = beyond.percent, ms(beyond.took_ms), ms(beyond.limit_ms)
    return (
        f"No number of nodes is enough: under {one.policy} TTFT {percent} is {took} on {beyond.most} nodes, and "
        f"{beyond.fewer} did as well. A lone prompt on {args.profile} already takes longer than {limit}: "
        "allow more time, or take a faster --profile."
    )
