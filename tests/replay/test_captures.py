"""Replay of captures: rotated files, the order of arrival, block sizes, answers, and what was measured."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from warmroute.app.main import main
from warmroute.lab.engine.timing import profile
from warmroute.lab.replay_setup import parse_policy
from warmroute.lab.run import Setup, replay
from warmroute.lab.simulated_node import NodeSpec
from warmroute.lab.summary import measure
from warmroute.lab.workloads import Trace
from warmroute.lab.workloads.trace import BadTrace, TraceFiles, mean_rate, prompts

ROW = {"input_length": 40, "output_length": 5, "hash_ids": [1, 2], "block_size": 16, "model": "m"}


def write(file: Path, rows: Iterable[dict[str, Any]], end: str = "\n") -> Path:
    text = "\n".join(json.dumps({**ROW, **row}) for row in rows) + end
    file.write_bytes(gzip.compress(text.encode()) if file.suffix == ".gz" else text.encode())
    return file


def times_ms(path: Path, **more: Any) -> list[float]:
    return [prompt.at_ms for prompt in prompts(path, **more)]


def hashes(path: Path, block_size: int = 16, output: bool = False) -> list[list[int]]:
    """Return the blocks of each prompt, and with `output` those of its answer."""
    found = []
    for prompt in prompts(path):
        tokens = prompt.prompt_tokens + (prompt.output_tokens if output else 0)
        found.append(prompt.blocks.content(block_size).hashes(0, tokens // block_size))
    return found


# Files.


def test_requests_are_read_in_the_order_of_their_arrival(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", [{"timestamp": at} for at in (30, 10, 0, 20, 50, 40)])
    assert times_ms(file) == [0, 10, 20, 30, 40, 50]
    assert mean_rate(file) == 100.0
    assert mean_rate(file, 2) == 100.0


def test_microseconds_order_requests_of_the_same_millisecond(tmp_path: Path) -> None:
    rows = [{"timestamp": 10, "timestamp_us": us} for us in (900, 0, 250)]
    assert times_ms(write(tmp_path / "a.jsonl", rows)) == [10, 10.25, 10.9]


def test_other_traces_are_read_as_they_are(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text("".join(f'{{"timestamp":{at},"input_length":9,"output_length":1}}\n' for at in (30, 10, 20)))
    assert times_ms(file) == [30, 10, 20]


def test_a_directory_is_read_as_the_captures_in_it_followed_each_other(tmp_path: Path) -> None:
    write(tmp_path / "capture-20261116T050000Z-00aa.0001.jsonl", [{"timestamp": 5}, {"timestamp": 3}])
    write(tmp_path / "capture-20261116T050000Z-00aa.0002.jsonl.gz", [{"timestamp": 4}, {"timestamp": 900}])
    write(tmp_path / "capture-20261116T050010Z-0001.0001.jsonl", [{"timestamp": 7}])
    (tmp_path / "notes.jsonl").write_text("not a capture")
    assert times_ms(tmp_path) == [3, 4, 5, 900, 10_007]
    assert times_ms(tmp_path / "capture-20261116T050000Z-*") == [3, 4, 5, 900]
    assert times_ms(tmp_path / "capture-20261116T050010Z-0001.0001.jsonl") == [7]


def test_a_line_that_a_crash_cut_off_is_ignored(tmp_path: Path) -> None:
    write(tmp_path / "capture-20261116T050000Z-00aa.0001.jsonl", [{"timestamp": 5}], end='\n{"timestamp": 6, "inp')
    assert times_ms(tmp_path) == [5]
    other = write(tmp_path / "trace.jsonl", [{"timestamp": 5}], end='\n{"timestamp": 6, "inp')
    with pytest.raises(BadTrace, match="line 2"):
        times_ms(other)


def test_a_damaged_or_missing_capture_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(BadTrace, match="no files of a capture"):
        times_ms(tmp_path)
    with pytest.raises(BadTrace, match="no file matches"):
        times_ms(tmp_path / "capture-*")
    file = tmp_path / "a.jsonl.gz"
    file.write_bytes(gzip.compress(b'{"timestamp":0}\n' * 1000)[:40])
    with pytest.raises(BadTrace, match="damaged"):
        times_ms(file)
    write(tmp_path / "b.jsonl", [{"timestamp": 0}, {"timestamp": 1, "block_size": 32}])
    with pytest.raises(BadTrace, match="different block sizes: 16, 32"):
        times_ms(tmp_path / "b.jsonl")


def test_one_model_of_several_is_replayed(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", [{"timestamp": at, "model": "ab"[at % 2]} for at in range(6)])
    assert times_ms(file, model="b") == [1, 3, 5]
    assert [row.model for row in TraceFiles(file, "a").rows()] == ["a", "a", "a"]
    assert mean_rate(file, model="b") == 500.0
    with pytest.raises(BadTrace, match="no request is for the model 'c'"):
        times_ms(file, model="c")


def test_priority_and_tenant_are_replayed(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", [{"timestamp": 0, "priority": "low", "tenant": "3f"}, {"timestamp": 1}])
    assert [(one.priority, one.tenant) for one in prompts(file)] == [("low", "3f"), ("normal", "")]


# Blocks.


def test_the_block_size_of_short_prompts_is_not_inferred(tmp_path: Path) -> None:
    """20 tokens with one id could be a block of 512."""
    file = write(tmp_path / "a.jsonl", [{"timestamp": 0, "input_length": 20, "hash_ids": [7]}])
    assert hashes(file) == [[7]]


@pytest.mark.parametrize(("block_size", "shared"), [(16, 5), (32, 2), (64, 1), (8, 10), (1, 80)])
def test_shared_prefixes_are_exact_in_every_block_size(tmp_path: Path, block_size: int, shared: int) -> None:
    one, two = list(range(100, 108)), [*range(100, 105), 900, 901, 902]
    file = write(
        tmp_path / "a.jsonl",
        [{"timestamp": at, "input_length": 130, "hash_ids": ids} for at, ids in enumerate((one, two))],
    )
    first, second = hashes(file, block_size)
    assert len(first) == len(second) == 130 // block_size
    equal = [a == b for a, b in zip(first, second, strict=True)]
    assert equal.index(False) == shared and not any(equal[shared:])


def test_estimated_lengths_are_corrected_by_what_nodes_reported(tmp_path: Path) -> None:
    """Of these prompts, three tokens were estimated where the node counted two."""
    one, two = list(range(100, 112)), [*range(100, 106), *range(900, 906)]
    rows = [
        {"timestamp": at, "input_length": 192, "hash_ids": ids, "input_estimated": True, "prompt_tokens": 128}
        for at, ids in enumerate((one, two))
    ]
    file = write(tmp_path / "a.jsonl", [*rows, {"timestamp": 2, "input_length": 192, "hash_ids": one}])
    first, second, exact = hashes(file)
    assert [len(first), len(second), len(exact)] == [8, 8, 12]
    assert first[:4] == second[:4] and not set(first[4:]) & set(second[4:])  # half of the prompt, as before
    assert exact == one


def test_conversations_survive_the_correction(tmp_path: Path) -> None:
    one = {"timestamp": 0, "input_length": 200, "hash_ids": [*range(12)], "prompt_tokens": 260, "output_length": 40}
    two = {"timestamp": 1, "input_length": 400, "hash_ids": [*range(25)], "prompt_tokens": 520, "follows": 200}
    rows = [{**row, "input_estimated": True, "node": "a"} for row in (one, two)]
    first, second = hashes(write(tmp_path / "a.jsonl", rows), output=True)
    assert first[:15] == second[:15]  # 12 × 1.3 blocks
    assert first[15:17] == second[15:17]  # and the answer


# Answers.


def turns(tmp_path: Path, **second: Any) -> Path:
    """A prompt of 40 tokens with an answer of 30, and the next turn of 100 tokens that contains both."""
    first = {"timestamp": 0, "hash_ids": [1, 2], "output_length": 30, "node": "a"}
    return write(
        tmp_path / "a.jsonl",
        [
            first,
            {"timestamp": 1, "input_length": 100, "hash_ids": [1, 2, 3, 4, 5, 6], "follows": 40, "node": "a", **second},
        ],
    )


def test_the_next_turn_hits_the_answer_of_the_one_before(tmp_path: Path) -> None:
    first, second = hashes(turns(tmp_path), output=True)
    assert first[:2] == [1, 2] and first[2:] == second[2:4]  # 70 tokens: four blocks
    assert second[4:6] == [5, 6]


def test_it_does_not_if_the_engine_found_the_prompt_and_nothing_after_it(tmp_path: Path) -> None:
    first, second = hashes(turns(tmp_path, cached_tokens=32), output=True)
    assert first[2:] != second[2:4] and second[:6] == [1, 2, 3, 4, 5, 6]
    first, second = hashes(turns(tmp_path, cached_tokens=64), output=True)
    assert first[2:] == second[2:4]
    first, second = hashes(turns(tmp_path, cached_tokens=32, node="b"), output=True)  # another node says nothing
    assert first[2:] == second[2:4]


def test_an_absurd_length_of_the_prompt_before_is_ignored(tmp_path: Path) -> None:
    for follows in (10**9, 15, -40):
        assert hashes(turns(tmp_path, follows=follows))[1] == [1, 2, 3, 4, 5, 6]


def test_it_does_not_if_the_prompt_is_too_short_for_the_answer(tmp_path: Path) -> None:
    _first, second = hashes(turns(tmp_path, input_length=65, hash_ids=[1, 2, 3, 4]), output=True)
    assert second[2:4] == [3, 4]


def test_later_turns_share_the_answers_too(tmp_path: Path) -> None:
    file = turns(tmp_path)
    with file.open("a") as out:
        third = {"timestamp": 2, "input_length": 144, "hash_ids": [1, 2, 3, 4, 5, 6, 7, 8, 9], "follows": 100}
        out.write(json.dumps({**ROW, **third}) + "\n")
    _first, second, third_hashes = hashes(file)
    assert third_hashes[:6] == second


def test_an_estimated_answer_counts_as_far_as_the_next_turn_contains_it(tmp_path: Path) -> None:
    first = {"timestamp": 0, "output_length": 60, "output_estimated": True, "outcome": "mirrored"}
    later = {"timestamp": 1, "input_length": 100, "hash_ids": [1, 2, 3, 4, 5, 6], "follows": 40, "outcome": "mirrored"}
    one, two = hashes(write(tmp_path / "a.jsonl", [first, {**later, "answer_length": 30}]), output=True)
    assert one[2:4] == two[2:4] and two[4:6] == [5, 6]
    one, two = hashes(write(tmp_path / "b.jsonl", [first, later]), output=True)
    assert two[:6] == [1, 2, 3, 4, 5, 6]


# What was measured.


def capture(tmp_path: Path) -> Path:
    rows = [
        {"timestamp": 1000 * at, "prompt_tokens": 40, "cached_tokens": 32 if at else 0, "ttft_ms": 10.0 * (at + 1),
         "duration_ms": 50.0, "node": "ab"[at % 2]}
        for at in range(4)
    ]  # fmt: skip
    return write(tmp_path / "a.jsonl", [*rows, {"timestamp": 4000, "outcome": "cancelled", "output_estimated": True}])


def test_what_was_measured_is_summed_over_the_replayed_requests(tmp_path: Path) -> None:
    past = measure(Trace(capture(tmp_path)))
    assert past is not None
    run = past.run("a")
    assert run is not None
    assert (run["requests"], run["finished"], run["left"], run["node_count"]) == (5, 4, 1, 2)
    assert run["hit_rate"] == 96 / 160 and run["ttft_ms"]["p50"] == 20.0
    later = measure(Trace(capture(tmp_path)), skip=1, limit=3)
    assert later is not None and later.hit_rate == 0.8 and later.requests == 3
    warm = measure(Trace(capture(tmp_path)), skip_s=1.5)
    assert warm is not None and warm.requests == 3
    soon = measure(Trace(capture(tmp_path)), duration_s=1.5)
    assert soon is not None and soon.requests == 2
    assert past.notes() == ["20% of the output lengths are estimates."]


def test_other_traces_have_nothing_measured(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"timestamp":0,"input_length":9,"output_length":1}\n')
    assert measure(Trace(file)) is None


def test_replay_prints_what_was_measured_beside_the_policies(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out, html = capture(tmp_path), tmp_path / "out.json", tmp_path / "out.html"
    assert main(["replay", str(file), "--nodes", "2", "--json", str(out), "--html", str(html)]) == 0
    printed = capsys.readouterr().out
    assert "│ measured " in printed and "60.0%" in printed and "20% of the output lengths are estimates." in printed
    assert json.loads(out.read_text())["measured"]["hit_rate"] == 0.6
    row = html.read_text().partition("The live fleet, as the capture has it")[2]
    assert "</span>measured</td>" in row and "60.0%" in row
    assert main(["replay", str(file), "--nodes", "2", "--rate", "5"]) == 0
    assert "measured" not in capsys.readouterr().out  # another load


def test_plan_reads_a_directory_of_captures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "capture-20261116T050000Z-00aa.0001.jsonl", [{"timestamp": at * 100} for at in range(20)])
    assert main(["plan", str(tmp_path), "--quiet"]) == 0
    assert "This workload needs 2 GPUs with price." in capsys.readouterr().out


def test_a_replay_of_a_capture_hits_answers(tmp_path: Path) -> None:
    """One node, one conversation: everything but the new text of a turn is cached."""
    setup = Setup(
        workload=Trace(turns(tmp_path, timestamp=60_000)),
        nodes=(NodeSpec("node-0", profile("l4-8b")),),
        policy=parse_policy("round_robin"),
    )
    run = replay(setup)
    assert run["hit_rate"] == pytest.approx(64 / 140)
