"""Workloads: faithful to their traces, deterministic, and shaped as they say."""

from __future__ import annotations

import gzip
import json
from itertools import islice
from pathlib import Path
from random import Random

import pytest
from small_worlds import NEAR, specs

from warmroute.fleet.node import Node
from warmroute.replay.workloads import GENERATORS, BadTrace, BadWorkload, Prompt, Segments, choose
from warmroute.replay.workloads.arrivals import as_told, bursts, poisson
from warmroute.replay.workloads.text import beginnings
from warmroute.replay.workloads.trace import mean_rate, prompts
from warmroute.replay.world import Listener, SimulatedRequest, World

TRACES = Path("/work/shared/data/traces")
needs_traces = pytest.mark.skipif(not TRACES.exists(), reason="no traces here")


def written(path: Path, rows: list[dict[str, object]]) -> Path:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return path


def chain(prompt: Prompt, size: int = 16) -> list[int]:
    return prompt.blocks.content(size).hashes(0, prompt.prompt_tokens // size)


def shared(a: list[int], b: list[int]) -> int:
    return next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
def test_blocks_are_shared_in_the_engine_as_in_the_trace(tmp_path: Path, suffix: str) -> None:
    rows = [
        {"timestamp": 100, "input_length": 1200, "output_length": 5, "hash_ids": [1, 2, 3]},
        {"timestamp": 5000, "input_length": 1500, "output_length": 5, "hash_ids": [1, 2, 4]},
        {"timestamp": 9000, "input_length": 1200, "output_length": 5, "hash_ids": [1, 2, 3]},
    ]
    path = written(tmp_path / f"t{suffix}", rows)
    a, b, c = map(chain, prompts(path))
    assert shared(a, b) == 64  # 2 × 512 tokens
    assert shared(a, c) == 75  # the partial last id has the same content
    cached: list[int] = []

    class Ears(Listener):
        def first_token(self, request: SimulatedRequest, node: Node, cached_tokens: int, now_s: float) -> None:
            cached.append(cached_tokens)

    world = World(specs(1), NEAR, listener=Ears())
    world.run(as_told(prompts(path)))
    # the last block of a prompt that ends on it is computed again: here 1,200 = 75 blocks, of which 74 hit
    assert cached == [0, 1024, 74 * 16]


@needs_traces
@pytest.mark.parametrize(
    ("name", "id_tokens"), [("mooncake_arxiv_first1000", 512), ("weka_60sessions_mooncake_format", 64)]
)
def test_real_traces_share_in_blocks_what_they_share_in_ids(name: str, id_tokens: int) -> None:
    found = list(islice(prompts(TRACES / f"{name}.jsonl.gz"), 120))
    random = Random(1)
    assert found[0].blocks.id_tokens == id_tokens  # type: ignore[attr-defined]
    for _ in range(300):
        a, b = random.sample(found, 2)
        ids = shared(a.blocks.hash_ids, b.blocks.hash_ids)  # type: ignore[attr-defined]
        longest = min(a.prompt_tokens, b.prompt_tokens) // 16
        assert shared(chain(a), chain(b)) == min(ids * id_tokens // 16, longest)


@needs_traces
def test_a_trace_without_prefixes_has_unique_prompts() -> None:
    found = list(islice(prompts(TRACES / "azure2023_code.jsonl.gz"), 200))
    blocks = [block for one in found for block in chain(one)]
    assert len(set(blocks)) == len(blocks)
    assert len({beginnings(one, "chat") for one in found}) == 200


def test_times_of_a_trace_keep_their_shape_at_another_rate(tmp_path: Path) -> None:
    rows = [{"timestamp": at, "input_length": 10, "output_length": 1} for at in (500, 600, 1500, 2500)]
    path = written(tmp_path / "t.jsonl", rows)
    assert [one.at_ms for one in choose([str(path)]).arrive(1)] == [0, 100, 1000, 2000]
    assert [one.at_ms for one in choose([str(path)], speed=2.0).arrive(1)] == [0, 50, 500, 1000]
    assert mean_rate(path) == 1.5
    assert [one.at_ms for one in choose([str(path)]).arrive(1, rate=15.0)] == pytest.approx([0, 10, 100, 200])


def test_what_is_wrong_with_a_workload_is_said(tmp_path: Path) -> None:
    with pytest.raises(BadWorkload, match="did you mean llm_d"):
        choose(["llmd"])
    with pytest.raises(BadWorkload, match="did you mean groups"):
        choose(["llm_d", "group=4"])
    with pytest.raises(BadWorkload, match="key=value"):
        choose(["llm_d", "4"])
    with pytest.raises(BadWorkload, match="Expected `int`"):
        choose(["llm_d", "groups=many"])
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"timestamp": 1}\n')
    with pytest.raises(BadTrace, match="line 1"):
        list(choose([str(bad)]).arrive(1))
    odd = [{"timestamp": 0, "input_length": 1000, "output_length": 1, "hash_ids": [1] * count} for count in (3, 40)]
    with pytest.raises(BadTrace, match="fits no block size"):
        list(choose([str(written(tmp_path / "odd.jsonl", odd))]).arrive(1))


def test_segments_share_blocks_up_to_where_they_differ() -> None:
    base = Segments().followed_by(1, 100)
    a, b = base.followed_by(2, 100), base.followed_by(3, 100)
    assert shared(a.content(16).hashes(0, 12), b.content(16).hashes(0, 12)) == 6  # 96 of 100 tokens
    assert a.content(16).hashes(0, 12) == base.followed_by(2, 100).content(16).hashes(0, 12)
    assert a.content(16).hashes(0, 12)[3:9] == a.content(16).hashes(3, 9)
    # the same words after other words are other blocks
    other = Segments().followed_by(9, 100).followed_by(2, 100)
    assert shared(a.content(16).hashes(0, 12), other.content(16).hashes(0, 12)) == 0
    # another block size, another cut, the same sharing
    assert shared(a.content(32).hashes(0, 6), b.content(32).hashes(0, 6)) == 3
    salted = a.in_namespace(None, "salt")
    assert not set(salted.content(16).hashes(0, 12)) & set(a.content(16).hashes(0, 12))
    # past the plan: blocks that nobody else has, and always the same
    beyond = a.content(16).hashes(10, 20)
    assert beyond == a.content(16).hashes(10, 20)
    assert len(set(beyond)) == 10


@pytest.mark.parametrize("name", GENERATORS)
def test_a_generator_is_its_seed(name: str) -> None:
    def told(seed: int) -> list[object]:
        found = islice(choose([name]).arrive(seed), 100)
        return [
            (one.at_ms, one.prompt_tokens, one.output_tokens, one.session, one.priority, chain(one)) for one in found
        ]

    assert told(1) == told(1)
    assert told(1) != told(2)
    times = [one[0] for one in told(1)]  # type: ignore[index]
    assert times == sorted(times)


@pytest.mark.parametrize("name", GENERATORS)
def test_prompts_with_one_key_begin_alike(name: str) -> None:
    """What the router takes for the same beginning is the same beginning in the engine's blocks."""
    by_key: dict[object, list[int]] = {}
    for one in islice(choose([name]).arrive(1), 300):
        key = beginnings(one, "chat")
        blocks = chain(one)
        if key in by_key and blocks and by_key[key]:
            assert by_key[key][0] == blocks[0]
        by_key.setdefault(key, blocks)
    assert len(by_key) > 1


def test_llm_d_is_as_published() -> None:
    found = list(islice(choose(["llm_d"]).arrive(1, rate=20.0), 750))
    assert {one.prompt_tokens for one in found} == {7200}
    assert {one.output_tokens for one in found} == {1000}
    assert len({one.session for one in found}) == 150
    assert len({beginnings(one, "chat") for one in found}) == 750
    assert len({beginnings(one, "chat")[0] for one in found}) == 150
    assert found[-1].at_ms / 1000 == pytest.approx(750 / 20, rel=0.15)


def test_a_storm_is_mostly_one_prefix() -> None:
    found = list(islice(choose(["hot_prefix_storm", "calm=100", "storm=100"]).arrive(1), 200))
    hot = [one.session == b"hot 0" for one in found]
    assert not any(hot[:100])
    assert sum(hot[100:]) > 80


def test_arrivals_by_chance_and_in_bursts() -> None:
    many = choose(["unique_batch"])
    plain = [one.at_ms for one in islice(poisson(many.generator.generate(Random(1)), 50.0, Random(2)), 2000)]  # type: ignore[attr-defined]
    assert plain[-1] / 1000 == pytest.approx(40, rel=0.1)
    together = [one.at_ms for one in islice(bursts(many.generator.generate(Random(1)), 50.0, 20, Random(2)), 2000)]  # type: ignore[attr-defined]
    assert len(set(together)) == 100
    assert together[-1] / 1000 == pytest.approx(40, rel=0.3)


def test_priorities_are_mixed_as_asked() -> None:
    found = [one.priority for one in islice(choose(["priority_mix"]).arrive(1), 2000)]
    assert found.count("high") == pytest.approx(400, abs=60)
    assert found.count("low") == pytest.approx(400, abs=60)
