"""CPU time per request of `serve --workers N`, all its processes together, compared with one process:

    python bench/workers.py [--workers 2] [--rates 2000 4000 0] [--clients 64] [--rounds 3] [--record NAME]

Clients send conversations on kept-alive connections: a turn contains the turns before it. Nodes answer at once with the
same bytes. So all that takes time is the router, the clients and the nodes, which share the machine's cores.

A busy process takes less CPU time per request than an idle one, since it handles several requests each time it wakes.
So all cases get the same requests per second. Rate 0 means as many as the router takes. N processes that share nothing
show how much of the difference comes from spreading requests over processes, and how much from sharing state.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from pathlib import Path
from random import Random
from statistics import median
from typing import NamedTuple

import uvloop
from quick_engine import QuickEngine
from record import Report, add_record_option, load_average

from warmroute.http_client import request

HOST = "127.0.0.1"
TURNS = 6
TURN_BYTES = 700
SATURATING_RATE = 8000.0
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: r\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"


class Case(NamedTuple):
    name: str
    routers: int
    workers: int


async def run_node(port: int) -> None:
    await (await asyncio.get_running_loop().create_server(QuickEngine, HOST, port)).serve_forever()


def cpu_s(pid: int) -> float:
    """CPU time of a process and its running children."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    own_ns = sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads)
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return own_ns / 1e9 + sum(cpu_s(int(child)) for child in children)


async def start(*arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, *arguments, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL
    )


async def until_ready(url: str) -> None:
    for _ in range(1200):
        try:
            if (await request("GET", url, timeout_s=2.0, limit_bytes=1 << 20))[0] == 200:
                return
        except (OSError, TimeoutError):
            pass
        await asyncio.sleep(0.05)
    raise SystemExit(f"{url} did not answer")


async def client(port: int, number: int, requests: int, every_s: float = 0.0) -> None:
    """Send requests one after another, at most one in `every_s` seconds."""
    random = Random(number)
    turns: list[bytes] = []
    for _ in range(TURNS * 4):
        if len(turns) % TURNS == 0:
            messages: list[dict[str, str]] = []
        text = " ".join(f"w{random.randrange(100_000)}" for _ in range(TURN_BYTES // 7))
        messages += [{"role": "user", "content": text}, {"role": "assistant", "content": "ok"}]
        body = json.dumps({"model": "m", "messages": messages[:-1]}).encode()
        turns.append(HEAD % len(body) + body)
    reader, writer = await asyncio.open_connection(HOST, port)
    due_s = time.monotonic() + random.random() * every_s
    for at in range(requests):
        if (wait_s := due_s - time.monotonic()) > 0:
            await asyncio.sleep(wait_s)
        due_s += every_s
        writer.write(turns[at % len(turns)])
        answer = await reader.readuntil(b"\r\n\r\n")
        length = answer.lower().find(b"content-length:")
        await reader.readexactly(int(answer[length + 15 :].split(b"\r\n")[0]))
    writer.close()


async def measure(case: Case, rate: float, clients: int, seconds: float, base_port: int) -> tuple[float, float]:
    """Return CPU µs per request, and requests per second."""
    node_ports = (base_port, base_port + 1)
    processes = [await start(__file__, "--node", str(one)) for one in node_ports]
    nodes = [word for one in node_ports for word in ("--node", f"http://{HOST}:{one}")]
    routers: list[asyncio.subprocess.Process] = []
    try:
        for one in node_ports:
            await until_ready(f"http://{HOST}:{one}/health")
        ports = [base_port + 2 + 2 * at for at in range(case.routers)]
        for port in ports:
            flags = ("--workers", str(case.workers), "--port", str(port), "--admin-port", str(port + 1))
            routers.append(await start("-m", "warmroute.cli.main", "serve", *flags, *nodes))
        for port in ports:
            await until_ready(f"http://{HOST}:{port}/ready")
        await asyncio.sleep(3.0)

        async def load(first: int, requests: int, every_s: float) -> None:
            await asyncio.gather(
                *(client(ports[at % len(ports)], first + at, requests, every_s) for at in range(clients))
            )

        await load(1000, 10, 0.0)
        each = round((rate or SATURATING_RATE) * seconds / clients)
        before_s, began_s = sum(cpu_s(one.pid) for one in routers), time.monotonic()
        await load(0, each, clients / rate if rate else 0.0)
        took_s, used_s = time.monotonic() - began_s, sum(cpu_s(one.pid) for one in routers) - before_s
    finally:
        for process in (*routers, *processes):
            process.terminate()
            await process.wait()
    return used_s / (each * clients) * 1e6, each * clients / took_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument(
        "--rates", type=float, nargs="+", default=[2000, 4000, 0], help="requests per second; 0: all it takes"
    )
    parser.add_argument("--seconds", type=float, default=5.0, help="length of a run at a given rate (5)")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3, help="the median of this many rounds counts (3)")
    parser.add_argument("--node", type=int, help=argparse.SUPPRESS)
    add_record_option(parser)
    args = parser.parse_args()
    if args.node:
        uvloop.run(run_node(args.node))
    cases = (
        Case("one process", 1, 1),
        Case(f"{args.workers} workers", 1, args.workers),
        Case(f"{args.workers} processes that share nothing", args.workers, 1),
    )
    runs: dict[tuple[float, Case], list[tuple[float, float]]] = {}
    base_port = 18_400
    for _ in range(args.rounds):
        for rate in args.rates:
            for case in cases:
                run = asyncio.run(measure(case, rate, args.clients, args.seconds, base_port))
                runs.setdefault((rate, case), []).append(run)
                base_port += 4 + 2 * args.workers
    report = Report()
    report.table("workers", "offered", "router", "CPU µs per request", "of one process", "requests/s")
    for rate in args.rates:
        one_us = median(run[0] for run in runs[rate, cases[0]])
        for case in cases:
            cpu_us, per_s = (median(run[at] for run in runs[rate, case]) for at in (0, 1))
            offered = f"{rate:.0f}/s" if rate else "all it takes"
            report.row(offered, case.name, f"{cpu_us:.0f}", f"{cpu_us / one_us:.2f}", f"{per_s:.0f}")
    report.value("load_average", load_average())
    report.record(args.record)


if __name__ == "__main__":
    main()
