"""How fast the router learns the nodes' speeds under `price`, in virtual time. One table each:

python bench/speed_learning.py mixed      GPUs of three kinds with wrong initial speeds, against a run with known speeds
python bench/speed_learning.py slowdown   how soon a node that becomes five times slower gets fewer requests

`--seeds` changes the size, `--processes 1` leaves other cores free.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from functools import cache
from statistics import fmean
from typing import Any

from experiment_tables import Experiment, fleet, mean_of, ratio, run_experiments, run_jobs, selected
from record import Report

from warmroute.core.speeds import DEFAULT_MS_PER_TOKEN
from warmroute.lab.engine.timing import profile
from warmroute.lab.replay_setup import parse_policy
from warmroute.lab.request_flow import MODEL
from warmroute.lab.run import Setup, build_world
from warmroute.lab.simulated_node import Conditions, NodeSpec, SimulatedNode
from warmroute.lab.summary import Run, summary
from warmroute.lab.workloads import parse_workload
from warmroute.lab.world import ScheduledFault, World

# Wrong initial speeds.

MIXED = ("t4-1.5b", "t4-1.5b", "l4-1.5b", "l4-1.5b", "h100-1.5b")
MIXED_LOADS = (("rag", 16.0), ("multi_turn_chat", 4.0), ("unique_batch", 8.0))
GUESSES: dict[str, Callable[[list[float]], list[float]]] = {
    "known": lambda true: true,
    "equal (the default)": lambda true: [DEFAULT_MS_PER_TOKEN] * len(true),
    "swapped": lambda true: true[::-1],
    "5 × too slow": lambda true: [5.0 * one for one in true],
    "5 × too fast": lambda true: [0.2 * one for one in true],
    "H100 5 × too slow, others 5 × too fast": lambda true: [one * (5.0 if one == min(true) else 0.2) for one in true],
}
DECODE_SPEED_FIELDS = ("answers", "least_ms", "mean_ms", "slope_ms", "mean_context", "_xx", "_xy")
SETTLED_S = 60.0
MEASURED_S = 90.0


def mixed(args: argparse.Namespace, report: Report) -> None:
    guesses = ["known", *selected(list(GUESSES)[1:], args)]
    jobs = [
        (workload, rate, guess, seed)
        for workload, rate in MIXED_LOADS
        for guess in guesses
        for seed in range(1, args.seeds + 1)
    ]
    runs = run_jobs(_run_guess, jobs, args)
    columns = ("first minute: TTFT mean, ms", "after it: TTFT mean", "p50", "p90", "goodput/s")
    report.table("speeds", "workload", "initial speeds", *columns)
    for workload, rate in MIXED_LOADS:
        for guess in guesses:
            ours, known = (
                [run for job, run in runs.items() if job[:3] == (workload, rate, which)] for which in (guess, "known")
            )
            cells = [f"{mean_of(ours, 'first_minute_ms'):,.0f}"]
            for path in (("ttft_ms", "mean"), ("ttft_ms", "p50"), ("ttft_ms", "p90"), ("good_per_s",)):
                factor, error = ratio(ours, known, *path)
                value = mean_of(ours, *path)
                text = f"{value:,.0f}" if path[0] == "ttft_ms" else f"{value:.2f}"
                cells.append(text if guess == "known" else f"{text} ({factor - 1.0:+.1%} ± {error:.1%})")
            report.row(f"{workload}, {rate:g}/s", guess, *cells)


def _run_guess(job: tuple[str, float, str, int]) -> Run:
    """Run with guessed speeds. The known ones are those that another run had learned by its end: prefill speeds, decode
    factors, and the decode speed that these refer to."""
    workload, rate, guess, seed = job
    true, factors, decode_speed = _learned(workload, rate, seed + 1000)
    world = _mixed_world(seed)
    speeds = GUESSES[guess](true)
    if guess == "swapped":
        factors = factors[::-1]
    elif guess != "known":
        factors = [1.0] * len(factors)
    for sim, ms_per_token, factor in zip(world.nodes.values(), speeds, factors, strict=True):
        sim.node.speed.guess(ms_per_token)
        sim.node.speed.answers = 1  # else it would take its peers' speed
        sim.node.speed.factor = factor
    group = world.fleet.group(MODEL)
    assert group is not None
    if guess in ("known", "swapped"):
        for name, value in decode_speed.items():
            setattr(group.decode_speed, name, value)
    before = world.results
    world.calendar.at(SETTLED_S * 1000.0, world.measure_from_now)
    _run_for(world, workload, rate, seed, SETTLED_S + MEASURED_S)
    run = summary(world)
    run["first_minute_ms"] = fmean(before.ttft_ms)
    return run


@cache
def _learned(workload: str, rate: float, seed: int) -> tuple[list[float], list[float], dict[str, float]]:
    world = _mixed_world(seed)
    _run_for(world, workload, rate, seed, SETTLED_S + MEASURED_S)
    group = world.fleet.group(MODEL)
    assert group is not None
    speeds = [sim.node.speed for sim in world.nodes.values()]
    decode_speed = {name: getattr(group.decode_speed, name) for name in DECODE_SPEED_FIELDS}
    return [speed.ms_per_token for speed in speeds], [speed.factor for speed in speeds], decode_speed


def _mixed_world(seed: int) -> World:
    nodes = tuple(NodeSpec(f"{name}-{at}", profile(name)) for at, name in enumerate(MIXED))
    setup = Setup(
        workload=parse_workload(["rag"]), nodes=nodes, policy=parse_policy("price"), conditions=Conditions(seed=seed)
    )
    return build_world(setup)


def _run_for(world: World, workload: str, rate: float, seed: int, duration_s: float) -> None:
    """Run with arrivals until `duration_s`. Measuring may begin in between."""
    prompts = parse_workload([workload]).arrivals(seed, rate)
    world.run(prompt for prompt in _until(prompts, duration_s * 1000.0))


def _until(prompts: Iterable[Any], at_ms: float) -> Iterable[Any]:
    for prompt in prompts:
        if prompt.at_ms > at_ms:
            return
        yield prompt


# A node that slows down.

SLOW_LOADS = (
    ("unique_batch", 8.0),
    ("unique_batch", 1.0),
    ("rag", 20.0),
    ("rag", 2.0),
    ("multi_turn_chat", 4.0),
)
SLOW_AT_S = 60.0
FACTOR = 5.0
SPANS_S = ((-30.0, 0.0), (0.0, 2.0), (2.0, 5.0), (5.0, 10.0), (10.0, 30.0), (30.0, 60.0))
SAMPLE_MS = 100.0
NOTICED = 1.5
"""A node estimated to be this many times slower than before gets few requests."""


def slowdown(args: argparse.Namespace, report: Report) -> None:
    jobs = [
        (workload, rate, policy, seed, args.nodes)
        for workload, rate in SLOW_LOADS
        for policy in ("price", "least_loaded")
        for seed in range(1, args.seeds + 1)
    ]
    runs = run_jobs(_run_slowdown, jobs, args)
    spans = (f"{a:g} to {b:g} s" for a, b in SPANS_S[1:])
    columns = ("estimated 1.5 × slower after", "share of requests before", *spans, "TTFT p90, ms")
    report.table("shares", "workload", "policy", *columns)
    for workload, rate in SLOW_LOADS:
        for policy in ("price", "least_loaded"):
            found = [run for job, run in runs.items() if job[:3] == (workload, rate, policy)]
            after = [run["noticed_s"] for run in found]
            noticed = "–" if policy != "price" else ", ".join("never" if s is None else f"{s:.1f} s" for s in after)
            shares = []
            for at in range(len(SPANS_S)):
                there = sum(run["spans"][at][0] for run in found)
                everywhere = sum(run["spans"][at][1] for run in found)
                shares.append(f"{there / everywhere:.0%} of {everywhere:,}" if everywhere else "–")
            p90 = f"{mean_of(found, 'ttft_ms', 'p90'):,.0f}"
            report.row(f"{workload}, {rate:g}/s", policy, noticed, *shares, p90)


def _run_slowdown(job: tuple[str, float, str, int, int]) -> Run:
    workload, rate, policy, seed, count = job
    setup = Setup(
        workload=parse_workload([workload]),
        nodes=fleet(count),
        policy=parse_policy(policy),
        conditions=Conditions(seed=seed),
        faults=(ScheduledFault(SLOW_AT_S, "slow", "node-0", FACTOR),),
    )
    world = build_world(setup)
    samples: list[tuple[float, int, int, float]] = []

    def sample() -> None:
        nodes = world.nodes.values()
        slow = world.nodes["node-0"]
        sent, all_sent = _sent(slow), sum(_sent(sim) for sim in nodes)
        samples.append((world.calendar.now_s - SLOW_AT_S, sent, all_sent, slow.node.speed.ms_per_token))
        world.calendar.after(SAMPLE_MS, sample)

    world.calendar.at(SLOW_AT_S * 1000.0, world.measure_from_now)
    sample()
    _run_for(world, workload, rate * count / 8, seed, SLOW_AT_S + SPANS_S[-1][1])
    run = summary(world)
    before_ms = max((one for one in samples if one[0] <= 0.0), default=samples[0])[-1]
    run["noticed_s"] = next((at_s for at_s, *_, ms in samples if at_s > 0.0 and ms > NOTICED * before_ms), None)
    run["spans"] = [_between(samples, *span) for span in SPANS_S]
    return run


def _sent(sim: SimulatedNode) -> int:
    """Return the number of requests ever sent to the node."""
    return sum(sim.node.outcomes) + sim.node.inflight


def _between(samples: list[tuple[float, int, int, float]], from_s: float, to_s: float) -> tuple[int, int]:
    """Return the requests sent to the slow node, and to all nodes."""
    first = max((one for one in samples if one[0] <= from_s), default=samples[0])
    last = max((one for one in samples if one[0] <= to_s), default=samples[-1])
    return last[1] - first[1], last[2] - first[2]


EXPERIMENTS = {"mixed": Experiment(mixed, 3), "slowdown": Experiment(slowdown, 3, nodes=8)}

if __name__ == "__main__":
    run_experiments(str(__doc__), EXPERIMENTS)
