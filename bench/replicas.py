"""Several routers in front of one fleet, in virtual time: what it costs that each decides alone on news of the others.

    python bench/replicas.py --data DIR [--workload NAME …] [--case POLICY …] [--seeds 3] [--limit 1200] [--record FILE]

One router, then 4 and 8 that share what they do with a lag of 20 ms, then 8 that share nothing. With KV events
(`price`) and without them (`approximate`). SGLang's routers share nothing. Dynamo's tell each other of every request
that starts, gets its first token or ends, as its replica sync does. All at the knee: load balancing alone begins to
queue. A seed sets the arrivals of generated workloads, which router gets a request, and each router's own randomness.
Means over all seeds; ± is the standard error of the ratio, with more than one seed.
"""

from __future__ import annotations

import argparse
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from math import hypot, sqrt
from statistics import fmean, stdev
from typing import Any

from external_data import add_data_option, data_files
from policy_comparison import LOADS, TRACES
from record import Report, add_record_option
from rich.progress import track

from warmroute.lab.engine.timing import profile
from warmroute.lab.replay_setup import parse_policy
from warmroute.lab.run import Setup, replay
from warmroute.lab.simulated_node import Conditions, NodeSpec
from warmroute.lab.workloads import parse_workload

WORKLOADS = ("weka_60sessions_mooncake_format", "tool_agents", "multi_turn_chat", "mooncake_synthetic")
LAG_MS = 20.0
SHARED, ALONE = "shared", "nothing shared"
CASES = (
    ("price", 1, SHARED),
    ("price", 4, SHARED),
    ("price", 8, SHARED),
    ("price", 8, ALONE),
    ("approximate", 1, SHARED),
    ("approximate", 4, SHARED),
    ("approximate", 8, SHARED),
    ("approximate", 8, ALONE),
    ("sglang", 1, ALONE),
    ("sglang", 8, ALONE),
    ("dynamo", 1, SHARED),
    ("dynamo", 8, SHARED),
)

Job = tuple[str, str, tuple[str, int, str], int, int]


def run(job: Job) -> tuple[Job, dict[str, Any]]:
    name, path, (policy, replicas, sharing), seed, limit = job
    setup = Setup(
        workload=parse_workload([path]),
        nodes=tuple(NodeSpec(f"node-{at}", profile("2xh100-32b")) for at in range(8)),
        policy=parse_policy(policy),
        conditions=Conditions(seed=seed, replicas=replicas, shares=sharing == SHARED, sync_lag_ms=LAG_MS),
        rate=LOADS[name][1],
        limit=limit,
    )
    return job, replay(setup)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_data_option(parser, *(f"traces/{name}.jsonl.gz" for name in WORKLOADS if name in TRACES))
    parser.add_argument("--workload", action="append", choices=WORKLOADS, help="repeatable (all)")
    parser.add_argument("--case", action="append", metavar="POLICY", help="only cases of this policy; repeatable (all)")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each, averaged (3)")
    parser.add_argument("--limit", type=int, default=1200, help="requests per run (1200)")
    add_record_option(parser)
    args = parser.parse_args()
    workloads = args.workload or WORKLOADS
    names = [name for name in TRACES if name in workloads]
    paths = dict(zip(names, data_files(args.data, *(f"traces/{name}.jsonl.gz" for name in names)), strict=True))
    cases = [case for case in CASES if not args.case or case[0] in args.case]
    jobs = [
        (name, str(paths.get(name, name)), case, seed, args.limit)
        for name in workloads
        for case in cases
        for seed in range(1, args.seeds + 1)
    ]
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        done = list(track(pool.map(run, jobs), "replaying", len(jobs), disable=not sys.stderr.isatty()))
    report = Report()
    report.table(
        "replicas", "workload", "policy", "routers", "between them", "hit rate", "TTFT p50 ms", "TTFT p90 ms",
        "p90 / one router",
    )  # fmt: skip
    for name in workloads:
        for case in cases:
            runs = [result for job, result in done if (job[0], job[2]) == (name, case)]
            alone = [result for job, result in done if job[0] == name and job[2][:2] == (case[0], 1)]
            alone = runs if case[1] == 1 else alone
            report.row(name, case[0], case[1], case[2] if case[1] > 1 else "–", *_figures(runs, alone))
    report.record(args.record)


def _figures(runs: list[dict[str, Any]], alone: list[dict[str, Any]]) -> list[str]:
    p90, p90_alone = _mean_of(runs, "p90"), _mean_of(alone, "p90")
    hit_rate = fmean(run["hit_rate"] for run in runs)
    ratio = p90 / p90_alone
    error = ratio * hypot(_relative_error(runs), _relative_error(alone))
    shown = f"{ratio:.2f} ± {error:.2f}" if runs is not alone and error else f"{ratio:.2f}"
    return [f"{hit_rate:.1%}", f"{_mean_of(runs, 'p50'):,.0f}", f"{p90:,.0f}", shown]


def _relative_error(runs: list[dict[str, Any]]) -> float:
    """Return the standard error of the mean p90, relative to it."""
    p90s = [run["ttft_ms"]["p90"] for run in runs]
    return stdev(p90s) / sqrt(len(p90s)) / fmean(p90s) if len(p90s) > 1 else 0.0


def _mean_of(runs: list[dict[str, Any]], percentile: str) -> float:
    return fmean(run["ttft_ms"][percentile] for run in runs)


if __name__ == "__main__":
    main()
