"""`warmroute replay`: reproducible, fast enough, and with clear errors."""

from __future__ import annotations

import json
import resource
import time
from pathlib import Path

import pytest
from load_steps import LoadStep, run_load_steps
from small_worlds import NEAR, assert_all_requests_ended, specs

from warmroute.app.main import main
from warmroute.lab.engine.timing import profile
from warmroute.lab.replay_setup import POLICIES, BadPolicy, parse_policy
from warmroute.lab.request_flow import TIMELINE_SPANS, Timeline
from warmroute.lab.run import Setup, build_world, replay
from warmroute.lab.simulated_node import Conditions, NodeSpec
from warmroute.lab.summary import percentile, variation
from warmroute.lab.workloads import parse_workload

TRACE = Path(__file__).parents[2] / "examples" / "trace.jsonl.gz"


def test_two_runs_with_the_same_seed_give_the_same_bytes(tmp_path: Path) -> None:
    def report(seed: int, name: str) -> bytes:
        file = tmp_path / name
        words = ["replay", "tool_agents", "steps=6", "--limit", "200", "--nodes", "4", "--rate", "1,3", "--quiet"]
        policies = [word for policy in ("prefix_hash", "random", "dynamo", "sglang") for word in ("--policy", policy)]
        faults = [
            "--kv-loss",
            "0.1",
            "--poll-loss",
            "0.1",
            "--fault",
            "20 fail node-1",
            "--fault",
            "40 restart node-1",
        ]
        assert main([*words, *policies, *faults, "--seed", str(seed), "--json", str(file)]) == 0
        return file.read_bytes()

    first = report(1, "a")
    assert first == report(1, "b")
    assert first != report(2, "c")
    runs = json.loads(first)
    assert list(runs) == ["runs"]
    assert len(runs["runs"]) == 8
    for run in runs["runs"]:
        assert run["requests"] == 200
        assert run["finished"] + run["rejected"] + run["failed"] + run["left"] == 200
        assert 0 < run["hit_rate"] < 1
        assert run["ttft_ms"]["p50"] <= run["ttft_ms"]["p90"] <= run["ttft_ms"]["p99"]
        assert len(run["nodes"]) == 4


@pytest.mark.parametrize("name", [name for name in POLICIES if name != "oracle"])
def test_every_policy_serves_all_requests(name: str) -> None:
    setup = Setup(
        workload=parse_workload(["multi_turn_chat", "rate=3", "think_s=2"]),
        nodes=tuple(specs(3, profile=profile("l4-1.5b"))),
        policy=parse_policy(name),
        conditions=NEAR,
        limit=150,
    )
    world = build_world(setup)
    world.run(setup.arrivals(), limit=150)
    assert world.results.total("finished") == 150
    assert_all_requests_ended(world)


def test_the_oracle_has_a_hit_rate_and_no_times() -> None:
    setup = Setup(workload=parse_workload(["rag"]), nodes=tuple(specs(2)), policy=parse_policy("oracle"), limit=100)
    run = replay(setup)
    assert run["policy"] == "oracle"
    assert 0 < run["hit_rate"] < 1
    assert run["ttft_ms"]["p50"] is None


def test_the_table_and_the_html_page_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.html"
    words = ["replay", "priority_mix", "--limit", "60", "--nodes", "2", "--rate", "5,50", "--profile", "l4-1.5b"]
    policies = ["--policy", "prefix_hash", "--policy", "round_robin", "--policy", "oracle"]
    assert main([*words, *policies, "--queue-threshold", "4", "--html", str(page)]) == 0
    printed = capsys.readouterr().out
    assert "TTFT p90" in printed
    assert "round_robin" in printed
    text = page.read_text()
    assert text.startswith("<!doctype html>")
    assert "<svg" in text
    assert "http://" not in text.replace("http://www.w3.org/2000/svg", "")
    assert "https://" not in text
    assert "<script" not in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["no_such"], "not a file and not a generator"),
        (["rag", "--policy", "prefixhash"], "did you mean prefix_hash"),
        (["rag", "--policy", "sglang:threshold=1"], "cache_threshold"),
        (["rag", "--profile", "h300-8b"], "no profile"),
        (["rag", "--fault", "10 explode node-1"], "is not like"),
        (["rag", "--fault", "10 fail node-77"], "no node node-77"),
        (["rag", "--nodes", "0"], "--nodes: expected a whole number from 1 to 100,000, got '0'"),
    ],
)
def test_mistakes_are_reported(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", *words, "--quiet"]) == 2
    assert message in capsys.readouterr().err


def test_policies_take_parameters() -> None:
    assert parse_policy("prefix_hash:load_factor=inf").parameters == {"load_factor": 1e9}
    assert parse_policy("sglang:balance_abs=8,cache_threshold=0.5").parameters == {
        "balance_abs": 8,
        "cache_threshold": 0.5,
    }
    with pytest.raises(BadPolicy, match="balance_abs is a int"):
        parse_policy("sglang:balance_abs=few")


def test_percentiles_and_variation() -> None:
    values = [float(value) for value in range(1, 101)]
    assert percentile(values, 0.5) == 50
    assert percentile(values, 0.99) == 99
    assert percentile(values, 1.0) == 100
    assert percentile([7.0], 0.5) == 7
    assert percentile([], 0.5) is None
    assert variation([2.0, 2.0]) == 0
    assert variation([1.0, 3.0]) == 0.5


def test_the_timeline_is_bounded_and_loses_nothing() -> None:
    line = Timeline()
    for second in range(100_000):
        line.at(second * 1000.0)[0] += 1
    assert len(line.sums) <= TIMELINE_SPANS
    assert sum(span[0] for span in line.sums) == 100_000
    assert line.sums[3][0] == line.span_ms / 1000


def test_a_fleet_of_a_thousand_nodes_is_summarised_without_node_rows() -> None:
    l4 = profile("l4-1.5b")
    setup = Setup(
        workload=parse_workload(["shared_system_prompts", "prompts=500", "rate=400"]),
        nodes=tuple(NodeSpec(f"node-{at}", l4) for at in range(1000)),
        policy=parse_policy("prefix_hash"),
        limit=1500,
    )
    run = replay(setup)
    assert run["finished"] == 1500
    assert "nodes" not in run


def cpu_s(setup: Setup) -> float:
    before = time.process_time()
    replay(setup)
    return time.process_time() - before


def test_replay_costs_little_more_than_its_engines() -> None:
    """Compared with a run of the engines alone, without router, network and polls."""
    from warmroute.lab.engine.core import EngineCore
    from warmroute.lab.engine.values import EngineRequest

    nodes = tuple(NodeSpec(f"node-{at}", profile("2xh100-32b")) for at in range(8))
    workload = parse_workload([str(TRACE)])
    setup = Setup(workload=workload, nodes=nodes, policy=parse_policy("round_robin"), conditions=Conditions())
    before = time.process_time()
    engines = [EngineCore(spec.engine(), spec.profile.timing) for spec in nodes]
    for number, one in enumerate(workload.arrivals(1)):
        content = one.blocks.content(16)
        request = EngineRequest(str(number), one.prompt_tokens, one.output_tokens, content)
        engines[number % 8].submit(request, one.at_ms)
    for engine in engines:
        while (due := engine.next_event_at()) is not None:
            engine.advance(due)
    alone = time.process_time() - before
    assert min(cpu_s(setup) for _ in range(2)) < 4 * alone + 0.2


def test_cpu_time_does_not_grow_with_idle_nodes() -> None:
    def setup(count: int) -> Setup:
        return Setup(
            workload=parse_workload(["shared_system_prompts", "rate=300"]),
            nodes=tuple(specs(count, profile=profile("l4-1.5b"))),
            policy=parse_policy("power_of_two"),
            conditions=Conditions(poll_interval_s=1e6),
            limit=1500,
        )

    few, many = min(cpu_s(setup(8)) for _ in range(3)), min(cpu_s(setup(160)) for _ in range(3))
    assert many < 3 * few


def test_memory_does_not_grow_with_the_number_of_requests() -> None:
    import tracemalloc

    def peak(limit: int) -> int:
        setup = Setup(
            workload=parse_workload(["unique_batch", "prompt_tokens=64", "output_tokens=4", "rate=50"]),
            nodes=tuple(specs(2, profile=profile("l4-1.5b"), blocks=400)),
            policy=parse_policy("least_loaded"),
            limit=limit,
        )
        tracemalloc.start()
        replay(setup)
        _, highest = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return highest

    peak(500)
    few, many = peak(1000), peak(5000)
    # four floats per request, sorted copies of them, and for the order by work an integer and a float each
    assert many - few < 4000 * 160
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss > 0


def test_warm_up_requests_are_not_measured() -> None:
    def run(policy: str, warm_up: int) -> dict[str, object]:
        setup = Setup(
            workload=parse_workload(["llm_d", "groups=4", "prompts=2", "system_tokens=800", "output_tokens=10"]),
            nodes=tuple(specs(2, profile=profile("l4-1.5b"))),
            policy=parse_policy(policy),
            rate=5.0,
            limit=40,
            warm_up=warm_up,
            warm_rate=2.0,
        )
        return replay(setup)

    cold, warm = run("llm_d_precise", 0), run("llm_d_precise", 40)
    assert cold["requests"] == warm["requests"] == 40
    assert warm["hit_rate"] > 0.95 > cold["hit_rate"]  # type: ignore[operator]
    assert warm["duration_s"] < 20  # type: ignore[operator]
    assert sum(node["requests"] for node in warm["nodes"]) == 40  # type: ignore[attr-defined]
    assert run("oracle", 40)["hit_rate"] > 0.95  # type: ignore[operator]
    assert run("oracle", 40)["requests"] == 40


def test_a_duration_ends_arrivals_but_not_running_requests() -> None:
    setup = Setup(
        workload=parse_workload(["unique_batch", "rate=10"]),
        nodes=tuple(specs(2, profile=profile("l4-1.5b"))),
        policy=parse_policy("least_loaded"),
        duration_s=20.0,
    )
    run = replay(setup)
    assert 150 < run["requests"] < 250
    assert run["finished"] == run["requests"]
    assert run["duration_s"] > 20


def test_a_load_step_waits_for_its_answers_and_keeps_the_caches() -> None:
    setup = Setup(
        workload=parse_workload(
            ["llm_d", "groups=3", "prompts=2", "system_tokens=800", "question_tokens=100", "output_tokens=400"]
        ),
        nodes=tuple(specs(2)),
        policy=parse_policy("round_robin"),
        conditions=NEAR,
    )
    steps = (LoadStep(1, 6, measured=False), LoadStep(2, 12), LoadStep(20, 3))
    slow, fast = run_load_steps(setup, steps)
    assert (slow["rate"], fast["rate"]) == (2, 20)
    assert slow["finished"] == slow["requests"] == 24
    assert fast["finished"] == fast["requests"] == 60
    # An answer takes four seconds, and the step lasts until the last one.
    assert fast["duration_s"] > 6
    assert fast["hit_rate"] > 0.85
    assert list(run_load_steps(setup, steps)) == [slow, fast]
