"""How well the router knows which cached blocks will be used again, and what a better estimate would gain:

    python bench/reuse_estimates.py --data DIR

The memory term of the price weighs what a request evicts with the probability that it is used again. The router learns
that by the age of a node's oldest block, over all prompts. This benchmark replaces the estimate:

    none         the memory term is off
    by age       as the router does, computed here from the blocks that each engine would evict next
    by prefix    the same, learned for each first block of prompts that has enough uses, else by age
    clairvoyant  whether the blocks are used again in the rest of the workload: no estimate can be better
"""

from __future__ import annotations

import argparse
from array import array
from bisect import bisect_right
from collections import defaultdict
from itertools import islice
from math import log2

from external_data import add_data_option, data_files
from policy_comparison import LOAD_NAMES, LOADS
from record import Report, add_record_option

from warmroute._kernel import REUSE_FIRST_S, Prices
from warmroute.core.node import Node
from warmroute.core.policies.price import PricePolicy
from warmroute.core.routing_context import Query
from warmroute.lab.engine.timing import profile
from warmroute.lab.replay_setup import parse_policy
from warmroute.lab.run import Setup, build_world
from warmroute.lab.simulated_node import Conditions, NodeSpec
from warmroute.lab.summary import summary
from warmroute.lab.workloads import parse_workload
from warmroute.lab.world import World

ROWS = (("weka_60sessions_mooncake_format", 1), ("mooncake_synthetic", 1), ("mooncake_arxiv_first1000", 1))
"""Workloads that evict blocks, and the load (policy_comparison.py)."""
ESTIMATES = ("none", "by age", "by prefix", "clairvoyant")
BUCKETS = 32
ENOUGH_USES = 100.0
"""Sampled uses from which a prefix has its own estimate."""
VICTIMS = 128
"""Blocks that an engine would evict next, which an estimate looks at."""
SAMPLE = 16
"""One block in so many is counted."""
VALID_S = 1.0
"""An estimate of a node is computed again after this time."""


def bucket_of(age_s: float) -> int:
    return 0 if age_s <= REUSE_FIRST_S else min(BUCKETS - 1, int(2.0 * log2(age_s / REUSE_FIRST_S)) + 1)


class ReuseByAge:
    """The probability that a block is used again, by the time since its last use (see core/reuse.py)."""

    def __init__(self) -> None:
        self.uses = 0.0
        self._reused = [0.0] * BUCKETS

    def record(self, age_s: float | None) -> None:
        self.uses += 1.0
        if age_s is not None:
            self._reused[bucket_of(age_s)] += 1.0

    def chance(self, age_s: float) -> float:
        later = sum(self._reused[bucket_of(age_s) :])
        return later / (later + max(0.0, self.uses - sum(self._reused)) + 1.0)


class Estimates:
    """Replaces the chance of reuse in the prices of one run."""

    def __init__(self, world: World, kind: str, uses_s: dict[int, list[float]]) -> None:
        """`uses_s`: when each block is used in the workload."""
        self._world, self._kind, self._uses_s = world, kind, uses_s
        self._last_use_s: dict[int, float] = {}
        self._root: dict[int, int] = {}
        self._all = ReuseByAge()
        self._by_root: defaultdict[int, ReuseByAge] = defaultdict(ReuseByAge)
        self._chances: dict[str, tuple[float, float]] = {}
        """By node: the estimate and when it was computed."""
        cache_view = world.replicas[0].cache_view
        cache_view.reuse._update = lambda: None  # type: ignore[method-assign]
        cache_view.reuse.chances = array("d", [bucket / (BUCKETS - 1) for bucket in range(BUCKETS)])

    def sent(self, hashes: list[int], now_s: float) -> None:
        for block in hashes:
            self._root.setdefault(block, hashes[0])
            if block % SAMPLE == 0:
                last_s = self._last_use_s.get(block)
                age_s = None if last_s is None else now_s - last_s
                self._all.record(age_s)
                self._by_root[self._root[block]].record(age_s)
            self._last_use_s[block] = now_s

    def apply(self, nodes: tuple[Node, ...], now_s: float) -> None:
        """Give each node's cache the age whose chance is the estimate."""
        cache_view = self._world.replicas[0].cache_view
        for node in nodes:
            found = self._chances.get(node.name)
            if found is None or now_s - found[1] > VALID_S:
                found = self._chances[node.name] = (self._estimate(node.name, now_s), now_s)
            cache = cache_view.cache(node.name)
            if cache is not None:
                bucket = round(found[0] * (BUCKETS - 1))
                age_s = REUSE_FIRST_S * 2.0 ** ((bucket - 0.5) / 2.0) if bucket else 0.0
                cache.oldest_s = now_s - age_s

    def _estimate(self, name: str, now_s: float) -> float:
        pool = self._world.nodes[name].engine.scheduler.pool
        victims = list(islice(pool._idle.values(), VICTIMS))
        if not victims:
            return 0.0
        return sum(self._chance(block, now_s) for block in victims) / len(victims)

    def _chance(self, block: int, now_s: float) -> float:
        if self._kind == "clairvoyant":
            uses_s = self._uses_s.get(block, ())
            return float(bisect_right(uses_s, now_s) < len(uses_s))
        age_s = now_s - self._last_use_s.get(block, now_s)
        by_root = self._by_root.get(self._root.get(block, 0))
        if self._kind == "by prefix" and by_root is not None and by_root.uses >= ENOUGH_USES:
            return by_root.chance(age_s)
        return self._all.chance(age_s)


def run(words: list[str], rate: float, limit: int, kind: str, uses_s: dict[int, list[float]]) -> list[str]:
    hardware = profile("2xh100-32b")
    setup = Setup(
        workload=parse_workload(words),
        nodes=tuple(NodeSpec(f"node-{at}", hardware) for at in range(8)),
        policy=parse_policy("price:memory=false" if kind == "none" else "price"),
        conditions=Conditions(seed=1),
        rate=rate,
        limit=limit,
    )
    world = build_world(setup)
    estimates = Estimates(world, kind, uses_s)
    policy = world.replicas[0].router.policy
    assert isinstance(policy, PricePolicy)
    original, sent = policy.prices, world.request_sent
    block_size = setup.nodes[0].block_size
    seen: dict[int, list[float]] = {}

    def prices(query: Query, output: float | None = None) -> Prices:
        estimates.apply(query.candidates.nodes, query.now_s)
        return original(query, output)

    def request_sent(exchange, sim) -> None:  # type: ignore[no-untyped-def]
        now_s, hashes = world.calendar.now_s, exchange.request.blocks(block_size)
        estimates.sent(hashes, now_s)
        for block in hashes:
            seen.setdefault(block, []).append(now_s)
        sent(exchange, sim)

    policy.prices = prices  # type: ignore[method-assign]
    world.request_sent = request_sent  # type: ignore[method-assign]
    world.run(setup.arrivals(), concurrency=None, limit=setup.requests, duration_s=None, warm_up=0, waits=True)
    uses_s.update(seen)
    found = summary(world)
    ttft_ms = found["ttft_ms"]
    times = [f"{ttft_ms[key]:,.0f}" for key in ("p50", "p90", "p99", "mean")]
    return [f"{found['hit_rate']:.1%}", *times, f"{found['good_per_s']:.3g}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_data_option(parser, *(f"traces/{name}.jsonl.gz" for name, _ in ROWS))
    parser.add_argument("--limit", type=int, default=800, help="requests per run (800)")
    add_record_option(parser)
    args = parser.parse_args()
    report = Report()
    report.table("estimates", "workload", "load", "estimate", "hits", "TTFT p50, ms", "p90", "p99", "mean", "goodput/s")
    for name, load in ROWS:
        [path] = data_files(args.data, f"traces/{name}.jsonl.gz")
        uses_s: dict[int, list[float]] = {}  # of the run before: with closed loops the times differ a little
        for kind in ESTIMATES:
            report.row(name, LOAD_NAMES[load], kind, *run([str(path)], LOADS[name][load], args.limit, kind, uses_s))
    report.record(args.record)


if __name__ == "__main__":
    main()
