"""The CPU time of a request in this code and in another build, side by side.

    python bench/cpu_pairs.py --harness DIR --base BUILD --this BUILD [--tokenizer DIR] [--pairs 20] [--cases A1,S10]

A BUILD is a directory that contains the package `warmroute` with its kernel: the `src` of a checkout (interpreted), or
its build/compiled. DIR is a folder with the harness of bench/peers.py; its `setup` builds a C load generator and a C
mock engine into PEERBENCH_HOME (~/peerbench).

Both routers run at the same time, pinned to one core; the load generator and the engines have the other one. A pair is
the same load on one router, then on the other, in random order. The routers start again after every five pairs, since a
process keeps the luck of its memory layout. The table shows the median of the pairs' ratios (this / base) and the 95 %
bootstrap interval of this median.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

from record import Report, add_record_option, load_average

ROUTER_CORE, OTHER_CORE = "0", "1"
NODE_PORTS = (18001, 18002)
PORTS = {"base": 18081, "this": 18082}
PAIRS_PER_START = 5
CONVERSATIONS = "64"


class Case(NamedTuple):
    title: str
    body: str
    connections: int
    interval_us: int
    """Between two events of a stream."""
    per_event: bool = False


CASES = {
    "A1": Case("1 KB", "b_1k_n.json", 32, 0),
    "A16": Case("16 KB", "b_16k_n.json", 32, 0),
    "A128": Case("128 KB", "b_128k_n.json", 32, 0),
    "S10": Case("streamed chunk at 10 ms pace", "b_1k_s.json", 64, 10_000, per_event=True),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--harness", type=Path, required=True, metavar="DIR")
    parser.add_argument("--base", type=Path, required=True, metavar="BUILD")
    parser.add_argument("--this", type=Path, required=True, metavar="BUILD")
    parser.add_argument("--tokenizer", type=Path, metavar="DIR", help="exact tokens; without it, prompts are text")
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=1.0, help="of load on each router, per pair and case")
    parser.add_argument("--cases", default=",".join(CASES))
    add_record_option(parser)
    args = parser.parse_args()
    home = Path(os.environ.get("PEERBENCH_HOME", Path.home() / "peerbench"))
    if not (home / "lg").exists():
        parser.error(f"{home} has no load generator (lg): run {args.harness}/setup first, or set PEERBENCH_HOME")
    names = args.cases.split(",")
    builds = {"base": args.base.resolve(), "this": args.this.resolve()}
    ratios: dict[str, list[float]] = defaultdict(list)
    cpu: dict[tuple[str, str], list[float]] = defaultdict(list)
    chance = random.Random(1)
    nodes = [subprocess.Popen(["taskset", "-c", OTHER_CORE, str(home / "mock"), str(port)]) for port in NODE_PORTS]
    try:
        for done in range(0, args.pairs, PAIRS_PER_START):
            with tempfile.TemporaryDirectory() as folder:
                routers = {
                    name: start(build, PORTS[name], Path(folder), args.tokenizer) for name, build in builds.items()
                }
                try:
                    for name in routers:
                        wait_until_ready(PORTS[name], home)
                        for case in names:  # caches, speeds and connections
                            load(routers[name].pid, PORTS[name], CASES[case], home, min(args.seconds, 1.0))
                    for _pair in range(min(PAIRS_PER_START, args.pairs - done)):
                        for case in names:
                            order = list(routers)
                            chance.shuffle(order)
                            took = {
                                name: load(routers[name].pid, PORTS[name], CASES[case], home, args.seconds)
                                for name in order
                            }
                            ratios[case].append(took["this"] / took["base"])
                            for name, one in took.items():
                                cpu[case, name].append(one)
                        print(
                            f"pair {len(ratios[names[0]])}",
                            *(f"{c} {ratios[c][-1]:.3f}" for c in names),
                            file=sys.stderr,
                        )
                finally:
                    for router in routers.values():
                        router.send_signal(signal.SIGTERM)
                    for router in routers.values():
                        router.wait(30)
    finally:
        for node in nodes:
            node.terminate()
            node.wait()
    report = Report()
    report.table("pairs", "µs of CPU", "base", "this", "this / base", "95 % interval")
    for case in names:
        low, high = interval(ratios[case])
        medians = [f"{statistics.median(cpu[case, name]):.1f}" for name in ("base", "this")]
        report.row(CASES[case].title, *medians, f"{statistics.median(ratios[case]):.3f}", f"{low:.3f} to {high:.3f}")
    report.value("load", load_average())
    for name, build in builds.items():
        report.value(name, version(build))
    report.record(args.record)
    return 0


def start(build: Path, port: int, folder: Path, tokenizer: Path | None) -> subprocess.Popen[bytes]:
    config = folder / f"{port}.toml"
    # The engines report no cache size. With the default the conversations of the 128 KB case would not fit.
    lines = ["[index]", "assumed_cache_tokens = 8_000_000", "[startup]", "max_wait_s = 120"]
    if tokenizer is not None:
        lines += ["[[models]]", 'name = "m"', f'tokenizer = "{tokenizer.resolve()}"']
    config.write_text("\n".join(lines) + "\n")
    nodes = [word for node in NODE_PORTS for word in ("--node", f"http://127.0.0.1:{node}")]
    # The name of the command's module depends on the build.
    code = (
        "import sys, importlib.util as u\n"
        "name = 'warmroute.app.main' if u.find_spec('warmroute.app') else 'warmroute.cli.main'\n"
        "sys.exit(__import__(name, fromlist=['main']).main())"
    )
    command = [sys.executable, "-c", code, "serve", "--port", str(port), "--admin-port", "0", "--policy", "price"]
    return subprocess.Popen(
        ["taskset", "-c", ROUTER_CORE, *command, "--config", str(config), *nodes],
        env=os.environ | {"PYTHONPATH": str(build), "WARMROUTE_EXPERIMENT": "1"},
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip


def wait_until_ready(port: int, home: Path) -> None:
    body = (home / "b_1k_n.json").read_bytes()
    headers = {"Content-Type": "application/json"}
    for _ in range(600):
        try:
            request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/chat/completions", body, headers)
            with urllib.request.urlopen(request, timeout=120):
                return
        except OSError:
            time.sleep(0.1)
    raise SystemExit(f"The router on port {port} does not answer.")


def cpu_ns(pid: int) -> int:
    return sum(int((task / "schedstat").read_text().split()[0]) for task in Path(f"/proc/{pid}/task").iterdir())


def load(pid: int, port: int, case: Case, home: Path, seconds: float) -> float:
    """Return the router's CPU time of a request, or of an event, in microseconds."""
    for node in NODE_PORTS:
        urllib.request.urlopen(f"http://127.0.0.1:{node}/_cfg?interval={case.interval_us}", timeout=5).close()
    command = ["taskset", "-c", OTHER_CORE, str(home / "lg"), "-p", str(port), "-c", str(case.connections),
               "-d", str(seconds), "-w", "0", "-b", str(home / case.body), "-S", CONVERSATIONS]  # fmt: skip
    before = cpu_ns(pid)
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    took_us = (cpu_ns(pid) - before) / 1000.0
    row = json.loads(ended.stdout)
    if row["err"] or row["non2xx"]:
        raise SystemExit(f"{case.title}: {row['err']} requests failed, {row['non2xx']} answers were not 2xx")
    count: int = row["events"] if case.per_event else row["done"]
    return took_us / count


def interval(ratios: list[float], samples: int = 10_000) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of the median."""
    chance = random.Random(2)
    medians = sorted(statistics.median(chance.choices(ratios, k=len(ratios))) for _ in range(samples))
    return medians[int(0.025 * samples)], medians[int(0.975 * samples)]


def version(build: Path) -> str:
    code = "from warmroute import build; print(build())"
    env = os.environ | {"PYTHONPATH": str(build)}
    kind = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True).stdout.strip()
    commit = subprocess.run(
        ["git", "-C", str(build), "describe", "--always", "--dirty"], capture_output=True, text=True
    )
    return f"{commit.stdout.strip()} {kind}".strip()


if __name__ == "__main__":
    sys.exit(main())
