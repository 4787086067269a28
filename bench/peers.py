"""CPU time per request and per chunk, compared with vllm-router, sglang-router and haproxy in the same run.

    python bench/peers.py --harness DIR [--rounds 3] [--seconds 2] [--policy prefix_hash] [--peers vr-rr,sgl-rr,haproxy]

DIR must contain bench.py, the harness that runs the routers, a C load generator and a C mock engine. Its `setup` builds
them into PEERBENCH_HOME (~/peerbench). Each round runs every router once on the same core. The first table has the
medians over the rounds, and ours as a fraction of vllm-router's in the same round; the second has every round.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

from record import Report, add_record_option, load_average


class Scenario(NamedTuple):
    title: str
    field: str
    """Of the harness's row."""
    key: str
    """Suffix of the recorded values."""


SCENARIOS = {
    "A1": Scenario("1 KB request, µs of CPU", "cpu_us_req", "1kb"),
    "A16": Scenario("16 KB request, µs of CPU", "cpu_us_req", "16kb"),
    "A128": Scenario("128 KB request, µs of CPU", "cpu_us_req", "128kb"),
    "S10": Scenario("streamed chunk at 10 ms pace, µs of CPU", "cpu_us_ev", "chunk"),
    "L1": Scenario("one connection, p50 latency, µs", "lat_p50", "latency"),
    "IDLE": Scenario("memory at the start, MB", "rss_idle", "memory_start"),
    "MEM": Scenario("memory after 10,000 distinct 16 KB prompts, MB", "rss_after", "memory"),
}
"""The harness reports the last two in one row, MEM."""
PEERS = {
    "vr-rr": "vllm-router, round_robin",
    "vr-ca": "vllm-router, cache_aware",
    "sgl-rr": "sglang-router, round_robin",
    "sgl-ca": "sglang-router, cache_aware",
    "haproxy": "haproxy, roundrobin",
}


def start_line(policy: str) -> str:
    warmroute = Path(sys.executable).with_name("warmroute")
    nodes = "--node http://127.0.0.1:18001 --node http://127.0.0.1:18002"
    return f"exec {warmroute} serve --port 18080 --admin-port 0 --policy {policy} {nodes}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--harness", type=Path, metavar="DIR", help="directory that contains the harness, bench.py")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--policy", default="prefix_hash")
    parser.add_argument("--peers", default="vr-rr,sgl-rr,haproxy")
    add_record_option(parser)
    args = parser.parse_args()
    home = Path(os.environ.get("PEERBENCH_HOME", Path.home() / "peerbench"))
    if args.harness is None or not (args.harness / "bench.py").exists():
        parser.error("--harness DIR is required. DIR must contain bench.py, the harness that runs the routers")
    if not (home / "lg").exists():
        parser.error(f"{home} has no load generator (lg): run {args.harness}/setup first, or set PEERBENCH_HOME")
    names = ["ours", *args.peers.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.jsonl"
        subprocess.run(
            [sys.executable, str(args.harness / "bench.py"), ",".join(names * args.rounds), "--pin", "--mem",
             "--scen", "A1,A16,A128,S10,L1", "--d", str(args.seconds), "--out", str(out)],
            env=os.environ | {"OURS": start_line(args.policy)}, check=True, stdout=sys.stderr,
        )  # fmt: skip
        rows = [json.loads(line) for line in out.read_text().splitlines()]
    report = Report()
    show(rows, names, args.policy, report)
    report.value("load", load_average())
    report.record(args.record)
    return 0


def show(rows: list[dict[str, Any]], names: list[str], policy: str, report: Report) -> None:
    results: dict[tuple[str, str], list[float]] = defaultdict(list)
    for row in rows:
        if row["err"] or row["non2xx"]:
            print(f"errors in {row['name']} {row['scen']}: {row['err']} failed, {row['non2xx']} not 2xx")
        for name in ("IDLE", "MEM") if row["scen"] == "MEM" else (row["scen"],):
            results[row["name"].partition("@")[0], name].append(float(row[SCENARIOS[name].field]))
    titles = [f"Warmroute, {policy}", *(PEERS.get(name, name) for name in names[1:])]
    report.table("medians", "", *titles, "ours / vllm-router")
    for name, scenario in SCENARIOS.items():
        medians = [statistics.median(results[router, name] or [float("nan")]) for router in names]
        pairs = zip(results["ours", name], results["vr-rr", name], strict=False)
        ratio = f"{statistics.median([ours / peer for ours, peer in pairs] or [float('nan')]):.2f}"
        report.row(scenario.title, *(f"{median:.1f}" for median in medians), ratio)
        report.values |= {f"ours_{scenario.key}": f"{medians[0]:.1f}", f"ratio_{scenario.key}": ratio}
    report.table("rounds", "", "router", "every round")
    for name, scenario in SCENARIOS.items():
        for router, title in zip(names, titles, strict=True):
            report.row(scenario.title, title, ", ".join(f"{figure:.1f}" for figure in results[router, name]))
    for name in ("A1", "S10"):
        kernel = [row["sys_frac"] for row in rows if row["scen"] == name and row["name"].startswith("ours")]
        report.value(f"kernel_{SCENARIOS[name].key}", f"{statistics.median(kernel):.0%}")


if __name__ == "__main__":
    sys.exit(main())
