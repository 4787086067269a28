"""The production scaler against other scalers, in virtual time: GPU hours, TTFT p90, and how long it was missed.

python bench/scaler_comparison.py --data DIR [--load chat|agentic|conversation …] [--scaler S …] [--days 3] [--runs DIR]

Three loads of a day's shape (day_loads.py). Nodes take 180 s (± 20 %) to start, and are paid for from the request to
the end. All run under the same router (`price`), and begin with two nodes. The objective is a TTFT p90; it is missed in
ten minutes in which more than a tenth of the arriving requests get their first token later.

With `--days N` each scaler runs N days of the same mean load: other conversations, at other times. The tables have
hours, times and hit rates of a day on average, and the fraction of the spans of all days that miss the objective.

    warmroute                     the production scaler: by replay, with its default settings and this objective
    warmroute:thresholds          the production scaler without replay
    hpa:target=0.7                ceil(nodes · utilisation / target), tolerance 0.1, stabilised for 5 minutes downwards
    hpa:kv=1,target=0.5           the same on the fraction of KV memory in use
    keda:target=2                 ceil(waiting requests / target), likewise
    keda:running=1,target=4       ceil((waiting + running requests) / target), likewise
    threshold:up=2                one node more if over 2 requests wait for each, one less if under a quarter
    fixed:12                      12 nodes all the time
    cron                          a schedule made in hindsight: for each half hour the nodes that `warmroute plan` finds
                                  for it, requested in time. Nobody knows the load like this; it shows what is possible
    hindsight                     the same schedule with a node more in each half hour that misses the objective, again
                                  and again until it is missed less than 2 % of the time: what is possible if it is not
                                  to be missed

Each of the others has several settings, and the one that is best in hindsight counts. The last table has the fewest GPU
hours with which another scaler reaches the objective's p90 over the day, interpolated between two settings of the same
scaler, and the fewest of those runs that miss the objective less than 2 % of the time. The table `one_setting` has what
each scaler costs with the same setting on all loads. `plan` is the number of nodes that `warmroute plan --margin` finds
for the load of the busiest hour once it is steady, `scaler` what the scaler has in that hour.

--runs DIR keeps the result of each run there, and takes those that are there already. --kept shows only these.
--recorded takes the rows of scalers that were not run from bench/results/scalers.json: other scalers do not change with
the production scaler. Their figures are rounded there, and are those of the recorded days.

--seed N is the seed of the first day. Tune on other days than the recorded ones.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import pairwise
from math import ceil, cos, exp, log, pi
from pathlib import Path
from typing import Any, NamedTuple

from day_loads import AGENT_TRACE, DAY_S, day_load
from day_schedule import Cron
from external_data import add_data_option
from record import RESULTS, Cell, Report, add_record_option

from warmroute.config import Objective, Scaling, ScalingReplay
from warmroute.lab.engine.timing import profile
from warmroute.lab.peers.scalers import Hpa, Keda, Threshold
from warmroute.lab.planning.search import SimulatedPlanning
from warmroute.lab.replay_setup import parse_policy
from warmroute.lab.report import paid_gpu_hours
from warmroute.lab.run import Setup, replay
from warmroute.lab.simulated_node import Conditions, NodeSpec
from warmroute.lab.simulated_scaling import ScalingSetup, SimulatedOffer
from warmroute.lab.sizing import LatencyLimits, load_margin, nodes_needed, with_load
from warmroute.lab.workloads import DEPTH
from warmroute.scaling.offers import Offer

START_S = 180.0
FIRST_NODES = 2
MAX_NODES = 20
MISS_SPAN_S = 600.0
PART_S = 1800.0
"""Of the schedule."""
STEADY_S = 7200.0
"""Before the measured hour of a plan: sessions of agents go on for half an hour on average, and some for hours."""
MISSED_SHARE = 0.1
MISSED_TIME = 0.02
MAX_SCHEDULES = 12
OURS = "warmroute"
LOADS = ("chat", "agentic", "conversation")
SCALERS = (
    OURS, "warmroute:thresholds", "hpa:target=0.6", "hpa:target=0.7", "hpa:target=0.8", "hpa:target=0.9",
    "hpa:kv=1,target=0.3", "hpa:kv=1,target=0.4", "hpa:kv=1,target=0.5", "hpa:kv=1,target=0.6", "hpa:kv=1,target=0.7",
    "keda:target=1", "keda:target=3", "keda:running=1,target=3", "keda:running=1,target=4", "keda:running=1,target=6",
    "keda:running=1,target=8", "threshold:up=0.5", "threshold:up=2", "cron", "hindsight",
)  # fmt: skip
OF_THE_LOAD = ("plan", "parts of the day")
"""What does not depend on the day."""


class Job(NamedTuple):
    load: str
    data: Path | None
    scaler: str
    runs: Path | None = None
    seed: int = 1


class Figures(NamedTuple):
    """What the comparison needs of a scaler's days."""

    hours: float
    p90_ms: float
    missed: float


Days = list[dict[str, Any]]
"""The results of one scaler."""


def setup_of(job: Job, schedule: Sequence[int] = ()) -> Setup:
    """`schedule`: nodes in each part of the day, instead of what `warmroute plan` finds."""
    load, data, text, runs, seed = job
    day = day_load(load, data)
    hardware = profile(day.profile)
    name, _, rest = text.partition(":")
    nodes, autoscale = FIRST_NODES, None
    if name == "fixed":
        nodes = int(rest)
    else:
        words = dict(word.split("=") for word in rest.split(",") if "=" in word)
        numbers: dict[str, Any] = {key: float(value) for key, value in words.items()}
        decision_maker: Callable[..., Any] | None = None
        if name == "hpa":
            decision_maker = partial(Hpa, **numbers)
        elif name == "keda":
            decision_maker = partial(Keda, **numbers)
        elif name == "threshold":
            decision_maker = partial(Threshold, down=numbers["up"] / 4, **numbers)
        elif name in ("cron", "hindsight"):
            nodes_by_part = list(schedule or run(Job(load, data, "parts of the day", runs))[2]["nodes"])
            decision_maker = partial(Cron, nodes=nodes_by_part, part_s=PART_S, ahead_s=1.2 * START_S)
            nodes = nodes_by_part[0]
        offer = Offer(
            provisioner="bench",
            name=day.profile,
            island="local",
            gpu=day.profile,
            gpus=hardware.gpus,
            usd_per_hour=day.usd_per_hour,
            start_s=START_S,
        )
        autoscale = ScalingSetup(
            config=Scaling(
                enabled=True,
                max_nodes=MAX_NODES,
                objective=Objective(ttft_p90_ms=day.objective_ms),
                replay=ScalingReplay(enabled=rest != "thresholds"),
            ),
            offers=(SimulatedOffer(offer=offer, profile=hardware),),
            decision_maker=decision_maker,
            planning=SimulatedPlanning,
            moves_prefixes=decision_maker is None,
        )
    return Setup(
        workload=day.workload,
        nodes=tuple(
            NodeSpec(f"node-{at}", hardware, block_size=day.block_size, usd_per_hour=day.usd_per_hour)
            for at in range(nodes)
        ),
        policy=parse_policy("price"),
        conditions=Conditions(seed=seed),
        rate=day.rate,
        duration_s=DAY_S,
        day_s=DAY_S,
        ceiling_ms=day.objective_ms,
        autoscale=autoscale,
    )


def run(job: Job) -> tuple[str, str, dict[str, Any]]:
    load, data, text, _, _ = job
    file = kept_file(job)
    if file is not None and file.exists():
        return load, text, json.loads(file.read_text())
    start_s = time.process_time()
    if text == "plan":
        one: dict[str, Any] = {"nodes": planned(load, data, 1.0 + DEPTH, margin=True)}
    elif text == "parts of the day":
        one = {"nodes": planned_parts(load, data)}
    elif text == "hindsight":
        one = in_hindsight(job)
    else:
        one = replay(setup_of(job), partial(progress, load, text))
    one["cpu_s"] = round(time.process_time() - start_s, 1)
    if file is not None:
        part = file.with_suffix(f".{os.getpid()}")  # another process may write or read the same file
        part.write_text(json.dumps(one))
        part.rename(file)
    return load, text, one


def kept_file(job: Job) -> Path | None:
    load, _, text, runs, seed = job
    day = f"{load} {text}" if seed == 1 or text in OF_THE_LOAD else f"{load} {text} seed {seed}"
    return runs / f"{day}.json".replace(":", " ") if runs is not None else None


def progress(load: str, text: str, ended: int) -> None:
    if ended % 1000 == 0:
        print(f"{load} {text}: {ended} requests", file=sys.stderr, flush=True)


def planned(load: str, data: Path | None, share: float, *, margin: bool = False) -> int:
    """Size a fleet for a part of the day with `warmroute plan`'s search. `share`: of the day's mean rate. `margin`:
    with the autoscaler's (`warmroute plan --margin`)."""
    day = day_load(load, data)
    limits = LatencyLimits.of(Objective(ttft_p90_ms=day.objective_ms))
    setup = Setup(
        workload=day.workload,
        nodes=(NodeSpec("node-0", profile(day.profile), block_size=day.block_size),),
        policy=parse_policy("price"),
        rate=share * day.rate,
        duration_s=3600.0,
        warm_up_s=STEADY_S,
    )
    if margin:
        setup = with_load(setup, load_margin(setup, ScalingReplay().margin).load)
    return nodes_needed(setup, parse_policy("price"), limits, MAX_NODES).nodes or MAX_NODES


def planned_parts(load: str, data: Path | None) -> list[int]:
    """Size a fleet for each part of the day, which is as busy after noon as before."""
    parts = round(DAY_S / PART_S)
    morning = [planned(load, data, 1.0 - DEPTH * cos(2.0 * pi * (at + 0.5) / parts)) for at in range(parts // 2)]
    return [*morning, *reversed(morning)]


def in_hindsight(job: Job) -> dict[str, Any]:
    """Add nodes to the parts of the day that miss the objective until it is missed less than MISSED_TIME."""
    load = job.load
    schedule: list[int] = list(run(Job(load, job.data, "parts of the day", job.runs))[2]["nodes"])
    for turn in range(MAX_SCHEDULES):
        one = replay(setup_of(job, schedule), partial(progress, load, "hindsight"))
        if missed_share([one]) < MISSED_TIME:
            break
        print(f"{load} hindsight, schedule {turn}: missed {missed_share([one]):.1%}", file=sys.stderr, flush=True)
        late = {int(at_s / PART_S) for start_s, end_s in missed_spans(one) for at_s in (start_s, end_s - 1.0)}
        schedule = [nodes + (part in late) for part, nodes in enumerate(schedule)]
    return one


def missed_spans(one: dict[str, Any]) -> list[tuple[float, float]]:
    """Return start and end of the spans of at least MISS_SPAN_S that miss the objective, in seconds."""
    over = one["ceiling"]
    at_once = max(1, round(MISS_SPAN_S / over["span_s"]))
    return [
        (at * over["span_s"], (at + at_once) * over["span_s"])
        for at in range(0, len(over["over"]), at_once)
        if sum(over["over"][at : at + at_once]) > MISSED_SHARE * sum(over["first_tokens"][at : at + at_once])
    ]


def missed_share(days: Days) -> float:
    """Return the fraction of spans of at least MISS_SPAN_S that miss the objective."""
    spans = 0
    for one in days:
        over = one["ceiling"]
        spans += ceil(len(over["over"]) / max(1, round(MISS_SPAN_S / over["span_s"])))
    return sum(len(missed_spans(one)) for one in days) / spans


def hours_at(points: list[tuple[float, float]], p90_ms: float) -> float | None:
    """Return the fewest hours with which a scaler reaches this p90, from (hours, p90) of its settings, interpolated
    logarithmically. None if no setting reaches it."""
    ordered = sorted(points)
    good = [hours for hours, p90 in ordered if p90 <= p90_ms]
    best = min(good, default=None)
    for (hours, p90), (more, less) in pairwise(ordered):
        if p90 > p90_ms >= less:
            share = log(p90 / p90_ms) / log(p90 / less)
            between = exp(log(hours) + share * (log(more) - log(hours)))
            best = between if best is None else min(best, between)
    return best


def show(
    done: list[tuple[str, str, dict[str, Any]]], data: Path | None, report: Report, recorded: dict[str, Any]
) -> None:
    """`recorded`: tables of which the rows of scalers that were not run are taken."""
    by_load: dict[str, dict[str, Days]] = {}
    for load, text, one in done:
        by_load.setdefault(load, {}).setdefault(text, []).append(one)
    figures: dict[str, dict[str, Figures]] = {}
    usd: dict[str, dict[str, float]] = {}
    for load, runs in by_load.items():
        columns = ("hit rate", "TTFT p50, ms", "p90", "p99", "objective missed")
        report.table(load, "scaler", "GPU hours", "USD", "nodes", "changes", *columns)
        rows: dict[str, list[Cell]] = {row[0]: row for row in recorded.get(load, {}).get("rows", ())}
        found = figures.setdefault(load, {text: _figures_of(row) for text, row in rows.items()})
        for text, days in runs.items():
            if text not in OF_THE_LOAD:
                rows[text] = _row(load, text, days, data)
                p90_ms = _mean(one["ttft_ms"]["p90"] for one in days)
                found[text] = Figures(_mean(map(_hours, days)), p90_ms, missed_share(days))
        for text, row in rows.items():
            report.row(*row)
            usd.setdefault(text, {})[load] = float(str(row[2]))
    _show_one_setting(figures, usd, report)
    report.table(
        "objective", "load", "objective, ms", "GPU hours", "TTFT p90, ms", "missed", "fewest hours of another scaler",
        "ours / other", "fewest hours that miss under 2 %", "ours / other", "hindsight", "ours / hindsight",
        "plan, nodes at noon", "scaler",
    )  # fmt: skip
    before = {row[0]: row for row in recorded.get("objective", {}).get("rows", ())}
    for load, runs in by_load.items():
        if OURS in runs:
            planned_nodes = str(runs["plan"][0]["nodes"]) if "plan" in runs else before[load][-2] if before else "–"
            cells = _comparison(figures[load], day_load(load, data).objective_ms)
            report.row(load, *cells, planned_nodes, ", ".join(str(_nodes_at_noon(one)) for one in runs[OURS]))


def _show_one_setting(figures: dict[str, dict[str, Figures]], usd: dict[str, dict[str, float]], report: Report) -> None:
    """Show what the same scaler with the same setting costs on all loads together, and how often it misses."""
    report.table("one_setting", "scaler", "USD", *(f"{load}, missed" for load in figures))
    everywhere = [text for text, by_load in usd.items() if len(by_load) == len(figures)]
    for text in sorted(everywhere, key=lambda text: sum(usd[text].values())):
        if not text.startswith(("fixed", "cron", "hindsight")):
            missed = (f"{by_text[text].missed:.1%}" for by_text in figures.values())
            report.row(text, f"{sum(usd[text].values()):.0f}", *missed)


def _row(load: str, text: str, days: Days, data: Path | None) -> list[Cell]:
    day = day_load(load, data)
    hours, first = _mean(map(_hours, days)), days[0]
    usd = hours / profile(day.profile).gpus * day.usd_per_hour
    scaled = [one["scaling"] for one in days if one.get("scaling")]
    nodes, changes = str(first["node_count"]), 0
    if scaled:
        nodes = f"{min(one['least_nodes'] for one in scaled)}–{max(one['most_nodes'] for one in scaled)}"
        changes = round(_mean(one["changes"] for one in scaled))
    times = (_mean(one["ttft_ms"][key] for one in days) for key in ("p50", "p90", "p99"))
    return [
        text, f"{hours:.1f}", f"{usd:.0f}", nodes, changes, f"{_mean(one['hit_rate'] for one in days):.1%}",
        *(f"{ms:,.0f}" for ms in times), f"{missed_share(days):.1%}",
    ]  # fmt: skip


def _hours(one: dict[str, Any]) -> float:
    return paid_gpu_hours(one) or 0.0


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found)


def _figures_of(row: list[Cell]) -> Figures:
    hours, p90_ms, missed_time = str(row[1]), str(row[-3]), str(row[-1])
    return Figures(float(hours), float(p90_ms.replace(",", "")), float(missed_time.rstrip("%")) / 100.0)


def _comparison(runs: dict[str, Figures], objective_ms: float) -> list[str]:
    ours = runs[OURS]
    points: dict[str, list[tuple[float, float]]] = {}
    steady: dict[str, float] = {}
    for text, one in runs.items():
        if text.startswith(OURS) or text in ("cron", "hindsight"):
            continue
        scaler = text.partition("=1,")[0] if "=1," in text else text.partition(":")[0]
        points.setdefault(scaler, []).append((one.hours, one.p90_ms))
        if one.missed < MISSED_TIME:
            steady[text] = one.hours
    reached: dict[str, float] = {}
    for name, at in points.items():
        least = hours_at(at, objective_ms)
        if least is not None:
            reached[name] = least
    cells = [f"{objective_ms:,.0f}", f"{ours.hours:.1f}", f"{ours.p90_ms:,.0f}", f"{ours.missed:.1%}"]
    for found in (reached, steady):
        best = min(found, key=found.__getitem__, default="")
        cells += [f"{found[best]:.1f} ({best})", f"{ours.hours / found[best]:.2f}"] if best else ["none", "–"]
    possible = runs["hindsight"].hours if "hindsight" in runs else None
    return [*cells, *([f"{possible:.1f}", f"{ours.hours / possible:.2f}"] if possible else ["–", "–"])]


def _nodes_at_noon(ours: dict[str, Any]) -> int:
    serving: list[int] = ours["scaling"]["timeline"]["serving"]
    middle = serving[len(serving) * 7 // 16 : len(serving) * 9 // 16]
    return sorted(middle)[len(middle) // 2]


def _complete(jobs: list[Job], days: int) -> list[Job]:
    """Return the jobs of scalers that have run all days."""
    found = Counter((job.load, job.scaler) for job in jobs)
    return [job for job in jobs if job.scaler in OF_THE_LOAD or found[job.load, job.scaler] == days]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--load", action="append", choices=LOADS, help="repeatable (all)")
    add_data_option(parser, AGENT_TRACE)
    parser.add_argument("--scaler", action="append", help="repeatable; plan for `warmroute plan`")
    parser.add_argument("--runs", type=Path, metavar="DIR", help="keep the results of runs there")
    parser.add_argument("--kept", action="store_true", help="show what --runs DIR has, and run nothing")
    parser.add_argument("--recorded", action="store_true", help="take the other scalers' rows from the recorded ones")
    parser.add_argument("--days", type=int, default=1, metavar="N", help="run N days, and take their means (1)")
    parser.add_argument("--seed", type=int, default=1, help="of the first day (1)")
    parser.add_argument("--jobs", type=int, default=2)
    add_record_option(parser)
    args = parser.parse_args()
    if args.runs is not None:
        args.runs.mkdir(parents=True, exist_ok=True)
    jobs = []
    for load in args.load or LOADS:
        fixed = [f"fixed:{nodes}" for nodes in day_load(load, args.data).fixed]
        scalers = args.scaler or [*SCALERS, *fixed, "plan"]
        for text in scalers:
            days = 1 if text in OF_THE_LOAD else args.days
            jobs += [Job(load, args.data, text, args.runs, args.seed + day) for day in range(days)]
    if args.kept:
        jobs = _complete([job for job in jobs if (file := kept_file(job)) is not None and file.exists()], args.days)
    done = []
    with ProcessPoolExecutor(args.jobs) as pool:
        for load, text, one in pool.map(run, jobs):
            done.append((load, text, one))
            print(f"{load} {text}: {one['cpu_s']} s", file=sys.stderr, flush=True)
    report = Report()
    before = json.loads((RESULTS / "scalers.json").read_text()) if args.recorded else {"tables": {}, "values": {}}
    if args.recorded and (before["values"]["seed"], before["values"]["days"]) != (args.seed, args.days):
        parser.error("the recorded rows are of other days")
    report.value("seed", args.seed)
    report.value("days", args.days)
    show(done, args.data, report, before["tables"])
    report.record(args.record)


if __name__ == "__main__":
    main()
