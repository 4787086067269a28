"""Frames recorded from a real vLLM 0.32: our events have its bytes, and our engine tells the same story."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from warmroute.fake_engine.core import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EngineConfig,
    EngineCore,
    EngineRequest,
    EventBatch,
    KvEvent,
    TokenContent,
    wire_events,
)
from warmroute.fake_engine.profiles import profile

SHARED = Path(os.environ.get("WARMROUTE_SHARED", Path(__file__).parents[3] / "shared"))
FRAMES = SHARED / "data" / "vllm-0.32" / "frames"
pytestmark = pytest.mark.skipif(not FRAMES.exists(), reason=f"no recorded vLLM frames at {FRAMES}")

LIVE = [
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
    items = json.loads((FRAMES / "index.json").read_text())["items"]
    events: list[dict[str, Any]] = next(item["decoded"][1] for item in items if item["name"] == name)
    return events


@pytest.mark.parametrize("name", LIVE)
def test_our_events_are_encoded_to_the_bytes_that_vllm_sends(name: str) -> None:
    payload = (FRAMES / f"{name}.frame2.bin").read_bytes()
    batch = msgspec.msgpack.decode(payload, type=EventBatch)
    assert msgspec.msgpack.encode(batch) == payload


class Replay:
    """A core set up as the recorded engine was (../shared/real-vllm/start), fed one request after another."""

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
        self.core.check()
        events, self.events = list(wire_events(self.events)), []
        return events


def same_but_for_hashes(ours: KvEvent, theirs: dict[str, Any], known: dict[int, int]) -> None:
    """Compares field by field; `known` maps vLLM's hashes to ours, and learns."""
    mine = msgspec.to_builtins(ours)
    assert len(mine["block_hashes"]) == len(theirs["block_hashes"])
    for their_hash, my_hash in zip(theirs["block_hashes"], mine["block_hashes"], strict=True):
        assert known.setdefault(their_hash, my_hash) == my_hash
    if theirs.get("parent_block_hash") is not None:
        assert known[theirs["parent_block_hash"]] == mine["parent_block_hash"]
    dropped = ("block_hashes", "parent_block_hash")
    assert {k: v for k, v in mine.items() if k not in dropped} == {k: v for k, v in theirs.items() if k not in dropped}


def test_the_recorded_story_of_stores_duplicates_and_evictions() -> None:
    first = recorded("chat_first_prompt_5_blocks_int_hashes")[0]
    second = recorded("shared_prefix_only_new_tail_block_parent_set")[0]
    salted = recorded("cache_salt_s1_first_block_extra_key")[0]
    twice = recorded("duplicate_store_of_same_hash")[0]
    evicting = recorded("evictions_then_store")
    shared = first["token_ids"][:128]
    replay = Replay()
    known: dict[int, int] = {}

    [event] = replay.serve([*first["token_ids"], 7])
    same_but_for_hashes(event, first, known)
    [event] = replay.serve([*shared, *second["token_ids"], 8])
    same_but_for_hashes(event, second, known)
    [event] = replay.serve([*salted["token_ids"], 7], salt="s1")
    same_but_for_hashes(event, salted, known)

    ends_on_a_block = [*shared, *twice["token_ids"]]
    [event] = replay.serve(ends_on_a_block)
    same_but_for_hashes(event, twice, known)
    [event] = replay.serve(ends_on_a_block)
    same_but_for_hashes(event, twice, known)

    # What vLLM was asked in between was not recorded, beyond using up the blocks that were never used.
    big = evicting[-1]
    filler = 0
    while replay.core._pool.num_blocks - replay.core._pool._never_used > 8:
        filler += 1
        replay.serve([2000 + filler] * 33)
    events = replay.serve([*big["token_ids"], 7])
    removed = [event.block_hashes[0] for event in events if isinstance(event, BlockRemoved)]
    theirs = [event["block_hashes"][0] for event in evicting if event["type"] == "BlockRemoved"]
    assert removed[:7] == [known[their_hash] for their_hash in theirs[:7]]
    assert isinstance(events[-1], BlockStored) and events[-1].token_ids == big["token_ids"]
    same_but_for_hashes(events[-1], big, known)


def test_a_lora_and_a_salt_are_told_as_recorded() -> None:
    replay = Replay()
    for name, salt, lora in (
        ("bytes_salt", "SALT", None),
        ("bytes_lora", None, "ad1"),
        ("bytes_lora_and_salt", "SALT", "ad1"),
    ):
        theirs = recorded(name)[0]
        [event] = replay.serve([*theirs["token_ids"], 7], salt=salt, lora=lora)
        mine = msgspec.to_builtins(event)
        for field in ("extra_keys", "lora_id", "lora_name", "token_ids", "medium", "block_size"):
            assert mine[field] == theirs[field]


def test_a_block_filled_by_the_answer_is_told_alone_with_its_parent() -> None:
    theirs = recorded("generated_tokens_fill_a_block")[0]
    replay = Replay()
    prompt = [40 + index % 60 for index in range(36)]
    content = TokenContent([*prompt[:32], *theirs["token_ids"], 1], 32)
    replay.core.submit(EngineRequest("a", 36, 29, content), 0.0)
    replay.core.advance(1e6)
    first, second = replay.events
    assert isinstance(first, BlockStored) and isinstance(second, BlockStored)
    assert second.parent_block_hash == first.block_hashes[-1] and second.token_ids == theirs["token_ids"]


def test_clearing_is_told_as_recorded() -> None:
    replay = Replay()
    replay.serve([1] * 40)
    assert replay.core.reset_prefix_cache(2e6)
    events = replay.serve([1] * 40)
    assert events[0] == AllBlocksCleared() and recorded("all_blocks_cleared") == [{"type": "AllBlocksCleared"}]
