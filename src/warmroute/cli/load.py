"""warmroute load: sends a workload to an endpoint and measures the responses."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from typing import Any, get_args

from warmroute.cli.arguments import number, output_file, whole
from warmroute.cli.terminal import console, print_runs, progress_bar, write_json
from warmroute.config import ConfigError


def add_to(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "load", help="send a workload to an endpoint and measure it (same workloads as replay)"
    )
    parser.add_argument("workload", nargs="+", metavar="WORKLOAD", help="trace or generator, then key=value …")
    parser.add_argument("--url", default="http://127.0.0.1:8080", help="endpoint (default: http://127.0.0.1:8080)")
    parser.add_argument("--model", default="sim", help="model in the requests (default: sim)")
    parser.add_argument(
        "--form", choices=("chat", "completion", "tokens"), default="chat", help="form of the requests (default: chat)"
    )
    parser.add_argument(
        "--rate", type=number(above=0), metavar="R", help="requests per second (default: that of the workload)"
    )
    parser.add_argument(
        "--scale-rate", type=number(above=0), default=1.0, metavar="X", help="send a trace X times as fast (default: 1)"
    )
    parser.add_argument("--burst", type=whole(1), default=1, metavar="N", help="send N requests at once (default: 1)")
    parser.add_argument("--concurrency", type=whole(1, 100_000), metavar="N", help="closed loop with N clients")
    parser.add_argument("--limit", type=whole(1), metavar="N", help="stop after N requests")
    parser.add_argument("--duration", type=number(above=0), metavar="S", help="send no requests after S seconds")
    parser.add_argument(
        "--speed", type=number(above=0), default=1.0, help="--speed of the simulated engines (default: 1)"
    )
    parser.add_argument(
        "--timeout", type=number(above=0), default=600.0, metavar="S", help="timeout of a response (default: 600)"
    )
    parser.add_argument("--seed", type=whole(), default=1, help="seed of the workload (default: 1)")
    parser.add_argument("--key-env", metavar="NAME", help="environment variable with the API key")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write all results as JSON")
    parser.add_argument("--quiet", action="store_true", help="print no progress bar and no table")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from warmroute.demo.load_generator.load_run import LoadOptions, LoadRun
    from warmroute.replay.workloads.catalog import BadWorkload, parse_workload
    from warmroute.replay.workloads.prompt_text import Form
    from warmroute.replay.workloads.trace import BadTrace

    assert args.form in get_args(Form)
    try:
        workload = parse_workload(args.workload, args.scale_rate)
        limit = args.limit if args.limit or args.duration else workload.requests
        prompts = workload.arrivals(args.seed, args.rate, args.burst, limit)
        headers = {"Authorization": f"Bearer {os.environ[args.key_env]}"} if args.key_env else {}
        load = LoadOptions(
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
        with progress_bar(args.quiet) as bar:
            task = bar.add_task(f"{workload.name} to {args.url}", total=limit)
            drive = LoadRun(load, prompts, lambda ended: bar.update(task, completed=ended))
            measured = asyncio.run(drive.run())
    except (BadWorkload, BadTrace) as error:
        raise ConfigError(str(error)) from None
    except KeyError:
        raise ConfigError(f"--key-env: the environment variable {args.key_env} is not set") from None
    result = {
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
        write_json(args.json, {"runs": [result]})
    if not args.quiet:
        out = console()
        print_runs(out, [result], f"{workload.name} at {args.url}")
        errors = dict(measured["errors"])
        if measured["rejected"]:
            errors["status 429"] = measured["rejected"]
        for reason, count in errors.items():
            message = drive.error_messages.get(reason)
            line = f"{count} × {reason}" + (f": {message}" if message else "")
            out.print(line, markup=False, highlight=False, soft_wrap=True)
    if measured["requests"] and not measured["finished"]:
        print(f"warmroute: none of the {measured['requests']} requests to {args.url} succeeded", file=sys.stderr)
        return 1
    return 0
