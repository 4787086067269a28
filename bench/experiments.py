"""Published experiments that take more than one replay, each with one command; docs/experiments.md has what came out:

python bench/experiments.py unequal      a. two unequal GPUs, over several seeds
python bench/experiments.py llm_d        d. llm-d's ladder of rates
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import fmean, stdev

from warmroute.fake_engine.profiles import profile
from warmroute.replay import Run, Setup, contender, replay
from warmroute.replay.ladder import Step, climb
from warmroute.replay.report.table import ms
from warmroute.replay.workloads import choose
from warmroute.replay.world import Conditions, NodeSpec

# llm-d/llm-d, guides/precise-prefix-cache-aware/benchmark-templates/guide.yaml: rate and seconds of each stage.
LLM_D_STEPS = (
    Step(15, 50, counts=False),
    *(Step(rate, seconds) for rate, seconds in ((3, 20), (10, 20), (15, 20), (20, 38), (22, 34), (25, 30), (30, 25))),
    *(Step(rate, seconds) for rate, seconds in ((35, 21), (40, 38), (43, 36), (46, 33), (49, 30), (52, 29), (55, 27))),
    *(Step(rate, seconds) for rate, seconds in ((57, 26), (60, 25))),
)
LLM_D_TOKENS = ("system_tokens=6320", "question_tokens=1264", "output_tokens=1000")
"""6,000 + 1,200 were asked for; the published reports count 7,577 to 7,584 in a prompt, and 998 in most answers."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    unequal = commands.add_parser("unequal", help="a. two unequal GPUs")
    unequal.add_argument("--seeds", type=int, default=40, metavar="N", help="how many (40)")
    unequal.add_argument("--profile", action="append", metavar="NAME", help="(t4-1.5b, l4-1.5b)")
    unequal.add_argument("--clients", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32], metavar="N")
    unequal.add_argument("--policy", action="append", metavar="P", help="two of them")
    unequal.add_argument("workload", nargs="*", metavar="KEY=VALUE", help="parameters of shared_system_prompts")
    unequal.set_defaults(run=run_unequal)
    llm_d = commands.add_parser("llm_d", help="d. llm-d's ladder of rates")
    llm_d.add_argument("--policy", action="append", metavar="P", help="repeat for more")
    llm_d.add_argument("--seed", type=int, default=1)
    llm_d.add_argument("--json", type=Path, metavar="FILE", help="all numbers, as JSON")
    llm_d.add_argument("--html", type=Path, metavar="FILE", help="a page with plots")
    llm_d.add_argument("workload", nargs="*", metavar="KEY=VALUE", help=f"parameters ({' '.join(LLM_D_TOKENS)})")
    llm_d.set_defaults(run=run_llm_d)
    args = parser.parse_args()
    args.run(args)


def run_unequal(args: argparse.Namespace) -> None:
    """Mean ± standard deviation over the seeds; differences are taken within a seed: what it does to both is out."""
    policies = args.policy or ["session:load_factor=inf", "round_robin"]
    profiles = [profile(name) for name in args.profile or ("t4-1.5b", "l4-1.5b")]
    workload = choose(["shared_system_prompts", *args.workload])
    print(
        f"| clients | | {' | '.join(policies)} | first against second |\n| --- | --- | {'--- | ' * (len(policies) + 1)}"
    )
    for clients in args.clients:
        runs = [
            [
                replay(
                    Setup(
                        workload=workload,
                        # named by the seed: which prompts belong to which node is chance too
                        nodes=tuple(NodeSpec(f"{one.name} {seed}", one) for one in profiles),
                        contender=contender(policy),
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
            off = [100.0 * (a / b - 1.0) for a, b in zip(values[0], values[-1], strict=True)]
            told = " | ".join(_spread(one, "") for one in values)
            print(f"| {clients} | {title} | {told} | {_spread(off, ' %', '+')} |", flush=True)


def _spread(values: list[float], unit: str, sign: str = "") -> str:
    return f"{fmean(values):{sign}.1f} ± {stdev(values) if len(values) > 1 else 0.0:.1f}{unit}"


def run_llm_d(args: argparse.Namespace) -> None:
    nodes = tuple(NodeSpec(f"node-{at}", profile("2xh100-32b"), block_size=64) for at in range(8))
    policies = args.policy or ["random", "least_loaded", "session", "prefix_hash", "llm_d", "llm_d_precise"]
    runs: list[Run] = []
    print("| policy | rate | TTFT mean | p90 | per token mean | output tokens/s | took | hit rate |")
    print("| --- " * 8 + "|")
    for policy in policies:
        setup = Setup(
            workload=choose(["llm_d", *LLM_D_TOKENS, *args.workload]),
            nodes=nodes,
            contender=contender(policy),
            conditions=Conditions(seed=args.seed, form="completion"),
        )
        for run in climb(setup, LLM_D_STEPS):
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
        from warmroute.replay.report.page import page

        args.html.write_text(page(runs, "llm-d's ladder of rates on 8 × 2xh100-32b"), encoding="utf-8")


if __name__ == "__main__":
    main()
