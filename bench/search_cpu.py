"""What a search by replay takes: CPU time of its process, relative to the time that passes, and of the router's loop.

    python bench/search_cpu.py [--searches N]

Recorded traffic of half an hour: conversations of four turns, on eight nodes. The searching process runs as beside a
router, with the default `scaling.replay.cpu_share`. The table has its CPU time, and that of the event loop's thread
which starts it. In a second search an event loop like the router's wakes up every millisecond: the table has the
longest time between two wake-ups.
"""

from __future__ import annotations

import argparse
import asyncio
import resource
import time
from random import Random

import msgspec
import uvloop
from record import Report, add_record_option, load_average

from warmroute.config import Objective, ScalingReplay
from warmroute.core.trace_row import TraceRow
from warmroute.scaling.fleet_plan import (
    MAX_INTERVALS,
    MIN_CPU_S,
    FleetNode,
    FleetPlan,
    NodeFigures,
    OfferedNode,
    PlanRequest,
)
from warmroute.scaling.recent_traffic import BLOCK_TOKENS, RecentTraffic
from warmroute.scaling.replay_planner import PlanningProcess

WINDOW_S = ScalingReplay().window_s
NODES = 8
NODE = FleetNode("L4", "local", 0.8)
SYSTEM_BLOCKS, TURN_BLOCKS, TURNS, ANSWER_TOKENS, TURN_S = 24, 24, 4, 800, 95.0
IDLE_S = 30.0
LOADS = (("a chat on eight nodes", 0.6), ("a busy router", 60.0))
"""Requests per second."""


def recent_traffic(per_s: float) -> RecentTraffic:
    random, rows = Random(1), []
    for conversation in range(round(per_s / TURNS * WINDOW_S)):
        at_s, ids = random.uniform(0.0, WINDOW_S), list(range(SYSTEM_BLOCKS))
        for turn in range(TURNS):
            follows = len(ids) * BLOCK_TOKENS if turn else 0
            first = 1000 + (conversation * TURNS + turn) * TURN_BLOCKS
            ids = [*ids, *range(first, first + TURN_BLOCKS)]
            length = len(ids) * BLOCK_TOKENS
            row = TraceRow(
                round(1000.0 * at_s), length, ANSWER_TOKENS, ids, BLOCK_TOKENS, follows=follows, duration_ms=30_000.0
            )
            rows.append(row)
            at_s += random.expovariate(1.0 / TURN_S)
    rows.sort(key=lambda row: row.timestamp)
    lines = b"\n".join(msgspec.json.encode(row) for row in rows if row.timestamp < 1000.0 * WINDOW_S)
    start_s = time.monotonic() - WINDOW_S
    traffic = RecentTraffic(2.0 * WINDOW_S, lambda: time.monotonic() - start_s)
    traffic.started_s = 0.0
    traffic.write(lines)
    return traffic


def plan_request(share: float, per_s: float) -> PlanRequest:
    """Return a task on eight nodes that are about as busy with the chat; the speed is that of an L4 with 8 B."""
    faster = max(1.0, per_s / LOADS[0][1])
    figures = NodeFigures(
        ms_per_token=0.35 / faster, step_ms=35.0 / faster, slope_ms=0.0, kv_tokens=int(60_000 * faster)
    )
    return PlanRequest(
        nodes=(NODE,) * NODES,
        removable=NODES - 1,
        offers=(OfferedNode(("cloud", "L4"), NODE, 12),),
        figures={"L4": figures},
        objective=Objective(ttft_p90_ms=2000.0),
        lead_s=480.0,
        predict_current=True,
        show_larger=True,
        max_cpu_s=max(MIN_CPU_S, MAX_INTERVALS * ScalingReplay().interval_s * share),
    )


class Wakeups:
    """Wakes up every millisecond, and measures how late."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        self._last_s = time.monotonic()
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(0.001)
            now_s = time.monotonic()
            self.longest_s, self._last_s = max(self.longest_s, now_s - self._last_s), now_s

    async def close(self) -> float:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        return self.longest_s


def children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


class Measured(msgspec.Struct):
    plan: FleetPlan
    recorded: int
    cpu_s: float
    wall_s: float
    loop_s: float
    """CPU time of the loop's thread while it does nothing but the search."""
    longest_s: float
    idle_longest_s: float


async def measure(per_s: float, share: float) -> Measured:
    traffic = recent_traffic(per_s)
    idle = Wakeups()
    await asyncio.sleep(IDLE_S)
    idle_longest_s = await idle.close()
    loop_s, cpu_s, start_s = time.thread_time(), children_cpu_s(), time.monotonic()
    plan = await search(traffic, per_s, share)
    loop_s, cpu_s, wall_s = time.thread_time() - loop_s, children_cpu_s() - cpu_s, time.monotonic() - start_s
    busy = Wakeups()
    await search(traffic, per_s, share)
    return Measured(plan, len(traffic), cpu_s, wall_s, loop_s, await busy.close(), idle_longest_s)


async def search(traffic: RecentTraffic, per_s: float, share: float) -> FleetPlan:
    process, ended = PlanningProcess(traffic, share), asyncio.get_running_loop().create_future()
    process.start(plan_request(share, per_s), lambda plan, reason: ended.set_result((plan, reason)))
    plan, reason = await ended
    await process.close()
    assert isinstance(plan, FleetPlan) and not plan.skipped, reason or plan
    return plan


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--searches", type=int, default=1, help="for each traffic")
    add_record_option(parser)
    args = parser.parse_args()
    defaults, report = ScalingReplay(), Report()
    report.table(
        "searches", "traffic", "recorded requests", "replays", "CPU, s", "wall, s", "share of a core meanwhile",
        "with a search every 5 minutes", "CPU of the loop's thread, ms", "loop's longest pause, ms", "without a search",
    )  # fmt: skip
    for name, per_s in LOADS:
        for _ in range(args.searches):
            one = uvloop.run(measure(per_s, defaults.cpu_share))
            report.row(
                name, f"{one.recorded:,}", one.plan.replays, f"{one.cpu_s:.1f}", f"{one.wall_s:.0f}",
                f"{one.cpu_s / one.wall_s:.1%}", f"{one.cpu_s / max(one.wall_s, defaults.interval_s):.1%}",
                f"{1000.0 * one.loop_s:.1f}", f"{1000.0 * one.longest_s:.1f}", f"{1000.0 * one.idle_longest_s:.1f}",
            )  # fmt: skip
    report.value("load", load_average())
    report.record(args.record)


if __name__ == "__main__":
    main()
