"""Requests for many LoRA adapters on nodes that keep a few each, with and without the price of loading an adapter.

    python bench/adapter_loading.py

Prompts share only their adapter's system prompt. An engine takes --load-ms to load an adapter. The router prices a load
at this time, at half of it, or at nothing.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from random import Random

import msgspec
from record import Report, add_record_option

from warmroute.config import from_table
from warmroute.lab.engine.timing import profile
from warmroute.lab.simulated_node import Conditions, NodeSpec
from warmroute.lab.summary import percentile
from warmroute.lab.workloads.generators import Popularity
from warmroute.lab.workloads.workload_prompt import Segments, WorkloadPrompt, segment_id
from warmroute.lab.world import World


def prompts(args: argparse.Namespace, adapters: tuple[str, ...]) -> Iterator[WorkloadPrompt]:
    random = Random(args.seed)
    popularity = Popularity(len(adapters), 0.8)
    at_ms = 0.0
    for number in range(args.requests):
        at_ms += random.expovariate(args.rate) * 1000.0
        adapter = adapters[popularity.pick(random)]
        text = Segments().followed_by(segment_id("system", adapter), 400)
        text = text.followed_by(segment_id("message", number), 400)
        answered = text.followed_by(segment_id("answer", number), 60)
        yield WorkloadPrompt(text.tokens, 60, answered, at_ms=at_ms, lora_name=adapter)


def run(priced_ms: float, args: argparse.Namespace, report: Report) -> None:
    adapters = tuple(f"adapter-{number}" for number in range(args.adapters))
    spec = NodeSpec("", profile(args.profile), adapters=adapters, max_loras=args.slots, lora_load_ms=args.load_ms)
    specs = [msgspec.structs.replace(spec, name=f"node-{at}") for at in range(args.nodes)]
    world = World(
        specs, Conditions(seed=args.seed), from_table({"price": {"adapter_load_ms": priced_ms}}, experiment=True)
    )
    world.run(prompts(args, adapters))
    loads = sum(stats.lora_loads for sim in world.nodes.values() for stats in sim.incarnation_stats)
    ordered = sorted(world.results.ttft_ms)
    p50, p95 = percentile(ordered, 0.5) or 0.0, percentile(ordered, 0.95) or 0.0
    hit_rate = world.results.cached_tokens / max(1, world.results.prompt_tokens)
    report.row(f"{priced_ms:.0f}", loads, f"{p50:.0f}", f"{p95:.0f}", f"{hit_rate:.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", default="a100-8b")
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--adapters", type=int, default=16)
    parser.add_argument("--slots", type=int, default=4, help="adapters that a node keeps (4)")
    parser.add_argument("--load-ms", type=float, default=200.0)
    parser.add_argument("--rate", type=float, default=8.0, help="requests per second (8)")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    add_record_option(parser)
    args = parser.parse_args()
    report = Report()
    report.table("adapters", "`adapter_load_ms`", "adapters loaded", "TTFT p50, ms", "p95", "hit rate")
    for priced_ms in (0.0, args.load_ms / 2, args.load_ms):
        run(priced_ms, args, report)
    report.record(args.record)


if __name__ == "__main__":
    main()
