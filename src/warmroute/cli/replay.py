"""warmroute replay: a workload through a simulated fleet in virtual time, policy against policy."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from warmroute.config import ConfigError

if TYPE_CHECKING:
    from warmroute.replay import Run, Setup
    from warmroute.replay.world import Conditions, NodeSpec
    from warmroute.replay.world.scaling import Autoscale

EPILOG = """\
WORKLOAD is a trace (.jsonl or .jsonl.gz in Mooncake's format) or a generator, with parameters after it as key=value:
shared_system_prompts, multi_turn_chat, rag, few_shot, tool_agents, unique_batch, hot_prefix_storm, priority_mix, llm_d.
Policies may have parameters: prefix_hash:load_factor=2. Peers' rules: sglang, llm_d, llm_d_precise, dynamo, kubeai,
aibrix; oracle is the hit rate of one cache as large as the fleet's. See docs/simulation.md.
"""


def add_to(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "replay",
        help="replay a workload on a simulated fleet, policy against policy",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("workload", nargs="+", metavar="WORKLOAD", help="a trace or a generator, then key=value …")
    parser.add_argument(
        "--policy", action="append", metavar="P", help="a policy; repeat to compare (price, round_robin)"
    )
    fleet = parser.add_argument_group("the fleet")
    fleet.add_argument("--nodes", type=int, default=8, metavar="N", help="how many nodes (8)")
    fleet.add_argument(
        "--profile", action="append", metavar="NAME", help="GPU and model (2xh100-32b); repeat: nodes take them in turn"
    )
    fleet.add_argument("--blocks", type=int, metavar="N", help="KV blocks of a node (what its GPUs hold)")
    fleet.add_argument("--block-size", type=int, default=16, metavar="N", help="tokens of a KV block (16)")
    fleet.add_argument("--cpu-blocks", type=int, default=0, metavar="N", help="KV blocks of a node's CPU tier (0)")
    fleet.add_argument(
        "--island", action="append", default=[], metavar="NAME=MS", help="an island and its round trip; nodes in turn"
    )
    load = parser.add_argument_group("the load")
    load.add_argument("--rate", type=_numbers, metavar="R,…", help="requests/s, a run for each (the workload's own)")
    load.add_argument("--scale-rate", type=float, default=1.0, metavar="X", help="runs a trace X times as fast (1)")
    load.add_argument("--day", type=float, metavar="S", help="arrivals follow the shape of a day, S seconds long")
    load.add_argument("--burst", type=int, default=1, metavar="N", help="requests arrive N at once")
    load.add_argument("--concurrency", type=_numbers, metavar="N,…", help="closed loop with N clients, a run for each")
    load.add_argument("--limit", type=int, metavar="N", help="stop after N requests (a trace: its end; else 2000)")
    load.add_argument("--duration", type=float, metavar="S", help="no new requests after S seconds")
    load.add_argument("--warm-up", type=int, default=0, metavar="N", help="N requests first that do not count (0)")
    load.add_argument("--warm-rate", type=float, metavar="R", help="their rate, requests/s (the run's own)")
    load.add_argument("--seed", type=int, default=1, help="of everything that is left to chance (1)")
    trouble = parser.add_argument_group("trouble")
    trouble.add_argument(
        "--queue-threshold", type=_numbers, metavar="N,…", help="refuse when all nodes have N requests"
    )
    trouble.add_argument("--poll-interval", type=float, metavar="S", help="between two looks at a node's metrics (1)")
    trouble.add_argument("--poll-lag", type=float, metavar="MS", help="age of metrics when they arrive (0)")
    trouble.add_argument("--poll-loss", type=float, metavar="SHARE", help="polls that get no answer (0)")
    trouble.add_argument("--kv-lag", type=float, metavar="MS", help="delay of KV events (2)")
    trouble.add_argument("--kv-loss", type=float, metavar="SHARE", help="KV event batches that are lost (0)")
    trouble.add_argument(
        "--happen",
        action="append",
        default=[],
        metavar="'60 fail node-3'",
        help="fail, hang, restart, drain, provision",
    )
    add_scaling(parser)
    out = parser.add_argument_group("the report")
    out.add_argument("--json", type=Path, metavar="FILE", help="all numbers, as JSON")
    out.add_argument("--html", type=Path, metavar="FILE", help="a page with plots")
    out.add_argument("--quiet", action="store_true", help="no progress bar and no table")
    parser.set_defaults(run=run)


def add_scaling(parser: argparse.ArgumentParser) -> None:
    scaling = parser.add_argument_group("scaling")
    scaling.add_argument("--autoscale", action="store_true", help="let the fleet grow and shrink from --nodes")
    scaling.add_argument(
        "--scaler", action="append", metavar="S", help="repeat to compare: warmroute, threshold, hpa:target=0.7, fixed"
    )
    scaling.add_argument("--offers", type=Path, metavar="FILE", help="TOML with [[offers]] and [scaling]")
    scaling.add_argument("--min-nodes", type=int, metavar="N", help="nodes at least (1)")
    scaling.add_argument("--max-nodes", type=int, metavar="N", help="nodes at most (4 × --nodes, at least 8)")
    scaling.add_argument("--start", type=float, metavar="S", help="from the request to a node (120)")
    scaling.add_argument("--usd", type=float, metavar="X", help="a node's price an hour (0)")
    scaling.add_argument("--quota", type=int, metavar="N", help="nodes that can be had in all, said only when asked")
    scaling.add_argument("--ceiling", type=float, metavar="MS", help="time to first token that is too long (10,000)")


def run(args: argparse.Namespace) -> int:
    from warmroute.replay import BadPolicy
    from warmroute.replay.workloads import BadTrace, BadWorkload
    from warmroute.replay.world.fault_schedule import BadHappening

    try:
        setups = plan(args)
        runs = _play(setups, args)
    except (BadWorkload, BadTrace, BadPolicy, BadHappening) as error:
        raise ConfigError(str(error)) from None
    if args.json:
        args.json.write_text(as_json(runs), encoding="utf-8")
    if args.html:
        from warmroute.replay.report.page import page

        args.html.write_text(page(runs, _said(args)), encoding="utf-8")
    return 0


def as_json(runs: list[Run]) -> str:
    return json.dumps({"runs": runs}, ensure_ascii=False, indent=1) + "\n"


def plan(args: argparse.Namespace) -> list[Setup]:
    """A run for each load and policy."""
    from warmroute.config import Scaling
    from warmroute.replay import Setup, contender
    from warmroute.replay.workloads import choose
    from warmroute.replay.world.fault_schedule import parse

    workload = choose(args.workload, args.scale_rate)
    contenders = [contender(text) for text in args.policy or ("price", "round_robin")]
    conditions, nodes = _conditions(args), _nodes(args)
    return [
        Setup(
            workload=workload,
            nodes=nodes,
            contender=one,
            conditions=conditions,
            rate=rate,
            burst=args.burst,
            concurrency=None if concurrency is None else int(concurrency),
            limit=args.limit,
            duration_s=args.duration,
            warm_up=args.warm_up,
            warm_rate=args.warm_rate,
            queue_threshold=None if threshold is None else int(threshold),
            happenings=tuple(parse(line) for line in args.happen),
            day_s=args.day,
            autoscale=autoscale,
            ceiling_ms=args.ceiling or (Scaling().ttft_p99_ceiling_ms if scaler else None),
            scaler=scaler,
            fleet_usd_per_hour=fleet_usd,
        )
        for rate in args.rate or (None,)
        for concurrency in args.concurrency or (None,)
        for threshold in args.queue_threshold or (None,)
        for one in contenders
        for scaler, autoscale, fleet_usd in _scalings(args, nodes)
    ]


def _scalings(args: argparse.Namespace, nodes: tuple[NodeSpec, ...]) -> list[tuple[str, Autoscale | None, float]]:
    """Each way to scale, with its name, and what the fleet costs an hour where it stays as it is."""
    if not args.autoscale and not args.scaler:
        _refuse_without_scaling(args)
        return [("", None, 0.0)]
    from warmroute.replay import autoscale as asked
    from warmroute.replay.world.scaling import Autoscale

    table, offers = asked.read(args.offers) if args.offers else ({}, ())
    if not offers:
        like, said = nodes[0], {"usd_per_hour": args.usd, "start_s": args.start}
        offered = asked.OfferSaid(
            name=like.profile.name,
            profile=like.profile.name,
            island=like.island,
            quota=args.quota,
            **{key: value for key, value in said.items() if value is not None},
        )
        offers = (offered.offer(),)
    flags = {
        "min_nodes": args.min_nodes,
        "max_nodes": args.max_nodes if args.max_nodes is not None else _most(table, args.nodes),
        "ttft_p99_ceiling_ms": args.ceiling,
    }
    config = asked.scaling_of({**table, **{key: value for key, value in flags.items() if value is not None}})
    texts = args.scaler or (asked.OURS,)
    if args.nodes > config.max_nodes and any(text != asked.FIXED for text in texts):
        raise ConfigError(
            f"--nodes {args.nodes}: the fleet begins with more nodes than it may have "
            f"(--max-nodes {config.max_nodes}); begin with fewer, or allow more"
        )
    fleet_usd = len(nodes) * offers[0].offer.usd_per_hour  # as scaled fleets pay for those they begin with
    found: list[tuple[str, Autoscale | None, float]] = []
    for text in texts:
        if text == asked.FIXED:
            found.append((text, None, fleet_usd))
        else:
            making = asked.scaler(text)
            found.append((text, Autoscale(config=config, offers=offers, decider=making, warms=making is None), 0.0))
    return found


def _most(table: dict[str, Any], nodes: int) -> int | None:
    return None if "max_nodes" in table else max(8, 4 * nodes)


def _refuse_without_scaling(args: argparse.Namespace) -> None:
    """Flags that would count for nothing."""
    flags = ("offers", "min_nodes", "max_nodes", "start", "usd", "quota")
    given = ["--" + flag.replace("_", "-") for flag in flags if getattr(args, flag) is not None]
    if given:
        verb = "counts" if len(given) == 1 else "count"
        raise ConfigError(f"{', '.join(given)} {verb} only with --autoscale, or --scaler with a way to scale: add it")


def _conditions(args: argparse.Namespace) -> Conditions:
    import msgspec

    from warmroute.replay.world import Conditions, Island

    asked = {
        "poll_interval_s": args.poll_interval,
        "poll_lag_ms": args.poll_lag,
        "poll_loss": args.poll_loss,
        "kv_lag_ms": args.kv_lag,
        "kv_loss": args.kv_loss,
    }
    islands: dict[str, Island] = {}
    for text in args.island:
        name, equals, round_trip = text.partition("=")
        try:
            islands[name] = Island(float(round_trip)) if equals else Island()
        except ValueError:
            raise ConfigError(f"--island {text!r} is not like eu-west=80 (a round trip in ms)") from None
    given = {key: value for key, value in asked.items() if value is not None}
    return msgspec.structs.replace(Conditions(seed=args.seed, islands=islands), **given)


def _nodes(args: argparse.Namespace) -> tuple[NodeSpec, ...]:
    from warmroute.fake_engine.profiles import profile
    from warmroute.replay.world import NodeSpec

    if args.nodes < 1:
        raise ConfigError("--nodes: a fleet has one node at least")
    try:
        profiles = [profile(name) for name in args.profile or ("2xh100-32b",)]
        islands = [text.partition("=")[0] for text in args.island] or ["local"]
        return tuple(
            NodeSpec(
                name=f"node-{at}",
                profile=profiles[at % len(profiles)],
                island=islands[at % len(islands)],
                blocks=args.blocks,
                block_size=args.block_size,
                cpu_blocks=args.cpu_blocks,
            )
            for at in range(args.nodes)
        )
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _play(setups: list[Setup], args: argparse.Namespace) -> list[Run]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from warmroute.replay import replay
    from warmroute.replay.report.table import table

    runs: list[Run] = []
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=args.quiet,
    )
    with bar:
        for at, setup in enumerate(setups):
            task = bar.add_task(f"{at + 1}/{len(setups)} {_called(setup)}", total=setup.requests)
            runs.append(replay(setup, lambda ended, task=task: bar.update(task, completed=ended)))  # type: ignore[misc]
            bar.remove_task(task)
    if not args.quiet:
        console = Console()
        if not console.is_terminal:
            console = Console(width=220)
        console.print(table(runs, _said(args)))
    return runs


def _called(setup: Setup) -> str:
    load = f" at {setup.rate:g}/s" if setup.rate else f", {setup.concurrency} clients" if setup.concurrency else ""
    return setup.contender.text + load


def _said(args: argparse.Namespace) -> str:
    profiles = " and ".join(args.profile or ("2xh100-32b",))
    workload = " ".join([Path(args.workload[0]).name, *args.workload[1:]])
    return f"{workload} on {args.nodes} × {profiles}"


def _numbers(text: str) -> list[float]:
    numbers = [float(word) for word in text.split(",")]
    if not numbers or min(numbers) <= 0:
        raise argparse.ArgumentTypeError("numbers above 0, with commas between them")
    return numbers
