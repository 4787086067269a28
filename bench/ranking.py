"""Whether policies rank live as they do in replay: the same workload through real processes (simulated engines with KV
events, `warmroute serve`, a load generator), and in virtual time. `python bench/ranking.py`; ends with 1 where two
policies that replay can tell apart came out the other way round.

Replay is run several times, each request and each pause some milliseconds later by chance, as on a real machine: what
those runs are apart is noise. Two policies are told apart where they differ by more than twice the noise of one live
result, and more than a little besides; all others are ties. Needs a machine that is not busy with something else.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, pairwise
from math import hypot, sqrt
from random import Random
from statistics import fmean, stdev

import uvloop

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from agreement import SHAKE_MS, Shaken
from agreement_trials import Trial, live, virtual

from warmroute.replay.summary import Run
from warmroute.replay.workloads import Prompt

POLICIES = ("round_robin", "least_loaded", "prefix_hash", "overlap", "price")
TRIALS = {
    "multi_turn_chat systems=4 system_tokens=1000 turns=5 message_tokens=800 output_tokens=16 think_s=6 rate=0.5": 1200,
    "rag documents=40 topics=12 per_request=2 document_tokens=1500 output_tokens=16 rate=2": 1500,
}
"""Workloads, with the KV blocks of each engine: too few for everything to be everywhere."""


@dataclass(frozen=True)
class Measure:
    name: str
    path: tuple[str, ...]
    little: float
    """Differences up to this are ties, whatever the noise: points, or a share of the smaller one."""
    more_is_better: bool = False

    def of(self, run: Run) -> float:
        found = run
        for key in self.path:
            found = found[key]
        return 100.0 * float(found) if self.more_is_better else float(found)  # type: ignore[arg-type]

    def apart(self, one: float, other: float, noise: float) -> bool:
        least = self.little if self.more_is_better else self.little * min(one, other)
        return abs(one - other) > max(least, 2.0 * noise)


HITS = Measure("hit rate", ("hit_rate",), 1.0, more_is_better=True)
MEAN = Measure("TTFT mean", ("ttft_ms", "mean"), 0.03)
P50 = Measure("TTFT p50", ("ttft_ms", "p50"), 0.03)
MEASURES = (HITS, MEAN, P50)


class ShakenArrivals(Shaken, frozen=True):
    """First requests come some milliseconds later by chance, too."""

    def prompts(self) -> Iterator[Prompt]:
        random, last_ms = Random(-1 - self.shake), 0.0
        for prompt in super().prompts():
            prompt.at_ms = last_ms = max(last_ms, prompt.at_ms + random.random() * SHAKE_MS)
            yield prompt


@dataclass(frozen=True)
class Result:
    """Of one policy, by measure."""

    replay: dict[Measure, float]
    live: dict[Measure, float]
    noise: dict[Measure, float]
    """Of the live result: its standard deviation, as far as replay knows it."""


def result(workload: str, blocks: int, policy: str, args: argparse.Namespace) -> Result:
    told: list[Run] = []
    replayed: list[list[Run]] = []
    for seed in range(1, args.seeds + 1):
        given = {"workload": tuple(workload.split()), "policy": policy, "blocks": blocks, "limit": args.limit}
        given |= {"profile": args.profile, "seed": seed, "speed": args.speed, "events": True}
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            run = runner.run(live(Trial(**given)))
        if run["finished"] != args.limit:
            raise SystemExit(f"{policy}: {run['finished']} of {args.limit} requests were answered: {run['errors']}")
        told.append(run)
        replayed.append([virtual(ShakenArrivals(shake=shake, **given)) for shake in range(args.chances)])
    return Result(
        {each: fmean(each.of(run) for runs in replayed for run in runs) for each in MEASURES},
        {each: fmean(map(each.of, told)) for each in MEASURES},
        {
            each: sqrt(sum(stdev(map(each.of, runs)) ** 2 for runs in replayed)) / args.seeds
            for each in MEASURES
        },
    )  # fmt: skip


def in_order(measure: Measure, found: dict[str, float], noise: dict[str, float]) -> str:
    """The policies, the best first; ≈ where two neighbours are a tie."""
    ranked = sorted(found, key=lambda policy: found[policy], reverse=measure.more_is_better)
    words = ranked[:1]
    for before, policy in pairwise(ranked):
        apart = measure.apart(found[before], found[policy], hypot(noise[before], noise[policy]))
        words += [">" if apart else "≈", policy]
    return " ".join(words)


def judge(measure: Measure, results: dict[str, Result]) -> bool:
    """Says how the pairs of policies stand that replay tells apart; whether none is the other way round."""
    replay = {policy: result.replay[measure] for policy, result in results.items()}
    told = {policy: result.live[measure] for policy, result in results.items()}
    noise = {policy: result.noise[measure] for policy, result in results.items()}
    clear = [
        (one, other)
        for one, other in combinations(results, 2)
        if measure.apart(replay[one], replay[other], hypot(noise[one], noise[other]))
    ]
    turned = [(a, b) for a, b in clear if (replay[a] > replay[b]) != (told[a] > told[b])]
    print(f"{measure.name}: {len(clear)} pairs are told apart in replay, {len(clear) - len(turned)} rank so live"
          + "".join(f"; {a} and {b} the other way round" for a, b in turned))  # fmt: skip
    print(f"    replay  {in_order(measure, replay, noise)}")
    print(f"    live    {in_order(measure, told, noise)}")
    return not turned


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", action="append", metavar="P", help=f"repeat for more ({', '.join(POLICIES)})")
    parser.add_argument("--profile", default="l4-8b")
    parser.add_argument("--speed", type=float, default=3.0, help="of the real engines (3)")
    parser.add_argument("--limit", type=int, default=150, metavar="N", help="requests of a run (150)")
    parser.add_argument("--seeds", type=int, default=2, metavar="N", help="live runs of each policy (2)")
    parser.add_argument("--chances", type=int, default=6, metavar="N", help="replays of each live run (6)")
    args = parser.parse_args()
    policies = args.policy or POLICIES
    agree = True
    print(f"3 × {args.profile}, {args.limit} requests, {args.seeds} seeds, speed {args.speed:g}; ± is one σ of noise")
    for workload, blocks in TRIALS.items():
        print(f"\n{workload}, {blocks} blocks")
        print(f"{'':13}" + "".join(f"{each.name + ', live / replay':>32}" for each in MEASURES))
        results: dict[str, Result] = {}
        for policy in policies:
            found = results[policy] = result(workload, blocks, policy, args)
            cells = [
                f"{found.live[each]:.{digits}f} / {found.replay[each]:.{digits}f} ± {found.noise[each]:.{digits}f}"
                for each, digits in zip(MEASURES, (1, 0, 0), strict=True)
            ]
            print(
                f"{policy:13}" + "".join(f"{cell:>32}" for cell in cells) + f"   load {os.getloadavg()[0]:.1f}",
                flush=True,
            )
        for measure in MEASURES:
            agree = judge(measure, results) and agree
    print("\nThe ranking is the same." if agree else "\nThe ranking is not the same.")
    return 0 if agree else 1


if __name__ == "__main__":
    raise SystemExit(main())
