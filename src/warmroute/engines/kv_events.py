"""KV events as vLLM and SGLang publish them: a message's payload in, plain values out. No I/O.

A payload is a msgpack array `[ts, events, rank]`. An event is a map with a "type" (vLLM since 0.24), or an array that
begins with its name (before, and SGLang) and that has grown at its end with the releases; both are read, and what a
later release adds is passed over. Hashes are opaque: 64-bit integers, signed or not, or 32 bytes.
"""

from __future__ import annotations

import struct
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
    locality: str | None = None
    """LOCAL or REMOTE, as seen from the engine."""
    cache_salt: str | None = None


class BlockRemoved(Struct, tag="BlockRemoved", tag_field="type", gc=False):
    block_hashes: list[EngineHash]
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None


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


_DOUBLE: Final = struct.Struct(">d")
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
    if isinstance(event, _BlockStored):
        return BlockStored(
            event.block_hashes, event.parent_block_hash, event.token_ids, event.block_size, event.lora_id, event.medium,
            event.lora_name, event.extra_keys, event.group_idx, event.kv_cache_spec_kind,
        )  # fmt: skip
    if isinstance(event, _BlockRemoved):
        return BlockRemoved(event.block_hashes, event.medium, event.group_idx)
    return AllBlocksCleared()


def sent_at_s(payload: bytes) -> float | None:
    """When a batch was sent, by the engine's clock, without reading the rest of it."""
    return float(_DOUBLE.unpack_from(payload, 2)[0]) if payload[1:2] == b"\xcb" and len(payload) >= 10 else None


def salt_of(event: BlockStored) -> str | None:
    """What the client salted the cache with: SGLang says it, vLLM has it among the first block's extra keys."""
    if event.cache_salt is not None:
        return event.cache_salt
    if event.parent_block_hash is not None or not event.extra_keys:
        return None
    return next((key for key in _own_keys(event, event.extra_keys[0]) if isinstance(key, str)), None)


def extra_of(event: BlockStored) -> list[bytes | None] | None:
    """What makes each block different beside its tokens, adapter and salt: pictures, say."""
    if not event.extra_keys or not any(event.extra_keys):
        return None
    salt = salt_of(event)
    extra: list[bytes | None] = []
    for number, keys in enumerate(event.extra_keys):
        own = _own_keys(event, keys)
        if number == 0 and salt in own:
            own.remove(salt)
        extra.append(msgspec.msgpack.encode(own) if own else None)
    return extra if any(extra) else None


def _own_keys(event: BlockStored, keys: Any) -> list[Any]:
    """A block's extra keys without its adapter, which comes first."""
    own = list(keys) if isinstance(keys, (list, tuple)) else []
    if own and event.lora_name is not None and own[0] == event.lora_name:
        del own[0]
    return own
