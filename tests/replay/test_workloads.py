"""Workloads: faithful to their traces, reproducible, and as documented."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from random import Random

import pytest
from small_worlds import NEAR, specs

from warmroute.core.node import Node
from warmroute.lab.request_flow import SimulatedRequest
from warmroute.lab.simulated_router import PolicyListener
from warmroute.lab.workloads import GENERATORS, BadWorkload, Generated, at_trace_times, parse_workload, poisson
from warmroute.lab.workloads.trace import BadTrace, mean_rate, prompts
from warmroute.lab.workloads.workload_prompt import Segments, WorkloadPrompt, leading_text
from warmroute.lab.world import World

EXAMPLE = Path(__file__).parents[2] / "examples" / "trace.jsonl.gz"


def write_trace(path: Path, rows: Sequence[Mapping[str, object]]) -> Path:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return path


def block_hashes(prompt: WorkloadPrompt, size: int = 16) -> list[int]:
    return prompt.blocks.content(size).hashes(0, prompt.prompt_tokens // size)


def common_prefix(a: list[int], b: list[int]) -> int:
    return next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
def test_blocks_are_shared_in_the_engine_as_in_the_trace(tmp_path: Path, suffix: str) -> None:
    rows = [
        {"timestamp": 100, "input_length": 1200, "output_length": 5, "hash_ids": [1, 2, 3]},
        {"timestamp": 5000, "input_length": 1500, "output_length": 5, "hash_ids": [1, 2, 4]},
        {"timestamp": 9000, "input_length": 1200, "output_length": 5, "hash_ids": [1, 2, 3]},
    ]
    path = write_trace(tmp_path / f"t{suffix}", rows)
    a, b, c = map(block_hashes, prompts(path))
    assert common_prefix(a, b) == 64  # 2 × 512 tokens
    assert common_prefix(a, c) == 75  # the partial last id has the same content
    cached: list[int] = []

    class Recorder(PolicyListener):
        def first_token(self, request: SimulatedRequest, node: Node, cached_tokens: int, now_s: float) -> None:
            cached.append(cached_tokens)

    world = World(specs(1), NEAR, listener=Recorder())
    world.run(at_trace_times(prompts(path)))
    # An engine always computes the last block: 1,200 tokens are 75 blocks, of which 74 hit.
    assert cached == [0, 1024, 74 * 16]


def test_prompts_of_the_example_share_the_blocks_of_their_common_ids() -> None:
    assert_blocks_follow_ids(EXAMPLE, 512)


@pytest.mark.data
@pytest.mark.parametrize(
    ("name", "id_tokens"), [("mooncake_arxiv_first1000", 512), ("weka_60sessions_mooncake_format", 64)]
)
def test_prompts_of_public_traces_share_the_blocks_of_their_common_ids(
    data_dir: Path, name: str, id_tokens: int
) -> None:
    assert_blocks_follow_ids(data_dir / "traces" / f"{name}.jsonl.gz", id_tokens)


def assert_blocks_follow_ids(path: Path, id_tokens: int) -> None:
    found = list(islice(prompts(path), 120))
    random = Random(1)
    assert found[0].blocks.id_tokens == id_tokens  # type: ignore[attr-defined]
    for _ in range(300):
        a, b = random.sample(found, 2)
        ids = common_prefix(a.blocks.hash_ids, b.blocks.hash_ids)  # type: ignore[attr-defined]
        longest = min(a.prompt_tokens, b.prompt_tokens) // 16
        assert common_prefix(block_hashes(a), block_hashes(b)) == min(ids * id_tokens // 16, longest)


def test_a_trace_without_hash_ids_has_unique_prompts(tmp_path: Path) -> None:
    rows = [{"timestamp": at, "input_length": 200 + at, "output_length": 5} for at in range(200)]
    found = list(prompts(write_trace(tmp_path / "t.jsonl", rows)))
    blocks = [block for one in found for block in block_hashes(one)]
    assert len(set(blocks)) == len(blocks)
    assert len({leading_text(one, "chat") for one in found}) == 200


def test_a_rate_scales_the_times_of_a_trace(tmp_path: Path) -> None:
    rows = [{"timestamp": at, "input_length": 10, "output_length": 1} for at in (500, 600, 1500, 2500)]
    path = write_trace(tmp_path / "t.jsonl", rows)
    assert [one.at_ms for one in parse_workload([str(path)]).arrivals(1)] == [0, 100, 1000, 2000]
    assert [one.at_ms for one in parse_workload([str(path)], speed=2.0).arrivals(1)] == [0, 50, 500, 1000]
    assert mean_rate(path) == 1.5
    assert [one.at_ms for one in parse_workload([str(path)]).arrivals(1, rate=15.0)] == pytest.approx([0, 10, 100, 200])


def test_an_invalid_workload_is_reported(tmp_path: Path) -> None:
    with pytest.raises(BadWorkload, match="did you mean llm_d"):
        parse_workload(["llmd"])
    with pytest.raises(BadWorkload, match="did you mean groups"):
        parse_workload(["llm_d", "group=4"])
    with pytest.raises(BadWorkload, match="key=value"):
        parse_workload(["llm_d", "4"])
    with pytest.raises(BadWorkload, match="expected a whole number above 0"):
        parse_workload(["llm_d", "groups=many"])
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"timestamp": 1}\n')
    with pytest.raises(BadTrace, match="line 1"):
        list(parse_workload([str(bad)]).arrivals(1))
    odd = [{"timestamp": 0, "input_length": 1000, "output_length": 1, "hash_ids": [1] * count} for count in (3, 40)]
    with pytest.raises(BadTrace, match="fits no block size"):
        list(parse_workload([str(write_trace(tmp_path / "odd.jsonl", odd))]).arrivals(1))


def test_segments_share_blocks_up_to_where_they_differ() -> None:
    base = Segments().followed_by(1, 100)
    a, b = base.followed_by(2, 100), base.followed_by(3, 100)
    assert common_prefix(a.content(16).hashes(0, 12), b.content(16).hashes(0, 12)) == 6  # 96 of 100 tokens
    assert a.content(16).hashes(0, 12) == base.followed_by(2, 100).content(16).hashes(0, 12)
    assert a.content(16).hashes(0, 12)[3:9] == a.content(16).hashes(3, 9)
    # the same segment after another one has other blocks
    other = Segments().followed_by(9, 100).followed_by(2, 100)
    assert common_prefix(a.content(16).hashes(0, 12), other.content(16).hashes(0, 12)) == 0
    # another block size, the same shared prefix
    assert common_prefix(a.content(32).hashes(0, 6), b.content(32).hashes(0, 6)) == 3
    # past the end of the text: unique, reproducible blocks
    beyond = a.content(16).hashes(10, 20)
    assert beyond == a.content(16).hashes(10, 20)
    assert len(set(beyond)) == 10


@pytest.mark.parametrize("name", GENERATORS)
def test_a_generator_depends_on_its_seed_only(name: str) -> None:
    def generated(seed: int) -> list[object]:
        found = islice(parse_workload([name]).arrivals(seed), 100)
        return [
            (one.at_ms, one.prompt_tokens, one.output_tokens, one.session, one.priority, block_hashes(one))
            for one in found
        ]

    assert generated(1) == generated(1)
    assert generated(1) != generated(2)
    times = [one[0] for one in generated(1)]  # type: ignore[index]
    assert times == sorted(times)


@pytest.mark.parametrize("name", GENERATORS)
def test_prompts_with_the_same_key_share_their_first_block(name: str) -> None:
    """Prompts with the same leading text for the router share their first block in the engine."""
    by_key: dict[object, list[int]] = {}
    for one in islice(parse_workload([name]).arrivals(1), 300):
        key = leading_text(one, "chat")
        blocks = block_hashes(one)
        if key in by_key and blocks and by_key[key]:
            assert by_key[key][0] == blocks[0]
        by_key.setdefault(key, blocks)
    assert len(by_key) > 1


def test_llm_d_has_the_published_shape() -> None:
    found = list(islice(parse_workload(["llm_d"]).arrivals(1, rate=20.0), 750))
    assert {one.prompt_tokens for one in found} == {7200}
    assert {one.output_tokens for one in found} == {1000}
    assert len({one.session for one in found}) == 150
    assert len({leading_text(one, "chat") for one in found}) == 750
    assert len({leading_text(one, "chat")[0] for one in found}) == 150
    assert found[-1].at_ms / 1000 == pytest.approx(750 / 20, rel=0.15)


def test_most_requests_of_a_storm_have_one_prefix() -> None:
    found = list(islice(parse_workload(["hot_prefix_storm", "calm=100", "storm=100"]).arrivals(1), 200))
    hot = [one.session == b"hot 0" for one in found]
    assert not any(hot[:100])
    assert sum(hot[100:]) > 80


def test_poisson_arrivals_with_and_without_bursts() -> None:
    workload = parse_workload(["unique_batch"])
    assert isinstance(workload, Generated)
    plain = list(islice(poisson(workload.generator.generate(Random(1)), 50.0, Random(2)), 2000))
    assert plain[-1].at_ms / 1000 == pytest.approx(40, rel=0.1)
    bursts = list(islice(poisson(workload.generator.generate(Random(1)), 50.0, Random(2), burst=20), 2000))
    assert len({one.at_ms for one in bursts}) == 100
    assert bursts[-1].at_ms / 1000 == pytest.approx(40, rel=0.3)


def test_priority_mix_has_the_default_shares() -> None:
    found = [one.priority for one in islice(parse_workload(["priority_mix"]).arrivals(1), 2000)]
    assert found.count("high") == pytest.approx(400, abs=60)
    assert found.count("low") == pytest.approx(400, abs=60)
