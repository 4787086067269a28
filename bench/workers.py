"""CPU time and throughput of `serve --workers N`, all its processes together, compared with one process:

    python bench/workers.py --harness DIR [--workers 2] [--rounds 3] [--seconds 3] [--share 0.3] [--record NAME]

DIR is the harness of bench/peers.py. Its `setup` builds a C load generator and a C mock engine into PEERBENCH_HOME
(~/peerbench). They share the machine's cores with the router, so they have to be cheap. Their number is the same in all
cases: two engines, and one load generator for each worker. Engines answer after 40 ms, as fast real ones do.

Closed loop: so many connections that one process is never idle. Then requests per second show what another process
adds, until the cores are used up. Streams and the last scenario have a fixed rate that one process can serve. A process
that is half as busy handles fewer requests each time it wakes, so N processes take more time for them than one, whether
they share anything or not: N processes that share nothing show this part alone.

With --share, each serving process gets at most this share of a core (a control group; needs root), so clients and
engines have what they need, and N processes have N times the CPU time of one. The parent of workers is not limited.
Without --share, all use the machine's cores together.

Releases are compiled: run `make compile` first, and set PYTHONPATH=build/compiled.
Ratios are taken within a round, one case after the other; the median over the rounds counts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from pathlib import Path
from statistics import median
from typing import NamedTuple

from record import Report, add_record_option, load_average

from warmroute import build
from warmroute.http_client import request

HOST = "127.0.0.1"
ENGINE_PORTS = (18_401, 18_402)
FIRST_PORT = 18_410
THINK_US = 40_000
"""Time of an engine until it answers."""
CHUNK_US = 10_000
"""Time between two chunks of a stream."""
WARM_UP_S = 1.0
PERIOD_US = 10_000
"""A process gets its share of a core in each of these periods."""
MIN_SHARE = 0.1
"""The kernel's limit: 1 ms in a period."""


class Scenario(NamedTuple):
    title: str
    body: str
    """A file of PEERBENCH_HOME."""
    connections: int
    rate: int = 0
    """Requests per second; 0: as many as the router serves."""
    streams: bool = False


SCENARIOS = {
    "1kb": Scenario("1 KB requests, all it takes", "b_1k_n.json", 800),
    "16kb": Scenario("16 KB requests, all it takes", "b_16k_n.json", 600),
    "streams": Scenario("chunks of 300 streams, one every 10 ms", "b_1k_s.json", 300, streams=True),
    "1000": Scenario("1 KB requests, 1000/s", "b_1k_n.json", 400, rate=1000),
}


class Case(NamedTuple):
    name: str
    routers: int
    workers: int


class Measured(NamedTuple):
    cpu_us: float
    """Of the router, per request or chunk."""
    per_s: float
    router_cores: float
    other_cores: float
    """Of engines and load generators."""


def cpu_s(pid: int) -> float:
    """CPU time of a process and its running children."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    own_ns = sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads)
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return own_ns / 1e9 + sum(cpu_s(int(child)) for child in children)


async def start(*command: str) -> asyncio.subprocess.Process:
    quiet = asyncio.subprocess.DEVNULL
    return await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, stderr=quiet)


async def start_router(port: int, workers: int) -> asyncio.subprocess.Process:
    nodes = [word for one in ENGINE_PORTS for word in ("--node", f"http://{HOST}:{one}")]
    flags = ("--workers", str(workers), "--port", str(port), "--admin-port", str(port + 1))
    quiet = asyncio.subprocess.DEVNULL
    command = (sys.executable, "-m", "warmroute", "serve", *flags, *nodes)
    return await asyncio.create_subprocess_exec(*command, stdout=quiet, stderr=quiet)


async def until_ready(url: str) -> None:
    for _ in range(600):
        try:
            if (await request("GET", url, timeout_s=2.0, limit_bytes=1 << 20))[0] == 200:
                return
        except (OSError, TimeoutError):
            pass
        await asyncio.sleep(0.05)
    raise SystemExit(f"{url} did not answer")


class CpuShares:
    """Limits the CPU time of processes, each in a control group of its own."""

    def __init__(self, share: float) -> None:
        self._share = share
        version_1 = Path("/sys/fs/cgroup/cpu")
        self._is_version_1 = version_1.is_dir()
        self._root = version_1 if self._is_version_1 else Path("/sys/fs/cgroup")
        self._groups: list[Path] = []

    def limit(self, pid: int) -> None:
        group = self._root / f"warmroute-bench-{pid}"
        group.mkdir()
        self._groups.append(group)
        quota_us = round(self._share * PERIOD_US)
        if self._is_version_1:
            (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (group / "cpu.cfs_quota_us").write_text(str(quota_us))
        else:
            (group / "cpu.max").write_text(f"{quota_us} {PERIOD_US}")
        (group / "cgroup.procs").write_text(str(pid))

    def close(self) -> None:
        """Remove the groups, whose processes have ended."""
        for group in self._groups:
            group.rmdir()


def serving_pids(router: asyncio.subprocess.Process, workers: int) -> list[int]:
    if workers == 1:
        return [router.pid]
    return [int(child) for child in Path(f"/proc/{router.pid}/task/{router.pid}/children").read_text().split()]


def generator(home: Path, scenario: Scenario, port: int, seconds: float, of: int) -> list[str]:
    """Return the command of one of the load generators. `of`: how many there are."""
    command = [
        str(home / "lg"), "-p", str(port), "-c", str(scenario.connections // of), "-d", f"{seconds:g}",
        "-w", f"{WARM_UP_S:g}", "-b", str(home / scenario.body), "-S", "64",
    ]  # fmt: skip
    return [*command, "-r", str(scenario.rate // of)] if scenario.rate else command


async def measure(
    home: Path, case: Case, scenario: Scenario, seconds: float, share: float, generators: int
) -> Measured:  # fmt: skip
    ports = [FIRST_PORT + 2 * at for at in range(case.routers)]
    shares = CpuShares(share)
    engines: list[asyncio.subprocess.Process] = []
    routers: list[asyncio.subprocess.Process] = []
    clients: list[asyncio.subprocess.Process] = []
    try:
        for engine_port in ENGINE_PORTS:
            engines.append(await start(str(home / "mock"), str(engine_port)))
            pace = f"interval={CHUNK_US if scenario.streams else 0}&think={0 if scenario.streams else THINK_US}"
            await until_ready(f"http://{HOST}:{engine_port}/_cfg?{pace}")
            if engines[-1].returncode is not None:
                raise SystemExit(f"port {engine_port} is used by another process")
        for port in ports:
            routers.append(await start_router(port, case.workers))  # noqa: PERF401 - each is ended below
        for port in ports:
            await until_ready(f"http://{HOST}:{port}/ready")
        await asyncio.sleep(2.0)
        for router in routers if share else ():
            for pid in serving_pids(router, case.workers):
                shares.limit(pid)
        for at in range(generators):
            command = generator(home, scenario, ports[at % len(ports)], seconds + 1.0, generators)
            clients.append(await start(*command))
        await asyncio.sleep(WARM_UP_S + 0.5)

        def used_s() -> tuple[float, float]:
            return sum(cpu_s(one.pid) for one in routers), sum(cpu_s(one.pid) for one in (*engines, *clients))

        loop = asyncio.get_running_loop()
        began_s, before = loop.time(), used_s()
        await asyncio.sleep(seconds)
        took_s, after = loop.time() - began_s, used_s()
        found = [json.loads((await one.communicate())[0]) for one in clients]
    finally:
        for process in (*clients, *routers, *engines):
            if process.returncode is None:
                process.terminate()
                await process.wait()
        shares.close()
    failed = sum(one["err"] + one["non2xx"] for one in found)
    if failed:
        raise SystemExit(f"{case.name}, {scenario.title}: {failed} requests failed")
    per_s = sum(one["evps" if scenario.streams else "rps"] for one in found)
    router_cores, other_cores = ((now - then) / took_s for now, then in zip(after, before, strict=True))
    return Measured(1e6 * router_cores / per_s, per_s, router_cores, other_cores)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--harness", type=Path, metavar="DIR", help="directory of the harness")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--scenario", action="append", choices=SCENARIOS, help="repeatable (all)")
    parser.add_argument("--seconds", type=float, default=3.0, help="measured time of a run (3)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--share", type=float, default=0.0, help="of a core, for each serving process (no limit)")
    add_record_option(parser)
    args = parser.parse_args()
    home = Path(os.environ.get("PEERBENCH_HOME", Path.home() / "peerbench"))
    if args.harness is None or not (args.harness / "setup").exists():
        parser.error("--harness DIR is required. DIR must contain setup, which builds the programs")
    if not (home / "lg").exists():
        parser.error(f"{home} has no load generator (lg): run {args.harness}/setup first, or set PEERBENCH_HOME")
    if args.share and (args.share < MIN_SHARE or os.geteuid()):
        parser.error(f"--share needs root, and at least {MIN_SHARE:g}")
    cases = (
        Case("one process", 1, 1),
        Case(f"{args.workers} workers", 1, args.workers),
        Case(f"{args.workers} processes that share nothing", args.workers, 1),
    )
    report = Report()
    report.table(
        "workers", "load", "router", "CPU µs of each", "CPU / one process", "per second", "rate / one process",
        "cores: router, clients and engines",
    )  # fmt: skip
    for name in args.scenario or SCENARIOS:
        scenario = SCENARIOS[name]
        rounds = [
            [asyncio.run(measure(home, case, scenario, args.seconds, args.share, args.workers)) for case in cases]
            for _ in range(args.rounds)
        ]
        for at, case in enumerate(cases):
            runs = [one[at] for one in rounds]
            cpu_us, per_s, router_cores, other_cores = (median(run[field] for run in runs) for field in range(4))
            cpu_ratio, rate_ratio = (median(one[at][field] / one[0][field] for one in rounds) for field in (0, 1))
            report.row(
                scenario.title, case.name, f"{cpu_us:.3g}", f"{cpu_ratio:.2f}", f"{per_s:,.0f}", f"{rate_ratio:.2f}",
                f"{router_cores:.2f}, {other_cores:.2f}",
            )  # fmt: skip
            if case.workers > 1:
                report.value(f"cpu_ratio_{name}", f"{cpu_ratio:.2f}")
                report.value(f"rate_ratio_{name}", f"{rate_ratio:.2f}")
    report.value("load_average", load_average())
    report.value("build", build())
    report.record(args.record)


if __name__ == "__main__":
    main()
