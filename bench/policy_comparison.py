"""All policies, ours and other routers', on all traces and generated workloads, at three loads, in virtual time:

python bench/policy_comparison.py --data DIR [--workload NAME …] [--policy P …] [--nodes 8] [--seeds 1]

Light is a load that every policy can serve. At the knee, load balancing alone begins to queue. Beyond is more than it
can serve. Goodput counts answers whose first token came within 2 s + 0.5 ms for each token of the prompt. The tables
state how often each policy is within 3 % of the best in TTFT p50, p90, p99 and goodput, and compare the hit rates with
that of one cache as large as the fleet's (`oracle`). The table `tail` has the TTFT p99 of the 10 % of requests with the
most prefill work, and of the others.

A p50 that a rule buys with a worse mean is no better p50: a rule that keeps a few nodes for long prompts makes half of
the requests faster and the others much slower. So a policy's p50 is compared only with policies whose mean TTFT is at
most 3 % above its own.

`--seeds` repeats each run, and the tables have the means. Another seed gives generated workloads other arrivals and
prompts. A trace keeps its own: only the policies' random choices and the times of their polls differ.

With `--runs FILE` each run is appended to a file, and runs that are in it are not repeated, so that the table can be
made in pieces. Delete the runs of a policy when its rule changes.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from external_data import add_data_option, data_files
from record import Report, add_record_option
from rich.progress import track

from warmroute.lab.engine.timing import profile
from warmroute.lab.replay_setup import parse_policy
from warmroute.lab.run import Setup, replay
from warmroute.lab.simulated_node import Conditions, NodeSpec
from warmroute.lab.workloads import parse_workload

LOADS: dict[str, tuple[float, float, float]] = {
    "mooncake_arxiv_first1000": (1, 3, 6),
    "mooncake_synthetic": (2, 6, 9),
    "weka_60sessions_mooncake_format": (0.1, 0.4, 0.9),
    "azure2023_code": (2, 8, 16),
    "shared_system_prompts": (10, 40, 80),
    "multi_turn_chat": (10, 40, 80),
    "rag": (5, 20, 40),
    "few_shot": (10, 40, 80),
    "tool_agents": (1, 4, 8),
    "unique_batch": (2, 8, 16),
    "hot_prefix_storm": (12, 40, 80),
    "priority_mix": (10, 40, 80),
    "llm_d": (8, 15, 25),
}
"""Requests per second for 8 × 2xh100-32b: light, knee, beyond. For multi_turn_chat and tool_agents: conversations."""
LOAD_NAMES = ("light", "knee", "beyond")
TRACES = tuple(name for name in LOADS if name.startswith(("mooncake", "weka", "azure")))
POLICIES = (
    "round_robin",
    "least_loaded",
    "power_of_two",
    "session",
    "prefix_hash",
    "approximate",
    "overlap",
    "price",
    "sglang",
    "smg",
    "llm_d",
    "llm_d_precise",
    "llm_d_affinity",
    "dynamo",
    "dynamo_fcfs",
    "dynamo_wspt",
    "kubeai",
    "aibrix",
    "oracle",
)
WITHIN = 1.03
"""A result within this factor of the best counts as the best."""


KEPT = ("hit_rate", "ttft_ms", "ttft_ms_by_work", "good_per_s", "queue")
"""What is kept of a run."""

Job = tuple[str, list[str], int, str, int, float, int, int]
Done = tuple[str, int, str, int, dict[str, Any]]


def run(job: Job) -> Done:
    name, words, load, policy, seed, rate, nodes, limit = job
    hardware = profile("2xh100-32b")
    setup = Setup(
        workload=parse_workload(words),
        nodes=tuple(NodeSpec(f"node-{at}", hardware) for at in range(nodes)),
        policy=parse_policy(policy),
        conditions=Conditions(seed=seed),
        rate=rate * nodes / 8,
        limit=limit,
    )
    result = replay(setup)
    return (
        name,
        load,
        policy,
        seed,
        {key: result[key] for key in KEPT if key in result},
    )


def run_all(jobs: list[Job], path: Path | None, processes: int) -> Iterator[Done]:
    """Run the jobs that the file does not have, append them to it, and return all."""
    kept: dict[str, Done] = {}
    if path is not None and path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            key, done = json.loads(line)
            kept[key] = tuple(done)
    missing = [job for job in jobs if _key(job) not in kept]
    yield from (kept[_key(job)] for job in jobs if _key(job) in kept)
    with ProcessPoolExecutor(processes) as pool:
        for job, done in zip(missing, pool.map(run, missing), strict=True):
            if path is not None:
                with path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps([_key(job), done]) + "\n")
            yield done


def _key(job: Job) -> str:
    name, words, load, policy, seed, rate, nodes, limit = job
    return " ".join(map(str, (name, *words[1:], load, policy, seed, rate, nodes, limit)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_data_option(parser, *(f"traces/{name}.jsonl.gz" for name in TRACES))
    parser.add_argument("--workload", action="append", help="repeatable (all; generators need no --data)")
    parser.add_argument("--policy", action="append", help="repeatable (all; price is always included)")
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--seeds", type=int, default=1, help="runs of each policy, averaged (1)")
    parser.add_argument("--limit", type=int, default=1200, help="requests per run (1200)")
    parser.add_argument("--runs", type=Path, metavar="FILE", help="keep runs in this file, and reuse those in it")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    add_record_option(parser)
    args = parser.parse_args()
    policies = [p for p in (args.policy or POLICIES) if p != "price"] + ["price"]
    workloads = args.workload or list(LOADS)
    names = [name for name in TRACES if name in workloads]
    traces = dict(zip(names, data_files(args.data, *(f"traces/{name}.jsonl.gz" for name in names)), strict=True))
    jobs = [
        (name, [str(traces.get(name, name))], load, policy, seed, rate, args.nodes, args.limit)
        for name in LOADS
        if name in workloads
        for load, rate in enumerate(LOADS[name])
        for policy in policies
        for seed in range(1, (1 if policy == "oracle" else args.seeds) + 1)
    ]
    runs = run_all(jobs, args.runs, args.processes)
    done = list(track(runs, "replaying", len(jobs), disable=not sys.stderr.isatty()))
    report = Report()
    show(done, policies, report)
    report.record(args.record)


MEASURES = ("p50", "p90", "p99", "good")


def behind_best(policy: str, rows: dict[str, dict[str, float]]) -> dict[str, float]:
    """Return for each measure the factor by which the policy is behind the best one; 1 or less: it is the best."""
    own = rows[policy]
    found = {key: own[key] / min(row[key] for row in rows.values()) for key in ("p90", "p99")}
    # A lower p50 with a worse mean is not better.
    found["p50"] = own["p50"] / min(row["p50"] for row in rows.values() if row["mean"] <= own["mean"] * WITHIN)
    found["good"] = max(row["good"] for row in rows.values()) / max(1e-9, own["good"])
    return found


def show(done: list[Done], policies: list[str], report: Report) -> None:
    cells = sorted({(name, load) for name, load, *_ in done}, key=lambda cell: (list(LOADS).index(cell[0]), cell[1]))
    shown = [policy for policy in policies if policy != "oracle"]
    lists: list[list[list[str]]] = [[] for _ in range(6)]
    times, goods, hits, tails, verdicts, behind = lists
    factors: dict[str, list[dict[str, float]]] = {policy: [] for policy in shown}
    for name, load in cells:
        rows = {
            policy: mean_of_seeds([r for n, at, p, _, r in done if (n, at, p) == (name, load, policy)])
            for policy in policies
        }
        others = {policy: rows[policy] for policy in shown}
        for policy in shown:
            factors[policy].append(behind_best(policy, others))
        cell = (name, LOAD_NAMES[load])
        now = {policy: factors[policy][-1] for policy in shown}
        times.append([*cell, *(_times(row, now[policy]) for policy, row in others.items())])
        goods.append([*cell, *(_bold(now[p]["good"] <= WITHIN, f"{row['good']:.3g}") for p, row in others.items())])
        tails.append([*cell, *(f"{row['long']:,.0f} / {row['short']:,.0f}" for row in others.values())])
        hits.append([*cell, *(f"{row['hit']:.1%}" for row in rows.values())])
        ours = now["price"]
        oracle = rows.get("oracle", {}).get("hit", 0.0)
        fraction = f"{rows['price']['hit'] / oracle:.1%}" if oracle else "–"
        ratios = (ours["p50"], ours["p90"], ours["p99"], 1 / ours["good"])
        verdicts.append([*cell, *(f"{ratio:.2f}" for ratio in ratios), fraction])
        worse = [f"{key} × {ours[key]:.2f}" for key in ("p50", "p90", "p99") if ours[key] > WITHIN]
        worse += [f"goodput × {1 / ours['good']:.2f}"] if ours["good"] > WITHIN else []
        behind += [[*cell, ", ".join(worse)]] if worse else []
    summary: list[list[str]] = []
    for policy, found in factors.items():
        best = [sum(one[key] <= WITHIN for one in found) for key in MEASURES]
        worst = [max(one[key] for one in found) for key in ("p50", "p90", "p99")]
        summary.append([policy, *map(str, (sum(best), *best)), *(f"× {one:.3g}" for one in worst)])
    summary.sort(key=lambda line: -int(line[1]))
    of_price = [one[key] for one in factors["price"] for key in MEASURES]
    report.value("rows", len(cells))
    report.value("cells", len(of_price))
    report.value("price_best", sum(factor <= WITHIN for factor in of_price))
    report.value("price_above_1_15", sum(factor > 1.15 for factor in of_price))
    best_of = [f"best {key}" for key in ("p50", "p90", "p99", "goodput")]
    for title, columns, lines in (
        ("summary", ["policy", "best cells", *best_of, "worst p50", "worst p90", "worst p99"], summary),
        ("behind", ["workload", "load", "`price` / best"], behind),
        ("price", ["workload", "load", "p50", "p90", "p99", "goodput", "hit rate / oracle"], verdicts),
        ("ttft", ["workload", "load", *shown], times),
        ("goodput", ["workload", "load", *shown], goods),
        ("tail", ["workload", "load", *shown], tails),
        ("hits", ["workload", "load", *policies], hits),
    ):
        report.table(title, *columns)
        for line in lines:
            report.row(*line)


def mean_of_seeds(found: list[dict[str, Any]]) -> dict[str, float]:
    """Return the means over the seeds. The oracle has a hit rate only."""
    if "good_per_s" not in found[0]:
        return {"hit": found[0]["hit_rate"]}
    read: dict[str, Callable[[dict[str, Any]], float]] = {
        "hit": lambda r: r["hit_rate"],
        "p50": lambda r: r["ttft_ms"]["p50"],
        "p90": lambda r: r["ttft_ms"]["p90"],
        "p99": lambda r: r["ttft_ms"]["p99"],
        "long": lambda r: r["ttft_ms_by_work"]["longest_10_percent"]["p99"],
        "short": lambda r: r["ttft_ms_by_work"]["others"]["p99"],
        "mean": lambda r: r["ttft_ms"]["mean"],
        "good": lambda r: r["good_per_s"],
        "wait_ratio": lambda r: r.get("queue", {}).get("longest_wait_ratio", 0.0),
    }
    return {key: sum(value(one) for one in found) / len(found) for key, value in read.items()}


def _times(row: dict[str, float], factors: dict[str, float]) -> str:
    return " / ".join(_bold(factors[key] <= WITHIN, f"{row[key]:,.0f}") for key in ("p50", "p90", "p99"))


def _bold(best: bool, text: str) -> str:
    return f"**{text}**" if best else text


if __name__ == "__main__":
    main()
