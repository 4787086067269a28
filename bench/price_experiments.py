"""Experiments on the policy `price` in virtual time. One table each:

python bench/price_experiments.py ablation --data DIR    the parts of the price, switched off one at a time
python bench/price_experiments.py storm      how evenly a hot prefix is spread, and how many hits that costs
python bench/price_experiments.py robust     stale metrics, lost KV events, nodes that misreport: against least_loaded
python bench/price_experiments.py affinity   two unequal GPUs: price, pure affinity, round robin

`--seeds`, `--limit` and `--nodes` change the size, `--processes 1` leaves other cores free. Goodput counts answers
whose first token came within 2 s + 0.5 ms for each token of the prompt.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import msgspec
from experiment_tables import Experiment, fleet, mean_of, ratio, run_experiments, run_jobs, selected
from external_data import data_files
from record import Report

from warmroute.lab.engine.timing import profile
from warmroute.lab.replay_setup import parse_policy
from warmroute.lab.run import Setup, replay
from warmroute.lab.simulated_node import Conditions, NodeSpec
from warmroute.lab.summary import Run
from warmroute.lab.workloads import parse_workload
from warmroute.lab.world import ScheduledFault

TOLERANCE = 1.03
"""A result within this factor of another one is as good."""
TRACES = {name: f"traces/{name}.jsonl.gz" for name in ("weka_60sessions_mooncake_format", "mooncake_synthetic")}

# The parts of the price.

PARTS = {
    "price": "price",
    "without memory": "price:memory=false",
    "without congestion": "price:congestion=false",
    "without memory, congestion": "price:memory=false,congestion=false",
    "without room": "price:room=false",
    "without second homes": "price:second_home_ms=0",
    "without queueing at the router": "price:queue_at_router=false",
    "with half the cache weight": "price:cache_weight=0.5",
    "without cache weight": "price:cache_weight=0",
    "own time only, sent at once": (
        "price:memory=false,congestion=false,room=false,second_home_ms=0,queue_at_router=false"
    ),
}
WORKLOADS = (
    ("weka_60sessions_mooncake_format", 0.4, "agentic_knee"),
    ("weka_60sessions_mooncake_format", 0.9, "agentic_beyond"),
    ("llm_d", 25.0, "llm_d_beyond"),
    ("mooncake_synthetic", 6.0, "mooncake_synthetic_knee"),
    ("hot_prefix_storm", 80.0, "hot_prefix_storm_beyond"),
    ("rag", 40.0, "rag_beyond"),
)
"""Workload, requests per second for 8 nodes, and the name of the table, as in bench/policy_comparison.py."""


def ablation(args: argparse.Namespace, report: Report) -> None:
    names = selected([name for _, _, name in WORKLOADS], args)
    cells = [(workload, rate, name) for workload, rate, name in WORKLOADS if name in names]
    traces = [workload for workload in dict.fromkeys(cell[0] for cell in cells) if workload in TRACES]
    paths = data_files(Path(args.data) if args.data else None, *(TRACES[workload] for workload in traces))
    words = {workload: workload for workload, _, _ in cells} | dict(zip(traces, map(str, paths), strict=True))
    jobs = [
        (words[workload], rate, part, seed, args.nodes, args.limit)
        for workload, rate, _ in cells
        for part in (*PARTS.values(), "oracle")
        for seed in range(1, (1 if part == "oracle" else args.seeds) + 1)
    ]
    runs = run_jobs(_run_ablation, jobs, args)
    for workload, rate, name in cells:
        report.table(name, "", "hit rate", "/ oracle", "TTFT p50, ms", "p90", "p99", "goodput/s", "load CV")
        oracle = runs[words[workload], rate, "oracle", 1, args.nodes, args.limit]["hit_rate"]
        for title, part in PARTS.items():
            found = [run for job, run in runs.items() if job[:3] == (words[workload], rate, part)]
            hit = mean_of(found, "hit_rate")
            times = [f"{mean_of(found, 'ttft_ms', key):,.0f}" for key in ("p50", "p90", "p99")]
            good, variation = mean_of(found, "good_per_s"), mean_of(found, "load_variation")
            fraction = f"{hit / oracle:.1%}" if oracle else "–"
            report.row(title, f"{hit:.1%}", fraction, *times, f"{good:.2f}", f"{variation:.2f}")


def _run_ablation(job: tuple[str, float, str, int, int, int]) -> Run:
    workload, rate, part, seed, nodes, limit = job
    return replay(
        Setup(
            workload=parse_workload([workload]),
            nodes=fleet(nodes),
            policy=parse_policy(part),
            conditions=Conditions(seed=seed),
            rate=rate * nodes / 8,
            limit=limit,
        )
    )


# A hot prefix.

STORM_RATES = (12.0, 40.0, 80.0)
STORM_POLICIES = ("least_loaded", "prefix_hash", "overlap", "sglang", "price:second_home_ms=0", "price")
EVEN = 0.25
"""A lower coefficient of variation of the load is bold."""


def storm(args: argparse.Namespace, report: Report) -> None:
    jobs = [
        (rate, policy, seed, args.nodes, args.limit)
        for rate in STORM_RATES
        for policy in selected(STORM_POLICIES, args)
        for seed in range(1, args.seeds + 1)
    ]
    runs = run_jobs(_run_storm, jobs, args)
    report.table("policies", "requests/s", "policy", "load CV", "hit rate", "TTFT p50, ms", "p90", "p99", "served/s")
    for rate in STORM_RATES:
        for policy in selected(STORM_POLICIES, args):
            found = [run for job, run in runs.items() if job[:2] == (rate, policy)]
            times = [f"{mean_of(found, 'ttft_ms', key):,.0f}" for key in ("p50", "p90", "p99")]
            variation = mean_of(found, "load_variation")
            cell = f"**{variation:.2f}**" if variation < EVEN else f"{variation:.2f}"
            hit, per_s = mean_of(found, "hit_rate"), mean_of(found, "requests_per_s")
            report.row(f"{rate:g}", policy, cell, f"{hit:.1%}", *times, f"{per_s:.1f}")


def _run_storm(job: tuple[float, str, int, int, int]) -> Run:
    rate, policy, seed, nodes, limit = job
    return replay(
        Setup(
            workload=parse_workload(["hot_prefix_storm"]),
            nodes=fleet(nodes),
            policy=parse_policy(policy),
            conditions=Conditions(seed=seed),
            rate=rate * nodes / 8,
            limit=limit,
        )
    )


# Bad information.

CONDITIONS: dict[str, Conditions] = {
    "none": Conditions(),
    "metrics every 3 s": Conditions(poll_interval_s=3.0),
    "metrics 3 s old": Conditions(poll_lag_ms=3000.0),
    "no metrics at all": Conditions(poll_loss=1.0),
    "1 % of KV events lost": Conditions(kv_loss=0.01),
    "half of KV events lost": Conditions(kv_loss=0.5),
    "all KV events lost": Conditions(kv_loss=1.0),
    "no metrics, no KV events": Conditions(poll_loss=1.0, kv_loss=1.0),
    "KV events 3 s late": Conditions(kv_lag_ms=3000.0),
}
MISREPORTS: dict[str, tuple[Any, ...]] = {
    "a node reports blocks that it does not have": ("cache",),
    "the same, and it reports cached tokens": ("cache", "usage"),
    "a node reports that it is idle": ("load",),
}
SLOW_NODE = "a node slows down 5 ×"
ROBUST_LOADS = (
    ("rag", 20.0, 2500),
    ("hot_prefix_storm", 40.0, 1500),
    ("multi_turn_chat", 40.0, 800),
    ("unique_batch", 8.0, 0),
)
"""Workload, requests per second and KV blocks of a node (0 for what fits on its GPUs). Memory is small, because lost KV
events do no harm where nothing is evicted, and metrics are not needed where memory is never short."""


def robust(args: argparse.Namespace, report: Report) -> None:
    troubles = selected([*CONDITIONS, *MISREPORTS, SLOW_NODE], args)
    jobs = [
        (workload, rate, blocks, trouble, policy, seed, args.nodes, args.limit)
        for workload, rate, blocks in ROBUST_LOADS
        for trouble in troubles
        for policy in ("price", "least_loaded")
        for seed in range(1, args.seeds + 1)
    ]
    runs = run_jobs(_run_robust, jobs, args)
    columns = ("fault", "workload", "TTFT p50", "p90", "p99", "goodput", "hit rates", "worse in")
    report.table("faults", *columns)
    rows = worse_rows = 0
    for trouble in troubles:
        for workload, rate, blocks in ROBUST_LOADS:
            ours, theirs = (
                [run for job, run in runs.items() if job[:5] == (workload, rate, blocks, trouble, policy)]
                for policy in ("price", "least_loaded")
            )
            cells, worse = [], []
            for name, path in (
                ("p50", ("ttft_ms", "p50")),
                ("p90", ("ttft_ms", "p90")),
                ("p99", ("ttft_ms", "p99")),
                ("goodput", ("good_per_s",)),
            ):
                factor, error = ratio(ours, theirs, *path)
                cells.append(f"{factor:.2f} ± {error:.2f}")
                loss = 1.0 - factor if name == "goodput" else factor - 1.0
                if name != "p99" and loss > TOLERANCE - 1.0 and loss > 2.0 * error:
                    worse.append(name)
            hits = f"{mean_of(ours, 'hit_rate'):.0%} / {mean_of(theirs, 'hit_rate'):.0%}"
            report.row(trouble, workload, *cells, hits, ", ".join(worse) or "–")
            rows += 1
            worse_rows += bool(worse)
    report.value("rows", rows)
    report.value("worse", worse_rows)


def _run_robust(job: tuple[str, float, int, str, str, int, int, int]) -> Run:
    workload, rate, blocks, trouble, policy, seed, count, limit = job
    nodes = [msgspec.structs.replace(spec, blocks=blocks or None) for spec in fleet(count)]
    if trouble in MISREPORTS:
        nodes[0] = msgspec.structs.replace(nodes[0], misreports=MISREPORTS[trouble])
    conditions = msgspec.structs.replace(CONDITIONS.get(trouble, Conditions()), seed=seed)
    per_s = rate * count / 8
    at_s = 0.25 * limit / per_s
    return replay(
        Setup(
            workload=parse_workload([workload]),
            nodes=tuple(nodes),
            policy=parse_policy(policy),
            conditions=conditions,
            rate=per_s,
            limit=limit,
            faults=(ScheduledFault(at_s, "slow", "node-0", 5.0),) if trouble == SLOW_NODE else (),
        )
    )


# Two unequal GPUs.

UNEQUAL = ("t4-1.5b", "l4-1.5b")
UNEQUAL_POLICIES = ("session:load_factor=inf", "round_robin", "price")


def affinity(args: argparse.Namespace, report: Report) -> None:
    jobs = [
        (clients, policy, seed, args.limit)
        for clients in (1, 2, 4, 8, 16, 32)
        for policy in UNEQUAL_POLICIES
        for seed in range(1, args.seeds + 1)
    ]
    runs = run_jobs(_run_unequal, jobs, args)
    report.table(
        "clients", "clients", "", "affinity", "round_robin", "price", "price / affinity", "price / round_robin"
    )
    for clients in (1, 2, 4, 8, 16, 32):
        found = [[run for job, run in runs.items() if job[:2] == (clients, policy)] for policy in UNEQUAL_POLICIES]
        for title, path in (
            ("TTFT mean, ms", ("ttft_ms", "mean")),
            ("TTFT p99, ms", ("ttft_ms", "p99")),
            ("tokens/s", ("output_tokens_per_s",)),
        ):
            means = [f"{mean_of(one, *path):,.1f}" for one in found]
            against = [ratio(found[2], other, *path) for other in found[:2]]
            report.row(clients, title, *means, *(f"{factor - 1.0:+.1%} ± {error:.1%}" for factor, error in against))


def _run_unequal(job: tuple[int, str, int, int]) -> Run:
    clients, policy, seed, limit = job
    return replay(
        Setup(
            workload=parse_workload(["shared_system_prompts"]),
            # The names differ by seed, because they decide which session goes to which node.
            nodes=tuple(NodeSpec(f"{name} {seed}", profile(name)) for name in UNEQUAL),
            policy=parse_policy(policy),
            conditions=Conditions(seed=seed),
            concurrency=clients,
            limit=limit,
        )
    )


EXPERIMENTS = {
    "ablation": Experiment(ablation, 1, 1200, 8),
    "storm": Experiment(storm, 3, 1200, 8),
    "robust": Experiment(robust, 4, 600, 8),
    "affinity": Experiment(affinity, 40, 200),
}

if __name__ == "__main__":
    run_experiments(str(__doc__), EXPERIMENTS, f"for ablation: directory that contains {', '.join(TRACES.values())}")
