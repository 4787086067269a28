"""What the price keeps of its promises, in virtual time. One table each:

python bench/price.py ablation    what each part brings: the parts switched off one at a time
python bench/price.py storm       how evenly a hot prefix is spread, and what hits that costs
python bench/price.py mixed       GPUs of three kinds whose speeds were guessed wrong, against the run that knew them
python bench/price.py robust      stale metrics, lost events, nodes that lie, a dead poller: against least_loaded
python bench/price.py slowdown    how soon a node that slows down five times has less to do
python bench/price.py affinity    two unequal GPUs (docs/experiments.md, a): price, pure affinity, round robin

`--processes 1` where the machine has other things to do; `--seeds`, `--limit` and `--nodes` for more or less of it.
Goodput counts answers whose first token came within 2 s and 0.5 ms for each token of the prompt.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from copy import deepcopy
from functools import cache
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import msgspec
from rich.progress import track

from warmroute.fake_engine.profiles import profile
from warmroute.fleet.decode_speed import DecodeSpeed
from warmroute.fleet.speed import USUAL_MS_PER_TOKEN
from warmroute.replay import Run, Setup, contender, replay, world_of
from warmroute.replay.summary import summary
from warmroute.replay.workloads import choose
from warmroute.replay.world import MODEL, Conditions, NodeSpec, SimNode, World
from warmroute.replay.world.fault_schedule import Happening

HARDWARE = "2xh100-32b"
SPARE_ROOM = 1.03
"""Within this of another is as good as it."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="PROMISE")
    for name, do, seeds, limit, nodes in (
        ("ablation", ablation, 1, 1200, 8),
        ("storm", storm, 3, 1200, 8),
        ("mixed", mixed, 3, 0, 0),
        ("robust", robust, 4, 600, 8),
        ("slowdown", slowdown, 3, 0, 8),
        ("affinity", affinity, 40, 200, 0),
    ):
        command = commands.add_parser(name)
        command.add_argument("--seeds", type=int, default=seeds, metavar="N", help=f"runs of each ({seeds})")
        command.add_argument("--processes", type=int, default=os.cpu_count() or 1, metavar="N")
        command.add_argument("--only", action="append", default=[], metavar="WORD", help="rows that have this word")
        if limit:
            command.add_argument("--limit", type=int, default=limit, metavar="N", help=f"requests of a run ({limit})")
        if nodes:
            command.add_argument("--nodes", type=int, default=nodes, metavar="N", help=f"({nodes})")
        if name == "ablation":
            command.add_argument("--traces", type=Path, default=Path("../shared/data/traces"))
        command.set_defaults(do=do)
    args = parser.parse_args()
    for line in args.do(args):
        print(line, flush=True)


def fleet(count: int) -> tuple[NodeSpec, ...]:
    return tuple(NodeSpec(f"node-{at}", profile(HARDWARE)) for at in range(count))


def done(do: Callable[[Any], Run], jobs: Sequence[Any], args: argparse.Namespace) -> list[Run]:
    if args.processes == 1:
        return [do(job) for job in jobs]
    with ProcessPoolExecutor(args.processes) as pool:
        return list(track(pool.map(do, jobs), "replaying", len(jobs), disable=not sys.stderr.isatty()))


def wanted(names: Iterable[str], args: argparse.Namespace) -> list[str]:
    return [name for name in names if not args.only or any(word in name for word in args.only)]


def table(*titles: str) -> list[str]:
    return ["| " + " | ".join(titles) + " |", "| --- " * len(titles) + "|"]


def row(*cells: object) -> str:
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def mean_of(runs: Sequence[Run], *path: str) -> float:
    return fmean(_value(run, path) for run in runs)


def _value(run: Run, path: Sequence[str]) -> float:
    value: Any = run
    for key in path:
        value = value[key]
    return float(value)


def ratio(ours: Sequence[Run], theirs: Sequence[Run], *path: str) -> tuple[float, float]:
    """Of the means over the seeds, and the error of that: by the differences within a seed."""
    a, b = [_value(run, path) for run in ours], [_value(run, path) for run in theirs]
    base = max(1e-9, fmean(b))
    off = [(x - y) / base for x, y in zip(a, b, strict=True)]
    return fmean(a) / base, stdev(off) / sqrt(len(off)) if len(off) > 1 else 0.0


# What each part brings.

PARTS = {
    "price": "price",
    "without memory": "price:memory=false",
    "without congestion": "price:congestion=false",
    "without memory, congestion": "price:memory=false,congestion=false",
    "without room": "price:room=false",
    "without second homes": "price:second_home_ms=0",
    "without waiting here": "price:hold=false",
    "with half the locality": "price:locality=0.5",
    "without locality": "price:locality=0",
    "own time only, sent at once": "price:memory=false,congestion=false,room=false,second_home_ms=0,hold=false",
}
CELLS = (
    ("weka_60sessions_mooncake_format", 0.4, "agentic trace, near the knee"),
    ("weka_60sessions_mooncake_format", 0.9, "agentic trace, beyond"),
    ("llm_d", 25.0, "llm_d, beyond"),
    ("mooncake_synthetic", 6.0, "mooncake_synthetic, near the knee"),
    ("hot_prefix_storm", 80.0, "hot_prefix_storm, beyond"),
    ("rag", 40.0, "rag, beyond"),
)
"""A workload and requests a second for 8 nodes, as in bench/policies.py."""


def ablation(args: argparse.Namespace) -> Iterable[str]:
    names = wanted([name for _, _, name in CELLS], args)
    cells = [(workload, rate, name) for workload, rate, name in CELLS if name in names]
    jobs = [
        (workload, rate, part, seed, args.nodes, args.limit, str(args.traces))
        for workload, rate, _ in cells
        for part in (*PARTS.values(), "oracle")
        for seed in range(1, (1 if part == "oracle" else args.seeds) + 1)
    ]
    runs = dict(zip(jobs, done(_ablated, jobs, args), strict=True))
    yield from table("workload", "", "hit", "of the oracle's", "TTFT p50", "p90", "p99", "good/s", "load CV")
    for workload, rate, name in cells:
        oracle = runs[workload, rate, "oracle", 1, args.nodes, args.limit, str(args.traces)]["hit_rate"]
        for title, part in PARTS.items():
            found = [run for job, run in runs.items() if job[:3] == (workload, rate, part)]
            hit = mean_of(found, "hit_rate")
            times = [f"{mean_of(found, 'ttft_ms', key):,.0f}" for key in ("p50", "p90", "p99")]
            good, spread = mean_of(found, "good_per_s"), mean_of(found, "load_variation")
            share = f"{hit / oracle:.1%}" if oracle else "–"
            yield row(name, title, f"{hit:.1%}", share, *times, f"{good:.2f}", f"{spread:.2f}")


def _ablated(job: tuple[str, float, str, int, int, int, str]) -> Run:
    workload, rate, part, seed, nodes, limit, traces = job
    trace = Path(traces) / f"{workload}.jsonl.gz"
    return replay(
        Setup(
            workload=choose([str(trace) if trace.exists() else workload]),
            nodes=fleet(nodes),
            contender=contender(part),
            conditions=Conditions(seed=seed),
            rate=rate * nodes / 8,
            limit=limit,
        )
    )


# A hot prefix.

STORM_RATES = (12.0, 40.0, 80.0)
STORM_POLICIES = ("least_loaded", "prefix_hash", "overlap", "sglang", "price:second_home_ms=0", "price")
EVEN = 0.25


def storm(args: argparse.Namespace) -> Iterable[str]:
    jobs = [
        (rate, policy, seed, args.nodes, args.limit)
        for rate in STORM_RATES
        for policy in wanted(STORM_POLICIES, args)
        for seed in range(1, args.seeds + 1)
    ]
    runs = dict(zip(jobs, done(_stormed, jobs, args), strict=True))
    yield from table("requests/s", "policy", "load CV", "hit", "TTFT p50", "p90", "p99", "req/s")
    for rate in STORM_RATES:
        for policy in wanted(STORM_POLICIES, args):
            found = [run for job, run in runs.items() if job[:2] == (rate, policy)]
            times = [f"{mean_of(found, 'ttft_ms', key):,.0f}" for key in ("p50", "p90", "p99")]
            spread = mean_of(found, "load_variation")
            told = f"**{spread:.2f}**" if spread < EVEN else f"{spread:.2f}"
            hit, per_s = mean_of(found, "hit_rate"), mean_of(found, "requests_per_s")
            yield row(f"{rate:g}", policy, told, f"{hit:.1%}", *times, f"{per_s:.1f}")


def _stormed(job: tuple[float, str, int, int, int]) -> Run:
    rate, policy, seed, nodes, limit = job
    return replay(
        Setup(
            workload=choose(["hot_prefix_storm"]),
            nodes=fleet(nodes),
            contender=contender(policy),
            conditions=Conditions(seed=seed),
            rate=rate * nodes / 8,
            limit=limit,
        )
    )


# Speeds that were guessed wrong.

MIXED = ("t4-1.5b", "t4-1.5b", "l4-1.5b", "l4-1.5b", "h100-1.5b")
MIXED_LOADS = (("rag", 16.0), ("multi_turn_chat", 4.0), ("unique_batch", 8.0))
GUESSES: dict[str, Callable[[list[float]], list[float]]] = {
    "knew": lambda true: true,
    "alike (the default)": lambda true: [USUAL_MS_PER_TOKEN] * len(true),
    "swapped": lambda true: true[::-1],
    "5 × too slow": lambda true: [5.0 * one for one in true],
    "5 × too fast": lambda true: [0.2 * one for one in true],
    "H100 5 × too slow, others 5 × too fast": lambda true: [one * (5.0 if one == min(true) else 0.2) for one in true],
}
SETTLED_S = 60.0
MEASURED_S = 90.0


def mixed(args: argparse.Namespace) -> Iterable[str]:
    guesses = ["knew", *wanted(list(GUESSES)[1:], args)]
    jobs = [
        (workload, rate, guess, seed)
        for workload, rate in MIXED_LOADS
        for guess in guesses
        for seed in range(1, args.seeds + 1)
    ]
    runs = dict(zip(jobs, done(_guessed, jobs, args), strict=True))
    yield from table("workload", "speeds at first", "first minute: mean", "after it: TTFT mean", "p50", "p90", "good/s")
    for workload, rate in MIXED_LOADS:
        for guess in guesses:
            ours, knew = (
                [run for job, run in runs.items() if job[:3] == (workload, rate, which)] for which in (guess, "knew")
            )
            told = [f"{mean_of(ours, 'first_minute_ms'):,.0f}"]
            for path in (("ttft_ms", "mean"), ("ttft_ms", "p50"), ("ttft_ms", "p90"), ("good_per_s",)):
                times, error = ratio(ours, knew, *path)
                value = mean_of(ours, *path)
                said = f"{value:,.0f}" if path[0] == "ttft_ms" else f"{value:.2f}"
                told.append(said if guess == "knew" else f"{said} ({times - 1.0:+.1%} ± {error:.1%})")
            yield row(f"{workload}, {rate:g}/s", guess, *told)


def _guessed(job: tuple[str, float, str, int]) -> Run:
    """What is known is what another run had learned by its end: the speeds of prefill, the factors of decoding and
    the pace that these refer to."""
    workload, rate, guess, seed = job
    true, factors, pace = _learned(workload, rate, seed + 1000)
    world = _mixed_world(seed)
    speeds = GUESSES[guess](true)
    if guess == "swapped":
        factors = factors[::-1]
    elif guess != "knew":
        factors = [1.0] * len(factors)
    for sim, ms_per_token, factor in zip(world.nodes.values(), speeds, factors, strict=True):
        sim.node.speed.guess(ms_per_token)
        sim.node.speed.factor = factor
    group = world.fleet.group(MODEL)
    assert group is not None
    if guess in ("knew", "swapped"):
        group.pace = deepcopy(pace)
    before = world.tally
    world.calendar.at(SETTLED_S * 1000.0, world.measure_from_now)
    _run_for(world, workload, rate, seed, SETTLED_S + MEASURED_S)
    run = summary(world)
    run["first_minute_ms"] = fmean(before.ttft_ms)
    return run


@cache
def _learned(workload: str, rate: float, seed: int) -> tuple[list[float], list[float], DecodeSpeed]:
    world = _mixed_world(seed)
    _run_for(world, workload, rate, seed, SETTLED_S + MEASURED_S)
    group = world.fleet.group(MODEL)
    assert group is not None
    speeds = [sim.node.speed for sim in world.nodes.values()]
    return [speed.ms_per_token for speed in speeds], [speed.factor for speed in speeds], group.pace


def _mixed_world(seed: int) -> World:
    nodes = tuple(NodeSpec(f"{name}-{at}", profile(name)) for at, name in enumerate(MIXED))
    setup = Setup(workload=choose(["rag"]), nodes=nodes, contender=contender("price"), conditions=Conditions(seed=seed))
    return world_of(setup)


def _run_for(world: World, workload: str, rate: float, seed: int, duration_s: float) -> None:
    """Arrivals end then; measuring may begin in between."""
    prompts = choose([workload]).arrive(seed, rate)
    world.run(prompt for prompt in _until(prompts, duration_s * 1000.0))


def _until(prompts: Iterable[Any], at_ms: float) -> Iterable[Any]:
    for prompt in prompts:
        if prompt.at_ms > at_ms:
            return
        yield prompt


# Trouble.

TROUBLES: dict[str, Conditions] = {
    "none": Conditions(),
    "metrics every 3 s": Conditions(poll_interval_s=3.0),
    "metrics 3 s old": Conditions(poll_lag_ms=3000.0),
    "no metrics at all": Conditions(poll_loss=1.0),
    "a hundredth of events lost": Conditions(kv_loss=0.01),
    "half of events lost": Conditions(kv_loss=0.5),
    "all events lost": Conditions(kv_loss=1.0),
    "no metrics, no events": Conditions(poll_loss=1.0, kv_loss=1.0),
    "events 3 s late": Conditions(kv_lag_ms=3000.0),
}
LIES: dict[str, tuple[Any, ...]] = {
    "a node that tells of blocks it has not": ("cache",),
    "the same, and answers say they were cached": ("cache", "usage"),
    "a node that says it is idle": ("load",),
}
SLOWS = "a node slows down 5 ×"
ROBUST_LOADS = (
    ("rag", 20.0, 2500),
    ("hot_prefix_storm", 40.0, 1500),
    ("multi_turn_chat", 40.0, 800),
    ("unique_batch", 8.0, 0),
)
"""Requests a second and KV blocks of a node; 0 for what its GPUs hold. With little memory: where nothing is evicted
what was sent to a node is there, and lost events do no harm; where memory is never short nobody needs metrics."""


def robust(args: argparse.Namespace) -> Iterable[str]:
    troubles = wanted([*TROUBLES, *LIES, SLOWS], args)
    jobs = [
        (workload, rate, blocks, trouble, policy, seed, args.nodes, args.limit)
        for workload, rate, blocks in ROBUST_LOADS
        for trouble in troubles
        for policy in ("price", "least_loaded")
        for seed in range(1, args.seeds + 1)
    ]
    runs = dict(zip(jobs, done(_troubled, jobs, args), strict=True))
    yield from table("trouble", "workload", "TTFT p50", "p90", "p99", "goodput", "hit", "worse?")
    for trouble in troubles:
        for workload, rate, blocks in ROBUST_LOADS:
            ours, theirs = (
                [run for job, run in runs.items() if job[:5] == (workload, rate, blocks, trouble, policy)]
                for policy in ("price", "least_loaded")
            )
            told, worse = [], []
            for name, path in (
                ("p50", ("ttft_ms", "p50")),
                ("p90", ("ttft_ms", "p90")),
                ("p99", ("ttft_ms", "p99")),
                ("goodput", ("good_per_s",)),
            ):
                times, error = ratio(ours, theirs, *path)
                told.append(f"{times:.2f} ± {error:.2f}")
                loss = 1.0 - times if name == "goodput" else times - 1.0
                if name != "p99" and loss > SPARE_ROOM - 1.0 and loss > 2.0 * error:
                    worse.append(name)
            hits = f"{mean_of(ours, 'hit_rate'):.0%} / {mean_of(theirs, 'hit_rate'):.0%}"
            yield row(trouble, workload, *told, hits, ", ".join(worse) or "no")


def _troubled(job: tuple[str, float, int, str, str, int, int, int]) -> Run:
    workload, rate, blocks, trouble, policy, seed, count, limit = job
    nodes = [msgspec.structs.replace(spec, blocks=blocks or None) for spec in fleet(count)]
    if trouble in LIES:
        nodes[0] = msgspec.structs.replace(nodes[0], lies=LIES[trouble])
    conditions = msgspec.structs.replace(TROUBLES.get(trouble, Conditions()), seed=seed)
    per_s = rate * count / 8
    at_s = 0.25 * limit / per_s
    return replay(
        Setup(
            workload=choose([workload]),
            nodes=tuple(nodes),
            contender=contender(policy),
            conditions=conditions,
            rate=per_s,
            limit=limit,
            happenings=(Happening(at_s, "slow", "node-0", 5.0),) if trouble == SLOWS else (),
        )
    )


# A node that slows down.

SLOW_LOADS = (
    ("unique_batch", 8.0),
    ("unique_batch", 1.0),
    ("rag", 20.0),
    ("rag", 2.0),
    ("multi_turn_chat", 4.0),
)
SLOWS_AT_S = 60.0
TIMES = 5.0
SPANS_S = ((-30.0, 0.0), (0.0, 2.0), (2.0, 5.0), (5.0, 10.0), (10.0, 30.0), (30.0, 60.0))
LOOKED_MS = 100.0
NOTICED = 1.5
"""Believed to be so many times slower than before is enough for most requests to go elsewhere."""


def slowdown(args: argparse.Namespace) -> Iterable[str]:
    jobs = [
        (workload, rate, policy, seed, args.nodes)
        for workload, rate in SLOW_LOADS
        for policy in ("price", "least_loaded")
        for seed in range(1, args.seeds + 1)
    ]
    runs = dict(zip(jobs, done(_slowed, jobs, args), strict=True))
    yield from table(
        "workload", "policy", "believed 1.5 × slower after", "its share of requests, before",
        *(f"{a:g} to {b:g} s" for a, b in SPANS_S[1:]), "TTFT p90 after it",
    )  # fmt: skip
    for workload, rate in SLOW_LOADS:
        for policy in ("price", "least_loaded"):
            found = [run for job, run in runs.items() if job[:3] == (workload, rate, policy)]
            after = [run["believed_s"] for run in found]
            said = "–" if policy != "price" else ", ".join("never" if s is None else f"{s:.1f} s" for s in after)
            shares = []
            for at in range(len(SPANS_S)):
                there = sum(run["spans"][at][0] for run in found)
                everywhere = sum(run["spans"][at][1] for run in found)
                shares.append(f"{there / everywhere:.0%} of {everywhere:,}" if everywhere else "–")
            yield row(f"{workload}, {rate:g}/s", policy, said, *shares, f"{mean_of(found, 'ttft_ms', 'p90'):,.0f}")


def _slowed(job: tuple[str, float, str, int, int]) -> Run:
    workload, rate, policy, seed, count = job
    setup = Setup(
        workload=choose([workload]),
        nodes=fleet(count),
        contender=contender(policy),
        conditions=Conditions(seed=seed),
        happenings=(Happening(SLOWS_AT_S, "slow", "node-0", TIMES),),
    )
    world = world_of(setup)
    seen: list[tuple[float, int, int, float]] = []

    def look() -> None:
        nodes = world.nodes.values()
        slow = world.nodes["node-0"]
        sent, all_sent = _sent(slow), sum(_sent(sim) for sim in nodes)
        seen.append((world.calendar.now_s - SLOWS_AT_S, sent, all_sent, slow.node.speed.ms_per_token))
        world.calendar.after(LOOKED_MS, look)

    world.calendar.at(SLOWS_AT_S * 1000.0, world.measure_from_now)
    look()
    _run_for(world, workload, rate * count / 8, seed, SLOWS_AT_S + SPANS_S[-1][1])
    run = summary(world)
    before_ms = max((one for one in seen if one[0] <= 0.0), default=seen[0])[-1]
    run["believed_s"] = next((at_s for at_s, *_, ms in seen if at_s > 0.0 and ms > NOTICED * before_ms), None)
    run["spans"] = [_between(seen, *span) for span in SPANS_S]
    return run


def _sent(sim: SimNode) -> int:
    """Requests that it was ever sent."""
    return sum(sim.node.outcomes) + sim.node.inflight


def _between(seen: list[tuple[float, int, int, float]], from_s: float, to_s: float) -> tuple[int, int]:
    """Requests that the slow node was sent, and all."""
    first = max((one for one in seen if one[0] <= from_s), default=seen[0])
    last = max((one for one in seen if one[0] <= to_s), default=seen[-1])
    return last[1] - first[1], last[2] - first[2]


# Two unequal GPUs.

UNEQUAL = ("t4-1.5b", "l4-1.5b")
UNEQUAL_POLICIES = ("session:load_factor=inf", "round_robin", "price")


def affinity(args: argparse.Namespace) -> Iterable[str]:
    jobs = [
        (clients, policy, seed, args.limit)
        for clients in (1, 2, 4, 8, 16, 32)
        for policy in UNEQUAL_POLICIES
        for seed in range(1, args.seeds + 1)
    ]
    runs = dict(zip(jobs, done(_unequal, jobs, args), strict=True))
    yield from table(
        "clients", "", "pure affinity", "round robin", "price", "price against affinity", "against round robin"
    )
    for clients in (1, 2, 4, 8, 16, 32):
        found = [[run for job, run in runs.items() if job[:2] == (clients, policy)] for policy in UNEQUAL_POLICIES]
        for title, path in (
            ("TTFT mean, ms", ("ttft_ms", "mean")),
            ("TTFT p99, ms", ("ttft_ms", "p99")),
            ("tokens/s", ("output_tokens_per_s",)),
        ):
            means = [f"{mean_of(one, *path):,.1f}" for one in found]
            against = [ratio(found[2], other, *path) for other in found[:2]]
            yield row(clients, title, *means, *(f"{times - 1.0:+.1%} ± {error:.1%}" for times, error in against))


def _unequal(job: tuple[int, str, int, int]) -> Run:
    clients, policy, seed, limit = job
    return replay(
        Setup(
            workload=choose(["shared_system_prompts"]),
            # named by the seed: which prompts belong to which node is chance too
            nodes=tuple(NodeSpec(f"{name} {seed}", profile(name)) for name in UNEQUAL),
            contender=contender(policy),
            conditions=Conditions(seed=seed),
            concurrency=clients,
            limit=limit,
        )
    )


if __name__ == "__main__":
    main()
