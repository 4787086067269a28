"""The simulated engine's KV events equal those that were recorded from a real vLLM 0.32."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from support.engine_invariants import check_engine
from support.vllm_recordings import event_payload

from warmroute.lab.engine.blocks import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    KvEvent,
    TokenContent,
    wire_events,
)
from warmroute.lab.engine.core import EngineCore
from warmroute.lab.engine.timing import profile
from warmroute.lab.engine.values import EngineConfig, EngineRequest

BATCHES = [
    "chat_first_prompt_5_blocks_int_hashes",
    "shared_prefix_only_new_tail_block_parent_set",
    "cache_salt_s1_first_block_extra_key",
    "duplicate_store_of_same_hash",
    "generated_tokens_fill_a_block",
    "three_BlockStored_in_one_batch",
    "evictions_then_store",
    "all_blocks_cleared",
    "report_mode_full_with_session_id",
    "data_parallel_rank_1",
]


def recorded(name: str) -> list[dict[str, Any]]:
    """Return the events of a recorded batch."""
    events: list[dict[str, Any]] = msgspec.msgpack.decode(event_payload(name))[1]
    return events


@pytest.mark.parametrize("name", BATCHES)
def test_events_are_encoded_to_the_bytes_that_vllm_sends(name: str) -> None:
    payload = event_payload(name)
    batch = msgspec.msgpack.decode(payload, type=EventBatch)
    assert msgspec.msgpack.encode(batch) == payload


class SingleRequestEngine:
    """A core with the settings of the recorded engine. It serves one request after another."""

    def __init__(self, num_blocks: int = 64) -> None:
        self.events: list[KvEvent] = []
        config = EngineConfig(num_blocks=num_blocks, block_size=32, max_num_seqs=16, max_num_batched_tokens=2048)
        self.core = EngineCore(config, profile("h200-1.5b").timing, lambda _, events: self.events.extend(events))
        self.count = 0

    def serve(
        self, tokens: list[int], output: int = 1, salt: str | None = None, lora: str | None = None
    ) -> list[KvEvent]:
        self.count += 1
        content = TokenContent(tokens + [5] * output, 32, cache_salt=salt, lora_name=lora)
        request = EngineRequest(str(self.count), len(tokens), output, content, lora_name=lora, cache_salt=salt)
        self.core.submit(request, self.count * 1e6)
        self.core.advance(self.count * 1e6 + 9e5)
        check_engine(self.core)
        events, self.events = list(wire_events(self.events)), []
        return events


def assert_equal_but_for_hashes(event: KvEvent, recorded: dict[str, Any], hashes: dict[int, int]) -> None:
    """Compare field by field. `hashes` maps vLLM's hashes to the simulated engine's, and grows."""
    simulated = msgspec.to_builtins(event)
    assert len(simulated["block_hashes"]) == len(recorded["block_hashes"])
    for real_hash, block_hash in zip(recorded["block_hashes"], simulated["block_hashes"], strict=True):
        assert hashes.setdefault(real_hash, block_hash) == block_hash
    if recorded.get("parent_block_hash") is not None:
        assert hashes[recorded["parent_block_hash"]] == simulated["parent_block_hash"]
    same_hashes = {name: simulated[name] for name in ("block_hashes", "parent_block_hash") if name in simulated}
    assert simulated == recorded | same_hashes


def test_stores_duplicates_and_evictions_equal_the_recorded_ones() -> None:
    first = recorded("chat_first_prompt_5_blocks_int_hashes")[0]
    second = recorded("shared_prefix_only_new_tail_block_parent_set")[0]
    salted = recorded("cache_salt_s1_first_block_extra_key")[0]
    twice = recorded("duplicate_store_of_same_hash")[0]
    evicting = recorded("evictions_then_store")
    shared = first["token_ids"][:128]
    engine = SingleRequestEngine()
    hashes: dict[int, int] = {}

    [event] = engine.serve([*first["token_ids"], 7])
    assert_equal_but_for_hashes(event, first, hashes)
    [event] = engine.serve([*shared, *second["token_ids"], 8])
    assert_equal_but_for_hashes(event, second, hashes)
    [event] = engine.serve([*salted["token_ids"], 7], salt="s1")
    assert_equal_but_for_hashes(event, salted, hashes)

    ends_on_a_block = [*shared, *twice["token_ids"]]
    for _ in range(2):
        [event] = engine.serve(ends_on_a_block)
        assert_equal_but_for_hashes(event, twice, hashes)

    # The requests that used the remaining blocks of vLLM were not recorded, so other ones fill them here.
    big = evicting[-1]
    filler = 0
    while engine.core.scheduler.pool.num_blocks - engine.core.scheduler.pool._never_used > 8:
        filler += 1
        engine.serve([2000 + filler] * 33)
    events = engine.serve([*big["token_ids"], 7])
    removed = [event.block_hashes[0] for event in events if isinstance(event, BlockRemoved)]
    recorded_removals = [event["block_hashes"][0] for event in evicting if event["type"] == "BlockRemoved"]
    assert removed[:7] == [hashes[real_hash] for real_hash in recorded_removals[:7]]
    assert isinstance(events[-1], BlockStored) and events[-1].token_ids == big["token_ids"]
    assert_equal_but_for_hashes(events[-1], big, hashes)


def test_the_extra_keys_of_a_lora_and_a_salt_equal_the_recorded_ones() -> None:
    engine = SingleRequestEngine()
    for name, salt, lora in (
        ("bytes_salt", "SALT", None),
        ("bytes_lora", None, "ad1"),
        ("bytes_lora_and_salt", "SALT", "ad1"),
    ):
        expected = recorded(name)[0]
        [event] = engine.serve([*expected["token_ids"], 7], salt=salt, lora=lora)
        simulated = msgspec.to_builtins(event)
        for field in ("extra_keys", "lora_id", "lora_name", "token_ids", "medium", "block_size"):
            assert simulated[field] == expected[field]


def test_a_block_that_the_output_fills_is_reported_alone_with_its_parent() -> None:
    expected = recorded("generated_tokens_fill_a_block")[0]
    engine = SingleRequestEngine()
    prompt = [40 + index % 60 for index in range(36)]
    content = TokenContent([*prompt[:32], *expected["token_ids"], 1], 32)
    engine.core.submit(EngineRequest("a", 36, 29, content), 0.0)
    engine.core.advance(1e6)
    first, second = engine.events
    assert isinstance(first, BlockStored) and isinstance(second, BlockStored)
    assert second.parent_block_hash == first.block_hashes[-1] and second.token_ids == expected["token_ids"]


def test_clearing_the_cache_is_reported_as_recorded() -> None:
    engine = SingleRequestEngine()
    engine.serve([1] * 40)
    assert engine.core.reset_prefix_cache(2e6)
    events = engine.serve([1] * 40)
    assert events[0] == AllBlocksCleared() and recorded("all_blocks_cleared") == [{"type": "AllBlocksCleared"}]
