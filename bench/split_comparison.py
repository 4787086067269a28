"""Prefill and decode nodes against mixed ones, in virtual time: short prompts and a tenth of very long ones.

    python bench/split_comparison.py [--nodes 8] [--prefill 3] [--requests 1000] [--seeds 31,32,33] [--record NAME]

The fleet has the same GPUs in all runs. `price` decides for each request whether another node prefills it;
`price:split=always` lets a prefill node prefill every prompt; `llm_d_split` and `dynamo_split` have the rules of these
routers; `mixed` is the policy `price` on nodes without roles. `price, N prefill` has more of the nodes as prefill
nodes. Inter-token time is the mean of each answer. Each figure
is the median over the seeds.
"""

from __future__ import annotations

import argparse
from statistics import median

from record import Report, add_record_option

from warmroute.config.nodes import Role
from warmroute.lab.engine.timing import profile
from warmroute.lab.replay_setup import parse_policy
from warmroute.lab.run import Setup, replay
from warmroute.lab.simulated_node import Conditions, NodeSpec
from warmroute.lab.workloads import parse_workload

RATES = (4.0, 8.0, 12.0, 16.0)
POLICIES = ("price", "price:split=always", "llm_d_split", "dynamo_split")
MIXED = "mixed"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--prefill", type=int, default=3, help="number of prefill nodes")
    parser.add_argument("--more-prefill", type=int, default=5, help="in the rows with more prefill nodes")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--profile", default="h200-8b")
    parser.add_argument("--seeds", default="31,32,33")
    add_record_option(parser)
    args = parser.parse_args()
    report = Report()
    report.table(
        "split", "requests/s", "rule", "TTFT p50", "TTFT p90", "TTFT p99", "inter-token p50", "inter-token p99"
    )
    hardware = profile(args.profile)

    def split(prefill: int) -> list[NodeSpec]:
        roles: list[Role] = ["prefill" if at < prefill else "decode" for at in range(args.nodes)]
        return [NodeSpec(name=f"node-{at}", profile=hardware, role=role) for at, role in enumerate(roles)]

    more = f"price, {args.more_prefill} prefill"
    same = [NodeSpec(name=f"node-{at}", profile=hardware) for at in range(args.nodes)]
    for rate in RATES:
        for name in (*POLICIES, more, MIXED):
            by_price = name in (more, MIXED)
            fleet = same if name == MIXED else split(args.more_prefill if name == more else args.prefill)
            runs = [
                replay(
                    Setup(
                        workload=parse_workload(["mixed_lengths"]),
                        nodes=tuple(fleet),
                        policy=parse_policy("price" if by_price else name),
                        conditions=Conditions(seed=int(seed)),
                        rate=rate,
                        limit=args.requests,
                    )
                )
                for seed in args.seeds.split(",")
            ]
            ttft = [f"{median(run['ttft_ms'][key] for run in runs):,.0f} ms" for key in ("p50", "p90", "p99")]
            between = [f"{median(run['inter_token_ms'][key] for run in runs):,.1f} ms" for key in ("p50", "p99")]
            report.row(f"{rate:g}", f"`{name}`", *ttft, *between)
    report.record(args.record)


if __name__ == "__main__":
    main()
