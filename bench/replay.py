"""How fast replay is: CPU seconds of whole runs on one core, and of 1,000 nodes. `python bench/replay.py [TRACES]`."""

from __future__ import annotations

import resource
import sys
import time
from pathlib import Path

from warmroute.fake_engine.profiles import profile
from warmroute.replay import Setup, contender, replay
from warmroute.replay.workloads import Workload, choose
from warmroute.replay.world import NodeSpec

TRACES = Path(sys.argv[1] if len(sys.argv) > 1 else "/work/shared/data/traces")


def measure(title: str, workload: Workload, policy: str, nodes: int, model: str, limit: int | None = None) -> None:
    specs = tuple(NodeSpec(f"node-{at}", profile(model)) for at in range(nodes))
    before = time.process_time()
    run = replay(Setup(workload=workload, nodes=specs, contender=contender(policy), limit=limit))
    cpu_s = time.process_time() - before
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(
        f"{title:38} {policy:14} {nodes:5} nodes {run['requests']:7,} requests {run['duration_s']:9,.0f} s simulated"
        f" {cpu_s:7.2f} CPU s {run['duration_s'] / cpu_s:9,.0f} × life  peak so far {peak_mb:5.0f} MB",
        flush=True,
    )


def main() -> None:
    first = choose([str(TRACES / "mooncake_arxiv_first1000.jsonl.gz")])
    for policy in ("round_robin", "prefix_hash", "sglang", "dynamo", "llm_d_precise"):
        measure("mooncake_arxiv_first1000", first, policy, 8, "2xh100-32b")
    chat = choose(["multi_turn_chat", "system_tokens=2000", "message_tokens=1000", "rate=2"])
    measure("multi_turn_chat, 12,000 requests", chat, "prefix_hash", 8, "2xh100-32b", 12_000)
    measure("mooncake_synthetic", choose([str(TRACES / "mooncake_synthetic.jsonl.gz")]), "prefix_hash", 8, "2xh100-32b")
    measure("azure2023_code", choose([str(TRACES / "azure2023_code.jsonl.gz")]), "prefix_hash", 8, "2xh100-32b")
    wide = choose(["shared_system_prompts", "prompts=500", "rate=400"])
    measure("shared_system_prompts", wide, "power_of_two", 1000, "l4-1.5b", 20_000)
    agents = choose([str(TRACES / "weka_60sessions_mooncake_format.jsonl.gz")])
    measure("weka_60sessions", agents, "prefix_hash", 8, "2xh100-32b")


if __name__ == "__main__":
    main()
