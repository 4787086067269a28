"""warmroute load: a workload sent to a real endpoint, measured as its clients see it."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from pathlib import Path
from typing import Any, get_args

from warmroute.cli.replay import as_json
from warmroute.config import ConfigError


def add_to(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "load", help="send a workload to an endpoint and measure it (the same workloads as replay)"
    )
    parser.add_argument("workload", nargs="+", metavar="WORKLOAD", help="a trace or a generator, then key=value …")
    parser.add_argument("--url", default="http://127.0.0.1:8080", help="the endpoint (http://127.0.0.1:8080)")
    parser.add_argument("--model", default="sim", help="the model to ask for (sim)")
    parser.add_argument(
        "--form", choices=("chat", "completion", "tokens"), default="chat", help="of the requests (chat)"
    )
    parser.add_argument("--rate", type=float, metavar="R", help="requests/s (the workload's own)")
    parser.add_argument("--scale-rate", type=float, default=1.0, metavar="X", help="runs a trace X times as fast (1)")
    parser.add_argument("--burst", type=int, default=1, metavar="N", help="requests arrive N at once")
    parser.add_argument("--concurrency", type=int, metavar="N", help="closed loop with N clients")
    parser.add_argument("--limit", type=int, metavar="N", help="stop after N requests")
    parser.add_argument("--duration", type=float, metavar="S", help="no new requests after S seconds")
    parser.add_argument("--speed", type=float, default=1.0, help="how many times faster than life the engines run (1)")
    parser.add_argument("--timeout", type=float, default=600.0, metavar="S", help="for a whole answer (600)")
    parser.add_argument("--seed", type=int, default=1, help="of the workload (1)")
    parser.add_argument("--key-env", metavar="NAME", help="environment variable with the API key")
    parser.add_argument("--json", type=Path, metavar="FILE", help="all numbers, as JSON")
    parser.add_argument("--quiet", action="store_true", help="no progress bar and no table")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.progress import Progress

    from warmroute.demo.load_generator.bodies import Form
    from warmroute.demo.load_generator.drive import Drive, Load
    from warmroute.replay.report.table import table
    from warmroute.replay.workloads import BadTrace, BadWorkload, choose

    assert args.form in get_args(Form)
    try:
        workload = choose(args.workload, args.scale_rate)
        limit = args.limit if args.limit or args.duration else workload.requests
        prompts = workload.arrive(args.seed, args.rate, args.burst, limit)
        headers = {"Authorization": f"Bearer {os.environ[args.key_env]}"} if args.key_env else {}
        load = Load(
            url=args.url,
            model=args.model,
            form=args.form,
            concurrency=args.concurrency,
            limit=limit,
            duration_s=args.duration,
            speed=args.speed,
            timeout_s=args.timeout,
            headers=headers,
        )
        with Progress(console=Console(stderr=True), transient=True, disable=args.quiet) as bar:
            task = bar.add_task(f"{workload.name} to {args.url}", total=limit)
            drive = Drive(load, prompts, lambda ended: bar.update(task, completed=ended))
            measured = asyncio.run(drive.run())
    except (BadWorkload, BadTrace) as error:
        raise ConfigError(str(error)) from None
    except KeyError:
        raise ConfigError(f"--key-env: the environment has no {args.key_env}") from None
    told = {
        "policy": "live",
        "workload": workload.name,
        "url": args.url,
        "rate": args.rate,
        "concurrency": args.concurrency,
        "queue_threshold": None,
        "seed": args.seed,
        **measured,
    }
    if args.json:
        args.json.write_text(as_json([told]), encoding="utf-8")
    if not args.quiet:
        console = Console()
        (console if console.is_terminal else Console(width=220)).print(table([told], f"{workload.name} at {args.url}"))
        errors = dict(measured["errors"])
        if measured["rejected"]:
            errors["status 429"] = measured["rejected"]
        for reason, count in errors.items():
            said = drive.said.get(reason)
            console.print(
                f"{count} × {reason}" + (f": {said}" if said else ""), markup=False, highlight=False, soft_wrap=True
            )
    if measured["requests"] and not measured["finished"]:
        print(f"warmroute: none of {measured['requests']} requests to {args.url} was answered", file=sys.stderr)
        return 1
    return 0
