"""CPU time per request of `serve --workers N`, all its processes together:

    python bench/workers.py [--workers 1 2] [--requests 20000] [--clients 64] [--rounds 2] [--record NAME]

Clients send conversations on kept-alive connections: a turn contains the turns before it. Nodes answer at once with the
same bytes. So all that takes time is the router, the clients and the nodes, which share the machine's cores.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from pathlib import Path
from random import Random

import uvloop
from quick_engine import QuickEngine
from record import Report, add_record_option, load_average

from warmroute.http_client import request

HOST = "127.0.0.1"
TURNS = 6
TURN_BYTES = 700
TICKS = os.sysconf("SC_CLK_TCK")
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: r\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"


async def run_node(port: int) -> None:
    await (await asyncio.get_running_loop().create_server(QuickEngine, HOST, port)).serve_forever()


def cpu_s(pid: int) -> float:
    """CPU time of a process and its running children."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return (int(fields[11]) + int(fields[12])) / TICKS + sum(cpu_s(int(child)) for child in children)


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


async def client(port: int, number: int, requests: int) -> None:
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
    for at in range(requests):
        writer.write(turns[at % len(turns)])
        answer = await reader.readuntil(b"\r\n\r\n")
        at = answer.lower().find(b"content-length:")
        await reader.readexactly(int(answer[at + 15 :].split(b"\r\n")[0]))
    writer.close()


async def measure(workers: int, clients: int, requests: int, ports: tuple[int, ...]) -> tuple[float, float]:
    """Return CPU µs per request, and requests per second."""
    port, admin_port, *node_ports = ports
    processes = [await start(__file__, "--node", str(one)) for one in node_ports]
    nodes = [word for one in node_ports for word in ("--node", f"http://{HOST}:{one}")]
    try:
        for one in node_ports:
            await until_ready(f"http://{HOST}:{one}/health")
        flags = ("--workers", str(workers), "--port", str(port), "--admin-port", str(admin_port))
        router = await start("-m", "warmroute.cli.main", "serve", *flags, *nodes)
        processes.append(router)
        await until_ready(f"http://{HOST}:{port}/ready")
        await asyncio.sleep(3.0)
        await asyncio.gather(*(client(port, 1000 + at, 10) for at in range(clients)))
        before_s, began_s = cpu_s(router.pid), time.monotonic()
        await asyncio.gather(*(client(port, at, requests // clients) for at in range(clients)))
        took_s, used_s = time.monotonic() - began_s, cpu_s(router.pid) - before_s
    finally:
        for process in reversed(processes):
            process.terminate()
            await process.wait()
    count = requests // clients * clients
    return used_s / count * 1e6, count / took_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=2, help="the best CPU time of this many rounds counts (2)")
    parser.add_argument("--node", type=int, help=argparse.SUPPRESS)
    add_record_option(parser)
    args = parser.parse_args()
    if args.node:
        uvloop.run(run_node(args.node))
    report = Report()
    report.table("workers", "workers", "CPU µs per request", "of one process", "requests/s")
    first, base = 0.0, 18_400
    for workers in args.workers:
        runs: list[tuple[float, float]] = []
        for _ in range(args.rounds):
            runs.append(asyncio.run(measure(workers, args.clients, args.requests, tuple(range(base, base + 4)))))
            base += 4
        cpu_us, per_s = min(run[0] for run in runs), max(run[1] for run in runs)
        first = first or cpu_us
        report.row(workers, f"{cpu_us:.0f}", f"{cpu_us / first:.2f}", f"{per_s:.0f}")
    report.value("load_average", load_average())
    report.record(args.record)


if __name__ == "__main__":
    main()
