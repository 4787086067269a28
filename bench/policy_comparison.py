"""All policies, ours and other routers', on all traces and generated workloads, at three loads, in virtual time:

python bench/policy_comparison.py --data DIR [--workload NAME …] [--policy P …] [--nodes 8] [--seeds 1]

Light is a load that every policy can serve. At the knee, load balancing alone begins to queue. Beyond is more than it
can serve. Goodput counts answers whose first token came within 2 s + 0.5 ms for each token of the prompt. The tables
state how often each policy is within 3 % of the best in TTFT p50, TTFT p90 and goodput, and compare the hit rates with
that of one cache as large as the fleet's (`oracle`). The table `tail` has the TTFT p99 of the 10 % of requests with the
most prefill work, and of the others.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from external_data import add_data_option, data_files
from record import Report, add_record_option
from rich.progress import track

from warmroute.fake_engine.profiles import profile
from warmroute.replay import Setup, parse_policy, replay
from warmroute.replay.simulation.conditions import Conditions, NodeSpec
from warmroute.replay.workloads.catalog import parse_workload

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
    "llm_d",
    "llm_d_precise",
    "dynamo",
    "kubeai",
    "aibrix",
    "oracle",
)
WITHIN = 1.03
"""A result within this factor of the best counts as the best."""


def run(job: tuple[str, list[str], int, str, int, float, int, int]) -> tuple[str, int, str, int, dict[str, Any]]:
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
    return name, load, policy, seed, replay(setup)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_data_option(parser, *(f"traces/{name}.jsonl.gz" for name in TRACES))
    parser.add_argument("--workload", action="append", help="repeatable (all; generators need no --data)")
    parser.add_argument("--policy", action="append", help="repeatable (all; price is always included)")
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--seeds", type=int, default=1, help="runs of each, averaged (1)")
    parser.add_argument("--limit", type=int, default=1200, help="requests per run (1200)")
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
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        done = list(track(pool.map(run, jobs), "replaying", len(jobs), disable=not sys.stderr.isatty()))
    report = Report()
    show(done, policies, report)
    report.record(args.record)


def show(done: list[tuple[str, int, str, int, dict[str, Any]]], policies: list[str], report: Report) -> None:
    cells = sorted({(name, load) for name, load, *_ in done}, key=lambda cell: (list(LOADS).index(cell[0]), cell[1]))
    shown = [policy for policy in policies if policy != "oracle"]
    lists: list[list[list[str]]] = [[] for _ in range(6)]
    times, goods, hits, tails, verdicts, behind = lists
    counts = {policy: [0, 0, 0, 1.0, 1.0] for policy in shown}
    """For each policy: how often it is among the best in p50, p90 and goodput; its worst p50 and p90 / the best."""
    for name, load in cells:
        rows = {
            policy: _mean([r for n, at, p, _, r in done if (n, at, p) == (name, load, policy)]) for policy in policies
        }
        others = {policy: rows[policy] for policy in shown}
        least = {key: min(row[key] for row in others.values()) for key in ("p50", "p90", "p99")}
        most = max(row["good"] for row in others.values())
        cell = (name, LOAD_NAMES[load])
        times.append([*cell, *(_times(row, least) for row in others.values())])
        goods.append([*cell, *(_bold(row["good"] * WITHIN >= most, f"{row['good']:.3g}") for row in others.values())])
        tails.append([*cell, *(f"{row['long']:,.0f} / {row['short']:,.0f}" for row in others.values())])
        hits.append([*cell, *(f"{row['hit']:.1%}" for row in rows.values())])
        ours = rows["price"]
        p50, p90, p99 = (ours[key] / least[key] for key in ("p50", "p90", "p99"))
        good = most / max(1e-9, ours["good"])
        for policy, row in others.items():
            count = counts[policy]
            count[0] += row["p50"] <= least["p50"] * WITHIN
            count[1] += row["p90"] <= least["p90"] * WITHIN
            count[2] += row["good"] * WITHIN >= most
            count[3] = max(count[3], row["p50"] / least["p50"])
            count[4] = max(count[4], row["p90"] / least["p90"])
        oracle = rows.get("oracle", {}).get("hit", 0.0)
        fraction = f"{ours['hit'] / oracle:.1%}" if oracle else "–"
        verdicts.append([*cell, *(f"{ratio:.2f}" for ratio in (p50, p90, p99, 1 / good)), fraction])
        worse = [f"{key} × {ratio:.2f}" for key, ratio in (("p50", p50), ("p90", p90)) if ratio > WITHIN]
        worse += [f"goodput × {1 / good:.2f}"] if good > WITHIN else []
        behind += [[*cell, ", ".join(worse)]] if worse else []
    summary = [
        [policy, *(f"{count:g}" for count in best), f"× {worst50:.3g}", f"× {worst90:.3g}"]
        for policy, (*best, worst50, worst90) in sorted(counts.items(), key=lambda item: -item[1][1])
    ]
    report.value("cells", len(cells))
    for title, columns, lines in (
        ("summary", ["policy", "best p50", "best p90", "best goodput", "worst p50", "worst p90"], summary),
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


def _mean(found: list[dict[str, Any]]) -> dict[str, float]:
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
        "good": lambda r: r["good_per_s"],
    }
    return {key: sum(value(one) for one in found) / len(found) for key, value in read.items()}


def _times(row: dict[str, float], least: dict[str, float]) -> str:
    return " / ".join(_bold(row[key] <= least[key] * WITHIN, f"{row[key]:,.0f}") for key in ("p50", "p90"))


def _bold(best: bool, text: str) -> str:
    return f"**{text}**" if best else text


if __name__ == "__main__":
    main()
