"""The production scaler against other scalers, in virtual time: GPU hours, TTFT p90, and time over the ceiling.

python bench/scaler_comparison.py --data DIR [--load agentic|day …] [--scaler S …] [--jobs 2]

Two loads. `agentic`: the agentic trace at its own times, 60 coding sessions over four hours (needs --data). `day`:
chats of six turns with long system prompts that follow a daily curve with a ratio of four between noon and night, a day
in 80 minutes. Nodes are 2xh100-32b, take 120 s (± 20 %) to start, and are paid for from the request to the end. All run
under the same router (`price`). Each scaler has several settings, since each trades latency for hours:

    warmroute:max_kv_usage=0.35   the production scaler, by the fraction of KV memory that running requests may fill
    hpa:target=0.7                ceil(nodes · utilisation / target), tolerance 0.1, stabilised for 5 minutes downwards
    hpa:kv=1,target=0.5           the same on the fraction of KV memory in use
    threshold:up=2                one node more if over 2 requests wait for each, one less if under a quarter
    fixed:12                      12 nodes all the time

The last lines compare: for each setting of ours, the fewest GPU hours with which another scaler reaches the same p90
(interpolated between two settings of the same scaler), and the fraction of them that ours takes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import pairwise
from math import exp, log
from pathlib import Path
from typing import Any

from external_data import add_data_option, data_files
from record import Report, add_record_option

from warmroute.config import Scaling
from warmroute.fake_engine.profiles import profile
from warmroute.replay import Setup, parse_policy, replay
from warmroute.replay.peers.scalers import Hpa, Threshold
from warmroute.replay.report.table import paid_gpu_hours
from warmroute.replay.simulation.conditions import NodeSpec
from warmroute.replay.simulation.simulated_scaling import ScalingSetup, SimulatedOffer
from warmroute.replay.workloads.catalog import parse_workload
from warmroute.scaling.offer import Offer

TRACE = "traces/weka_60sessions_mooncake_format.jsonl.gz"
PROFILE = "2xh100-32b"
USD = 5.0
START_S = 120.0
FIRST_NODES = 2
CEILING_MS = 10_000.0
DAY_S = 4800.0
CHAT = "multi_turn_chat systems=8 system_tokens=4000 message_tokens=2000 output_tokens=400 turns=6 think_s=20"
OURS = ("warmroute:max_kv_usage=0.25", "warmroute:max_kv_usage=0.35", "warmroute:max_kv_usage=0.6")
OTHERS = ("hpa:target=0.7", "hpa:target=0.8", "hpa:target=0.9", "hpa:kv=1,target=0.3", "hpa:kv=1,target=0.5")
THRESHOLDS = ("threshold:up=0.5", "threshold:up=2")
SCALERS = {
    "agentic": (*OURS, *OTHERS, *THRESHOLDS, "fixed:8", "fixed:12", "fixed:16"),
    "day": (*OURS, *OTHERS, *THRESHOLDS, "fixed:3", "fixed:4", "fixed:6"),
}


def setup_of(load: str, trace: Path | None, text: str, max_nodes: int) -> Setup:
    hardware = profile(PROFILE)
    offer = Offer(
        provisioner="bench",
        name=PROFILE,
        island="local",
        gpu=PROFILE,
        gpus=hardware.gpus,
        usd_per_hour=USD,
        start_s=START_S,
    )
    name, _, rest = text.partition(":")
    nodes, autoscale = FIRST_NODES, None
    if name == "fixed":
        nodes = int(rest)
    else:
        words = dict(word.split("=") for word in rest.split(",") if word)
        numbers: dict[str, Any] = {key: float(value) for key, value in words.items()}
        config = Scaling(enabled=True, max_nodes=max_nodes, max_ttft_p99_ms=CEILING_MS)
        decision_maker: Callable[..., Any] | None = None
        if name == "warmroute":
            config = Scaling(enabled=True, max_nodes=max_nodes, max_ttft_p99_ms=CEILING_MS, **numbers)
        elif name == "hpa":
            decision_maker = partial(Hpa, **numbers)
        else:
            decision_maker = partial(Threshold, down=numbers["up"] / 4, **numbers)
        autoscale = ScalingSetup(
            config=config,
            offers=(SimulatedOffer(offer=offer, profile=hardware),),
            decision_maker=decision_maker,
            moves_prefixes=decision_maker is None,
        )
    if load == "agentic":
        workload, rate, limit, day_s = (
            parse_workload([str(trace)]),
            None,
            None,
            None,
        )
    else:
        workload, rate, limit, day_s = parse_workload(CHAT.split()), 0.6, round(0.6 * 6 * DAY_S), DAY_S
    return Setup(
        workload=workload,
        nodes=tuple(NodeSpec(f"node-{at}", hardware, usd_per_hour=USD) for at in range(nodes)),
        policy=parse_policy("price"),
        rate=rate,
        limit=limit,
        day_s=day_s,
        ceiling_ms=CEILING_MS,
        autoscale=autoscale,
    )


def run(job: tuple[str, Path | None, str, int]) -> tuple[str, str, dict[str, Any]]:
    load, trace, text, max_nodes = job
    return load, text, replay(setup_of(load, trace, text, max_nodes))


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


def show(done: list[tuple[str, str, dict[str, Any]]], report: Report) -> None:
    points: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for load, text, one in done:
        if load not in report.tables:
            columns = ("hit rate", "TTFT p50, ms", "p90", "p99", "seconds over 10 s", "unanswered")
            report.table(load, "scaler", "GPU hours", "USD", "nodes", "changes", *columns)
        hours, times, scaling = paid_gpu_hours(one) or 0.0, one["ttft_ms"], one.get("scaling")
        usd = scaling["usd"] if scaling else hours / profile(PROFILE).gpus * USD
        nodes = f"{scaling['least_nodes']}–{scaling['most_nodes']}" if scaling else str(one["node_count"])
        report.row(
            text, f"{hours:.1f}", f"{usd:.0f}", nodes, scaling["changes"] if scaling else 0, f"{one['hit_rate']:.1%}",
            *(f"{times[key]:,.0f}" for key in ("p50", "p90", "p99")), f"{one['ceiling']['seconds_over']:,.0f}",
            one["requests"] - one["finished"],
        )  # fmt: skip
        scaler = "hpa on KV memory" if "kv=1" in text else text.partition(":")[0]
        points.setdefault(load, {}).setdefault(scaler, []).append((hours, times["p90"]))
    report.table("same_p90", "load", "GPU hours", "TTFT p90, ms", "fewest GPU hours of another scaler", "ours / other")
    for load, scalers in points.items():
        for hours, p90 in sorted(scalers.get("warmroute", [])):
            others = {
                name: found for name, at in scalers.items() if name != "warmroute" and (found := hours_at(at, p90))
            }
            best = min(others, key=others.__getitem__, default="")
            cells = (
                (f"{others[best]:.1f} ({best})", f"{hours / others[best]:.0%}") if best else ("none is as fast", "–")
            )
            report.row(load, f"{hours:.1f}", f"{p90:,.0f}", *cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--load", action="append", choices=tuple(SCALERS), help="repeatable (both)")
    add_data_option(parser, TRACE)
    parser.add_argument("--scaler", action="append", help="repeatable")
    parser.add_argument("--max-nodes", type=int, default=24)
    parser.add_argument("--jobs", type=int, default=2)
    add_record_option(parser)
    args = parser.parse_args()
    jobs = []
    for load in args.load or SCALERS:
        [trace] = data_files(args.data, TRACE) if load == "agentic" else [None]
        jobs += [(load, trace, text, args.max_nodes) for text in args.scaler or SCALERS[load]]
    done = []
    with ProcessPoolExecutor(args.jobs) as pool:
        for load, text, one in pool.map(run, jobs):
            done.append((load, text, one))
            times = one["ttft_ms"]
            print(
                f"{load} {text}: {paid_gpu_hours(one):.1f} GPU h, p90 {times['p90']:,.0f} ms",
                file=sys.stderr,
                flush=True,
            )
    report = Report()
    show(done, report)
    report.record(args.record)


if __name__ == "__main__":
    main()
