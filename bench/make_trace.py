"""Writes a trace in Mooncake's format from one of replay's generators.

    python bench/make_trace.py FILE WORKLOAD [KEY=VALUE …] [--requests N] [--seed N]

A conversation's next turn follows after its think time and the time that its answer takes at --ms-per-token. Hash ids
cover 512 tokens and are numbered in the order of their first use.
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from warmroute.lab.workloads import parse_workload, with_follow_ups
from warmroute.lab.workloads.workload_prompt import WorkloadPrompt

ID_TOKENS = 512


def trace_lines(prompts: Iterator[WorkloadPrompt], ms_per_token: float) -> Iterator[str]:
    """Return the lines of the trace, without end."""
    ids: dict[int, int] = {}
    for at_ms, prompt in with_follow_ups(prompts, ms_per_token):
        hashes = prompt.blocks.content(ID_TOKENS).hashes(0, -(-prompt.prompt_tokens // ID_TOKENS))
        row: dict[str, Any] = {
            "timestamp": round(at_ms),
            "input_length": prompt.prompt_tokens,
            "output_length": prompt.output_tokens,
            "hash_ids": [ids.setdefault(block, len(ids)) for block in hashes],
        }
        if prompt.session:
            row["session_id"] = prompt.session.decode()
        yield json.dumps(row, separators=(",", ":")) + "\n"


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="the trace, .jsonl or .jsonl.gz")
    parser.add_argument("workload", nargs="+", metavar="WORKLOAD", help="a generator, then key=value …")
    parser.add_argument("--requests", type=int, default=500, help="number of requests (500)")
    parser.add_argument("--ms-per-token", type=float, default=20.0, help="time for a token of an answer (20)")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args(words)
    prompts = parse_workload(args.workload).arrivals(args.seed)
    text = "".join(islice(trace_lines(prompts, args.ms_per_token), args.requests)).encode()
    # A gzip header without a time makes the file reproducible.
    args.file.write_bytes(gzip.compress(text, 9, mtime=0) if args.file.suffix == ".gz" else text)


if __name__ == "__main__":
    main()
