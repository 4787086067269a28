"""The KV events of an engine, with vLLM 0.32's names and field order.

Encoded with msgspec's msgpack, they are the bytes that vLLM publishes. Two steps are left to the publisher: it wraps
the events of a step in an `EventBatch`, and it splits them with `wire_events`, because the core reports all blocks that
one allocation evicts in one event and vLLM sends one event for each block.
"""

from collections.abc import Callable, Iterable, Iterator

import msgspec

GPU = "GPU"
CPU = "CPU"


class BlockStored(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """Consecutive blocks of one request that became reusable. `parent_block_hash` precedes the first of them."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[list[str] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None


class BlockRemoved(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """Blocks that were evicted from one medium, in the order of eviction."""

    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """The engine cleared its whole prefix cache."""


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared

KvEventSink = Callable[[float, list[KvEvent]], None]
"""Takes the time (ms) at which a step ended and the events of that step. The list is never empty."""


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """The payload of one ZMQ message: `[ts, events, data_parallel_rank]`."""

    ts: float
    events: list[KvEvent]
    data_parallel_rank: int | None = None


def wire_events(events: Iterable[KvEvent]) -> Iterator[KvEvent]:
    """Split events as vLLM sends them: one `BlockRemoved` per block, one `BlockStored` per block of the CPU tier."""
    for event in events:
        if isinstance(event, BlockRemoved):
            for block_hash in event.block_hashes:
                yield BlockRemoved([block_hash], event.medium, event.group_idx)
        elif isinstance(event, BlockStored) and event.medium == CPU:
            for block_hash in event.block_hashes:
                yield BlockStored([block_hash], None, [], 0, None, CPU, None, group_idx=event.group_idx)
        else:
            yield event
