"""Joins the result files of bench/gpu/run.py, prints them as a table, and writes bench/results/gpu.json.

python bench/gpu/record_runs.py DIR/gpu-1.json DIR/gpu-2-3.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from record import RESULTS, Report

NAME = "gpu"
RUN_COLUMNS = (
    "policy", "round", "TTFT p50, ms", "p90", "p99", "turns after the first, p50", "requests/s",
    "prefill learned, ms/token",
)  # fmt: skip
MEDIAN_COLUMNS = (
    "policy", "runs", "TTFT p50, ms", "requests/s", "TTFT p50 / round_robin", "requests/s / round_robin",
)  # fmt: skip


def row(run: dict[str, Any]) -> list[str | int | float]:
    # Policies that read no prompts learn no speed.
    speeds = run["prefill_ms_per_token"].values() if run["policy"] == "price" else ()
    ttft, learned = run["ttft_ms"], [speed for speed in speeds if speed]
    speed = f"{min(learned):.3f} to {max(learned):.3f}" if learned else "–"
    return [
        run["policy"], run["round"], ttft["p50"], ttft["p90"], ttft["p99"], run["ttft_later_turns_p50_ms"],
        run["requests_per_s"], speed,
    ]  # fmt: skip


def main() -> None:
    files = [json.loads(Path(name).read_text()) for name in sys.argv[1:]]
    runs = sorted((run for file in files for run in file["runs"]), key=lambda run: (run["policy"], run["round"]))
    failed = [run for run in runs if run["served"] < run["requests"]]
    if not runs or failed:
        sys.exit(f"requests failed: {[(run['policy'], run['round'], run['errors']) for run in failed]}")
    report = Report()
    report.table("runs", *RUN_COLUMNS)
    for run in runs:
        report.row(*row(run))
    report.table("medians", *MEDIAN_COLUMNS)
    medians = {}
    for policy in dict.fromkeys(run["policy"] for run in runs):
        own = [run for run in runs if run["policy"] == policy]
        medians[policy] = (
            len(own), median(run["ttft_ms"]["p50"] for run in own), median(run["requests_per_s"] for run in own)
        )  # fmt: skip
    base_ttft, base_rate = medians["round_robin"][1:]
    for policy, (count, ttft, rate) in medians.items():
        report.row(policy, count, ttft, rate, f"{ttft / base_ttft:.2f}", f"{rate / base_rate:.2f}")
        report.value(f"{policy}_ttft_ratio", f"{ttft / base_ttft:.2f}")
        report.value(f"{policy}_rate_ratio", f"{rate / base_rate:.2f}")
    load = files[0]["load"]
    report.value("load", ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in load.items()))
    report.record(NAME, "python3 bench/gpu/run.py prepare --assets DIR; python3 bench/gpu/run.py measure --round 1 …")
    path = RESULTS / f"{NAME}.json"
    result = json.loads(path.read_text())
    result["machine"] = files[0]["machine"]
    path.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
