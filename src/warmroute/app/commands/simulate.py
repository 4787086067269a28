"""warmroute engine, load and demo: simulated engines, and load for an endpoint."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from pathlib import Path
from typing import Any, get_args

from warmroute.app.commands import console, number, output_file, port, print_runs, progress_bar, whole, write_json
from warmroute.config import ConfigError

# warmroute engine: runs a simulated engine with vLLM's API and realistic timing.


def add_engine(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser("engine", help="run a simulated vLLM engine, without a GPU")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument("--port", type=port, default=8000, help="HTTP port, 0 for a free one (default: 8000)")
    parser.add_argument("--profile", default="l4-1.5b", help="GPU and model, such as 2xh100-32b (default: l4-1.5b)")
    parser.add_argument("--blocks", type=whole(1), help="number of KV blocks (default: from the profile)")
    parser.add_argument("--block-size", type=whole(1, 65_536), default=16, help="tokens per KV block (default: 16)")
    parser.add_argument("--cpu-blocks", type=whole(0), default=0, help="KV blocks in a CPU tier (default: 0)")
    parser.add_argument("--max-num-seqs", type=whole(1), help="maximum requests per batch (default: from the profile)")
    parser.add_argument(
        "--max-num-batched-tokens", type=whole(1), help="maximum tokens per step (default: from the profile)"
    )
    parser.add_argument(
        "--max-model-len", type=whole(1), help="maximum prompt and output tokens together (default: 32768)"
    )
    parser.add_argument(
        "--scheduling-policy",
        choices=("fcfs", "priority"),
        default="fcfs",
        help="order of waiting requests (default: fcfs)",
    )
    parser.add_argument("--events-port", type=port, help="port for KV events, 0 for a free one (default: no events)")
    parser.add_argument(
        "--replay-port", type=port, help="port for replayed KV events, 0 for a free one (default: none)"
    )
    parser.add_argument("--events-topic", help="topic of the KV events (default: kv@HOST:PORT@MODEL)")
    parser.add_argument("--model", default="sim", help="name of the served model (default: sim)")
    parser.add_argument("--lora", action="append", default=[], metavar="NAME", help="LoRA adapter to serve; repeatable")
    parser.add_argument("--max-loras", type=whole(1), default=1, help="maximum adapters per batch (default: 1)")
    parser.add_argument(
        "--data-parallel-size", type=whole(1, 256), default=1, metavar="N", help="ranks with a cache each (default: 1)"
    )
    parser.add_argument(
        "--speed", type=number(above=0), default=1.0, help="speed; 2 is twice as fast as real (default: 1)"
    )
    parser.add_argument(
        "--answer-tokens", type=whole(1), default=128, help="mean output tokens without max_tokens (default: 128)"
    )
    parser.add_argument(
        "--tokenizer",
        type=Path,
        metavar="PATH",
        help="tokenizer.json of a model, or its directory (default: a simulated tokenizer)",
    )
    parser.add_argument(
        "--role",
        choices=("mixed", "prefill", "decode"),
        help="transfer KV cache from and to other engines, as vLLM with a KV connector (default: no transfers)",
    )
    parser.add_argument(
        "--kv-bandwidth",
        type=number(above=0),
        default=10.0,
        metavar="GB/S",
        help="bandwidth of KV transfers, shared by all of them (default: 10)",
    )
    parser.add_argument("--seed", type=whole(), default=0, help="seed of outputs and faults (default: 0)")
    parser.set_defaults(run=run_engine)


def run_engine(args: argparse.Namespace) -> int:
    import asyncio

    import uvloop

    from warmroute.app import log as logs
    from warmroute.config import ConfigError, Log
    from warmroute.lab.engine.server import EngineServer, ServerConfig
    from warmroute.lab.engine.timing import profile
    from warmroute.lab.engine.tokenizers import FakeTokenizer, ModelTokenizer
    from warmroute.lab.engine.values import EngineConfig

    logs.set_up(Log())
    try:
        chosen = profile(args.profile)
        blocks = args.blocks or chosen.num_blocks(args.block_size)
        sequences = args.max_num_seqs or chosen.max_num_seqs
        engine = EngineConfig(
            num_blocks=blocks,
            block_size=args.block_size,
            max_num_batched_tokens=args.max_num_batched_tokens or max(sequences, chosen.max_num_batched_tokens),
            max_num_seqs=sequences,
            max_model_len=args.max_model_len or 32_768,
            by_priority=args.scheduling_policy == "priority",
            max_loras=args.max_loras if args.lora else 0,
            cpu_blocks=args.cpu_blocks,
            every_token=True,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from None
    config = ServerConfig(
        engine=engine,
        timing=chosen.timing,
        profile=chosen.name,
        tokenizer=ModelTokenizer(args.tokenizer) if args.tokenizer else FakeTokenizer(),
        host=args.host,
        port=args.port,
        events_port=args.events_port,
        replay_port=args.replay_port,
        topic=args.events_topic,
        model=args.model,
        loras=tuple(args.lora),
        ranks=args.data_parallel_size,
        speed=args.speed,
        seed=args.seed,
        mean_output_tokens=args.answer_tokens,
        kv_connector=args.role is not None,
        kv_bytes_per_token=chosen.kv_bytes_per_token,
        kv_gigabytes_per_s=args.kv_bandwidth,
    )

    async def serve() -> None:
        await EngineServer(config).serve_until_signal()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve())
    return 0


# warmroute load: sends a workload to an endpoint and measures the responses.


def add_load(commands: Any) -> None:
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
    parser.set_defaults(run=run_load)


def run_load(args: argparse.Namespace) -> int:
    from warmroute.lab.load import LoadOptions, LoadRun
    from warmroute.lab.workloads import BadWorkload, parse_workload
    from warmroute.lab.workloads.trace import BadTrace
    from warmroute.lab.workloads.workload_prompt import Form

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


# warmroute demo: simulated engines behind the router, with live output.


def add_demo(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser("demo", help="show the router at work, without a GPU")
    parser.add_argument("--port", type=port, help="port of the router (default: 8080, or the next free port)")
    parser.add_argument(
        "--only",
        choices=("compare", "scale"),
        help="run one part: round robin against price, or autoscaling (default: both)",
    )
    parser.add_argument(
        "--speed",
        type=number(above=0),
        default=1.0,
        help="speed of the compared engines; 2 is twice as fast (default: 1)",
    )
    parser.add_argument("--exit", action="store_true", help="exit after the last part instead of continuing to serve")
    parser.set_defaults(run=run_demo)


def run_demo(args: argparse.Namespace) -> int:
    from warmroute.config import ConfigError
    from warmroute.lab.demo.demo_run import DemoOptions, run_demo

    if args.only == "scale" and args.speed != 1.0:
        raise ConfigError("--speed applies to the comparison; it cannot be used with --only scale")
    options = DemoOptions(port=args.port, speed=args.speed, exit=args.exit, only=args.only)
    return run_demo(options, console())
