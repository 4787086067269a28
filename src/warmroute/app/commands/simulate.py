"""warmroute engine: runs a simulated engine with vLLM's API and realistic timing."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from warmroute.cli.arguments import number, port, whole


def add_to(commands: Any) -> None:
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
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    import asyncio

    import uvloop

    from warmroute.config import ConfigError, Log
    from warmroute.fake_engine.core import EngineConfig
    from warmroute.fake_engine.profiles import profile
    from warmroute.fake_engine.server.engine_server import EngineServer, ServerConfig
    from warmroute.fake_engine.server.fake_tokenizer import FakeTokenizer
    from warmroute.fake_engine.server.model_tokenizer import ModelTokenizer
    from warmroute.telemetry import log as logs

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
