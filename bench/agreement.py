"""Whether replay agrees with real processes: the same workload through fake engines, router and load generator as
processes, and in virtual time.

    python bench/agreement.py

The exit code is 1 if the hit rates differ by more than one percentage point or the TTFT p50 by more than 10 %. Run it
on an idle machine: CPU time that other processes take is measured as TTFT, multiplied by --speed.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Iterator
from random import Random
from statistics import fmean, stdev

import uvloop
from agreement_trials import Comparison, Trial, run_both, run_in_replay
from record import Report, add_record_option, load_average

from warmroute.lab.workloads.workload_prompt import FollowUp, WorkloadPrompt

MAX_HIT_RATE_POINTS, MAX_TTFT_DIFFERENCE = 1.0, 0.10
JITTER_MS = 50.0
KEYED_POLICIES = ("prefix_hash", "session")
POLICIES = ("round_robin", "least_loaded", *KEYED_POLICIES)
RAG = "rag documents=40 topics=12 per_request=2 document_tokens=1500 output_tokens=16 rate=1"
CHATS = "multi_turn_chat systems=4 system_tokens=2000 turns=4 message_tokens=1400 output_tokens=16 think_s=6 rate=0.25"
TRIALS = {RAG: POLICIES, CHATS: KEYED_POLICIES}
"""Long prompts on slow GPUs, so that the machine's own milliseconds matter little. Conversations run under policies
with a routing key only: round robin depends on the order of turns, which changes when an answer ends a little later."""


class JitteredTrial(Trial, frozen=True):
    """The same trial with random milliseconds added to every think time, as on a real machine."""

    jitter_seed: int = 0

    def prompts(self) -> Iterator[WorkloadPrompt]:
        random, plain = Random(self.jitter_seed), super().prompts()
        return (_add_jitter(prompt, random) for prompt in plain)


def _add_jitter(prompt: WorkloadPrompt, random: Random) -> WorkloadPrompt:
    next_turn = prompt.next_turn

    def later() -> FollowUp | None:
        follow_up = next_turn() if next_turn else None
        if follow_up is not None:
            follow_up.think_ms += random.random() * JITTER_MS
            _add_jitter(follow_up.prompt, random)
        return follow_up

    prompt.next_turn = later if next_turn else None
    return prompt


def replay_noise(args: argparse.Namespace, report: Report) -> None:
    """Report how much replays differ from each other when answers end a little later."""
    words = tuple(CHATS.split())
    report.table("noise", "multi_turn_chat", "hit rate, %", "σ, points", "TTFT p50, ms", "σ, %")
    for policy in POLICIES:
        runs = [
            run_in_replay(
                JitteredTrial(workload=words, policy=policy, limit=args.limit, seed=args.seed, jitter_seed=jitter_seed)
            )
            for jitter_seed in range(args.noise)
        ]
        hits = [100.0 * run["hit_rate"] for run in runs]
        p50 = [run["ttft_ms"]["p50"] for run in runs]
        ranges = f"{min(hits):.1f} to {max(hits):.1f}", f"{min(p50):.0f} to {max(p50):.0f}"
        report.row(policy, ranges[0], f"{stdev(hits):.1f}", ranges[1], f"{100.0 * stdev(p50) / fmean(p50):.1f}")


def judge(found: Comparison) -> tuple[list[str], bool]:
    """Return the cells of a row, and whether the runs agree."""
    live, replay = found.live, found.replay
    points, p50, p90 = found.hit_rate_points, found.ttft_difference("p50"), found.ttft_difference("p90")
    cells = [f"{live['hit_rate']:.2%} / {replay['hit_rate']:.2%}", f"{points:+.2f}"]
    for key, difference in (("p50", p50), ("p90", p90)):
        cells += [f"{live['ttft_ms'][key]:,.0f} / {replay['ttft_ms'][key]:,.0f}", f"{difference:+.1%}"]
    complete = live["failed"] == live["rejected"] == 0 and live["finished"] == replay["finished"]
    return cells, complete and abs(points) <= MAX_HIT_RATE_POINTS and abs(p50) <= MAX_TTFT_DIFFERENCE


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", action="append", metavar="P", help=f"repeatable ({', '.join(POLICIES)})")
    parser.add_argument("--profile", default="l4-8b")
    parser.add_argument("--speed", type=float, default=3.0, help="speed of the engine processes (3)")
    parser.add_argument("--limit", type=int, default=80, metavar="N", help="requests per run (80)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--attempts", type=int, default=3, metavar="N", help="runs until one agrees (3)")
    parser.add_argument("--noise", type=int, metavar="N", help="compare N replays with random jitter instead")
    add_record_option(parser)
    args = parser.parse_args()
    report = Report()
    if args.noise:
        replay_noise(args, report)
        report.record(args.record)
        return 0
    columns = ("hit rate, live / replay", "points", "TTFT p50, ms", "", "TTFT p90, ms", "", "agree")
    report.table("trials", "workload", "policy", *columns)
    agree = True
    for workload, policies in TRIALS.items():
        for policy in [one for one in policies if one in (args.policy or POLICIES)]:
            trial = Trial(
                workload=tuple(workload.split()),
                policy=policy,
                profile=args.profile,
                limit=args.limit,
                seed=args.seed,
                speed=args.speed,
            )
            passed = False
            for _ in range(args.attempts):
                with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                    cells, passed = judge(runner.run(run_both(trial)))
                report.row(trial.workload[0], policy, *cells, "yes" if passed else f"no (load {load_average()})")
                if passed:
                    break
            agree = agree and passed
    report.value("agree", "yes" if agree else "no")
    report.value("load", load_average())
    report.record(args.record)
    return 0 if agree else 1


if __name__ == "__main__":
    raise SystemExit(main())
