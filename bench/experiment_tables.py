"""What the experiments on `price` share: one subcommand each, parallel replays, means and ratios."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from math import sqrt
from statistics import fmean, stdev
from typing import Any, NamedTuple

from record import Report, add_record_option
from rich.progress import track

from warmroute.lab.engine.timing import profile
from warmroute.lab.simulated_node import NodeSpec
from warmroute.lab.summary import Run

HARDWARE = "2xh100-32b"


class Experiment(NamedTuple):
    run: Callable[[argparse.Namespace, Report], None]
    seeds: int
    limit: int = 0
    """Requests per run; 0 if the experiment sets them itself."""
    nodes: int = 0
    """Size of the fleet; 0 if the experiment sets it itself."""


def run_experiments(description: str, experiments: dict[str, Experiment], data: str = "") -> None:
    """Parse the command line and print the tables of one experiment. `data` describes what --data must contain."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="EXPERIMENT")
    for name, one in experiments.items():
        command = commands.add_parser(name)
        command.add_argument("--seeds", type=int, default=one.seeds, metavar="N", help=f"runs of each ({one.seeds})")
        command.add_argument("--processes", type=int, default=os.cpu_count() or 1, metavar="N")
        command.add_argument("--only", action="append", default=[], metavar="WORD", help="only rows with this word")
        if one.limit:
            command.add_argument("--limit", type=int, default=one.limit, help=f"requests per run ({one.limit})")
        if one.nodes:
            command.add_argument("--nodes", type=int, default=one.nodes, help=f"({one.nodes})")
        if data:
            command.add_argument("--data", metavar="DIR", help=data)
        add_record_option(command)
        command.set_defaults(experiment=one)
    args = parser.parse_args()
    report = Report()
    args.experiment.run(args, report)
    report.record(args.record)


def fleet(count: int) -> tuple[NodeSpec, ...]:
    return tuple(NodeSpec(f"node-{at}", profile(HARDWARE)) for at in range(count))


def run_jobs(do: Callable[[Any], Run], jobs: Sequence[Any], args: argparse.Namespace) -> dict[Any, Run]:
    """Return the runs by job."""
    if args.processes == 1:
        return {job: do(job) for job in jobs}
    with ProcessPoolExecutor(args.processes) as pool:
        runs = track(pool.map(do, jobs), "replaying", len(jobs), disable=not sys.stderr.isatty())
        return dict(zip(jobs, runs, strict=True))


def selected(names: Iterable[str], args: argparse.Namespace) -> list[str]:
    """Return the names that --only selects."""
    return [name for name in names if not args.only or any(word in name for word in args.only)]


def mean_of(runs: Sequence[Run], *path: str) -> float:
    return fmean(_value(run, path) for run in runs)


def _value(run: Run, path: Sequence[str]) -> float:
    value: Any = run
    for key in path:
        value = value[key]
    return float(value)


def ratio(ours: Sequence[Run], theirs: Sequence[Run], *path: str) -> tuple[float, float]:
    """Return the ratio of the means over the seeds, and its standard error from the differences within each seed."""
    a, b = [_value(run, path) for run in ours], [_value(run, path) for run in theirs]
    base = max(1e-9, fmean(b))
    differences = [(x - y) / base for x, y in zip(a, b, strict=True)]
    return fmean(a) / base, stdev(differences) / sqrt(len(differences)) if len(differences) > 1 else 0.0
