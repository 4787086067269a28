"""The speed of replay: CPU seconds of whole runs on one core, and of a fleet of 1,000 nodes.

python bench/replay_speed.py --data DIR
"""

from __future__ import annotations

import argparse
import resource
import time

from external_data import add_data_option, data_files

from warmroute.fake_engine.profiles import profile
from warmroute.replay import Setup, parse_policy, replay
from warmroute.replay.simulation import NodeSpec
from warmroute.replay.workloads import parse_workload

TRACES = tuple(
    f"traces/{name}.jsonl.gz"
    for name in ("mooncake_arxiv_first1000", "mooncake_synthetic", "azure2023_code", "weka_60sessions_mooncake_format")
)


def measure(
    title: str, words: list[str], policy: str, nodes: int = 8, hardware: str = "2xh100-32b", limit: int | None = None
) -> None:
    specs = tuple(NodeSpec(f"node-{at}", profile(hardware)) for at in range(nodes))
    workload = parse_workload(words)
    before = time.process_time()
    run = replay(Setup(workload=workload, nodes=specs, policy=parse_policy(policy), limit=limit))
    cpu_s = time.process_time() - before
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(
        f"{title:38} {policy:14} {nodes:5} nodes {run['requests']:7,} requests {run['duration_s']:9,.0f} s simulated"
        f" {cpu_s:7.2f} CPU s {run['duration_s'] / cpu_s:9,.0f} × real time  peak so far {peak_mb:5.0f} MB",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_data_option(parser, *TRACES)
    arxiv, synthetic, azure, weka = map(str, data_files(parser.parse_args().data, *TRACES))
    for policy in ("round_robin", "prefix_hash", "sglang", "dynamo", "llm_d_precise"):
        measure("mooncake_arxiv_first1000", [arxiv], policy)
    chat = ["multi_turn_chat", "system_tokens=2000", "message_tokens=1000", "rate=2"]
    measure("multi_turn_chat, 12,000 requests", chat, "prefix_hash", limit=12_000)
    measure("mooncake_synthetic", [synthetic], "prefix_hash")
    measure("azure2023_code", [azure], "prefix_hash")
    shared = ["shared_system_prompts", "prompts=500", "rate=400"]
    measure("shared_system_prompts", shared, "power_of_two", 1000, "l4-1.5b", 20_000)
    measure("weka_60sessions", [weka], "prefix_hash")


if __name__ == "__main__":
    main()
