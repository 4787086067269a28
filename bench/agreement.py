"""Whether virtual time and real time agree: the same workload through engines, router and load generator as processes,
and through the simulated fleet. Ends with 1 where they are further apart than the bar. `python bench/agreement.py`

The bar: hit rate within one point, TTFT p50 within 10 %. Needs a machine that is not busy with something else: what it
steals from the router and the engines is measured as time to first token, times --speed.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import Iterator
from random import Random
from statistics import fmean, stdev

import uvloop
from agreement_trials import Both, Trial, both, virtual

from warmroute.replay.workloads import FollowUp, Prompt

POINTS, TTFT_SHARE = 1.0, 0.10
SHAKE_MS = 50.0
BY_KEY = ("prefix_hash", "session")
POLICIES = ("round_robin", "least_loaded", *BY_KEY)
RAG = "rag documents=40 topics=12 per_request=2 document_tokens=1500 output_tokens=16 rate=1"
CHATS = "multi_turn_chat systems=4 system_tokens=2000 turns=4 message_tokens=1400 output_tokens=16 think_s=6 rate=0.25"
TRIALS = {RAG: POLICIES, CHATS: BY_KEY}
"""Prompts of thousands of tokens, on cards that take long for them: the machine's own milliseconds are few beside. Of
conversations only policies that go by a key: round robin goes by the order in which turns arrive, and a turn comes some
milliseconds sooner or later with the end of the answer before it (docs/simulation.md)."""


class Shaken(Trial, frozen=True):
    """The same with every pause in a conversation some milliseconds longer, by chance: what a real machine does."""

    shake: int = 0

    def prompts(self) -> Iterator[Prompt]:
        random, plain = Random(self.shake), super().prompts()
        return (_shaken(prompt, random) for prompt in plain)


def _shaken(prompt: Prompt, random: Random) -> Prompt:
    then = prompt.then

    def later() -> FollowUp | None:
        follow_up = then() if then else None
        if follow_up is not None:
            follow_up.think_ms += random.random() * SHAKE_MS
            _shaken(follow_up.prompt, random)
        return follow_up

    prompt.then = later if then else None
    return prompt


def by_chance(args: argparse.Namespace) -> None:
    """How far virtual time is from itself where answers end a little later."""
    for policy in POLICIES:
        runs = [
            virtual(Shaken(workload=tuple(CHATS.split()), policy=policy, limit=args.limit, seed=args.seed, shake=shake))
            for shake in range(args.by_chance)
        ]
        hits = [100.0 * run["hit_rate"] for run in runs]
        p50 = [run["ttft_ms"]["p50"] for run in runs]
        print(
            f"multi_turn_chat {policy:12} hit rate {min(hits):.1f} to {max(hits):.1f} %, σ {stdev(hits):.1f} points;"
            f" TTFT p50 {min(p50):.0f} to {max(p50):.0f} ms, σ {stdev(p50) / fmean(p50):.1%}"
        )


def told(both_runs: Both) -> tuple[str, bool]:
    live, virtual = both_runs.live, both_runs.virtual
    points, p50, p90 = both_runs.hit_rate_points, both_runs.ttft_off("p50"), both_runs.ttft_off("p90")
    line = (
        f"{live['hit_rate']:7.2%} {virtual['hit_rate']:7.2%} {points:+6.2f}"
        f" {live['ttft_ms']['p50']:8.0f} {virtual['ttft_ms']['p50']:8.0f} {p50:+7.1%}"
        f" {live['ttft_ms']['p90']:8.0f} {virtual['ttft_ms']['p90']:8.0f} {p90:+7.1%}"
    )
    whole = live["failed"] == live["rejected"] == 0 and live["finished"] == virtual["finished"]
    return line, whole and abs(points) <= POINTS and abs(p50) <= TTFT_SHARE


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", action="append", metavar="P", help=f"repeat for more ({', '.join(POLICIES)})")
    parser.add_argument("--profile", default="l4-8b")
    parser.add_argument("--speed", type=float, default=3.0, help="of the real engines (3)")
    parser.add_argument("--limit", type=int, default=80, metavar="N", help="requests of a run (80)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--again", type=int, default=3, metavar="N", help="tries before a difference counts (3)")
    parser.add_argument("--by-chance", type=int, metavar="N", help="instead: N virtual runs, each a little shaken")
    args = parser.parse_args()
    if args.by_chance:
        by_chance(args)
        return 0
    print(f"3 × {args.profile}, {args.limit} requests, speed {args.speed:g}, seed {args.seed}, chat")
    print(f"{'':28}{'hit rate':>22} {'TTFT p50, ms':>25} {'TTFT p90, ms':>25}")
    pair = f" {'live':>8} {'virtual':>8} {'':>7}"
    print(f"{'':28}{'live':>7} {'virtual':>7} {'points':>6}{pair}{pair}")
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
            good = False
            for _ in range(args.again):
                with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                    line, good = told(runner.run(both(trial)))
                remark = "" if good else f"  over the bar (machine load {os.getloadavg()[0]:.1f})"
                print(f"{trial.workload[0]:15} {policy:12}{line}{remark}", flush=True)
                if good:
                    break
            agree = agree and good
    print("They agree." if agree else "They do not agree.")
    return 0 if agree else 1


if __name__ == "__main__":
    raise SystemExit(main())
