"""KV events over real ZMQ sockets: the engine publishes them as vLLM does, and replays them on request."""

from __future__ import annotations

import time

import msgspec
import pytest
from support.engine_processes import BLOCK, StartEngine, Subscribe, replay_events
from support.vllm_recordings import TOPIC, event_payload

from warmroute.lab.demo.processes import free_port
from warmroute.lab.engine.blocks import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch


def prompt(seed: int, blocks: int = 4) -> list[int]:
    return [1000 + (seed * 7919 + index) % 100_000 for index in range(blocks * BLOCK + 1)]


def stored(event: object) -> BlockStored:
    assert isinstance(event, BlockStored)
    return event


def test_a_subscriber_receives_only_new_blocks(start_engine: StartEngine, subscribe: Subscribe) -> None:
    engine = start_engine()
    subscriber = subscribe(engine.event_ports[0])
    engine.complete(prompt(1))
    topic, sequence, batch = subscriber.next()
    port = engine.url.rpartition(":")[2]
    assert (topic.decode(), sequence, batch.data_parallel_rank) == (f"kv@127.0.0.1:{port}@sim", 0, 0)
    assert abs(batch.ts - time.time()) < 5
    first = stored(batch.events[0])
    assert (first.token_ids, first.block_size, first.parent_block_hash) == (prompt(1)[:-1], BLOCK, None)
    assert len(first.block_hashes) == 4
    assert (first.medium, first.group_idx, first.kv_cache_spec_kind) == ("GPU", 0, "full_attention")
    engine.complete(prompt(1))
    assert subscriber.is_silent()
    engine.complete(prompt(1)[:-1] + prompt(2, 1))
    _, sequence, batch = subscriber.next()
    tail = stored(batch.events[0])
    assert (sequence, tail.parent_block_hash, tail.token_ids) == (1, first.block_hashes[-1], prompt(2, 1)[:-1])


@pytest.mark.parametrize(
    ("name", "flags", "body"),
    [
        ("chat_first_prompt_5_blocks_int_hashes", (), {}),
        ("cache_salt_s1_first_block_extra_key", (), {"cache_salt": "s1"}),
        ("data_parallel_rank_1", ("--data-parallel-size", "2"), {}),
    ],
)
def test_frames_equal_those_of_vllm_except_for_time_and_hashes(
    start_engine: StartEngine, subscribe: Subscribe, name: str, flags: tuple[str, ...], body: dict[str, str]
) -> None:
    recorded = msgspec.msgpack.decode(event_payload(name), type=EventBatch)
    event = stored(recorded.events[0])
    engine = start_engine("--block-size", "32", "--model", "tiny", "--events-topic", TOPIC, *flags)
    rank = recorded.data_parallel_rank
    assert rank is not None
    subscriber = subscribe(engine.event_ports[rank])
    request = {"prompt": [*event.token_ids, 5], "max_tokens": 1, **body}
    assert engine.request("/v1/completions", request, X_data_parallel_rank=str(rank))[0] == 200
    frames = subscriber.next_frames()
    received = msgspec.msgpack.decode(frames[2], type=EventBatch)
    recorded.ts = received.ts
    event.block_hashes[:] = stored(received.events[0]).block_hashes
    assert frames == [TOPIC.encode(), bytes(8), msgspec.msgpack.encode(recorded)]


def test_blocks_that_the_output_fills_are_published(start_engine: StartEngine, subscribe: Subscribe) -> None:
    engine = start_engine()
    subscriber = subscribe(engine.event_ports[0])
    text = engine.complete(prompt(1, 1), max_tokens=2 * BLOCK)["choices"][0]["text"]
    hashes: list[int] = []
    tokens: list[int] = []
    while len(hashes) < 3:
        event = stored(subscriber.events()[0])
        assert event.parent_block_hash == (hashes[-1] if hashes else None)
        hashes += event.block_hashes
        tokens += event.token_ids
    _, detokenized = engine.request("/detokenize", {"tokens": tokens[BLOCK + 1 :]})
    assert text.startswith(detokenized["prompt"])
    assert len(detokenized["prompt"]) > 20


def test_each_evicted_block_has_its_own_event(start_engine: StartEngine, subscribe: Subscribe) -> None:
    engine = start_engine(blocks=9)  # one of them the null block
    subscriber = subscribe(engine.event_ports[0])
    engine.complete(prompt(1))
    known = stored(subscriber.events()[0]).block_hashes
    engine.complete(prompt(2))
    events = subscriber.events()
    removed = [event for event in events if isinstance(event, BlockRemoved)]
    assert removed
    assert all(len(event.block_hashes) == 1 and event.block_hashes[0] in known for event in removed)


def test_a_salt_or_an_adapter_has_its_own_blocks_and_extra_keys(
    start_engine: StartEngine, subscribe: Subscribe
) -> None:
    engine = start_engine("--lora", "ad1", "--lora", "ad2")
    subscriber = subscribe(engine.event_ports[0])
    seen: set[int] = set()
    for body, keys in (
        ({}, [None, None]),
        ({"cache_salt": "S"}, [["S"], None]),
        ({"model": "ad1"}, [["ad1"], ["ad1"]]),
        ({"model": "ad1", "cache_salt": "S"}, [["ad1", "S"], ["ad1"]]),
        ({"model": "ad2"}, [["ad2"], ["ad2"]]),
    ):
        assert engine.cached(prompt(1, 2), **body) == 0
        event = stored(subscriber.events()[0])
        assert event.extra_keys == keys
        assert (event.lora_name, event.lora_id) == ((body["model"], 1) if "model" in body else (None, None))
        assert seen.isdisjoint(event.block_hashes)
        seen.update(event.block_hashes)
        assert engine.cached(prompt(1, 2), **body) == 2 * BLOCK
    _, models = engine.request("/v1/models")
    assert [card["id"] for card in models["data"]] == ["sim", "ad1", "ad2"]
    assert models["data"][1]["parent"] == "sim"
    assert 'running_lora_adapters=""' in engine.request("/metrics")[1]


def test_lost_batches_can_be_replayed(start_engine: StartEngine, subscribe: Subscribe) -> None:
    engine = start_engine()
    subscriber = subscribe(engine.event_ports[0])
    engine.complete(prompt(0))
    engine.fail("drop_events", share=1)
    for seed in (1, 2):
        engine.complete(prompt(seed))
    engine.fail("none")
    engine.complete(prompt(3))
    assert [subscriber.next()[1] for _ in range(2)] == [0, 3]
    replayed = replay_events(engine.replay_ports[0], 1)
    assert [sequence for _, sequence, _ in replayed] == [1, 2, 3]
    assert [stored(batch.events[0]).token_ids for _, _, batch in replayed] == [prompt(seed)[:-1] for seed in (1, 2, 3)]
    assert replayed[0][0].startswith(b"kv@")
    assert len(replay_events(engine.replay_ports[0], 0)) == 4
    assert replay_events(engine.replay_ports[0], 4) == []


def test_a_replay_may_exceed_the_usual_high_water_mark(start_engine: StartEngine, subscribe: Subscribe) -> None:
    engine = start_engine("--max-num-seqs", "64", speed=1000, blocks=2000)
    for index in range(2):
        engine.complete([2000 + index], max_tokens=16_000)
    batches = replay_events(engine.replay_ports[0], 0)
    sequences = [sequence for _, sequence, _ in batches]
    assert len(sequences) > 1500
    assert sequences == list(range(len(sequences)))


def test_a_restart_in_place_resets_the_sequence_and_the_cache(start_engine: StartEngine, subscribe: Subscribe) -> None:
    engine = start_engine()
    subscriber = subscribe(engine.event_ports[0])
    for seed in range(3):
        engine.complete(prompt(seed))
    assert [subscriber.next()[1] for _ in range(3)] == [0, 1, 2]
    started = engine.metric("process_start_time_seconds")
    engine.fail("restart")
    assert engine.metric("process_start_time_seconds") > started
    assert engine.metric("vllm:prompt_tokens_total") == 0
    assert subscriber.is_silent()
    assert replay_events(engine.replay_ports[0], 0) == []
    assert engine.cached(prompt(0)) == 0
    assert subscriber.next()[1] == 0


def test_a_cache_reset_is_published_with_the_next_request(start_engine: StartEngine, subscribe: Subscribe) -> None:
    engine = start_engine()
    subscriber = subscribe(engine.event_ports[0])
    engine.complete(prompt(1))
    subscriber.next()
    assert engine.request("/reset_prefix_cache", b"", "POST") == (200, {"success": True})
    assert subscriber.is_silent()
    assert engine.cached(prompt(1)) == 0
    assert isinstance(subscriber.events()[0], AllBlocksCleared)


def test_each_rank_has_its_own_cache_port_and_metrics(start_engine: StartEngine, subscribe: Subscribe) -> None:
    engine = start_engine("--data-parallel-size", "2")
    subscriber = [subscribe(port) for port in engine.event_ports]
    for rank in (1, 0):
        status, response = engine.request(
            "/v1/completions", {"prompt": prompt(1), "max_tokens": 1}, X_data_parallel_rank=str(rank)
        )
        assert status == 200
        assert response["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert subscriber[rank].next()[2].data_parallel_rank == rank
        assert subscriber[1 - rank].is_silent(100)
    status, response = engine.request("/v1/completions", {"prompt": prompt(1)}, X_data_parallel_rank="2")
    assert (status, response["error"]["type"]) == (400, "BadRequestError")
    _, page = engine.request("/metrics")
    assert 'vllm:prompt_tokens_total{engine="1",model_name="sim"} 65.0' in page
    _, sources = engine.request("/kv_event_sources")
    assert [sources[rank]["endpoint"] for rank in "01"] == [f"tcp://*:{port}" for port in engine.event_ports]


def test_each_rank_takes_the_next_port(start_engine: StartEngine) -> None:
    base = free_port(23_410)
    engine = start_engine("--data-parallel-size", "2", "--events-port", str(base), "--replay-port", str(base + 10))
    assert engine.event_ports == [base, base + 1]
    assert engine.replay_ports == [base + 10, base + 11]
