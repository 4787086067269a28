"""What an engine says of its KV cache, in vLLM 0.32's own words and field order.

Encoded with msgspec's msgpack these are the bytes that vLLM publishes, with two steps left to the publisher: it wraps
a step's events in an `EventBatch`, and passes them through `wire_events`, since the core puts all blocks that one
allocation pushed out into one event and vLLM sends one event a block.
"""

from collections.abc import Callable, Iterable, Iterator

import msgspec

GPU = "GPU"
CPU = "CPU"


class BlockStored(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """Consecutive blocks of one request that became reusable, the first one's parent named."""

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
    """Blocks that were pushed out of one medium, in the order in which they went."""

    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """The whole prefix cache was dropped."""


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared

KvEventSink = Callable[[float, list[KvEvent]], None]
"""Takes the time (ms) at which a step ended and the events of that step; never called with an empty list."""


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """The payload of one ZMQ message: `[ts, events, data_parallel_rank]`."""

    ts: float
    events: list[KvEvent]
    data_parallel_rank: int | None = None


def wire_events(events: Iterable[KvEvent]) -> Iterator[KvEvent]:
    """The events as vLLM sends them: one `BlockRemoved` a block, one `BlockStored` a block of the CPU tier."""
    for event in events:
        if isinstance(event, BlockRemoved):
            for block_hash in event.block_hashes:
                yield BlockRemoved([block_hash], event.medium, event.group_idx)
        elif isinstance(event, BlockStored) and event.medium == CPU:
            for block_hash in event.block_hashes:
                yield BlockStored([block_hash], None, [], 0, None, CPU, None, group_idx=event.group_idx)
        else:
            yield event
