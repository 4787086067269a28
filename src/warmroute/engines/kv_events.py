"""KV events as vLLM and SGLang publish them: a message's payload in, plain values out. No I/O.

A payload is a msgpack array `[ts, events, rank]`. An event is a map with a "type" (vLLM since 0.24), or an array that
begins with its name (before, and SGLang) and that has grown at its end with the releases; both are read, and what a
later release adds is passed over. Hashes are opaque: 64-bit integers, signed or not, or 32 bytes.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
from msgspec import Struct

EngineHash = int | bytes
"""An engine's own name for a block."""


class BadPayload(ValueError):
    """Not a batch of KV events."""


class BlockStored(Struct, tag="BlockStored", tag_field="type", gc=False):
    block_hashes: list[EngineHash]
    parent_block_hash: EngineHash | None = None
    token_ids: list[int] = []
    block_size: int = 0
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[Any] | None = None
    """For each block what its hash covers beside its tokens; None where nothing."""
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    cache_salt: str | None = None


class BlockRemoved(Struct, tag="BlockRemoved", tag_field="type", gc=False):
    block_hashes: list[EngineHash]
    medium: str | None = None
    group_idx: int | None = None


class AllBlocksCleared(Struct, tag="AllBlocksCleared", tag_field="type", gc=False):
    pass


Event = BlockStored | BlockRemoved | AllBlocksCleared


class Batch(Struct, array_like=True, gc=False):
    sent_s: float
    events: list[Event]
    rank: int | None = None


# The same as arrays.


class _BlockStored(Struct, tag="BlockStored", array_like=True, gc=False):
    block_hashes: list[EngineHash]
    parent_block_hash: EngineHash | None = None
    token_ids: list[int] = []
    block_size: int = 0
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[Any] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class _BlockRemoved(Struct, tag="BlockRemoved", array_like=True, gc=False):
    block_hashes: list[EngineHash]
    medium: str | None = None
    group_idx: int | None = None


class _AllBlocksCleared(Struct, tag="AllBlocksCleared", array_like=True, gc=False):
    pass


class _Batch(Struct, array_like=True, gc=False):
    sent_s: float
    events: list[_BlockStored | _BlockRemoved | _AllBlocksCleared]
    rank: int | None = None


_maps: Final = msgspec.msgpack.Decoder(Batch)
_arrays: Final = msgspec.msgpack.Decoder(_Batch)


def read_batch(payload: bytes) -> Batch:
    """Raises BadPayload."""
    try:
        return _maps.decode(payload)
    except msgspec.ValidationError:
        pass
    except msgspec.DecodeError as error:
        raise BadPayload(str(error)) from None
    try:
        batch = _arrays.decode(payload)
    except msgspec.DecodeError as error:
        raise BadPayload(str(error)) from None
    return Batch(batch.sent_s, [_as_map(event) for event in batch.events], batch.rank)


def _as_map(event: _BlockStored | _BlockRemoved | _AllBlocksCleared) -> Event:
    match event:
        case _BlockStored():
            return BlockStored(*(getattr(event, name) for name in _BlockStored.__struct_fields__))
        case _BlockRemoved():
            return BlockRemoved(event.block_hashes, event.medium, event.group_idx)
        case _:
            return AllBlocksCleared()


def salt_of(event: BlockStored) -> str | None:
    """What the client salted the cache with: SGLang says it, vLLM has it among the first block's extra keys."""
    if event.cache_salt is not None:
        return event.cache_salt
    if event.parent_block_hash is not None or not event.extra_keys:
        return None
    others = [key for key in event.extra_keys[0] or () if isinstance(key, str) and key != event.lora_name]
    return others[0] if others else None
