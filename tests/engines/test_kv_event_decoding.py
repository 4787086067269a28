"""KV events of every engine release are decoded."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from kv_event_factory import payload as encoded
from kv_event_factory import recorded

from warmroute.engines.kv_events import (
    AllBlocksCleared,
    BadPayload,
    BlockRemoved,
    BlockStored,
    decode_batch,
    salt_and_extra_keys,
    sent_time_s,
)

PAYLOADS_BY_RELEASE = Path(__file__).parent / "payloads_by_release"
"""The same events in the format of each vLLM release."""


@pytest.mark.parametrize("path", sorted(PAYLOADS_BY_RELEASE.glob("synthetic_*")), ids=lambda path: path.name)
def test_all_releases_decode_to_the_same_events(path: Path) -> None:
    stored, removed, cleared = decode_batch(path.read_bytes()).events
    assert (
        isinstance(stored, BlockStored) and isinstance(removed, BlockRemoved) and isinstance(cleared, AllBlocksCleared)
    )
    assert stored.block_hashes == [10782738191534376704, 13397126663502732708]
    assert stored.token_ids == list(range(32)) and stored.block_size == 16 and stored.parent_block_hash is None
    assert removed.block_hashes == [10782738191534376704]


def test_recorded_vllm_messages_are_decoded() -> None:
    first = decode_batch(recorded("chat_first_prompt_5_blocks_int_hashes"))
    assert first.rank == 0
    [stored] = first.events
    assert isinstance(stored, BlockStored)
    assert len(stored.block_hashes) == 5 and len(stored.token_ids) == 5 * stored.block_size
    [tail] = decode_batch(recorded("shared_prefix_only_new_tail_block_parent_set")).events
    assert isinstance(tail, BlockStored) and tail.parent_block_hash in stored.block_hashes
    assert decode_batch(recorded("data_parallel_rank_1")).rank == 1
    assert decode_batch(recorded("all_blocks_cleared")).events == [AllBlocksCleared()]


def test_byte_hashes_salts_and_adapters_are_decoded() -> None:
    [stored] = decode_batch(recorded("bytes_lora_and_salt")).events
    assert isinstance(stored, BlockStored)
    assert all(isinstance(name, bytes) and len(name) == 32 for name in stored.block_hashes)
    assert stored.lora_name == "ad1" and salt_and_extra_keys(stored)[0] == "SALT"
    [salted] = decode_batch(recorded("cache_salt_s1_first_block_extra_key")).events
    assert isinstance(salted, BlockStored) and salt_and_extra_keys(salted)[0] == "s1"


def test_unknown_fields_are_ignored() -> None:
    event = {"type": "BlockStored", "block_hashes": [-5], "token_ids": [1], "block_size": 1, "news": {"a": 1}}
    [stored] = decode_batch(msgspec.msgpack.encode([1.0, [event], None, "more"])).events
    assert isinstance(stored, BlockStored) and stored.block_hashes == [-5]


@pytest.mark.parametrize("payload", [b"", b"\xc1", b"\x93", msgspec.msgpack.encode({"no": 1}), b"garbage"])
def test_garbage_raises(payload: bytes) -> None:
    with pytest.raises(BadPayload):
        decode_batch(payload)


def test_the_send_time_is_read_without_decoding_the_payload() -> None:
    assert sent_time_s(encoded(sent_s=1794709587.25)) == 1794709587.25
    assert sent_time_s(recorded("data_parallel_rank_1")) == pytest.approx(1794710455.0231237)
    assert sent_time_s(b"") is None and sent_time_s(b"\x93\xcb") is None and sent_time_s(b"\x93\x01") is None
