"""Published experiments that need more than one replay, with one command each:

python bench/experiments.py unequal      a. two unequal GPUs, over several seeds
python bench/experiments.py llm_d        d. llm-d's load steps
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import fmean, stdev

import msgspec
from load_steps import LoadStep, run_load_steps
from record import Report, add_record_option

from warmroute.lab.engine.timing import GPUS, profile
from warmroute.lab.replay_setup import parse_policy
from warmroute.lab.report import ms
from warmroute.lab.run import Setup, replay
from warmroute.lab.simulated_node import Conditions, NodeSpec
from warmroute.lab.summary import Run
from warmroute.lab.workloads import parse_workload

# llm-d/llm-d, guides/precise-prefix-cache-aware/benchmark-templates/guide.yaml: rate and seconds of each stage.
LLM_D_STEPS = (
    LoadStep(15, 50, measured=False),
    *(LoadStep(rate, s) for rate, s in ((3, 20), (10, 20), (15, 20), (20, 38), (22, 34), (25, 30), (30, 25))),
    *(LoadStep(rate, s) for rate, s in ((35, 21), (40, 38), (43, 36), (46, 33), (49, 30), (52, 29), (55, 27))),
    *(LoadStep(rate, s) for rate, s in ((57, 26), (60, 25))),
)
LLM_D_TOKENS = ("system_tokens=6320", "question_tokens=1264", "output_tokens=1000")
"""The guide specifies 6,000 + 1,200; the published reports count 7,577 to 7,584 in a prompt and 998 in an answer."""
LLM_D_EQUAL = "llm_d:prefix=1,kv=1,short_queue=1,no_hit_lru=0"
"""llm-d's estimated routing with the weights of the published run."""
LLM_D_JANUARY = "llm_d_precise:no_hit_lru=0,speculative_s=0"
"""llm-d's precise routing as its guide had it in January 2026."""
PUBLISHED_TTFT_P90_S: dict[str, tuple[float, ...]] = {
    "random": (0.82, 1.4, 2.3, 70, 86, 101, 106),
    "least_loaded": (1.6, 4.1, 7.0, 78, 84, 101, 110),
    LLM_D_EQUAL: (0.50, 0.50, 0.40, 0.60, 0.71, 43, 50),
    LLM_D_JANUARY: (0.50, 0.60, 0.40, 0.60, 0.51, 0.49, 0.50),
    "llm_d_precise": (0.187, 0.199, 0.225, 0.320, 0.193, 0.272, 0.300),
}
"""By rate of PUBLISHED_RATES. The first four: llm-d-kv-cache, benchmarking/73-capacity, whose names are
random-scheduling, load-scheduling, estimated-scheduling and precise-scheduling. `llm_d_precise`: llm-d's
guides/precise-prefix-cache-routing at commit 0aa9f337 (2026), with no-hit-lru and speculative entries."""
PUBLISHED_RATES = (3, 10, 15, 20, 30, 40, 60)
PUBLISHED_STEP_S = (38, 43, 43, 72, 62, 109, 110)
"""Time of each step until its last answer: the log of llm-d's guides/precise-prefix-cache-aware, January 2026."""
PUBLISHED_TOKENS_PER_S = (1219, 3902, 5761, 9185, 9222, 10271, 10497)
PUBLISHED_LATER_TOKENS_PER_S = (1707, 4904, 6887, 11224, 13507, 15593, 15733)
"""Of `llm_d_precise`, from the same report as its TTFT."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    unequal = commands.add_parser("unequal", help="a. two unequal GPUs")
    unequal.add_argument("--seeds", type=int, default=40, metavar="N", help="number of seeds (40)")
    unequal.add_argument("--profile", action="append", metavar="NAME", help="(t4-1.5b, l4-1.5b)")
    unequal.add_argument("--clients", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32], metavar="N")
    unequal.add_argument("--policy", action="append", metavar="P", help="repeatable; compares the first and the last")
    unequal.add_argument("--t4-efficiency", type=float, metavar="X", help="fraction of the T4's data sheet (0.37)")
    unequal.add_argument("workload", nargs="*", metavar="KEY=VALUE", help="parameters of shared_system_prompts")
    add_record_option(unequal)
    unequal.set_defaults(run=run_unequal)
    llm_d = commands.add_parser("llm_d", help="d. llm-d's load steps")
    llm_d.add_argument("--policy", action="append", metavar="P", help="repeatable")
    llm_d.add_argument("--seed", type=int, default=1)
    llm_d.add_argument("--json", type=Path, metavar="FILE", help="all numbers, as JSON")
    llm_d.add_argument("--html", type=Path, metavar="FILE", help="a page with plots")
    llm_d.add_argument("workload", nargs="*", metavar="KEY=VALUE", help=f"parameters ({' '.join(LLM_D_TOKENS)})")
    add_record_option(llm_d)
    llm_d.set_defaults(run=run_llm_d)
    args = parser.parse_args()
    report = Report()
    args.run(args, report)
    report.record(args.record)


def run_unequal(args: argparse.Namespace, report: Report) -> None:
    """Print means ± standard deviations over the seeds. Differences are taken within each seed."""
    policies = args.policy or ["session:load_factor=inf", "round_robin"]
    if args.t4_efficiency:
        GPUS["t4"] = msgspec.structs.replace(GPUS["t4"], efficiency=args.t4_efficiency)
    profiles = [profile(name) for name in args.profile or ("t4-1.5b", "l4-1.5b")]
    workload = parse_workload(["shared_system_prompts", *args.workload])
    report.table("clients", "clients", "", *policies, "first / last")
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
            cells = (_mean_and_deviation(one, "") for one in values)
            report.row(clients, title, *cells, _mean_and_deviation(differences, " %", "+"))


def _mean_and_deviation(values: list[float], unit: str, sign: str = "") -> str:
    return f"{fmean(values):{sign}.1f} ± {stdev(values) if len(values) > 1 else 0.0:.1f}{unit}"


def run_llm_d(args: argparse.Namespace, report: Report) -> None:
    nodes = tuple(NodeSpec(f"node-{at}", profile("2xh100-32b"), block_size=64) for at in range(8))
    policies = args.policy or [*PUBLISHED_TTFT_P90_S, "llm_d_affinity", "session", "prefix_hash"]
    runs: list[Run] = []
    columns = ("TTFT mean", "p90", "per token mean", "output tokens/s", "until the last answer", "hit rate")
    report.table("steps", "policy", "requests/s", *columns)
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
            report.row(
                policy, f"{run['rate']:g}", ms(ttft_ms["mean"]), ms(ttft_ms["p90"]), ms(run["inter_token_ms"]["mean"]),
                f"{run['output_tokens_per_s']:,.0f}", f"{run['duration_s']:.0f} s", f"{run['hit_rate']:.1%}",
            )  # fmt: skip
    if args.json:
        args.json.write_text(json.dumps({"runs": runs}, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    if args.html:
        from warmroute.lab.html_report import page

        args.html.write_text(page(runs, "llm-d's load steps on 8 × 2xh100-32b"), encoding="utf-8")
    found = {(run["policy"], run["rate"]): run for run in runs}
    if not {(policy, rate) for policy in PUBLISHED_TTFT_P90_S for rate in PUBLISHED_RATES} <= set(found):
        return  # With other policies or steps there is nothing to compare.
    report.table("ttft_p90", "requests/s", *policies)
    for at, rate in enumerate(PUBLISHED_RATES):
        cells = (_beside_published(policy, at, found[policy, rate]["ttft_ms"]["p90"] / 1000.0) for policy in policies)
        report.row(rate, *cells)
    report.table("precise", "requests/s", "until the last answer", "output tokens/s", "later guide: output tokens/s")
    for rate, step_s, tokens_per_s, later in zip(
        PUBLISHED_RATES, PUBLISHED_STEP_S, PUBLISHED_TOKENS_PER_S, PUBLISHED_LATER_TOKENS_PER_S, strict=True
    ):
        january, now = found[LLM_D_JANUARY, rate], found["llm_d_precise", rate]
        tokens = f"{tokens_per_s:,} / {january['output_tokens_per_s']:,.0f}"
        later_tokens = f"{later:,} / {now['output_tokens_per_s']:,.0f}"
        report.row(rate, f"{step_s} / {january['duration_s']:.0f} s", tokens, later_tokens)
    for policy, name in (("random", "random"), (LLM_D_JANUARY, "january"), ("llm_d_precise", "llm_d_precise")):
        run = found[policy, PUBLISHED_RATES[-1]]
        report.value(f"{name}_60_tokens_per_s", f"{run['output_tokens_per_s']:,.0f}")
        report.value(f"{name}_60_ttft_mean", ms(run["ttft_ms"]["mean"]))
        report.value(f"{name}_60_per_token", ms(run["inter_token_ms"]["mean"]))


def _beside_published(policy: str, at: int, simulated_s: float) -> str:
    simulated = f"{simulated_s:.2g} s" if simulated_s < 100 else f"{simulated_s:.0f} s"
    return f"{PUBLISHED_TTFT_P90_S[policy][at]:g} / {simulated}" if policy in PUBLISHED_TTFT_P90_S else simulated


if __name__ == "__main__":
    main()
