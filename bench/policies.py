"""Every policy and every peer's rule on every trace and generated workload, at three loads, in virtual time:

python bench/policies.py [--traces DIR] [--workload NAME …] [--policy P …] [--nodes 8] [--seeds 1] [--out FILE]

Light is a load that any policy carries, knee is where load balancing alone begins to queue, beyond is more than it can
carry. Goodput counts answers whose first token came within 2 s and 0.5 ms for each token of the prompt. The last table
says where `price` is within 3 % of the best of all in TTFT p50, TTFT p90 and goodput, and its hit rate against one
cache as large as the fleet's.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from rich.progress import track

from warmroute.fake_engine.profiles import profile
from warmroute.replay import Setup, contender, replay
from warmroute.replay.workloads import choose
from warmroute.replay.world import Conditions, NodeSpec

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
"""Requests a second for 8 × 2xh100-32b: light, knee, beyond. Of multi_turn_chat and tool_agents: conversations."""
NAMES = ("light", "knee", "beyond")
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
NEAR = 1.03


def run(job: tuple[str, list[str], int, str, int, float, int, int]) -> tuple[str, int, str, int, dict[str, Any]]:
    name, words, load, policy, seed, rate, nodes, limit = job
    hardware = profile("2xh100-32b")
    setup = Setup(
        workload=choose(words),
        nodes=tuple(NodeSpec(f"node-{at}", hardware) for at in range(nodes)),
        contender=contender(policy),
        conditions=Conditions(seed=seed),
        rate=rate * nodes / 8,
        limit=limit,
    )
    return name, load, policy, seed, replay(setup)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, default=Path("../shared/data/traces"))
    parser.add_argument("--workload", action="append", help="only these")
    parser.add_argument("--policy", action="append", help="only these (price is always there)")
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--seeds", type=int, default=1, help="runs of each, averaged (1)")
    parser.add_argument("--limit", type=int, default=1200, help="requests of a run (1200)")
    parser.add_argument("--out", type=Path, help="the tables as Markdown")
    args = parser.parse_args()
    policies = [p for p in (args.policy or POLICIES) if p != "price"] + ["price"]
    jobs = []
    for name, rates in LOADS.items():
        if args.workload and name not in args.workload:
            continue
        path = args.traces / f"{name}.jsonl.gz"
        words = [str(path)] if path.exists() else [name]
        if "_" in name and not path.exists() and name.startswith(("mooncake", "weka", "azure")):
            print(f"{name}: no such trace under {args.traces}; left out", file=sys.stderr)
            continue
        for load, rate in enumerate(rates):
            for policy in policies:
                seeds = range(1, (1 if policy == "oracle" else args.seeds) + 1)
                jobs += [(name, words, load, policy, seed, rate, args.nodes, args.limit) for seed in seeds]
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        done = list(track(pool.map(run, jobs), "replaying", len(jobs), disable=not sys.stderr.isatty()))
    text = "\n".join(report(done, policies))
    print(text)
    if args.out:
        args.out.write_text(text + "\n")


def report(done: list[tuple[str, int, str, int, dict[str, Any]]], policies: list[str]) -> list[str]:
    cells = sorted({(name, load) for name, load, *_ in done}, key=lambda cell: (list(LOADS).index(cell[0]), cell[1]))
    shown = [policy for policy in policies if policy != "oracle"]
    head = "| workload | load | " + " | ".join(shown) + " |"
    line = "| --- " * (2 + len(shown)) + "|"
    times = ["TTFT p50 / p90 in ms; the lowest of each, and what is within 3 % of it, is bold.", "", head, line]
    goods = [
        "Answers a second whose first token came in good time; the highest, and what is within 3 %.",
        "",
        head,
        line,
    ]
    hits = [
        "Hit rate; the oracle is one cache as large as the fleet's.",
        "",
        "| workload | load | " + " | ".join(policies) + " |",
        "| --- " * (2 + len(policies)) + "|",
    ]
    verdicts = ["| workload | load | p50 | p90 | p99 | goodput | hit of the oracle's |", "| --- " * 7 + "|"]
    counts = {policy: [0, 0, 0, 1.0, 1.0] for policy in shown}
    """Of each: where it is near the best in p50, p90 and goodput; its worst p50 and p90, against the best."""
    for name, load in cells:
        rows = {
            policy: _mean([r for n, at, p, _, r in done if (n, at, p) == (name, load, policy)]) for policy in policies
        }
        others = {policy: rows[policy] for policy in shown}
        least = {key: min(row[key] for row in others.values()) for key in ("p50", "p90", "p99")}
        most = max(row["good"] for row in others.values())
        begin = f"| {name} | {NAMES[load]} | "
        times.append(begin + " | ".join(_times(row, least) for row in others.values()) + " |")
        goods.append(
            begin
            + " | ".join(_bold(row["good"] * NEAR >= most, f"{row['good']:.3g}") for row in others.values())
            + " |"
        )
        hits.append(begin + " | ".join(f"{row['hit']:.1%}" for row in rows.values()) + " |")
        ours = rows["price"]
        p50, p90, p99 = (ours[key] / least[key] for key in ("p50", "p90", "p99"))
        good = most / max(1e-9, ours["good"])
        for policy, row in others.items():
            count = counts[policy]
            count[0] += row["p50"] <= least["p50"] * NEAR
            count[1] += row["p90"] <= least["p90"] * NEAR
            count[2] += row["good"] * NEAR >= most
            count[3] = max(count[3], row["p50"] / least["p50"])
            count[4] = max(count[4], row["p90"] / least["p90"])
        oracle = rows.get("oracle", {}).get("hit", 0.0)
        share = f"{ours['hit'] / oracle:.1%}" if oracle else "–"
        verdicts.append(f"| {name} | {NAMES[load]} | {p50:.2f} | {p90:.2f} | {p99:.2f} | {1 / good:.2f} | {share} |")
    summary = [f"| of {len(cells)} | p50 | p90 | goodput | worst p50 | worst p90 |", "| --- " * 6 + "|"]
    summary += [
        f"| {policy} | {p50} | {p90} | {good} | × {worst50:.3g} | × {worst90:.3g} |"
        for policy, (p50, p90, good, worst50, worst90) in sorted(counts.items(), key=lambda item: -item[1][1])
    ]
    return [
        *("How often each is within 3 % of the best of all, and its worst times against the best:", "", *summary, ""),
        *("`price` against the best of all, itself included:", "", *verdicts, ""),
        *(*times, "", *goods, "", *hits),
    ]


def _mean(found: list[dict[str, Any]]) -> dict[str, float]:
    """Over seeds. The oracle has a hit rate alone."""
    if "good_per_s" not in found[0]:
        return {"hit": found[0]["hit_rate"]}
    read: dict[str, Callable[[dict[str, Any]], float]] = {
        "hit": lambda r: r["hit_rate"],
        "p50": lambda r: r["ttft_ms"]["p50"],
        "p90": lambda r: r["ttft_ms"]["p90"],
        "p99": lambda r: r["ttft_ms"]["p99"],
        "good": lambda r: r["good_per_s"],
    }
    return {key: sum(value(one) for one in found) / len(found) for key, value in read.items()}


def _times(row: dict[str, float], least: dict[str, float]) -> str:
    return " / ".join(_bold(row[key] <= least[key] * NEAR, f"{row[key]:,.0f}") for key in ("p50", "p90"))


def _bold(best: bool, text: str) -> str:
    return f"**{text}**" if best else text


if __name__ == "__main__":
    main()
