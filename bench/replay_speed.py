"""The speed of replay: CPU seconds of whole runs on one core, and of a fleet of 1,000 nodes.

python bench/replay_speed.py --data DIR
"""

from __future__ import annotations

import argparse
import resource
import time

from external_data import add_data_option, data_files
from record import Report, add_record_option, load_average

from warmroute.lab.engine.timing import profile
from warmroute.lab.replay_setup import parse_policy
from warmroute.lab.run import Setup, replay
from warmroute.lab.simulated_node import NodeSpec
from warmroute.lab.workloads import parse_workload

TRACES = tuple(
    f"traces/{name}.jsonl.gz"
    for name in ("mooncake_arxiv_first1000", "mooncake_synthetic", "azure2023_code", "weka_60sessions_mooncake_format")
)


def measure(
    report: Report,
    title: str,
    words: list[str],
    policy: str,
    nodes: int = 8,
    hardware: str = "2xh100-32b",
    limit: int | None = None,
) -> None:
    specs = tuple(NodeSpec(f"node-{at}", profile(hardware)) for at in range(nodes))
    workload = parse_workload(words)
    before = time.process_time()
    run = replay(Setup(workload=workload, nodes=specs, policy=parse_policy(policy), limit=limit))
    cpu_s = time.process_time() - before
    requests, simulated_s = f"{run['requests']:,}", f"{run['duration_s']:,.0f}"
    report.row(title, policy, nodes, requests, simulated_s, f"{cpu_s:.1f}", f"{run['duration_s'] / cpu_s:,.0f} ×")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_data_option(parser, *TRACES)
    add_record_option(parser)
    args = parser.parse_args()
    arxiv, synthetic, azure, weka = map(str, data_files(args.data, *TRACES))
    report = Report()
    report.table("runs", "workload", "policy", "nodes", "requests", "simulated s", "CPU s", "speed")
    for policy in ("round_robin", "prefix_hash", "price", "sglang", "dynamo", "llm_d_precise"):
        measure(report, "mooncake_arxiv_first1000", [arxiv], policy)
    chat = ["multi_turn_chat", "system_tokens=2000", "message_tokens=1000", "rate=2"]
    measure(report, "multi_turn_chat, 7,000-token prompts", chat, "prefix_hash", limit=12_000)
    measure(report, "mooncake_synthetic", [synthetic], "prefix_hash")
    measure(report, "azure2023_code", [azure], "prefix_hash")
    shared = ["shared_system_prompts", "prompts=500", "rate=400"]
    measure(report, "shared_system_prompts", shared, "power_of_two", 1000, "l4-1.5b", 20_000)
    measure(report, "weka_60sessions", [weka], "prefix_hash")
    report.value("peak_mb", f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f}")
    report.value("load", load_average())
    report.record(args.record)


if __name__ == "__main__":
    main()
