"""Whether policies rank in replay as they do with real processes: fake engines with KV events, `warmroute serve` and a
load generator.

    python bench/policy_ranking.py

Each workload is replayed several times with random milliseconds added to arrivals and think times, as on a real
machine. The differences between these runs are the noise. Replay distinguishes two policies if they differ by more than
twice the noise of one live result and by more than a minimum; all others are ties. The exit code is 1 if two policies
that replay distinguishes rank the other way round live. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, pairwise
from math import hypot, sqrt
from random import Random
from statistics import fmean, stdev

import uvloop
from agreement import JITTER_MS, JitteredTrial
from agreement_trials import Trial, run_in_replay, run_live
from record import Report, add_record_option, load_average

from warmroute.lab.summary import Run
from warmroute.lab.workloads.workload_prompt import WorkloadPrompt

POLICIES = ("round_robin", "least_loaded", "prefix_hash", "overlap", "price")
TRIALS = {
    "multi_turn_chat systems=4 system_tokens=1000 turns=5 message_tokens=800 output_tokens=16 think_s=6 rate=0.5": 1200,
    "rag documents=40 topics=12 per_request=2 document_tokens=1500 output_tokens=16 rate=2": 1500,
}
"""Workloads and the KV blocks of each engine, which are too few to cache everything on every node."""


@dataclass(frozen=True)
class Measure:
    name: str
    path: tuple[str, ...]
    min_difference: float
    """Smaller differences are ties: percentage points, or a fraction of the smaller value."""
    more_is_better: bool = False

    def of(self, run: Run) -> float:
        found = run
        for key in self.path:
            found = found[key]
        return 100.0 * float(found) if self.more_is_better else float(found)  # type: ignore[arg-type]

    def apart(self, one: float, other: float, noise: float) -> bool:
        least = self.min_difference if self.more_is_better else self.min_difference * min(one, other)
        return abs(one - other) > max(least, 2.0 * noise)


HITS = Measure("hit rate, %", ("hit_rate",), 1.0, more_is_better=True)
MEAN = Measure("TTFT mean, ms", ("ttft_ms", "mean"), 0.03)
P50 = Measure("TTFT p50, ms", ("ttft_ms", "p50"), 0.03)
MEASURES = (HITS, MEAN, P50)


class JitteredArrivals(JitteredTrial, frozen=True):
    """Adds random milliseconds to the arrivals of first requests, too."""

    def prompts(self) -> Iterator[WorkloadPrompt]:
        random, last_ms = Random(-1 - self.jitter_seed), 0.0
        for prompt in super().prompts():
            prompt.at_ms = last_ms = max(last_ms, prompt.at_ms + random.random() * JITTER_MS)
            yield prompt


@dataclass(frozen=True)
class Result:
    """The results of one policy, by measure."""

    replay: dict[Measure, float]
    live: dict[Measure, float]
    noise: dict[Measure, float]
    """Standard deviation of the live result, estimated by replay."""


def result(workload: str, blocks: int, policy: str, args: argparse.Namespace) -> Result:
    live_runs: list[Run] = []
    replayed: list[list[Run]] = []
    for seed in range(1, args.seeds + 1):
        given = {"workload": tuple(workload.split()), "policy": policy, "blocks": blocks, "limit": args.limit}
        given |= {"profile": args.profile, "seed": seed, "speed": args.speed, "events": True}
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            run = runner.run(run_live(Trial(**given)))
        if run["finished"] != args.limit:
            raise SystemExit(f"{policy}: {run['finished']} of {args.limit} requests were answered: {run['errors']}")
        live_runs.append(run)
        replayed.append(
            [run_in_replay(JitteredArrivals(jitter_seed=jitter_seed, **given)) for jitter_seed in range(args.replays)]
        )
    return Result(
        {each: fmean(each.of(run) for runs in replayed for run in runs) for each in MEASURES},
        {each: fmean(map(each.of, live_runs)) for each in MEASURES},
        {
            each: sqrt(sum(stdev(map(each.of, runs)) ** 2 for runs in replayed)) / args.seeds
            for each in MEASURES
        },
    )  # fmt: skip


def in_order(measure: Measure, found: dict[str, float], noise: dict[str, float]) -> str:
    """Return the policies, the best first, with ≈ between ties."""
    ranked = sorted(found, key=lambda policy: found[policy], reverse=measure.more_is_better)
    words = ranked[:1]
    for before, policy in pairwise(ranked):
        apart = measure.apart(found[before], found[policy], hypot(noise[before], noise[policy]))
        words += [">" if apart else "≈", policy]
    return " ".join(words)


def judge(measure: Measure, results: dict[str, Result]) -> tuple[int, int]:
    """Print how the pairs rank that replay distinguishes. Return their number, and how many rank the same live."""
    replay = {policy: result.replay[measure] for policy, result in results.items()}
    live = {policy: result.live[measure] for policy, result in results.items()}
    noise = {policy: result.noise[measure] for policy, result in results.items()}
    clear = [
        (one, other)
        for one, other in combinations(results, 2)
        if measure.apart(replay[one], replay[other], hypot(noise[one], noise[other]))
    ]
    reversed_pairs = [(a, b) for a, b in clear if (replay[a] > replay[b]) != (live[a] > live[b])]
    print(f"{measure.name}: {len(clear)} pairs differ in replay, {len(clear) - len(reversed_pairs)} rank the same live"
          + "".join(f"; {a} and {b} the other way round" for a, b in reversed_pairs))  # fmt: skip
    print(f"    replay  {in_order(measure, replay, noise)}")
    print(f"    live    {in_order(measure, live, noise)}")
    return len(clear), len(clear) - len(reversed_pairs)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", action="append", metavar="P", help=f"repeatable ({', '.join(POLICIES)})")
    parser.add_argument("--profile", default="l4-8b")
    parser.add_argument("--speed", type=float, default=3.0, help="speed of the engine processes (3)")
    parser.add_argument("--limit", type=int, default=150, metavar="N", help="requests per run (150)")
    parser.add_argument("--seeds", type=int, default=2, metavar="N", help="live runs of each policy (2)")
    parser.add_argument("--replays", type=int, default=6, metavar="N", help="replays of each live run (6)")
    add_record_option(parser)
    args = parser.parse_args()
    policies = args.policy or POLICIES
    report = Report()
    pairs = clear = same = 0
    for workload, blocks in TRIALS.items():
        name = workload.split()[0]
        report.table(name, f"{name}, {blocks:,} blocks", *(f"{each.name}, live / replay" for each in MEASURES), "load")
        results: dict[str, Result] = {}
        for policy in policies:
            found = results[policy] = result(workload, blocks, policy, args)
            cells = [
                f"{found.live[each]:.{digits}f} / {found.replay[each]:.{digits}f} ± {found.noise[each]:.{digits}f}"
                for each, digits in zip(MEASURES, (1, 0, 0), strict=True)
            ]
            report.row(policy, *cells, load_average())
        for measure in MEASURES:
            found_clear, found_same = judge(measure, results)
            pairs += len(results) * (len(results) - 1) // 2
            clear, same = clear + found_clear, same + found_same
    report.value("pairs", pairs)
    report.value("clear_pairs", clear)
    report.value("same_order", same)
    report.record(args.record)
    return 0 if same == clear else 1


if __name__ == "__main__":
    raise SystemExit(main())
