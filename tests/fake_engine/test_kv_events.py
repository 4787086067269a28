"""KV events over real ZMQ sockets: what vLLM says, when it says it, and again on request."""

from __future__ import annotations

import time

import msgspec
import pytest
from engine_processes import BLOCK, CAPTURES, StartEngine, Subscribe, replay

from warmroute.demo.child_processes import free_port
from warmroute.fake_engine.core import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch


def prompt(seed: int, blocks: int = 4) -> list[int]:
    return [1000 + (seed * 7919 + index) % 100_000 for index in range(blocks * BLOCK + 1)]


def stored(event: object) -> BlockStored:
    assert isinstance(event, BlockStored)
    return event


def test_a_subscriber_hears_of_new_blocks_only(start_engine: StartEngine, subscribe: Subscribe) -> None:
    engine = start_engine()
    heard = subscribe(engine.event_ports[0])
    engine.complete(prompt(1))
    topic, sequence, batch = heard.next()
    port = engine.url.rpartition(":")[2]
    assert (topic.decode(), sequence, batch.data_parallel_rank) == (f"kv@127.0.0.1:{port}@sim", 0, 0)
    assert abs(batch.ts - time.time()) < 5
    first = stored(batch.events[0])
    assert (first.token_ids, first.block_size, first.parent_block_hash) == (prompt(1)[:-1], BLOCK, None)
    assert len(first.block_hashes) == 4
    assert (first.medium, first.group_idx, first.kv_cache_spec_kind) == ("GPU", 0, "full_attention")
    engine.complete(prompt(1))
    assert heard.is_silent()
    engine.complete(prompt(1)[:-1] + prompt(2, 1))
    _, sequence, batch = heard.next()
    tail = stored(batch.events[0])
    assert (sequence, tail.parent_block_hash, tail.token_ids) == (1, first.block_hashes[-1], prompt(2, 1)[:-1])


@pytest.mark.skipif(not CAPTURES.exists(), reason=f"no recorded vLLM frames at {CAPTURES}")
@pytest.mark.parametrize(
    ("name", "flags", "body"),
    [
        ("chat_first_prompt_5_blocks_int_hashes", (), {}),
        ("cache_salt_s1_first_block_extra_key", (), {"cache_salt": "s1"}),
        ("data_parallel_rank_1", ("--data-parallel-size", "2"), {}),
    ],
)
def test_frames_are_those_of_vllm_but_for_time_and_hashes(
    start_engine: StartEngine, subscribe: Subscribe, name: str, flags: tuple[str, ...], body: dict[str, str]
) -> None:
    """The recorded prompts to an engine of the recorded set-up: the same bytes, once our hashes stand in for vLLM's."""
    topic, payload = (CAPTURES / "frames" / f"{name}.frame{part}.bin" for part in (0, 2))
    recorded = msgspec.msgpack.decode(payload.read_bytes(), type=EventBatch)
    theirs = stored(recorded.events[0])
    engine = start_engine("--block-size", "32", "--model", "tiny", "--events-topic", topic.read_text(), *flags)
    rank = recorded.data_parallel_rank
    assert rank is not None
    heard = subscribe(engine.event_ports[rank])
    asked = {"prompt": [*theirs.token_ids, 5], "max_tokens": 1, **body}
    assert engine.ask("/v1/completions", asked, X_data_parallel_rank=str(rank))[0] == 200
    frames = heard.raw()
    ours = msgspec.msgpack.decode(frames[2], type=EventBatch)
    recorded.ts = ours.ts
    theirs.block_hashes[:] = stored(ours.events[0]).block_hashes
    assert frames == [topic.read_bytes(), bytes(8), msgspec.msgpack.encode(recorded)]


def test_generated_tokens_fill_blocks_that_are_told(start_engine: StartEngine, subscribe: Subscribe) -> None:
    engine = start_engine()
    heard = subscribe(engine.event_ports[0])
    text = engine.complete(prompt(1, 1), max_tokens=2 * BLOCK)["choices"][0]["text"]
    hashes: list[int] = []
    tokens: list[int] = []
    while len(hashes) < 3:
        event = stored(heard.events()[0])
        assert event.parent_block_hash == (hashes[-1] if hashes else None)
        hashes += event.block_hashes
        tokens += event.token_ids
    _, said = engine.ask("/detokenize", {"tokens": tokens[BLOCK + 1 :]})
    assert text.startswith(said["prompt"])
    assert len(said["prompt"]) > 20


def test_evictions_are_told_one_by_one(start_engine: StartEngine, subscribe: Subscribe) -> None:
    engine = start_engine(blocks=9)  # one of them the null block
    heard = subscribe(engine.event_ports[0])
    engine.complete(prompt(1))
    known = stored(heard.events()[0]).block_hashes
    engine.complete(prompt(2))
    events = heard.events()
    removed = [event for event in events if isinstance(event, BlockRemoved)]
    assert removed
    assert all(len(event.block_hashes) == 1 and event.block_hashes[0] in known for event in removed)


def test_salt_and_adapter_keep_blocks_apart_and_are_told(start_engine: StartEngine, subscribe: Subscribe) -> None:
    engine = start_engine("--lora", "ad1", "--lora", "ad2")
    heard = subscribe(engine.event_ports[0])
    seen: set[int] = set()
    for body, keys in (
        ({}, [None, None]),
        ({"cache_salt": "S"}, [["S"], None]),
        ({"model": "ad1"}, [["ad1"], ["ad1"]]),
        ({"model": "ad1", "cache_salt": "S"}, [["ad1", "S"], ["ad1"]]),
        ({"model": "ad2"}, [["ad2"], ["ad2"]]),
    ):
        assert engine.cached(prompt(1, 2), **body) == 0
        event = stored(heard.events()[0])
        assert event.extra_keys == keys
        assert (event.lora_name, event.lora_id) == ((body["model"], 1) if "model" in body else (None, None))
        assert seen.isdisjoint(event.block_hashes)
        seen.update(event.block_hashes)
        assert engine.cached(prompt(1, 2), **body) == 2 * BLOCK
    _, models = engine.ask("/v1/models")
    assert [card["id"] for card in models["data"]] == ["sim", "ad1", "ad2"]
    assert models["data"][1]["parent"] == "sim"
    assert 'running_lora_adapters=""' in engine.ask("/metrics")[1]


def test_what_was_lost_can_be_had_again(start_engine: StartEngine, subscribe: Subscribe) -> None:
    engine = start_engine()
    heard = subscribe(engine.event_ports[0])
    engine.complete(prompt(0))
    engine.fail("drop_events", share=1)
    for seed in (1, 2):
        engine.complete(prompt(seed))
    engine.fail("none")
    engine.complete(prompt(3))
    assert [heard.next()[1] for _ in range(2)] == [0, 3]
    again = replay(engine.replay_ports[0], 1)
    assert [sequence for _, sequence, _ in again] == [1, 2, 3]
    assert [stored(batch.events[0]).token_ids for _, _, batch in again] == [prompt(seed)[:-1] for seed in (1, 2, 3)]
    assert again[0][0].startswith(b"kv@")
    assert len(replay(engine.replay_ports[0], 0)) == 4
    assert replay(engine.replay_ports[0], 4) == []


def test_the_last_ten_thousand_batches_are_held(start_engine: StartEngine, subscribe: Subscribe) -> None:
    """All of them come, though they are far above a ROUTER's usual high-water mark."""
    engine = start_engine("--max-num-seqs", "64", speed=1000, blocks=2000)
    for index in range(2):
        engine.complete([2000 + index], max_tokens=16_000)
    batches = replay(engine.replay_ports[0], 0)
    sequences = [sequence for _, sequence, _ in batches]
    assert len(sequences) > 1500
    assert sequences == list(range(len(sequences)))


def test_a_restart_in_place_begins_at_zero_with_nothing_cached(start_engine: StartEngine, subscribe: Subscribe) -> None:
    engine = start_engine()
    heard = subscribe(engine.event_ports[0])
    for seed in range(3):
        engine.complete(prompt(seed))
    assert [heard.next()[1] for _ in range(3)] == [0, 1, 2]
    started = engine.metric("process_start_time_seconds")
    engine.fail("restart")
    assert engine.metric("process_start_time_seconds") > started
    assert engine.metric("vllm:prompt_tokens_total") == 0
    assert heard.is_silent()
    assert replay(engine.replay_ports[0], 0) == []
    assert engine.cached(prompt(0)) == 0
    assert heard.next()[1] == 0


def test_an_emptied_cache_is_told_with_the_next_request(start_engine: StartEngine, subscribe: Subscribe) -> None:
    engine = start_engine()
    heard = subscribe(engine.event_ports[0])
    engine.complete(prompt(1))
    heard.next()
    assert engine.ask("/reset_prefix_cache", b"", "POST") == (200, {"success": True})
    assert heard.is_silent()
    assert engine.cached(prompt(1)) == 0
    assert isinstance(heard.events()[0], AllBlocksCleared)


def test_each_rank_has_its_own_cache_port_and_metrics(start_engine: StartEngine, subscribe: Subscribe) -> None:
    engine = start_engine("--data-parallel-size", "2")
    heard = [subscribe(port) for port in engine.event_ports]
    for rank in (1, 0):
        status, answer = engine.ask(
            "/v1/completions", {"prompt": prompt(1), "max_tokens": 1}, X_data_parallel_rank=str(rank)
        )
        assert status == 200
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert heard[rank].next()[2].data_parallel_rank == rank
        assert heard[1 - rank].is_silent(100)
    status, answer = engine.ask("/v1/completions", {"prompt": prompt(1)}, X_data_parallel_rank="2")
    assert (status, answer["error"]["type"]) == (400, "BadRequestError")
    _, page = engine.ask("/metrics")
    assert 'vllm:prompt_tokens_total{engine="1",model_name="sim"} 65.0' in page
    _, sources = engine.ask("/kv_event_sources")
    assert [sources[rank]["endpoint"] for rank in "01"] == [f"tcp://*:{port}" for port in engine.event_ports]


def test_ranks_count_up_from_the_given_ports(start_engine: StartEngine) -> None:
    base = free_port(23_410)
    engine = start_engine("--data-parallel-size", "2", "--events-port", str(base), "--replay-port", str(base + 10))
    assert engine.event_ports == [base, base + 1]
    assert engine.replay_ports == [base + 10, base + 11]
