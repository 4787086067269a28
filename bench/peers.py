"""CPU time per request and per chunk, compared with vllm-router, sglang-router and haproxy in the same run.

    python bench/peers.py --harness DIR [--rounds 3] [--seconds 2] [--policy prefix_hash] [--peers vr-rr,sgl-rr,haproxy]

DIR must contain bench.py, the harness that runs the routers, a C load generator and a C mock engine. Its `setup` builds
them into PEERBENCH_HOME (~/peerbench). Each round runs every router once on the same core. The table has the medians
over the rounds, and ours as a fraction of vllm-router's in the same round.
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

SCENARIOS = {
    "A1": "1 KB request, µs",
    "A16": "16 KB request, µs",
    "A128": "128 KB request, µs",
    "S10": "chunk at 10 ms pace, µs",
    "L1": "one connection, p50 latency, µs",
}


def start_line(policy: str) -> str:
    warmroute = Path(sys.executable).with_name("warmroute")
    nodes = "--node http://127.0.0.1:18001 --node http://127.0.0.1:18002"
    return f"exec {warmroute} serve --port 18080 --admin-port 0 --policy {policy} {nodes}"


def figure(row: dict[str, float], scenario: str) -> float:
    if scenario.startswith("S"):
        return row["cpu_us_ev"]
    return row["lat_p50"] if scenario.startswith("L") else row["cpu_us_req"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--harness", type=Path, metavar="DIR", help="directory that contains the harness, bench.py")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--policy", default="prefix_hash")
    parser.add_argument("--peers", default="vr-rr,sgl-rr,haproxy")
    args = parser.parse_args()
    home = Path(os.environ.get("PEERBENCH_HOME", Path.home() / "peerbench"))
    if args.harness is None or not (args.harness / "bench.py").exists():
        parser.error("--harness DIR is required. DIR must contain bench.py, the harness that runs the routers")
    if not (home / "lg").exists():
        parser.error(f"{home} has no load generator (lg): run {args.harness}/setup first, or set PEERBENCH_HOME")
    names = ["ours", *args.peers.split(",")]
    results: dict[tuple[str, str], list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.jsonl"
        subprocess.run(
            [sys.executable, str(args.harness / "bench.py"), ",".join(names * args.rounds), "--pin",
             "--scen", ",".join(SCENARIOS), "--d", str(args.seconds), "--out", str(out)],
            env=os.environ | {"OURS": start_line(args.policy)}, check=True, stdout=sys.stderr,
        )  # fmt: skip
        for line in out.read_text().splitlines():
            row = json.loads(line)
            if row["err"] or row["non2xx"]:
                print(f"errors in {row['name']} {row['scen']}: {row['err']} failed, {row['non2xx']} not 2xx")
            results[row["name"].partition("@")[0], row["scen"]].append(figure(row, row["scen"]))
    print(f"policy {args.policy}, {args.rounds} rounds, medians")
    print(f"{'':34s}" + "".join(f"{name:>12s}" for name in names) + f"{'ours/vr-rr':>12s}")
    for scenario, what in SCENARIOS.items():
        cells = [
            statistics.median(results[name, scenario]) if results[name, scenario] else float("nan") for name in names
        ]
        pairs = zip(results["ours", scenario], results["vr-rr", scenario], strict=False)
        ratios = [ours / peer for ours, peer in pairs]
        ratio = f"{statistics.median(ratios):12.2f}" if ratios else f"{'':>12s}"
        print(f"{what:34s}" + "".join(f"{cell:12.1f}" for cell in cells) + ratio)
    return 0


if __name__ == "__main__":
    sys.exit(main())
