"""How many nodes a workload needs: what is named has been replayed, and agrees with a replay of that size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from warmroute.cli.main import main
from warmroute.cli.plan import duration_ms

WORDS = ["shared_system_prompts", "system_tokens=3000", "question_tokens=1500", "output_tokens=60", "prompts=20"]
LOAD = ["--rate", "8", "--limit", "250", "--profile", "l4-1.5b"]


def test_a_plan_agrees_with_a_replay_at_the_size_it_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    planned, played = tmp_path / "plan.json", tmp_path / "replay.json"
    assert main(["plan", *WORDS, *LOAD, "--ttft-p90", "600ms", "--usd", "2", "--json", str(planned), "--quiet"]) == 0
    said = capsys.readouterr().out
    ours, theirs = json.loads(planned.read_text())["plan"]
    assert (ours["policy"], theirs["policy"]) == ("price", "round_robin")
    assert 1 < ours["nodes"] <= theirs["nodes"]
    assert f"needs {ours['nodes']} GPUs under price" in said
    assert f"round_robin would have needed {theirs['nodes']}" in said
    for one in (ours, theirs):
        for nodes, meets in ((one["nodes"], True), (one["nodes"] - 1, False)):
            command = ["replay", *WORDS, *LOAD, "--nodes", str(nodes), "--policy", one["policy"]]
            assert main([*command, "--json", str(played), "--quiet"]) == 0
            (run,) = json.loads(played.read_text())["runs"]
            assert (run["ttft_ms"]["p90"] <= 600.0) == meets
            told = next(told for told in one["runs"] if told["node_count"] == nodes)
            assert told["ttft_ms"] == run["ttft_ms"]


def test_what_no_fleet_can_do_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", *WORDS, "--limit", "60", "--profile", "l4-1.5b", "--ttft-p90", "1ms", "--max-nodes", "64"]
    assert main([*command, "--policy", "round_robin", "--quiet"]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "A lone prompt on l4-1.5b already takes longer than 1.0 ms" in said and "--max-nodes" not in said
    assert "on 64 nodes, and 32 did as well" in said


def test_a_fleet_that_may_be_too_small_is_to_be_larger(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", *WORDS, "--limit", "120", "--rate", "30", "--profile", "l4-1.5b", "--ttft-p90", "300ms"]
    assert main([*command, "--max-nodes", "2", "--policy", "price", "--quiet"]) == 1
    assert "needs more than 2 nodes: try a larger --max-nodes" in capsys.readouterr().out


def test_as_many_are_as_many(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", *WORDS, "--limit", "30", "--rate", "0.1", "--profile", "l4-1.5b", "--ttft-p90", "60s"]
    assert main([*command, "--quiet"]) == 0
    assert "round_robin would have needed 1: as many." in capsys.readouterr().out


def test_times_are_read_as_people_write_them() -> None:
    assert [duration_ms(text) for text in ("500ms", "2s", "0.5 s", "250")] == [500.0, 2000.0, 500.0, 250.0]


@pytest.mark.parametrize("text", ["", "fast", "0", "1h"])
def test_what_is_no_time_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "llm_d", "--ttft-p90", text])
    assert "is not a time like 500ms" in capsys.readouterr().err
