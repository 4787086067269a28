"""Hit rate and time to first token behind `serve --workers N`, compared with one process, in real time:

    python bench/worker_hits.py [--workers 1 2] [--workload tool_agents] [--rate 6] [--requests 500] [--rounds 3]

Four simulated engines, with KV events and without them. Rounds alternate between the numbers of workers. Each run
starts fresh engines and a fresh router, so that all of them begin with empty caches. The load generator opens a
connection for each request, so a conversation's turns reach any worker.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import sys
import tempfile
from pathlib import Path
from statistics import fmean
from typing import Any

from record import Report, add_record_option, load_average
from workers import HOST, start, until_ready

MODULE = ("-m", "warmroute")
ENGINES = 4


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


async def measure(workers: int, events: bool, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return the result of one run of the load generator."""
    ports = [free_port() for _ in range(2 + 2 * ENGINES)]
    port, admin_port, *engine_ports = ports
    processes: list[asyncio.subprocess.Process] = []
    config = ""
    try:
        for at in range(ENGINES):
            http, kv = engine_ports[2 * at : 2 * at + 2]
            more = ("--events-port", str(kv)) if events else ()
            processes.append(await start(*MODULE, "engine", "--port", str(http), "--profile", args.profile, *more))
            config += f'[[nodes]]\nurl = "http://{HOST}:{http}"\n'
            config += f'kv_events = "tcp://{HOST}:{kv}"\n' if events else ""
        for at in range(ENGINES):
            await until_ready(f"http://{HOST}:{engine_ports[2 * at]}/health")
        file = folder / "router.toml"
        file.write_text(config)
        flags = ("--config", str(file), "--workers", str(workers), "--port", str(port), "--admin-port", str(admin_port))
        processes.append(await start(*MODULE, "serve", *flags))
        await until_ready(f"http://{HOST}:{port}/ready")
        await asyncio.sleep(2.0)
        result = folder / "result.json"
        load = await start(
            *MODULE, "load", "--url", f"http://{HOST}:{port}", "--rate", str(args.rate), "--limit", str(args.requests),
            "--quiet", "--json", str(result), args.workload,
        )  # fmt: skip
        await load.wait()
        found: dict[str, Any] = json.loads(result.read_text())["runs"][0]
        return found
    finally:
        for process in reversed(processes):
            process.terminate()
            await process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--workload", default="tool_agents")
    parser.add_argument("--profile", default="l4-1.5b")
    parser.add_argument("--rate", type=float, default=6.0)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=3)
    add_record_option(parser)
    args = parser.parse_args()
    report = Report()
    report.table(
        "worker_hits", "KV events", "workers", "hit rate", "TTFT p50 ms", "TTFT p90 ms", "TTFT mean ms", "failed"
    )
    with tempfile.TemporaryDirectory() as folder:
        for events in (True, False):
            runs: dict[int, list[dict[str, Any]]] = {workers: [] for workers in args.workers}
            for _ in range(args.rounds):
                for workers, found in runs.items():
                    found.append(asyncio.run(measure(workers, events, args, Path(folder))))
                    print(workers, events, found[-1]["hit_rate"], found[-1]["ttft_ms"], file=sys.stderr)
            for workers, found in runs.items():
                ttft = [[run["ttft_ms"][key] for run in found] for key in ("p50", "p90", "mean")]
                report.row(
                    "yes" if events else "no", workers, f"{fmean(run['hit_rate'] for run in found):.3f}",
                    *(f"{fmean(one):.0f}" for one in ttft), sum(run["requests"] - run["finished"] for run in found),
                )  # fmt: skip
    report.value("load_average", load_average())
    report.record(args.record)


if __name__ == "__main__":
    main()
