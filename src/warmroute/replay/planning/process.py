"""The process that searches a fleet by replay (scaling/planning_process.py starts it):

    python -m warmroute.replay.planning.process < task > plan

It has the lowest priority, sleeps so that it takes its share of a core at most, and ends when the router has ended.
"""

from __future__ import annotations

import os
import resource
import sys
import time
from collections.abc import Iterator
from typing import IO, Final

import msgspec

from warmroute.capture.trace_row import TraceRow
from warmroute.replay.planning.fleet_search import plan_fleet
from warmroute.replay.planning.recorded_traffic import RecordedRequest, recorded_until
from warmroute.replay.workloads.text_lengths import text_lengths
from warmroute.replay.workloads.trace import prompts_of
from warmroute.scaling.planning_process import PlanningTask

MAX_MEMORY_BYTES: Final = 4 << 30
USED_SHARE: Final = 0.97
"""Of the share: the start and the end of a process are outside of what it can measure."""
SLEEP_S: Final = 0.02
"""The process sleeps at least this long at a time."""
CHECK_S: Final = 1.0
"""Time between two checks whether the router still runs."""


class Throttle:
    """Sleeps so that the process takes at most `share` of a core, counted from its start. Ends it with the router."""

    def __init__(self, share: float, parent: int) -> None:
        self._share = share if share >= 1.0 else USED_SHARE * share
        self._parent = parent
        self._start_s = self._checked_s = time.monotonic()
        self._start_cpu_s = 0.0

    def pause(self) -> None:
        now_s = time.monotonic()
        ahead_s = (time.process_time() - self._start_cpu_s) / self._share - (now_s - self._start_s)
        if ahead_s > SLEEP_S or now_s - self._checked_s > CHECK_S:
            self._checked_s = now_s
            if os.getppid() != self._parent:
                sys.exit("the router has ended")
        if ahead_s > SLEEP_S and self._share < 1.0:
            time.sleep(ahead_s)


def lower_priority(max_cpu_s: float) -> None:
    """Let every other process go first, and bound what a mistake could cost."""
    os.nice(19)
    try:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    except (AttributeError, OSError):
        pass  # not allowed in this container: nice remains
    for limit, value in ((resource.RLIMIT_CPU, int(2 * max_cpu_s) + 60), (resource.RLIMIT_AS, MAX_MEMORY_BYTES)):
        _soft, hard = resource.getrlimit(limit)
        resource.setrlimit(limit, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def read_recorded(lines: Iterator[bytes], block_tokens: int, recorded_ms: float) -> tuple[list[RecordedRequest], float]:
    """Return the recorded requests in the order of their arrival, and until when: without the last moments, because
    many requests that arrived then have not ended yet."""
    decoder = msgspec.json.Decoder(TraceRow)
    rows: list[tuple[float, int, TraceRow]] = []
    for line in lines:
        conversation, _, text = line.partition(b" ")
        row = decoder.decode(text)
        rows.append((row.timestamp + row.timestamp_us / 1000.0, int(conversation), row))
    until_ms = recorded_until(recorded_ms, [row.duration_ms or 0.0 for _, _, row in rows])
    rows = [one for one in rows if one[0] <= until_ms]
    rows.sort(key=lambda one: one[0])
    in_order = [row for _, _, row in rows]
    prompts = (prompt for _, prompt in prompts_of(in_order, block_tokens, text_lengths(in_order)))
    recorded = [
        RecordedRequest(prompt, at_ms, conversation)
        for prompt, (at_ms, conversation, _) in zip(prompts, rows, strict=True)
    ]
    return recorded, until_ms


def search(file: IO[bytes]) -> bytes:
    size = int.from_bytes(file.read(8), "big")
    task = msgspec.msgpack.decode(file.read(size), type=PlanningTask)
    lower_priority(task.request.max_cpu_s)
    throttle = Throttle(task.cpu_share, task.parent)
    throttle.pause()
    recorded, until_ms = read_recorded(iter(file), task.block_tokens, task.recorded_ms)
    task.request.lead_s += (task.recorded_ms - until_ms) / 1000.0
    plan = plan_fleet(task.request, recorded, until_ms, throttle.pause)
    throttle.pause()
    plan.cpu_s = time.process_time()
    return msgspec.msgpack.encode(plan)


if __name__ == "__main__":
    sys.stdout.buffer.write(search(sys.stdin.buffer))
