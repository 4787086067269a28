"""`warmroute plan`: the fleet size that it names agrees with a replay of that size."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from warmroute.app.commands.plan import parse_duration_ms
from warmroute.app.main import main
from warmroute.lab.engine.timing import profile
from warmroute.lab.replay_setup import parse_policy
from warmroute.lab.run import Setup
from warmroute.lab.simulated_node import Conditions, NodeSpec
from warmroute.lab.sizing import LoadMargin, load_margin, load_rises, with_load
from warmroute.lab.workloads import Trace, parse_workload

WORKLOAD = ["shared_system_prompts", "system_tokens=3000", "question_tokens=1500", "output_tokens=60", "prompts=20"]
LOAD = ["--rate", "8", "--limit", "250", "--profile", "l4-1.5b"]


def test_a_plan_agrees_with_a_replay_at_the_size_it_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    planned, played = tmp_path / "plan.json", tmp_path / "replay.json"
    assert main(["plan", *WORKLOAD, *LOAD, "--ttft-p90", "600ms", "--usd", "2", "--json", str(planned), "--quiet"]) == 0
    printed = capsys.readouterr().out
    ours, theirs = json.loads(planned.read_text())["plan"]
    assert (ours["policy"], theirs["policy"]) == ("price", "round_robin")
    assert 1 < ours["nodes"] <= theirs["nodes"]
    assert f"needs {ours['nodes']} GPUs with price" in printed
    assert f"With round_robin it would need {theirs['nodes']}" in printed
    for one in (ours, theirs):
        for nodes, meets in ((one["nodes"], True), (one["nodes"] - 1, False)):
            command = ["replay", *WORKLOAD, *LOAD, "--nodes", str(nodes), "--policy", one["policy"]]
            assert main([*command, "--json", str(played), "--quiet"]) == 0
            (run,) = json.loads(played.read_text())["runs"]
            assert (run["ttft_ms"]["p90"] <= 600.0) == meets
            planned_run = next(found for found in one["runs"] if found["node_count"] == nodes)
            assert planned_run["ttft_ms"] == run["ttft_ms"]


def test_a_plan_with_roles_names_prefill_and_decode_nodes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    planned, played = tmp_path / "plan.json", tmp_path / "replay.json"
    load = ["mixed_lengths", "--rate", "8", "--limit", "120", "--profile", "h200-8b"]
    limits = ["--ttft-p99", "15s", "--inter-token-p90", "7ms", "--max-nodes", "16"]
    assert main(["plan", *load, *limits, "--roles", "--json", str(planned), "--quiet"]) == 0
    mixed, roles = json.loads(planned.read_text())["plan"]
    nodes, prefill = roles["nodes"], roles["prefill_nodes"]
    assert mixed["prefill_nodes"] is None and nodes < mixed["nodes"], "long prompts stop no answers"
    assert 0 < prefill < nodes
    printed = " ".join(capsys.readouterr().out.split())
    assert f"{nodes} ({prefill} + {nodes - prefill})" in printed
    command = ["replay", *load, "--nodes", str(nodes), "--policy", "price", "--json", str(played), "--quiet"]
    assert main([*command, "--role", f"prefill={prefill}", "--role", f"decode={nodes - prefill}"]) == 0
    (run,) = json.loads(played.read_text())["runs"]
    assert run["ttft_ms"]["p99"] <= 15_000.0 and run["inter_token_ms"]["p90"] <= 7.0


def test_a_plan_with_a_margin_holds_more_load(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As the autoscaler's: by the margin, and by what chance does to the requests of ten minutes."""
    nodes: list[int] = []
    command = ["plan", *WORKLOAD, *LOAD, "--ttft-p90", "600ms", "--policy", "price", "--quiet", "--json"]
    for words in ([], ["--margin", "0.05"], ["--margin", "0.5"]):
        assert main([*command, str(tmp_path / "plan.json"), *words]) == 0
        (one,) = json.loads((tmp_path / "plan.json").read_text())["plan"]
        nodes.append(one["nodes"])
        printed = capsys.readouterr().out
        assert ("of the load: margin" in printed) == bool(words)
        chance = float(printed.partition("chance ")[2].partition("%")[0]) / 100.0 if words else 0.0
        assert (chance > 0.0) == bool(words)
        load = 1.0 + chance + (float(words[1]) if words else 0.0)
        assert all(run["rate"] == pytest.approx(8.0 * load, rel=0.01) for run in one["runs"])
    assert nodes[0] <= nodes[1] < nodes[2]


def test_the_chance_of_a_workload_is_that_of_its_conversations() -> None:
    def margin(*words: str, rate: float, duration_s: float) -> LoadMargin:
        workload, nodes = parse_workload(words), (NodeSpec("node", profile("l4-1.5b")),)
        setup = Setup(workload=workload, nodes=nodes, policy=parse_policy("price"), rate=rate, duration_s=duration_s)
        return load_margin(setup, 0.05)

    alone = margin("multi_turn_chat", "turns=1", rate=1.0, duration_s=3600.0)
    assert alone.chance == pytest.approx(600**-0.5, rel=0.15)
    shorter = margin("multi_turn_chat", "turns=1", rate=1.0, duration_s=1200.0)
    assert shorter.chance == pytest.approx(alone.chance, rel=0.15)
    chats = margin("multi_turn_chat", "turns=4", "think_s=20", rate=0.25, duration_s=3600.0)
    assert chats.chance == pytest.approx(2.0 * alone.chance, rel=0.25)


CHATS = ["multi_turn_chat", "turns=10", "think_s=30", "--rate", "2", "--limit", "400", "--profile", "l4-1.5b"]


def test_a_plan_says_that_the_load_still_rises(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Conversations go on while others begin: without a warm-up, the plan is for the first minutes of the load."""
    nodes: list[int] = []
    command = ["plan", *CHATS, "--ttft-p90", "1s", "--policy", "price", "--quiet", "--json"]
    for words in ([], ["--warm-up", "600s"]):
        assert main([*command, str(tmp_path / "plan.json"), *words]) == 0
        (one,) = json.loads((tmp_path / "plan.json").read_text())["plan"]
        assert all(run["requests"] == 400 for run in one["runs"])
        nodes.append(one["nodes"])
        assert ("The load still rises" in " ".join(capsys.readouterr().out.split())) == (not words)
    assert nodes[0] < nodes[1]


def test_a_warm_up_in_seconds_keeps_the_times_of_a_trace(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = [{"timestamp": 500 * at, "input_length": 64, "output_length": 4, "hash_ids": [at]} for at in range(40)]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    played = tmp_path / "replay.json"
    command = ["replay", str(trace), "--nodes", "1", "--policy", "price", "--policy", "oracle", "--quiet"]
    assert main([*command, "--warm-up", "10s", "--json", str(played)]) == 0
    assert all(run["requests"] == 20 for run in json.loads(played.read_text())["runs"])


@pytest.mark.parametrize("policy", ["price", "oracle"])
@pytest.mark.parametrize("warm_up", ["40", "20s", "19.6s"])
def test_a_warm_up_that_leaves_nothing_to_measure_is_an_error(
    warm_up: str, policy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.jsonl"
    row = {"input_length": 64, "output_length": 4, "hash_ids": [1]}
    trace.write_text("".join(json.dumps({"timestamp": 500 * at, **row}) + "\n" for at in range(40)))
    command = ["replay", str(trace), "--nodes", "1", "--policy", policy, "--quiet"]
    assert main([*command, "--warm-up", warm_up]) == 2
    assert "trace: all its requests are in the warm-up" in " ".join(capsys.readouterr().err.split())


def test_clients_without_arrival_times_have_no_warm_up_in_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", "rag", "--concurrency", "2", "--warm-up", "10s", "--quiet"]) == 2
    assert "--concurrency have no arrival times" in " ".join(capsys.readouterr().err.split())
    assert main(["replay", "rag", "--warm-rate", "2", "--warm-up", "10s", "--quiet"]) == 2
    assert "--warm-rate: requests of a warm-up in seconds" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("seed", range(30))
def test_requests_without_conversations_do_not_rise_by_chance(seed: int) -> None:
    nodes = (NodeSpec("node", profile("l4-1.5b")),)
    for name, limit in (("rag", 100), ("unique_batch", 150)):
        setup = Setup(workload=parse_workload([name]), nodes=nodes, policy=parse_policy("price"), limit=limit)
        assert not load_rises(msgspec.structs.replace(setup, conditions=Conditions(seed=seed)))


def test_more_load_is_a_higher_rate_or_a_faster_trace() -> None:
    setup = Setup(workload=Trace(Path("trace.jsonl"), 2.0), nodes=(), policy=parse_policy("price"))
    faster = with_load(setup, 1.5).workload
    assert isinstance(faster, Trace) and faster.speed == 3.0
    assert with_load(msgspec.structs.replace(setup, rate=4.0), 1.5).rate == 6.0
    assert with_load(msgspec.structs.replace(setup, warm_up_s=30.0), 1.5).warm_up_s == 20.0, "the same requests"
    assert with_load(msgspec.structs.replace(setup, workload=parse_workload(["rag", "rate=2"])), 1.5).rate == 3.0


def test_a_limit_that_no_fleet_can_meet_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", *WORKLOAD, "--limit", "60", "--profile", "l4-1.5b", "--ttft-p90", "1ms", "--max-nodes", "64"]
    assert main([*command, "--policy", "round_robin", "--quiet"]) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert "A single prompt on l4-1.5b takes longer than 1.0 ms" in printed and "--max-nodes" not in printed
    assert "on 64 nodes, and about the same on 32" in printed


def test_a_too_small_max_nodes_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", *WORKLOAD, "--limit", "120", "--rate", "30", "--profile", "l4-1.5b", "--ttft-p90", "300ms"]
    assert main([*command, "--max-nodes", "2", "--policy", "price", "--quiet"]) == 1
    assert "needs more than 2 nodes: use a larger --max-nodes" in capsys.readouterr().out


def test_equal_fleet_sizes_are_reported_as_equal(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", *WORKLOAD, "--limit", "30", "--rate", "0.1", "--profile", "l4-1.5b", "--ttft-p90", "60s"]
    assert main([*command, "--quiet"]) == 0
    assert "With round_robin it would need 1: the same number." in capsys.readouterr().out


def test_durations_may_have_units() -> None:
    assert [parse_duration_ms(text) for text in ("500ms", "2s", "0.5 s", "250")] == [500.0, 2000.0, 500.0, 250.0]


@pytest.mark.parametrize("text", ["", "fast", "0", "1h"])
def test_an_invalid_duration_is_rejected(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "llm_d", "--ttft-p90", text]) == 2
    assert "is not a duration such as 500ms" in capsys.readouterr().err


def test_roles_without_the_policy_that_uses_them_are_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *WORKLOAD, "--limit", "10", "--roles", "--policy", "round_robin", "--quiet"]) == 2
    assert "--roles: only the policy price" in " ".join(capsys.readouterr().err.split())
