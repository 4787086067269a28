"""Clients that wait for answers: the turns of a trace are found, and sent after the answer of the turn before them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from small_worlds import NEAR, assert_all_requests_ended, prompt, specs

from warmroute.core.trace_row import TraceRow
from warmroute.lab.replay_setup import parse_policy
from warmroute.lab.run import Setup, replay
from warmroute.lab.workloads import parse_workload
from warmroute.lab.workloads.trace import ANSWER_MS_PER_TOKEN, TraceTurns
from warmroute.lab.workloads.workload_prompt import WorkloadPrompt
from warmroute.lab.world import World

SYSTEM = [1, 2]


def row(at_ms: float, ids: list[int], output: int = 100, extra: int = 0, **more: Any) -> TraceRow:
    return TraceRow(timestamp=at_ms, input_length=16 * len(ids) + extra, output_length=output, hash_ids=ids, **more)


def follow(*rows: TraceRow) -> list[int]:
    turns = TraceTurns(16)
    return [turns.follow(one, number)[0] for number, one in enumerate(rows)]


def test_a_turn_follows_the_longest_prompt_that_it_begins_with_and_can_contain_its_answer() -> None:
    first = row(0, [*SYSTEM, 3])
    second = row(10_000, [*SYSTEM, 3, 4, 5, 6, 7, 8, 9, 10])  # 112 tokens more than the first
    third = row(20_000, [*second.hash_ids, *range(20, 28)])
    retried = row(21_000, [*SYSTEM, 3, 11])  # begins with the first prompt and is too short for its answer
    assert follow(first, second, third, retried) == [-1, 0, 1, -1]


def test_requests_that_share_a_system_prompt_follow_nobody() -> None:
    first, second = row(0, [*SYSTEM, 3]), row(10, [*SYSTEM, 4, *range(30, 45)])
    short = row(20, SYSTEM, extra=5)  # its last full block is the system prompt's, which others had before
    assert follow(first, second, short, row(30, [*SYSTEM, *range(50, 70)])) == [-1, -1, -1, -1]


def test_turns_of_other_sessions_do_not_count() -> None:
    first, later = row(0, [1, 2, 3], session_id="a"), list(range(1, 20))
    assert follow(first, row(10, later, session_id="b"), row(20, [*later, 30], session_id="a")) == [-1, -1, 0]


def test_a_capture_says_which_prompt_a_prompt_follows() -> None:
    more = {"block_size": 16}
    first, same = row(0, [1, 2, 3], **more), row(5, [1, 2, 3], extra=4, **more)
    assert follow(first, same, row(9, list(range(1, 20)), follows=52, **more)) == [-1, -1, 1]
    assert follow(first, row(9, list(range(1, 20)), **more)) == [-1, -1]


def test_the_think_time_is_the_gap_without_the_answer() -> None:
    turns = TraceTurns(16)
    turns.follow(row(1000, [1, 2], output=50), 0)
    assert turns.follow(row(9000, list(range(1, 9))), 1) == (0, 8000 - 50 * ANSWER_MS_PER_TOKEN)
    assert turns.follow(row(9100, list(range(1, 30))), 2) == (1, 0.0)


def turn(number: int, follows: int = -1, at_ms: float = 0.0, think_ms: float = 0.0) -> WorkloadPrompt:
    """A request whose prefill takes 160 ms, and its answer 90 ms more."""
    return prompt(
        f"turn {number}", tokens=160, output=10, at_ms=at_ms, number=number, follows=follows, think_ms=think_ms
    )


def sent_ms(world: World, prompts: list[WorkloadPrompt], **more: Any) -> list[float]:
    times: dict[int, float] = {}
    arrive = world.arrive

    def record(one: WorkloadPrompt) -> Any:
        times[one.number] = world.calendar.now_ms
        return arrive(one)

    world.arrive = record  # type: ignore[method-assign, assignment]
    world.run(iter(prompts), **more)
    assert_all_requests_ended(world)
    return [times[number] for number in sorted(times)]


def test_a_turn_is_sent_after_its_predecessors_answer_and_never_before_its_own_time() -> None:
    prompts = [
        turn(0),
        turn(1, 0, 100.0, 30.0),
        turn(2, 1, 120.0, 1000.0),
        turn(3, 0, 5000.0, 20.0),
        turn(4, -1, 130.0),
    ]
    prompts.sort(key=lambda one: one.at_ms)
    first, second, third, fourth, other = sent_ms(world := World(specs(2), NEAR), prompts)
    answered = 250.0
    assert (first, fourth, other) == (0.0, 5000.0, 130.0)
    assert second == pytest.approx(answered + 30.0, abs=15.0)
    assert third == pytest.approx(second + 250.0 + 1000.0, abs=30.0)
    assert world.loop == "closed"


def test_in_the_open_loop_turns_do_not_wait() -> None:
    prompts = [turn(0), turn(1, 0, 100.0, 30.0), turn(2, 1, 120.0)]
    assert sent_ms(world := World(specs(2), NEAR), prompts, waits=False) == [0.0, 100.0, 120.0]
    assert world.loop == "open"


def test_a_limit_takes_the_first_requests_of_the_trace_even_if_they_wait() -> None:
    prompts = [turn(0), turn(1, 0, 10.0), turn(2, 1, 20.0), turn(3, -1, 30.0), turn(4, -1, 40.0)]
    assert len(sent_ms(World(specs(1), NEAR), prompts, limit=4)) == 4


def test_a_turn_goes_on_if_the_one_before_it_was_given_up() -> None:
    prompts = [turn(0), turn(1, 0, 10.0, 5.0)]
    prompts[0].patience_ms = 50.0
    assert sent_ms(World(specs(1), NEAR), prompts) == [0.0, 55.0]


def test_a_run_says_which_loop_it_had(tmp_path: Path) -> None:
    path = tmp_path / "chat.jsonl"
    rows = [(0, list(range(1, 5))), (40, list(range(1, 9))), (50, [30, 31])]
    path.write_text("\n".join(
        json.dumps({"timestamp": at, "input_length": 512 * len(ids), "output_length": 20, "hash_ids": ids})
        for at, ids in rows
    ))  # fmt: skip
    more: dict[str, Any] = {"nodes": tuple(specs(2)), "policy": parse_policy("price"), "conditions": NEAR}
    assert replay(Setup(workload=parse_workload([str(path)]), **more))["loop"] == "closed"
    assert replay(Setup(workload=parse_workload([str(path)]), open_loop=True, **more))["loop"] == "open"
    assert replay(Setup(workload=parse_workload(["unique_batch"]), limit=5, **more))["loop"] == "open"
    assert (
        replay(Setup(workload=parse_workload(["multi_turn_chat", "think_s=1"]), limit=30, **more))["loop"] == "closed"
    )
    assert replay(Setup(workload=parse_workload(["unique_batch"]), limit=5, concurrency=2, **more))["loop"] == "closed"
