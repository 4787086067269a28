"""Placement and order separated: where a policy sends requests, and in which order they wait. In virtual time:

python bench/queue_orders.py --data DIR [--seeds 1] [--limit 800]

Each rule of another router runs with its own order and with ours; `price` runs with ours, first come first served,
shortest first, and without a queue at the router. The tables have the TTFT p99 of the 10 % of requests with the most
prefill work and of the others, and the longest wait relative to its guarantee. The table `long_prompts` compares the
first of these in our order and in first-come order.

With `--runs FILE` each run is kept in a file, as in policy_comparison.py.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from external_data import add_data_option, data_files
from policy_comparison import LOAD_NAMES, LOADS, TRACES, Job, mean_of_seeds, run_all
from record import Report, add_record_option

ROWS = (
    ("mooncake_arxiv_first1000", 2),
    ("mooncake_synthetic", 1),
    ("mooncake_synthetic", 2),
    ("weka_60sessions_mooncake_format", 2),
    ("azure2023_code", 2),
    ("rag", 2),
    ("llm_d", 2),
)
"""Workloads with queues, and the load (policy_comparison.py)."""
OTHERS = ("sglang", "llm_d", "llm_d_precise", "dynamo", "dynamo_wspt", "aibrix")
OURS = ("price:queue=none", "price:queue=fcfs", "price:queue=shortest", "price")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_data_option(parser, *(f"traces/{name}.jsonl.gz" for name in TRACES))
    parser.add_argument("--seeds", type=int, default=1, help="runs of each, averaged (1)")
    parser.add_argument("--limit", type=int, default=800, help="requests per run (800)")
    parser.add_argument("--runs", type=Path, metavar="FILE", help="keep runs in this file, and reuse those in it")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    add_record_option(parser)
    args = parser.parse_args()
    names = [name for name in dict.fromkeys(name for name, _ in ROWS) if name in TRACES]
    traces = dict(zip(names, data_files(args.data, *(f"traces/{name}.jsonl.gz" for name in names)), strict=True))
    policies = [*(name for other in OTHERS for name in (other, f"{other}:queue=warmroute")), *OURS]
    jobs: list[Job] = [
        (name, [str(traces.get(name, name))], load, policy, seed, LOADS[name][load], 8, args.limit)
        for name, load in ROWS
        for policy in policies
        for seed in range(1, args.seeds + 1)
    ]
    done = list(run_all(jobs, args.runs, args.processes))
    report = Report()
    measures = ("TTFT p50, ms", "p90", "p99", "longest 10 %, p99", "others, p99", "goodput/s", "wait / guarantee")
    long_prompts: list[list[str]] = []
    for name, load in ROWS:
        report.table(f"{name}_{LOAD_NAMES[load]}", "placement", "order", *measures)
        long_ms: dict[str, list[float]] = {}
        longest_wait = 0.0
        for policy in policies:
            runs = [run for n, at, p, _, run in done if (n, at, p) == (name, load, policy)]
            row = mean_of_seeds(runs)
            long_ms[policy] = [run["ttft_ms_by_work"]["longest_10_percent"]["p99"] for run in runs]
            placement, _, order = policy.partition(":queue=")
            wait = max(run.get("queue", {}).get("longest_wait_ratio", 0.0) for run in runs)
            ratio = f"{wait:.2f}" if policy == "price" or order == "warmroute" else "–"
            longest_wait = wait if policy == "price" else longest_wait
            report.row(
                placement,
                order or ("warmroute" if placement == "price" else "own"),
                *(f"{row[key]:,.0f}" for key in ("p50", "p90", "p99", "long", "short")),
                f"{row['good']:.3g}",
                ratio,
            )
        ours, first_come = long_ms["price"], long_ms["price:queue=fcfs"]
        ratios = sorted(one / other for one, other in zip(ours, first_come, strict=True))
        cells = (f"{sum(ours) / sum(first_come):.2f}", f"{ratios[0]:.2f} to {ratios[-1]:.2f}", f"{longest_wait:.2f}")
        long_prompts.append([name, LOAD_NAMES[load], *cells])
    columns = ("ours / first come, means", "single runs", "longest wait / guarantee")
    report.table("long_prompts", "workload", "load", *columns)
    for line in long_prompts:
        report.row(*line)
    report.record(args.record)


if __name__ == "__main__":
    main()
