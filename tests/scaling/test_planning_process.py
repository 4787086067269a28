"""The process that searches by replay: its priority, its share of a core, its end; and the traffic that it gets."""

from __future__ import annotations

import asyncio
import io
import os
import sys
import time
from random import Random

import msgspec
import pytest
from recorded_loads import plan_request

from warmroute.core.trace_row import TraceRow
from warmroute.lab.planning.search import USED_SHARE, Throttle, read_recorded, search
from warmroute.scaling import recent_traffic
from warmroute.scaling.fleet_plan import FleetPlan
from warmroute.scaling.recent_traffic import BLOCK_TOKENS, RecentTraffic, framed
from warmroute.scaling.replay_planner import PlanningProcess, PlanningTask


def lines(count: int, per_s: float = 6.0, tokens: int = 512, blocks: int = 8) -> bytes:
    """Requests without common prefixes, as a capture writes them."""
    random, at_ms, rows = Random(2), 0.0, []
    for number in range(count):
        at_ms += random.expovariate(per_s) * 1000.0
        ids = list(range(number * blocks, (number + 1) * blocks))
        rows.append(TraceRow(round(at_ms), tokens, 4, ids, BLOCK_TOKENS, duration_ms=900.0))
    return b"\n".join(map(msgspec.json.encode, rows)) + b"\n"


def traffic(count: int = 400) -> RecentTraffic:
    now_s = iter([0.0])
    recorded = RecentTraffic(1800.0, lambda: next(now_s, 1.0 + count / 6.0))
    recorded.write(lines(count))
    return recorded


async def started(process: PlanningProcess) -> int:
    while (pid := process.pid) is None:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    return pid


class Result:
    def __init__(self) -> None:
        self.ended = asyncio.Event()
        self.plan: FleetPlan | None = None
        self.reason = ""

    def __call__(self, plan: FleetPlan | None, reason: str) -> None:
        self.plan, self.reason = plan, reason
        self.ended.set()


@pytest.mark.timeout(120)
async def test_a_process_of_the_lowest_priority_returns_a_plan() -> None:
    process, result = PlanningProcess(traffic(), cpu_share=0.5), Result()
    process.start(plan_request(1, max_cpu_s=2.0), result)
    seen: set[int] = set()
    while not result.ended.is_set():
        await asyncio.sleep(0.02)
        pid = process.pid
        try:
            if pid is not None:
                seen.add(os.getpriority(os.PRIO_PROCESS, pid))
        except ProcessLookupError:
            pass
    assert result.plan is not None, result.reason
    assert result.plan.add > 0
    assert result.plan.cpu_s > 0
    assert 19 in seen
    assert process.pid is None


@pytest.mark.timeout(60)
async def test_the_router_survives_the_death_of_the_process() -> None:
    process, result = PlanningProcess(traffic(), cpu_share=0.01), Result()
    process.start(plan_request(1), result)
    os.kill(await started(process), 9)
    await result.ended.wait()
    assert result.plan is None
    assert result.reason == "the process was ended by signal 9"


async def test_an_unexpected_error_is_a_reason_too(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = traffic()
    monkeypatch.setattr(recorded, "snapshot", lambda: 1 / 0)
    result = Result()
    PlanningProcess(recorded, cpu_share=0.1).start(plan_request(1), result)
    await result.ended.wait()
    assert result.plan is None and result.reason.startswith("ZeroDivisionError")


async def test_a_router_that_stops_at_once_does_not_wait_for_the_search() -> None:
    process = PlanningProcess(traffic(), 0.1, (sys.executable, "-c", "import time; time.sleep(100)"))
    process.start(plan_request(1), Result())
    await asyncio.sleep(0)
    async with asyncio.timeout(20.0):
        await process.close()


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("raise SystemExit('no memory')", "the process ended with status 1: no memory"),
        ("print('no plan')", ""),
    ],
)
async def test_a_program_that_fails_is_a_reason(program: str, reason: str) -> None:
    process, result = PlanningProcess(traffic(), 0.1, (sys.executable, "-c", program)), Result()
    process.start(plan_request(1), result)
    await result.ended.wait()
    assert result.plan is None
    assert reason in result.reason and result.reason


async def test_a_program_that_hangs_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("warmroute.scaling.replay_planner.START_S", 0.3)
    command = (sys.executable, "-c", "import time; time.sleep(1000)")
    process, result = PlanningProcess(traffic(), 1.0, command), Result()
    process.start(plan_request(1, max_cpu_s=0.1), result)
    await result.ended.wait()
    assert "did not end within" in result.reason
    assert process.pid is None


async def test_a_router_that_stops_ends_the_search() -> None:
    command = (sys.executable, "-c", "import time; time.sleep(1000)")
    process, result = PlanningProcess(traffic(), 1.0, command), Result()
    process.start(plan_request(1), result)
    await started(process)
    await process.close()
    assert process.pid is None
    assert not result.ended.is_set()


def test_the_process_sleeps_until_it_has_taken_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    clock = {"wall": 10.0, "cpu": 0.0}
    monkeypatch.setattr(time, "monotonic", lambda: clock["wall"])
    monkeypatch.setattr(time, "process_time", lambda: clock["cpu"])
    monkeypatch.setattr(time, "sleep", slept.append)
    throttle = Throttle(0.1, os.getppid())
    clock.update(wall=11.0, cpu=0.5)
    throttle.pause()
    assert slept == [pytest.approx(0.5 / (USED_SHARE * 0.1) - 1.0)]


def test_a_process_that_may_take_a_whole_core_ends_with_its_router_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("warmroute.lab.planning.search.CHECK_S", 0.0)
    Throttle(1.0, os.getppid()).pause()
    with pytest.raises(SystemExit, match="the router has ended"):
        Throttle(1.0, parent=-1).pause()


def test_a_process_without_its_router_ends() -> None:
    with pytest.raises(SystemExit, match="the router has ended"):
        Throttle(1e-9, parent=-1).pause()


def test_the_task_and_the_traffic_become_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("warmroute.lab.planning.search.lower_priority", lambda _max_cpu_s: None)
    recorded, share, recorded_ms = traffic().snapshot()
    assert share == 1.0
    task = PlanningTask(
        request=plan_request(1), cpu_share=1.0, parent=os.getppid(), block_tokens=BLOCK_TOKENS, recorded_ms=recorded_ms
    )
    encoded = msgspec.msgpack.encode(task)
    file = io.BytesIO(len(encoded).to_bytes(8, "big") + encoded + b"".join(framed(recorded)))
    plan = msgspec.msgpack.decode(search(file), type=FleetPlan)
    assert plan.add > 0
    assert plan.recorded > 380


def test_recorded_requests_are_in_the_order_of_their_arrival() -> None:
    rows = [TraceRow(at, 100, 4, [], BLOCK_TOKENS, duration_ms=1.0) for at in (30.0, 10.0, 20.0)]
    found, _ = read_recorded((b"7 " + msgspec.json.encode(row) for row in rows), BLOCK_TOKENS, 1000.0)
    assert [one.at_ms for one in found] == [10.0, 20.0, 30.0]


def test_requests_of_the_last_moments_are_left_out_because_others_had_not_ended() -> None:
    rows = [TraceRow(10.0 * at, 100, 4, [], BLOCK_TOKENS, duration_ms=200.0) for at in range(100)]
    found, _ = read_recorded((b"7 " + msgspec.json.encode(row) for row in rows), BLOCK_TOKENS, 1000.0)
    assert found[-1].at_ms == 800.0


def test_turns_of_one_conversation_have_one_number() -> None:
    rows = [
        TraceRow(0.0, 130, 4, [1, 2], BLOCK_TOKENS),
        TraceRow(1.0, 130, 4, [8, 9], BLOCK_TOKENS),
        TraceRow(2.0, 200, 4, [1, 2, 3], BLOCK_TOKENS, follows=130),
    ]
    recorded = RecentTraffic(60.0)
    recorded.write(b"\n".join(map(msgspec.json.encode, rows)))
    first, other, second = (one.conversation for one in recorded.snapshot()[0])
    assert first == second != other


def test_recent_traffic_forgets_what_is_older_than_its_window() -> None:
    now_s = 0.0
    recorded = RecentTraffic(10.0, lambda: now_s)
    now_s = 100.0
    recorded.write(lines(600))
    assert 30 <= len(recorded) <= 90
    now_s = 200.0
    assert not recorded.snapshot()[0]


@pytest.mark.timeout(30)
async def test_a_request_that_took_long_does_not_extend_the_recorded_time() -> None:
    """It is recorded when it has ended: behind requests that arrived long after it."""
    now_s = 0.0
    recorded = RecentTraffic(60.0, lambda: now_s)
    now_s = 100.0
    recorded.write(lines(600))
    recorded.write(msgspec.json.encode(TraceRow(5000.0, 512, 4, [], BLOCK_TOKENS, duration_ms=95_000.0)))
    assert min(one.at_ms for one in recorded.snapshot()[0]) == 5000.0
    program = (
        "import json, msgspec, sys; data = sys.stdin.buffer.read(); "
        "rows = data[8 + int.from_bytes(data[:8], 'big') :].splitlines(); "
        "first = min(json.loads(row.partition(b' ')[2])['timestamp'] for row in rows); "
        "sys.stdout.buffer.write(msgspec.msgpack.encode({'recorded': len(rows), 'measured_s': first / 1000}))"
    )
    process, result = PlanningProcess(recorded, 0.1, (sys.executable, "-c", program)), Result()
    process.start(plan_request(1), result)
    await result.ended.wait()
    assert result.plan is not None, result.reason
    assert result.plan.recorded == len(recorded) - 1
    assert result.plan.measured_s >= 40.0


def test_the_memory_of_recent_traffic_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recent_traffic, "MAX_BYTES", 100_000)
    recorded = traffic(2000)
    kept, share, _ = recorded.snapshot()
    assert sum(len(one.text) + recent_traffic.LINE_BYTES for one in kept) <= 100_000
    assert share < 1.0
    assert len(kept) == pytest.approx(2000 * share, rel=0.25)


def test_the_process_gets_the_lines_of_its_share_of_the_conversations() -> None:
    kept, _, _ = traffic(2000).snapshot()
    assert len(list(framed(kept))) == len(kept) == 2000
    assert len(list(framed(kept, 0.25))) == pytest.approx(500, rel=0.25)


def test_more_conversations_are_kept_again_after_a_busy_hour(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recent_traffic, "MAX_BYTES", 100_000)
    now_s = 0.0
    recorded = RecentTraffic(100.0, lambda: now_s)
    recorded.write(lines(2000))
    assert recorded.share < 0.5
    shares = []
    for _ in range(20):
        now_s += 101.0
        recorded.write(b"")
        shares.append((recorded.share, recorded.snapshot()[1]))
    assert shares[-1] == (1.0, 1.0)
    assert all(reported <= kept for kept, reported in shares)
    assert any(reported < kept for kept, reported in shares)  # until the window has turned over
