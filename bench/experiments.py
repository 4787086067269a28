"""Published experiments that need more than one replay, with one command each:

python bench/experiments.py unequal      a. two unequal GPUs, over several seeds
python bench/experiments.py llm_d        d. llm-d's load steps
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import fmean, stdev

from load_steps import LoadStep, run_load_steps

from warmroute.fake_engine.profiles import profile
from warmroute.replay import Run, Setup, parse_policy, replay
from warmroute.replay.report.table import ms
from warmroute.replay.simulation import Conditions, NodeSpec
from warmroute.replay.workloads import parse_workload

# llm-d/llm-d, guides/precise-prefix-cache-aware/benchmark-templates/guide.yaml: rate and seconds of each stage.
LLM_D_STEPS = (
    LoadStep(15, 50, measured=False),
    *(LoadStep(rate, s) for rate, s in ((3, 20), (10, 20), (15, 20), (20, 38), (22, 34), (25, 30), (30, 25))),
    *(LoadStep(rate, s) for rate, s in ((35, 21), (40, 38), (43, 36), (46, 33), (49, 30), (52, 29), (55, 27))),
    *(LoadStep(rate, s) for rate, s in ((57, 26), (60, 25))),
)
LLM_D_TOKENS = ("system_tokens=6320", "question_tokens=1264", "output_tokens=1000")
"""The guide specifies 6,000 + 1,200; the published reports count 7,577 to 7,584 in a prompt and 998 in an answer."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    unequal = commands.add_parser("unequal", help="a. two unequal GPUs")
    unequal.add_argument("--seeds", type=int, default=40, metavar="N", help="number of seeds (40)")
    unequal.add_argument("--profile", action="append", metavar="NAME", help="(t4-1.5b, l4-1.5b)")
    unequal.add_argument("--clients", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32], metavar="N")
    unequal.add_argument("--policy", action="append", metavar="P", help="repeatable; compares the first and the last")
    unequal.add_argument("workload", nargs="*", metavar="KEY=VALUE", help="parameters of shared_system_prompts")
    unequal.set_defaults(run=run_unequal)
    llm_d = commands.add_parser("llm_d", help="d. llm-d's load steps")
    llm_d.add_argument("--policy", action="append", metavar="P", help="repeatable")
    llm_d.add_argument("--seed", type=int, default=1)
    llm_d.add_argument("--json", type=Path, metavar="FILE", help="all numbers, as JSON")
    llm_d.add_argument("--html", type=Path, metavar="FILE", help="a page with plots")
    llm_d.add_argument("workload", nargs="*", metavar="KEY=VALUE", help=f"parameters ({' '.join(LLM_D_TOKENS)})")
    llm_d.set_defaults(run=run_llm_d)
    args = parser.parse_args()
    args.run(args)


def run_unequal(args: argparse.Namespace) -> None:
    """Print means ± standard deviations over the seeds. Differences are taken within each seed."""
    policies = args.policy or ["session:load_factor=inf", "round_robin"]
    profiles = [profile(name) for name in args.profile or ("t4-1.5b", "l4-1.5b")]
    workload = parse_workload(["shared_system_prompts", *args.workload])
    print(
        f"| clients | | {' | '.join(policies)} | first against last |\n| --- | --- | {'--- | ' * (len(policies) + 1)}"
    )
    for clients in args.clients:
        runs = [
            [
                replay(
                    Setup(
                        workload=workload,
                        # The names differ by seed, because they decide which session goes to which node.
                        nodes=tuple(NodeSpec(f"{one.name} {seed}", one) for one in profiles),
                        policy=parse_policy(policy),
                        conditions=Conditions(seed=seed),
                        concurrency=clients,
                        limit=200,
                    )
                )
                for seed in range(1, args.seeds + 1)
            ]
            for policy in policies
        ]
        for title, key in (("TTFT mean, ms", "mean"), ("TTFT p99, ms", "p99"), ("tokens/s", "")):
            values = [
                [float(run["ttft_ms"][key] if key else run["output_tokens_per_s"]) for run in one] for one in runs
            ]
            differences = [100.0 * (a / b - 1.0) for a, b in zip(values[0], values[-1], strict=True)]
            cells = " | ".join(_mean_and_deviation(one, "") for one in values)
            print(f"| {clients} | {title} | {cells} | {_mean_and_deviation(differences, ' %', '+')} |", flush=True)


def _mean_and_deviation(values: list[float], unit: str, sign: str = "") -> str:
    return f"{fmean(values):{sign}.1f} ± {stdev(values) if len(values) > 1 else 0.0:.1f}{unit}"


def run_llm_d(args: argparse.Namespace) -> None:
    nodes = tuple(NodeSpec(f"node-{at}", profile("2xh100-32b"), block_size=64) for at in range(8))
    policies = args.policy or ["random", "least_loaded", "session", "prefix_hash", "llm_d", "llm_d_precise"]
    runs: list[Run] = []
    print("| policy | rate | TTFT mean | p90 | per token mean | output tokens/s | took | hit rate |")
    print("| --- " * 8 + "|")
    for policy in policies:
        setup = Setup(
            workload=parse_workload(["llm_d", *LLM_D_TOKENS, *args.workload]),
            nodes=nodes,
            policy=parse_policy(policy),
            conditions=Conditions(seed=args.seed, form="completion"),
        )
        for run in run_load_steps(setup, LLM_D_STEPS):
            runs.append(run)
            ttft_ms = run["ttft_ms"]
            print(
                f"| {policy} | {run['rate']:g} | {ms(ttft_ms['mean'])} | {ms(ttft_ms['p90'])} "
                f"| {ms(run['inter_token_ms']['mean'])} | {run['output_tokens_per_s']:,.0f} "
                f"| {run['duration_s']:.0f} s | {run['hit_rate']:.1%} |",
                flush=True,
            )
    if args.json:
        args.json.write_text(json.dumps({"runs": runs}, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    if args.html:
        from warmroute.replay.report.html_page import page

        args.html.write_text(page(runs, "llm-d's load steps on 8 × 2xh100-32b"), encoding="utf-8")


if __name__ == "__main__":
    main()
