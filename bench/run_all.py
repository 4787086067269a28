"""`make bench`: the benchmarks whose figures the docs quote.

    make bench ARGS="--data DIR --harness DIR"                      CPU time and live runs; on an idle machine
    make bench ARGS="--data DIR --replays"                          replays in virtual time; an hour on two cores
    make bench ARGS="--data DIR --harness DIR --only peers --record"

--data is the directory of public traces, chats and tokenizers, --harness that of the programs that run other routers
(bench/peers.py). A benchmark whose directory is not given is skipped. --record writes bench/results/NAME.json; `make
docs` then updates the pages.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent

TIMED = {
    "request_path": "request_path.py",
    "decision_latency": "decision_latency.py --data DATA",
    "queue_length": "queue_length.py",
    "index_throughput": "index_throughput.py --data DATA",
    "live_page_cpu": "live_page_cpu.py",
    "metrics_page": "metrics_page.py",
    "tracing_cpu": "tracing_cpu.py",
    "observability_cpu": "observability_cpu.py",
    "search_cpu": "search_cpu.py",
    "demo": "demo.py",
    "peers_prefix_hash": "peers.py --harness HARNESS --policy prefix_hash",
    "peers_least_loaded": "peers.py --harness HARNESS --policy least_loaded",
    "peers_price": "peers.py --harness HARNESS --policy price --peers vr-rr,sgl-ca",
    "peers_tokenizer": "peers.py --harness HARNESS --tokenizer DATA/tokenizers/qwen3-rebuilt",
    "cluster_messages": "cluster_messages.py",
    "workers": "workers.py --harness HARNESS",
    "worker_shares": "workers.py --harness HARNESS --share 0.3",
    "replay_speed": "replay_speed.py --data DATA",
    "agreement": "agreement.py",
    "policy_ranking": "policy_ranking.py",
    "capture_replay": "capture_replay.py --data DATA --nginx",
}
TWO_GPUS = "--nodes 2 --profile t4-1.5b --profile l4-1.5b"
GATE_COLUMNS = "policy,threshold,TTFT p50,TTFT p99,tokens/s,load CV,rejected"
GATE = f"replay_table.py --columns '{GATE_COLUMNS}' shared_system_prompts {TWO_GPUS}"
AFFINE = "--policy session:load_factor=inf --policy round_robin"
LONG_CHATS = "multi_turn_chat systems=12 system_tokens=1500 turns=8 message_tokens=400 output_tokens=200 think_s=8"
REPLAYS = {
    "policies": "policy_comparison.py --data DATA --limit 800 --seeds 3",
    "queue_orders": "queue_orders.py --data DATA --seeds 6",
    "order_bounds": "order_bounds.py --data DATA",
    "reuse_estimates": "reuse_estimates.py --data DATA",
    "policies_llm_d": "policy_comparison.py --workload llm_d --policy sglang --limit 2500 --seeds 3",
    "ablation": "price_experiments.py ablation --data DATA",
    "storm": "price_experiments.py storm",
    "faults": "price_experiments.py robust",
    "affinity": "price_experiments.py affinity",
    "speeds": "speed_learning.py mixed",
    "slowdown": "speed_learning.py slowdown",
    "fairness": "fairness.py",
    "islands": "island_outage.py",
    "islands_h100": f"island_outage.py --profile h100-8b --nodes 3 --rate 7 --duration 120 --workload '{LONG_CHATS}'",
    "islands_l4": "island_outage.py --profile l4-8b --nodes 6 --rate 2 --surviving 1 --duration 160",
    "adapters": "adapter_loading.py",
    "scalers": "scaler_comparison.py --data DATA",
    "agreement_noise": "agreement.py --noise 12",
    "unequal": "experiments.py unequal",
    "unequal_fast_t4": "experiments.py unequal --t4-efficiency 0.65 --clients 1 32",
    "llm_d_steps": "experiments.py llm_d",
    "queue_threshold": f"{GATE} --rate 20 --limit 1000 --queue-threshold 4,8,16,32 {AFFINE}",
    "queue_threshold_80": f"{GATE} --rate 80 --limit 1000 --queue-threshold 16,32,64,128 {AFFINE}",
    "priority_classes": f"replay_table.py priority_mix {TWO_GPUS} --rate 24 --limit 1000 --queue-threshold 8,16,32 "
    "--policy least_loaded",
    "held_rates": "replay_table.py --columns 'policy,offered req/s,TTFT p90,hit rate' llm_d --rate 10,15,20,30,60 "
    "--duration 60 --warm-up 1500 --warm-rate 5 --policy round_robin --policy session --policy sglang "
    "--policy sglang:miss_by_tree=true --policy smg --policy smg:kv_events=false --policy llm_d_precise "
    "--policy llm_d_affinity --policy dynamo --policy price",
    "mooncake": "replay_table.py --columns 'policy,hit rate,TTFT p50,TTFT p90,TTFT p99,load CV' "
    "DATA/traces/mooncake_arxiv_first1000.jsonl.gz --policy round_robin --policy least_loaded --policy prefix_hash "
    "--policy price --policy sglang --policy smg --policy llm_d_precise --policy llm_d_affinity --policy dynamo "
    "--policy kubeai --policy aibrix --policy oracle",
}
"""The name of the result file and the command that writes it. island_outage.py and agreement.py end with 1 if their
figures miss a goal; islands_h100 and islands_l4 do."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", metavar="DIR")
    parser.add_argument("--harness", metavar="DIR")
    parser.add_argument("--replays", action="store_true", help="the replays instead of the timed ones")
    parser.add_argument("--only", action="append", default=[], metavar="WORD", help="names with WORD; repeatable")
    parser.add_argument("--record", action="store_true", help="write the result files")
    args = parser.parse_args()
    missed = []
    for name, command in (REPLAYS if args.replays else TIMED).items():
        if args.only and not any(word in name for word in args.only):
            continue
        print(f"\n== {name}: bench/{command}", flush=True)
        directories = (("DATA", args.data), ("HARNESS", args.harness))
        missing = [word for word, value in directories if not value and word in command]
        if missing:
            print(f"not run: --{missing[0].lower()} DIR is required", flush=True)
            continue
        script, *words = shlex.split(command.replace("DATA", args.data or "").replace("HARNESS", args.harness or ""))
        record = ["--record", name] if args.record else []
        if subprocess.run([sys.executable, str(HERE / script), *words, *record], cwd=HERE.parent).returncode:
            missed.append(name)
    if missed:
        print(f"\nended with an error or missed a goal: {', '.join(missed)}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
