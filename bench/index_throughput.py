"""The block index under the Mooncake traces, on one core: block operations per second, memory and match latency.

    python bench/index_throughput.py --data DIR

docs/concepts/cache-index.md defines the operations. Dynamo's RadixTree runs the same operations if `dynamo` can be
imported, by this interpreter or by the one that DYNAMO_PYTHON names.
"""

from __future__ import annotations

import argparse
import gc
import gzip
import json
import os
import pickle
import random
import statistics
import subprocess
import sys
import tempfile
import time
from array import array
from collections import OrderedDict
from functools import cache
from pathlib import Path
from typing import Any

from external_data import add_data_option, data_files
from record import Report, add_record_option, load_average

TRACES = ("traces/mooncake_synthetic.jsonl.gz", "traces/mooncake_arxiv_first1000.jsonl.gz")
HOLDERS = 64
KV_TOKENS = 307_328
"""KV cache of one holder, as of one pod in llm-d's published benchmark."""
TRACE_BLOCK_TOKENS = 512
GPU = 0
MATCH, STORE, REMOVE = range(3)

Operation = tuple[int, int, bytes, list[int], int]
"""Kind, holder, our hashes, engine hashes, engine hash of the parent (0 for none)."""


def prompts(path: Path) -> list[list[int]]:
    with gzip.open(path) as lines:
        return [json.loads(line)["hash_ids"] for line in lines]


def make_operations(paths: list[Path], blocks_per_id: int) -> list[Operation]:
    """Return the operations of a router: a match for each request, and the stores and removes of the engine it goes to.

    A prompt goes to the holder that holds at least half of it, else to the next holder in turn. A holder evicts the
    least recently used blocks, the tail of a prompt first, as vLLM does. In the end everything is removed.
    """
    from warmroute._kernel import hash_blocks
    from warmroute.core.messages import namespace_seed

    capacity = KV_TOKENS // (TRACE_BLOCK_TOKENS // blocks_per_id)
    operations: list[Operation] = []
    for path in paths:
        namespace = namespace_seed(path.name, "", 1)
        caches: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(HOLDERS)]
        next_holder = 0
        for ids in prompts(path):
            tokens = array("I", [i * blocks_per_id + k for i in ids for k in range(blocks_per_id)])
            packed = hash_blocks(namespace, None, tokens, 1)
            hashes = array("Q", packed).tolist()
            operations.append((MATCH, 0, packed, [], 0))
            holder, depth = max(
                ((p, depth_in(cache, hashes)) for p, cache in enumerate(caches)), key=lambda pair: pair[1]
            )
            if depth * 2 < len(hashes):
                holder = next_holder = (next_holder + 1) % HOLDERS
                depth = depth_in(caches[holder], hashes)
            held, salt = caches[holder], salt_of(holder)
            new = hashes[depth:]
            for block in reversed(hashes):
                held[block] = None
                held.move_to_end(block)
            if new:
                parent = hashes[depth - 1] ^ salt if depth else 0
                operations.append((STORE, holder, packed[8 * depth :], [h ^ salt for h in new], parent))
            evicted = [held.popitem(last=False)[0] for _ in range(max(0, len(held) - capacity))]
            if evicted:
                operations.append((REMOVE, holder, b"", [h ^ salt for h in evicted], 0))
        for holder, held in enumerate(caches):
            if held:
                operations.append((REMOVE, holder, b"", [h ^ salt_of(holder) for h in held], 0))
    return operations


@cache
def salt_of(holder: int) -> int:
    """Return the holder's salt: engines seed their hash chains randomly, so each has its own hash for a block."""
    return random.Random(holder).getrandbits(64)


def depth_in(held: OrderedDict[int, None], hashes: list[int]) -> int:
    for depth, block in enumerate(hashes):
        if block not in held:
            return depth
    return len(hashes)


def count_blocks(operations: list[Operation]) -> tuple[int, int]:
    """Return the number of blocks walked, stored and removed, and the same with every block of a prompt as walked.

    A match walks the leading blocks that some holder holds, and the first one that no holder holds.
    """
    from warmroute._kernel import BlockIndex

    index = BlockIndex(1 << 30)
    holders = [index.add_holder() for _ in range(HOLDERS)]
    walked = with_all_matched = 0
    for kind, holder, packed, engine_hashes, _ in operations:
        if kind == MATCH:
            n = len(packed) // 8
            depth = max((row[-1] for row in index.match(packed)), default=0)
            walked += min(n, depth + 1)
            with_all_matched += n
        else:
            walked += len(engine_hashes)
            with_all_matched += len(engine_hashes)
            if kind == STORE:
                index.store_hashes(holders[holder], packed, GPU, engine_hashes)
            else:
                index.remove(holders[holder], engine_hashes, GPU)
    stats = index.stats()
    assert stats["pairs"] == stats["blocks"] == stats["unknown_removes"] == 0, stats
    return walked, with_all_matched


def run_operations(operations: list[Operation]) -> float:
    """Return the CPU seconds of all operations on an empty index, one call each."""
    from warmroute._kernel import BlockIndex

    index = BlockIndex(1 << 30)
    holders = [index.add_holder() for _ in range(HOLDERS)]
    match, store, remove = index.match, index.store_hashes, index.remove
    gc.disable()
    start = time.process_time()
    for kind, holder, packed, engine_hashes, _ in operations:
        if kind == MATCH:
            match(packed)
        elif kind == STORE:
            store(holders[holder], packed, GPU, engine_hashes)
        else:
            remove(holders[holder], engine_hashes, GPU)
    seconds = time.process_time() - start
    gc.enable()
    assert index.stats()["pairs"] == 0
    return seconds


def throughput(report: Report, block_tokens: int, operations: list[Operation], rounds: int) -> None:
    """Report the block operations per second of the best round. Other processes can only slow a round down."""
    walked, with_all_matched = count_blocks(operations)
    took = sorted(run_operations(operations) for _ in range(rounds))
    best, median = took[0], took[len(took) // 2]
    name = f"Mooncake traces, blocks of {block_tokens} tokens: {walked:,} block operations in {len(operations):,} calls"
    report.row(name, f"{walked / best / 1e6:.1f} M/s; median of {rounds} rounds {walked / median / 1e6:.1f}")
    report.row("the same, all blocks of a prompt counted", f"{with_all_matched / best / 1e6:.1f} M/s")
    report.values[f"operations_{block_tokens}"] = f"{walked / best / 1e6:.1f}"


def bytes_per_pair(report: Report) -> None:
    """Report the bytes per pair over all fill levels from 100,000 pairs on, by how many holders hold each block."""
    from warmroute._kernel import BlockIndex
    from warmroute.core.node_cache import Tier

    report.table("memory", "holders of a block", "of", "tier", "blocks in a row", "bytes per pair, highest", "lowest")
    for sharing, count, run, tier in (
        (1, 64, 64, Tier.GPU),
        (1, 4096, 64, Tier.GPU),
        (2, 64, 64, Tier.GPU),
        (3, 64, 64, Tier.GPU),
        (8, 64, 64, Tier.GPU),
        (64, 64, 64, Tier.GPU),
        (3, 4096, 1, Tier.GPU),
        (2, 4096, 1, Tier.CPU),
    ):
        index = BlockIndex(1 << 30)
        holders = [index.add_holder() for _ in range(count)]
        source = random.Random(5)
        seen: list[float] = []
        pairs = 0
        while pairs < 1_000_000:
            blocks = array("Q", source.randbytes(8 * run))
            for holder in source.sample(holders, sharing):
                salt = source.getrandbits(64)
                index.store_hashes(holder, blocks, tier, [b ^ salt for b in blocks])
            pairs += run * sharing
            if pairs > 100_000 and pairs % 64 == 0:
                seen.append(index.stats()["bytes"] / pairs)
        report.row(sharing, f"{count:,}", tier.name, run, f"{max(seen):.1f}", f"{min(seen):.1f}")


def match_latency(report: Report) -> None:
    from warmroute._kernel import BlockIndex, hash_blocks

    hashes = hash_blocks(1, None, array("I", range(512)), 1)
    for title, depths in (
        ("all hold it", [512] * 64),
        ("64 depths", [8 * (i + 1) for i in range(64)]),
        ("all hold it, a random half of the blocks in CPU memory too", [512] * 64),
    ):
        index = BlockIndex(1 << 30)
        source = random.Random(3)
        for depth in depths:
            holder = index.add_holder()
            index.store_hashes(holder, hashes[: 8 * depth], GPU)
            if "CPU" in title:
                for k in range(depth):
                    if source.random() < 0.5:
                        index.store_hashes(holder, hashes[8 * k : 8 * k + 8], 1)
        took = []
        for _ in range(2000):
            start = time.perf_counter_ns()
            index.match(hashes)
            took.append((time.perf_counter_ns() - start) / 1e3)
        took.sort()
        report.row(f"match of 512 blocks, 64 holders: {title}", f"p50 {took[1000]:.1f} µs, p99 {took[1980]:.1f} µs")


def longest_call(report: Report) -> None:
    """Report the CPU time of batches of 1,000 events of four blocks, while the index grows to two million pairs."""
    from warmroute._kernel import BlockIndex

    index = BlockIndex(1 << 30)
    holder = index.add_holder()
    source = random.Random(9)
    batches = []
    for _ in range(500):
        events = [
            (None, [source.getrandbits(63) for _ in range(4)], [source.getrandbits(17) for _ in range(64)])
            for _ in range(1000)
        ]
        start = time.process_time_ns()
        for parent, engine_hashes, tokens in events:
            index.store(holder, 1, parent, engine_hashes, tokens, 16, GPU)
        batches.append((time.process_time_ns() - start) / 1e6)
    batches.sort()
    times = f"p50 {batches[250]:.2f} ms, longest {batches[-1]:.2f} ms"
    report.row("1,000 store events of 4 blocks, while growing to 2 M pairs", times)
    start = time.process_time_ns()
    index.clear(holder)
    report.row("clear of 2 M pairs; later calls sweep the rest", f"{(time.process_time_ns() - start) / 1e6:.2f} ms")


def hashing(report: Report) -> None:
    from warmroute._kernel import hash_blocks

    for block_size in (16, 64, 512):
        tokens = array("I", [random.getrandbits(17) for _ in range(1 << 18)])
        took = []
        for _ in range(50):
            start = time.perf_counter()
            hash_blocks(1, None, tokens, block_size)
            took.append(time.perf_counter() - start)
        speed = 4 * len(tokens) / statistics.median(took) / 1e9
        report.row(f"hash chain, blocks of {block_size} tokens", f"{speed:.1f} GB/s")


def dynamo_replay(path: str) -> None:
    """Run the operations on Dynamo's tree. The interpreter may have no other package than dynamo.

    The tree loses blocks if engines have different hashes for the same block, so all of them use the same here.
    """
    from dynamo._core import RadixTree  # type: ignore[import-not-found]

    with open(path, "rb") as file:
        operations: list[Operation] = pickle.load(file)
    calls: list[tuple[int, int, Any]] = []
    for number, (kind, holder, packed, engine_hashes, parent) in enumerate(operations):
        hashes = array("Q", packed).tolist()
        names = [e ^ salt_of(holder) for e in engine_hashes]
        data: dict[str, Any]
        if kind == MATCH:
            calls.append((MATCH, 0, hashes))
            continue
        if kind == STORE:
            blocks = [{"block_hash": e, "tokens_hash": h} for e, h in zip(names, hashes, strict=True)]
            data = {"stored": {"parent_hash": parent ^ salt_of(holder) if parent else None, "blocks": blocks}}
        else:
            data = {"removed": {"block_hashes": names}}
        calls.append((kind, holder, json.dumps({"event_id": number, "data": data, "dp_rank": 0}).encode()))
    took = []
    for _ in range(3):
        tree = RadixTree()
        find, apply = tree.find_matches, tree.apply_event
        cpu, start = time.process_time(), time.perf_counter()
        for kind, holder, argument in calls:
            if kind == MATCH:
                find(argument)
            else:
                apply(holder, argument)
        took.append((time.perf_counter() - start, time.process_time() - cpu))
    prompt = list(range(512))
    tree = RadixTree()
    blocks = [{"block_hash": 1000 + h, "tokens_hash": h} for h in prompt]
    data = {"stored": {"parent_hash": None, "blocks": blocks}}
    for holder in range(HOLDERS):
        tree.apply_event(holder, json.dumps({"event_id": holder, "data": data, "dp_rank": 0}).encode())
    matches = []
    for _ in range(500):
        start = time.perf_counter()
        scores = tree.find_matches(prompt).scores
        matches.append((time.perf_counter() - start) * 1e6)
    assert len(scores) == HOLDERS
    wall, cpu = min(took)
    print(json.dumps({"wall_s": wall, "cpu_s": cpu, "match_us": statistics.median(matches)}))


def beside_dynamo(report: Report, operations: list[Operation]) -> None:
    python = os.environ.get("DYNAMO_PYTHON", sys.executable)
    if subprocess.run([python, "-c", "import dynamo._core"], capture_output=True).returncode:
        print(
            "Dynamo's RadixTree: not run, because `ai-dynamo-runtime` is not installed; set DYNAMO_PYTHON to a Python "
            "that has it"
        )
        return
    with tempfile.NamedTemporaryFile(suffix=".pickle") as file:
        pickle.dump(operations, file)
        file.flush()
        ran = subprocess.run([python, __file__, "--dynamo-replay", file.name], capture_output=True, text=True)
    if ran.returncode:
        print(f"Dynamo's RadixTree: failed, {ran.stderr.strip().splitlines()[-1:]}")
        return
    figures = json.loads(ran.stdout.splitlines()[-1])
    walked, _ = count_blocks(operations)
    wall, cpu = (f"{walked / figures[key] / 1e6:.2f} M/s" for key in ("wall_s", "cpu_s"))
    report.table("dynamo", "Dynamo's RadixTree, the same operations", "")
    report.row("by wall time", wall)
    report.row("by CPU time", cpu)
    report.row("match of 512 blocks, 64 holders, p50", f"{figures['match_us']:.1f} µs")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_data_option(parser, *TRACES)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--quick", action="store_true", help="the headline figure only")
    parser.add_argument("--dynamo-replay", metavar="FILE", help=argparse.SUPPRESS)
    add_record_option(parser)
    options = parser.parse_args()
    if options.dynamo_replay:
        dynamo_replay(options.dynamo_replay)
        return 0
    traces = data_files(options.data, *TRACES)
    operations = make_operations(traces, 1)
    report = Report()
    report.table("speed", "operation", "one core")
    throughput(report, TRACE_BLOCK_TOKENS, operations, options.rounds)
    if not options.quick:
        throughput(report, 16, make_operations(traces, TRACE_BLOCK_TOKENS // 16), 5)
        match_latency(report)
        longest_call(report)
        hashing(report)
        bytes_per_pair(report)
        beside_dynamo(report, operations)
    report.value("load", load_average())
    report.record(options.record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
