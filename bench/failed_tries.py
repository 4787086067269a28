"""The CPU time of a try that fails, in this code and in another build, side by side.

    python bench/failed_tries.py --base BUILD --this BUILD [--pairs 40] [--split]

A BUILD is a directory that contains the package `warmroute` with its kernel: the `src` of a checkout (interpreted), or
its build/compiled. Every request fails on each of four engines, with an error as vLLM sends it; with `--split` its body
comes after its head. No breaker opens. Both routers run at the same time, pinned to one core. A pair is the same load
on one, then on the other, in random order. The table shows the median of each and of the pairs' ratios (this / base),
and the ratio of the least values, which a busy machine disturbs less. `lines_per_s_and_node`: what this code logs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from record import Report, add_record_option, load_average

ROUTER_CORE, OTHER_CORE = 0, 1
NODES = 4
PORTS = {"base": 18181, "this": 18182}
CONNECTIONS = 16
ERROR = json.dumps(
    {"error": {"message": "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB of "
               "which 1.19 GiB is free.", "type": "InternalServerError", "param": None, "code": 500}}
).encode()  # fmt: skip
HEAD = b"HTTP/1.1 500 X\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(ERROR)
MODELS = b'{"data":[{"id":"m"}]}'
REQUEST = b'{"model":"m","messages":[{"role":"user","content":"hello"}],"max_tokens":4}'


class Engine(asyncio.Protocol):
    """Answers each POST with an error, and whatever else with the list of its models."""

    tries = 0
    split = False

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._received = b""

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, end, rest = self._received.partition(b"\r\n\r\n")
        if not end:
            return
        if head.startswith(b"POST /v1/chat"):
            if len(rest) < len(REQUEST):
                return
            Engine.tries += 1
            if Engine.split:
                self._transport.write(HEAD)
                asyncio.get_running_loop().call_later(0.002, self._transport.write, ERROR)
            else:
                self._transport.write(HEAD + ERROR)
        else:
            body = MODELS if b"/v1/models" in head else b""
            self._transport.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        self._received = b""


async def run(args: argparse.Namespace) -> Report:
    loop = asyncio.get_running_loop()
    Engine.split = args.split
    servers = [await loop.create_server(Engine, "127.0.0.1", 0) for _ in range(NODES)]
    nodes = [server.sockets[0].getsockname()[1] for server in servers]
    report, chance = Report(), random.Random(1)
    ratios: list[float] = []
    cpu: dict[str, list[float]] = {"base": [], "this": []}
    tries = lines = seconds = 0.0
    with tempfile.TemporaryDirectory() as folder:
        routers = {
            name: start(build.resolve(), PORTS[name], Path(folder), nodes)
            for name, build in (("base", args.base), ("this", args.this))
        }
        try:
            for name in routers:
                await ready(PORTS[name])
                await load(PORTS[name], 1.0)
            for _ in range(args.pairs):
                took: dict[str, float] = {}
                for name in chance.sample(list(routers), 2):
                    before_s, before = cpu_s(routers[name].pid), Engine.tries
                    logged, began_s = log_lines(Path(folder), name), time.monotonic()
                    await load(PORTS[name], args.seconds)
                    took[name] = (cpu_s(routers[name].pid) - before_s) / max(1, Engine.tries - before) * 1e6
                    cpu[name].append(took[name])
                    if name == "this":
                        tries += Engine.tries - before
                        lines += log_lines(Path(folder), name) - logged
                        seconds += time.monotonic() - began_s
                ratios.append(took["this"] / took["base"])
                print(f"{took['base']:.0f} {took['this']:.0f} µs, ratio {ratios[-1]:.3f}", file=sys.stderr)
        finally:
            for router in routers.values():
                router.send_signal(signal.SIGTERM)
            for router in routers.values():
                router.wait(30)
    for server in servers:
        server.close()
    report.table("failed_tries", "µs of CPU for each failed try", "base", "this", "this / base", "of the least")
    medians = [f"{statistics.median(cpu[name]):.0f}" for name in cpu]
    report.row("the body comes after the head" if args.split else "head and body together", *medians,
               f"{statistics.median(ratios):.3f}", f"{min(cpu['this']) / min(cpu['base']):.3f}")  # fmt: skip
    report.value("tries_per_s", f"{tries / seconds:.0f}")
    report.value("lines_per_s_and_node", f"{lines / seconds / NODES:.2f}")
    report.value("load", load_average())
    return report


def start(build: Path, port: int, folder: Path, nodes: list[int]) -> subprocess.Popen[bytes]:
    config = folder / f"{port}.toml"
    config.write_text(
        "[health]\nconsecutive_failures = 1_000_000_000\n[outlier_detection]\nfailure_ratio = 0.0\nslow_factor = 0.0\n"
        '[routing]\npolicy = "price"\n'
    )
    name = next(one for one, known in PORTS.items() if known == port)
    urls = [word for node in nodes for word in ("--node", f"http://127.0.0.1:{node}")]
    command = [sys.executable, "-m", "warmroute", "serve", "--port", str(port), "--admin-port", "0"]
    return subprocess.Popen(
        ["taskset", "-c", str(ROUTER_CORE), *command, "--config", str(config), *urls],
        env=os.environ | {"PYTHONPATH": str(build), "WARMROUTE_EXPERIMENT": "1"}, stdout=subprocess.DEVNULL,
        stderr=(folder / f"{name}.log").open("wb"),
    )  # fmt: skip


async def ready(port: int) -> None:
    for _ in range(600):
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /ready HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            answer = await reader.read()
            writer.close()
            if answer.startswith(b"HTTP/1.1 200"):
                return
        except OSError:
            pass
        await asyncio.sleep(0.1)
    raise SystemExit("the router does not get ready")


async def load(port: int, seconds: float) -> None:
    until_s = time.monotonic() + seconds
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    request = head + b"Content-Length: %d\r\n\r\n%b" % (len(REQUEST), REQUEST)

    async def one_client() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        while time.monotonic() < until_s:
            writer.write(request)
            answer = await reader.readuntil(b"\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 502"), answer
            length = answer.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
            await reader.readexactly(int(length))
        writer.close()

    await asyncio.gather(*(one_client() for _ in range(CONNECTIONS)))


def cpu_s(pid: int) -> float:
    """On a processor, of all threads: the scheduler counts nanoseconds."""
    return sum(int(task.read_text().split()[0]) for task in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9


def log_lines(folder: Path, name: str) -> int:
    return (folder / f"{name}.log").read_bytes().count(b" try_failed ")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, required=True, metavar="BUILD")
    parser.add_argument("--this", type=Path, required=True, metavar="BUILD")
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=0.4, help="of load on each router, per pair")
    parser.add_argument("--split", action="store_true", help="the engines send the body after the head")
    add_record_option(parser)
    args = parser.parse_args()
    os.sched_setaffinity(0, {OTHER_CORE})
    report: Report = asyncio.run(run(args))
    report.record(args.record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
