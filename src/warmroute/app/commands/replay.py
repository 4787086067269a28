"""warmroute replay: replays a workload on a simulated fleet in virtual time, and compares policies."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from warmroute.app.commands import (
    add_warm_up_option,
    console,
    fraction,
    number,
    output_file,
    print_runs,
    progress_bar,
    several,
    whole,
    write_json,
)
from warmroute.config import ConfigError
from warmroute.config.nodes import Role

if TYPE_CHECKING:
    from warmroute.lab.run import Setup
    from warmroute.lab.simulated_node import Conditions, NodeSpec
    from warmroute.lab.simulated_scaling import ScalingSetup
    from warmroute.lab.summary import Measured, Run


ROLES: tuple[Role, ...] = ("mixed", "prefill", "decode")
STORE = "store"
"""Name of the KV store of `--kv-store`."""

EPILOG = """\
WORKLOAD is a trace in Mooncake's format (.jsonl or .jsonl.gz), a directory of captures, or a generator, followed by its
parameters as key=value (of a trace: model=NAME, id_tokens=N):
shared_system_prompts, multi_turn_chat, rag, few_shot, tool_agents, unique_batch, hot_prefix_storm, priority_mix,
mixed_lengths, llm_d.
Policies can have parameters: prefix_hash:load_factor=2. Policies of other routers: sglang, smg, llm_d,
llm_d_precise, llm_d_affinity, dynamo, dynamo_fcfs, dynamo_wspt, kubeai, aibrix. `oracle` is the
hit rate of one cache as large as the fleet's. See docs/lab/simulation.md.
"""


def add_to(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "replay",
        help="replay a workload on a simulated fleet and compare policies",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("workload", nargs="+", metavar="WORKLOAD", help="trace or generator, then key=value …")
    parser.add_argument(
        "--policy", action="append", metavar="P", help="policy; repeatable (default: price and round_robin)"
    )
    fleet = parser.add_argument_group("fleet")
    fleet.add_argument("--nodes", type=whole(1, 100_000), default=8, metavar="N", help="number of nodes (default: 8)")
    fleet.add_argument(
        "--profile",
        action="append",
        metavar="NAME",
        help="GPU and model; repeatable: nodes take the profiles in turn (default: 2xh100-32b)",
    )
    fleet.add_argument("--blocks", type=whole(1), metavar="N", help="KV blocks per node (default: from the profile)")
    fleet.add_argument(
        "--block-size", type=whole(1, 65_536), default=16, metavar="N", help="tokens per KV block (default: 16)"
    )
    fleet.add_argument(
        "--cpu-blocks", type=whole(0), default=0, metavar="N", help="KV blocks in each node's CPU tier (default: 0)"
    )
    fleet.add_argument(
        "--island",
        action="append",
        default=[],
        metavar="NAME=MS",
        help="island and its round trip; repeatable: nodes take the islands in turn",
    )
    fleet.add_argument(
        "--role",
        action="append",
        default=[],
        metavar="ROLE=N[:PROFILE]",
        help="role (prefill or decode) of the first N nodes, then of the next; repeatable (default: all are mixed)",
    )
    fleet.add_argument(
        "--kv-bandwidth", type=number(above=0), metavar="GB/S", help="of KV transfers from a prefill node (default: 10)"
    )
    fleet.add_argument(
        "--kv-store", type=whole(1), metavar="TOKENS", help="capacity of a KV store that all nodes share"
    )
    fleet.add_argument(
        "--kv-store-bandwidth", type=number(above=0), default=10.0, metavar="GB/S", help="of this store (default: 10)"
    )
    load = parser.add_argument_group("load")
    load.add_argument(
        "--rate",
        type=several(number(above=0)),
        metavar="R,…",
        help="requests per second, one run for each (default: of the workload)",
    )
    load.add_argument(
        "--scale-rate",
        type=number(above=0),
        default=1.0,
        metavar="X",
        help="replay a trace X times as fast (default: 1)",
    )
    load.add_argument("--day", type=number(above=0), metavar="S", help="vary the rate like a day that lasts S seconds")
    load.add_argument("--burst", type=whole(1), default=1, metavar="N", help="N requests arrive at once (default: 1)")
    load.add_argument(
        "--concurrency",
        type=several(whole(1, 1_000_000)),
        metavar="N,…",
        help="N clients that send one request after the other, a run for each",
    )
    load.add_argument(
        "--open-loop",
        action="store_true",
        help="send the turns of a trace at their times, answered or not (default: they wait for answers)",
    )
    load.add_argument(
        "--limit", type=whole(1), metavar="N", help="stop after N requests (default: the whole trace, or 2000)"
    )
    load.add_argument("--duration", type=number(above=0), metavar="S", help="no new requests after S seconds")
    add_warm_up_option(load)
    load.add_argument(
        "--warm-rate",
        type=number(above=0),
        metavar="R",
        help="requests per second of the warm-up (default: of the run)",
    )
    load.add_argument(
        "--tenants",
        type=several(whole(0, 10_000)),
        metavar="N,…",
        help="N tenants send the requests in turn and share no knowledge of caches, a run for each; 0: all share",
    )
    load.add_argument("--seed", type=whole(), default=1, help="seed of all random choices (default: 1)")
    faults = parser.add_argument_group("delays and faults")
    faults.add_argument(
        "--queue-threshold",
        type=several(whole(1)),
        metavar="N,…",
        help="reject requests when all nodes have N requests",
    )
    faults.add_argument(
        "--poll-interval", type=number(above=0), metavar="S", help="time between two metrics polls (default: 1)"
    )
    faults.add_argument(
        "--poll-lag", type=number(0.0), metavar="MS", help="age of the metrics when they arrive (default: 0)"
    )
    faults.add_argument("--poll-loss", type=fraction, metavar="FRACTION", help="polls that fail (default: 0)")
    faults.add_argument("--kv-lag", type=number(0.0), metavar="MS", help="delay of KV events (default: 2)")
    faults.add_argument(
        "--kv-loss", type=fraction, metavar="FRACTION", help="KV event batches that are lost (default: 0)"
    )
    faults.add_argument(
        "--fault",
        action="append",
        default=[],
        metavar="'60 fail node-3'",
        help="fail, hang, restart, drain or provision a node at a time in seconds; repeatable",
    )
    _add_replica_flags(parser)
    _add_scaling_flags(parser)
    report = parser.add_argument_group("report")
    report.add_argument("--json", type=output_file, metavar="FILE", help="write all results as JSON")
    report.add_argument("--html", type=output_file, metavar="FILE", help="write a page with plots")
    report.add_argument("--quiet", action="store_true", help="print no progress bar and no table")
    parser.set_defaults(run=run)


def _add_replica_flags(parser: argparse.ArgumentParser) -> None:
    replicas = parser.add_argument_group("several routers")
    replicas.add_argument(
        "--replicas", type=whole(1, 64), default=1, metavar="R", help="number of routers (default: 1)"
    )
    replicas.add_argument(
        "--sync-lag", type=number(0.0), metavar="MS", help="delay of messages between routers (default: 20)"
    )
    replicas.add_argument(
        "--sync-loss", type=fraction, metavar="FRACTION", help="messages between routers that are lost (default: 0)"
    )
    replicas.add_argument(
        "--partition",
        action="append",
        default=[],
        metavar="'FROM TO'",
        help="time in seconds in which no message between routers arrives; repeatable",
    )
    replicas.add_argument("--no-sync", action="store_true", help="routers tell each other nothing")


def _add_scaling_flags(parser: argparse.ArgumentParser) -> None:
    scaling = parser.add_argument_group("scaling")
    scaling.add_argument("--autoscale", action="store_true", help="scale the fleet, starting with --nodes")
    scaling.add_argument(
        "--scaler",
        action="append",
        metavar="S",
        help="warmroute, threshold, hpa:target=0.7 or fixed; repeatable (default: warmroute)",
    )
    scaling.add_argument("--offers", type=Path, metavar="FILE", help="TOML file with [[offers]] and [scaling]")
    scaling.add_argument("--min-nodes", type=whole(0), metavar="N", help="minimum number of nodes (default: 1)")
    scaling.add_argument(
        "--max-nodes", type=whole(1), metavar="N", help="maximum number of nodes (default: 4 × --nodes, at least 8)"
    )
    scaling.add_argument("--start", type=number(0.0), metavar="S", help="time to start a node (default: 120)")
    scaling.add_argument("--usd", type=number(0.0), metavar="X", help="USD per hour of a node (default: 0)")
    scaling.add_argument(
        "--quota", type=whole(0), metavar="N", help="number of nodes at which the simulated cloud refuses more"
    )
    scaling.add_argument(
        "--ceiling", type=number(above=0), metavar="MS", help="maximum time to first token (default: 10000)"
    )


def run(args: argparse.Namespace) -> int:
    from warmroute.lab.replay_setup import BadPolicy
    from warmroute.lab.workloads import BadWorkload
    from warmroute.lab.workloads.trace import BadTrace
    from warmroute.lab.world import BadFault

    try:
        setups = create_setups(args)
        measured = _measured(setups[0], args)
        runs = _replay_all(setups, args, measured)
    except (BadWorkload, BadTrace, BadPolicy, BadFault) as error:
        raise ConfigError(str(error)) from None
    past = measured.run(setups[0].workload.name) if measured is not None else None
    if args.json:
        write_json(args.json, {"runs": runs, **({"measured": past} if past is not None else {})})
    if args.html:
        from warmroute.lab.html_report import page

        args.html.write_text(page(runs, _title(args), past), encoding="utf-8")
    return 0


def create_setups(args: argparse.Namespace) -> list[Setup]:
    """Return the setup of each run: one for each load, policy and scaler."""
    import msgspec

    from warmroute.config import Scaling
    from warmroute.lab.replay_setup import parse_policy
    from warmroute.lab.run import Setup
    from warmroute.lab.workloads import parse_workload
    from warmroute.lab.world import parse_fault

    workload = parse_workload(args.workload, args.scale_rate)
    policies = [parse_policy(text) for text in args.policy or ("price", "round_robin")]
    conditions, nodes = _conditions(args), _nodes(args)
    tenants = [None if count is None else int(count) for count in args.tenants or (None,)]
    if conditions.replicas > 1 and (args.autoscale or args.scaler):
        raise ConfigError("--replicas: not together with --autoscale or --scaler")
    if args.warm_up.seconds and args.concurrency:
        raise ConfigError("--warm-up: clients of --concurrency have no arrival times: give a number of requests")
    if args.warm_up.seconds and args.warm_rate:
        raise ConfigError("--warm-rate: requests of a warm-up in seconds keep their times")
    return [
        Setup(
            workload=workload,
            nodes=nodes,
            policy=policy,
            conditions=msgspec.structs.replace(conditions, tenants=count),
            rate=rate,
            burst=args.burst,
            concurrency=None if concurrency is None else int(concurrency),
            open_loop=args.open_loop,
            limit=args.limit,
            duration_s=args.duration,
            warm_up=args.warm_up.requests,
            warm_up_s=args.warm_up.seconds,
            warm_rate=args.warm_rate,
            queue_threshold=None if threshold is None else int(threshold),
            faults=tuple(parse_fault(line) for line in args.fault),
            day_s=args.day,
            autoscale=autoscale,
            ceiling_ms=args.ceiling or (Scaling().max_ttft_p99_ms if scaler else None),
            scaler=scaler,
            fleet_usd_per_hour=fleet_usd,
        )
        for rate in args.rate or (None,)
        for concurrency in args.concurrency or (None,)
        for threshold in args.queue_threshold or (None,)
        for count in tenants
        for policy in policies
        for scaler, autoscale, fleet_usd in _scalers(args, nodes)
    ]


def _scalers(args: argparse.Namespace, nodes: tuple[NodeSpec, ...]) -> list[tuple[str, ScalingSetup | None, float]]:
    """Return the name and setup of each scaler. A fixed fleet has no setup, but a cost per hour."""
    if not args.autoscale and not args.scaler:
        _reject_scaling_flags(args)
        return [("", None, 0.0)]
    from warmroute.lab import replay_setup
    from warmroute.lab.planning.search import SimulatedPlanning
    from warmroute.lab.simulated_scaling import ScalingSetup

    table, offers = replay_setup.read(args.offers) if args.offers else ({}, ())
    if not offers:
        first = nodes[0]
        values = {"usd_per_hour": args.usd, "start_s": args.start}
        offer = replay_setup.OfferTable(
            name=first.profile.name, profile=first.profile.name, island=first.island, quota=args.quota, **_given(values)
        )
        offers = (offer.offer(),)
    default_max = None if "max_nodes" in table else max(8, 4 * args.nodes)
    flags = {
        "min_nodes": args.min_nodes,
        "max_nodes": args.max_nodes if args.max_nodes is not None else default_max,
        "max_ttft_p99_ms": args.ceiling,
    }
    config = replay_setup.scaling_of({**table, **_given(flags)})
    names = args.scaler or (replay_setup.OURS,)
    if args.nodes > config.max_nodes and any(name != replay_setup.FIXED for name in names):
        raise ConfigError(
            f"--nodes {args.nodes} is above --max-nodes {config.max_nodes}: start with fewer nodes, or allow more"
        )
    fleet_usd = len(nodes) * offers[0].offer.usd_per_hour
    found: list[tuple[str, ScalingSetup | None, float]] = []
    for name in names:
        if name == replay_setup.FIXED:
            found.append((name, None, fleet_usd))
        else:
            scaler = replay_setup.parse_scaler(name)
            setup = ScalingSetup(
                config=config,
                offers=offers,
                decision_maker=scaler,
                planning=SimulatedPlanning if name == replay_setup.OURS else None,
                moves_prefixes=scaler is None,
            )
            found.append((name, setup, 0.0))
    return found


def _given(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


def _reject_scaling_flags(args: argparse.Namespace) -> None:
    """Raise ConfigError for flags that have no effect without scaling."""
    flags = ("offers", "min_nodes", "max_nodes", "start", "usd", "quota")
    given = ["--" + flag.replace("_", "-") for flag in flags if getattr(args, flag) is not None]
    if given:
        raise ConfigError(f"{', '.join(given)}: only with --autoscale or --scaler")


def _conditions(args: argparse.Namespace) -> Conditions:
    import msgspec

    from warmroute.lab.engine.blocks import SharedStoreConfig
    from warmroute.lab.simulated_node import Conditions, Island

    values = {
        "poll_interval_s": args.poll_interval,
        "poll_lag_ms": args.poll_lag,
        "poll_loss": args.poll_loss,
        "kv_lag_ms": args.kv_lag,
        "kv_loss": args.kv_loss,
        "kv_gigabytes_per_s": args.kv_bandwidth,
        "kv_stores": (SharedStoreConfig(STORE, args.kv_store, args.kv_store_bandwidth),) if args.kv_store else None,
        "replicas": args.replicas,
        "sync_lag_ms": args.sync_lag,
        "sync_loss": args.sync_loss,
        "shares": not args.no_sync,
        "partitions": tuple(_partition(text) for text in args.partition),
    }
    islands: dict[str, Island] = {}
    for text in args.island:
        name, equals, round_trip = text.partition("=")
        try:
            islands[name] = Island(number(0.0)(round_trip)) if equals else Island()
        except argparse.ArgumentTypeError:
            raise ConfigError(f"--island {text!r}: expected NAME=MS, such as eu-west=80") from None
    return msgspec.structs.replace(Conditions(seed=args.seed, islands=islands), **_given(values))


def _partition(text: str) -> tuple[float, float]:
    try:
        begin_s, end_s = map(number(0.0), text.split())
    except (ValueError, argparse.ArgumentTypeError):
        raise ConfigError(f"--partition {text!r}: expected two times in seconds, such as '60 90'") from None
    return begin_s, end_s


def _nodes(args: argparse.Namespace) -> tuple[NodeSpec, ...]:
    from warmroute.lab.engine.timing import profile
    from warmroute.lab.simulated_node import NodeSpec

    try:
        profiles = [profile(name) for name in args.profile or ("2xh100-32b",)]
        islands = [text.partition("=")[0] for text in args.island] or ["local"]
        roles = _roles(args.role, args.nodes)
        return tuple(
            NodeSpec(
                name=f"node-{at}",
                profile=profile(roles[at][1]) if roles[at][1] else profiles[at % len(profiles)],
                role=roles[at][0],
                kv_connector=bool(args.role) and roles[at][0] == "mixed",
                island=islands[at % len(islands)],
                blocks=args.blocks,
                block_size=args.block_size,
                cpu_blocks=args.cpu_blocks,
                kv_store=STORE if args.kv_store else "",
            )
            for at in range(args.nodes)
        )
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _roles(texts: list[str], nodes: int) -> list[tuple[Role, str]]:
    """Return the role of each node, and its profile if the role has one of its own."""
    found: list[tuple[Role, str]] = []
    for text in texts:
        role, _, rest = text.partition("=")
        count, _, profile_name = rest.partition(":")
        known: Role | None = next((one for one in ROLES if one == role), None)
        if known is None or not count.isdigit():
            raise ConfigError(f"--role {text!r}: expected ROLE=N, such as prefill=2 or decode=6:h200-8b")
        found += [(known, profile_name)] * int(count)
    if len(found) > nodes:
        raise ConfigError(f"--role: {len(found)} nodes have a role, but there are {nodes} (--nodes)")
    return found + [("mixed", "")] * (nodes - len(found))


def _measured(setup: Setup, args: argparse.Namespace) -> Measured | None:
    """Return what a capture measured, if the replay has its load."""
    from warmroute.lab.summary import measure
    from warmroute.lab.workloads import Trace

    changed = args.rate or args.concurrency or args.day or args.scale_rate != 1.0
    if not isinstance(setup.workload, Trace) or changed:
        return None
    return measure(setup.workload, setup.warm_up, args.limit, args.duration, setup.warm_up_s)


def _replay_all(setups: list[Setup], args: argparse.Namespace, measured: Measured | None) -> list[Run]:
    from warmroute.lab.run import replay

    runs: list[Run] = []
    with progress_bar(args.quiet) as bar:
        for at, setup in enumerate(setups):
            task = bar.add_task(f"{at + 1}/{len(setups)} {_run_name(setup)}", total=setup.requests)
            runs.append(replay(setup, lambda ended, task=task: bar.update(task, completed=ended)))  # type: ignore[misc]
            bar.remove_task(task)
    if not args.quiet:
        from warmroute.lab.report import loop_name

        past = measured.run(setups[0].workload.name) if measured is not None else None
        out = console()
        print_runs(out, runs if past is None else [past, *runs], f"{_title(args)}, {loop_name(runs)}")
        for note in measured.notes() if measured is not None else ():
            out.print(note, highlight=False)
    return runs


def _run_name(setup: Setup) -> str:
    load = f" at {setup.rate:g}/s" if setup.rate else f", {setup.concurrency} clients" if setup.concurrency else ""
    return setup.policy.text + load


def _title(args: argparse.Namespace) -> str:
    profiles = " and ".join(args.profile or ("2xh100-32b",))
    workload = " ".join([Path(args.workload[0]).name, *args.workload[1:]])
    return f"{workload} on {args.nodes} × {profiles}"
