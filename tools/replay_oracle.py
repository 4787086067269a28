"""Compares the results of seeded replays with recorded ones, byte by byte.

Replay runs the deciding code of production in virtual time. A change that is meant to change no decision (a rename, a
move, a redesign) must leave every figure here as it is:

    python tools/replay_oracle.py             run all replays; name each figure that differs
    python tools/replay_oracle.py split       only those whose name begins with `split`
    python tools/replay_oracle.py --write     record the figures of this code

A change that is meant to change decisions records them anew, in a commit of its own that shows the tables before and
after. The sums of floats differ between Python versions, so figures are recorded and compared on Python 3.11 only.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[1]
RECORD = REPOSITORY / "tests" / "fixtures" / "replay_oracle.json"
PYTHON = (3, 11)

OWN = "price round_robin random least_loaded power_of_two latency prefix_hash session overlap approximate"
PEERS = "sglang llm_d llm_d_precise dynamo dynamo_fcfs dynamo_wspt kubeai aibrix oracle smg llm_d_affinity"
TRACE = "examples/trace.jsonl.gz"

REPLAYS = {
    # every policy
    "policies-trace": f"{TRACE} --nodes 4 --rate 12",
    "policies-chat": "multi_turn_chat systems=12 --nodes 3 --rate 40 --limit 500 --blocks 6000",
    "policies-storm": "hot_prefix_storm --nodes 3 --limit 400",
    # price in situations of its own
    "queue": "mixed_lengths --nodes 4 --rate 8 --limit 400 --profile l4-1.5b --policy price --policy dynamo:queue=fcfs",
    "queue-orders": "rag --nodes 3 --rate 20 --limit 300 --policy price:queue=fcfs --policy price:queue=shortest",
    "priorities": "priority_mix --nodes 2 --rate 60 --limit 500 --queue-threshold 16,1000 --policy price",
    "evicting": "few_shot --nodes 3 --rate 60 --limit 500 --blocks 2500 --cpu-blocks 2000 --policy price",
    "kv-store": "rag --nodes 3 --rate 6 --limit 300 --kv-store 400000 --policy price",
    "kv-loss": "tool_agents --nodes 4 --rate 3 --limit 400 --kv-loss 0.3 --poll-loss 0.2 --policy price",
    "closed-loop": "llm_d --nodes 4 --concurrency 24 --limit 400 --policy price",
    "islands": "multi_turn_chat --nodes 4 --rate 60 --limit 600 --island near=0 --island far=80 --policy price",
    "unequal": "rag --nodes 4 --rate 12 --limit 300 --profile l4-1.5b --profile 2xh100-32b --policy price",
    # faults
    "faults": (
        "multi_turn_chat --nodes 5 --rate 25 --limit 800 --fault '5 hang node-1' --fault '12 fail node-2' "
        "--fault '20 restart node-2' --fault '24 drain node-3' --policy price --policy least_loaded"
    ),
    "faults-long": (
        "mixed_lengths --nodes 4 --rate 6 --limit 300 --fault '5 fail node-0' --fault '20 hang node-2' --policy price"
    ),
    # prefill and decode nodes
    "split": "mixed_lengths --nodes 5 --rate 5 --limit 300 --role prefill=2 --role decode=2 --policy price",
    "split-faults": (
        "mixed_lengths --nodes 6 --rate 6 --limit 300 --role prefill=2 --role decode=3 --policy price "
        "--fault '6 fail node-0' --fault '14 hang node-1' --fault '20 fail node-3'"
    ),
    "split-peers": (
        "rag --nodes 5 --rate 5 --limit 200 --role prefill=2 --role decode=2 --policy llm_d_split --policy dynamo_split"
    ),
    # scalers
    "scalers": (
        "multi_turn_chat --nodes 2 --rate 12 --duration 900 --day 900 --limit 6000 --start 30 --max-nodes 8 --usd 2 "
        "--policy price --scaler warmroute --scaler threshold --scaler hpa:target=0.7"
    ),
}  # fmt: skip


def arguments(name: str) -> list[str]:
    import shlex

    words = shlex.split(REPLAYS[name])
    if "--policy" not in words:
        for policy in f"{OWN} {PEERS}".split():
            words += ["--policy", policy]
    return [*words, "--seed", "7", "--quiet"]


def figures(name: str) -> dict[str, Any]:
    """Return what a replay measured: for each of its runs, by policy and load, every figure."""
    from warmroute.app.main import main as warmroute

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "runs.json"
        if code := warmroute(["replay", *arguments(name), "--json", str(file)]):
            raise SystemExit(f"{name}: warmroute replay ended with status {code}")
        runs = json.loads(file.read_text())["runs"]
    return {f"{at} {run['policy']}": run for at, run in enumerate(runs)}


def as_lines(recorded: dict[str, Any]) -> str:
    """Return JSON with one line for each run, so that a change of one run is a change of one line."""
    replays = []
    for name, replay in recorded.items():
        runs = [f"{json.dumps(run)}: {json.dumps(figures, sort_keys=True)}" for run, figures in replay["runs"].items()]
        text = ",\n".join(runs)
        replays.append(f'{json.dumps(name)}: {{"arguments": {json.dumps(replay["arguments"])}, "runs": {{\n{text}}}}}')
    text = ",\n".join(replays)
    return f"{{{text}}}\n"


def differences(path: str, before: Any, after: Any) -> list[str]:
    if isinstance(before, dict) and isinstance(after, dict):
        keys = sorted(before.keys() | after.keys())
        return [line for key in keys for line in differences(f"{path} {key}", before.get(key), after.get(key))]
    return [] if before == after else [f"{path}: {before} -> {after}"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prefix", nargs="?", default="", help="only replays whose name begins with it")
    parser.add_argument("--write", action="store_true", help="record the figures instead of comparing them")
    args = parser.parse_args()
    if sys.version_info[:2] != PYTHON:
        print(f"The figures are those of Python {PYTHON[0]}.{PYTHON[1]}; this is another version.")
        return 2
    names = [name for name in REPLAYS if name.startswith(args.prefix)]
    recorded: dict[str, Any] = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    failed = 0
    with ProcessPoolExecutor(2) as pool:
        for name, runs in zip(names, pool.map(figures, names), strict=True):
            if args.write:
                recorded[name] = {"arguments": " ".join(arguments(name)), "runs": runs}
                continue
            lines = differences(name, recorded.get(name, {}).get("runs"), runs)
            failed += bool(lines)
            print(f"{name}: {len(lines)} figures differ" if lines else f"{name}: equal")
            for line in lines[:12]:
                print(f"    {line}")
    if args.write:
        kept = {name: recorded[name] for name in REPLAYS if name in recorded}
        RECORD.write_text(as_lines(kept))
        return 0
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
