"""KV event types, and decoding of the payloads that vLLM and SGLang publish. No I/O.

A payload is a msgpack array `[ts, events, rank]`. An event is a map with a "type" (vLLM since 0.24), or an array that
starts with its name (older vLLM, SGLang) and that newer releases extend at the end. Both forms are decoded; unknown
fields are ignored. Hashes are opaque: 64-bit integers, signed or unsigned, or 32 bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, Final

import msgspec
from msgspec import Struct
from msgspec.structs import astuple

from warmroute.index.node_cache import EngineHash


class BadPayload(ValueError):
    """Not a batch of KV events."""


class _StoredFields(Struct, gc=False):
    block_hashes: list[EngineHash]
    parent_block_hash: EngineHash | None = None
    token_ids: list[int] = []
    block_size: int = 0
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[Any] | None = None
    """For each block, what its hash covers besides its tokens; None for nothing."""
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class BlockStored(_StoredFields, tag="BlockStored", tag_field="type", gc=False):
    locality: str | None = None
    """LOCAL or REMOTE, as the engine sees it."""
    cache_salt: str | None = None


class _RemovedFields(Struct, gc=False):
    block_hashes: list[EngineHash]
    medium: str | None = None
    group_idx: int | None = None


class BlockRemoved(_RemovedFields, tag="BlockRemoved", tag_field="type", gc=False):
    locality: str | None = None


class AllBlocksCleared(Struct, tag="AllBlocksCleared", tag_field="type", gc=False):
    pass


class HashesStored(Struct, gc=False):
    """Stored blocks without tokens, whose hashes are the index's own. Only replay's simulated engines send them."""

    block_hashes: list[int]
    parent_block_hash: int | None


PublishedEvent = BlockStored | BlockRemoved | AllBlocksCleared
Event = PublishedEvent | HashesStored


class Batch(Struct, array_like=True, gc=False):
    sent_s: float
    events: list[PublishedEvent]
    rank: int | None = None


# The same as arrays.


class _StoredArray(_StoredFields, tag="BlockStored", array_like=True, gc=False):
    pass


class _RemovedArray(_RemovedFields, tag="BlockRemoved", array_like=True, gc=False):
    pass


class _ClearedArray(Struct, tag="AllBlocksCleared", array_like=True, gc=False):
    pass


class _Batch(Struct, array_like=True, gc=False):
    sent_s: float
    events: list[_StoredArray | _RemovedArray | _ClearedArray]
    rank: int | None = None


_AS_MAP: Final[dict[type[Struct], Callable[..., PublishedEvent]]] = {
    _StoredArray: BlockStored, _RemovedArray: BlockRemoved, _ClearedArray: AllBlocksCleared,
}  # fmt: skip
_DOUBLE: Final = struct.Struct(">d")
_maps: Final = msgspec.msgpack.Decoder(Batch)
_arrays: Final = msgspec.msgpack.Decoder(_Batch)


def decode_batch(payload: bytes) -> Batch:
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
    return Batch(batch.sent_s, [_AS_MAP[type(event)](*astuple(event)) for event in batch.events], batch.rank)


def sent_time_s(payload: bytes) -> float | None:
    """Return when a batch was sent, by the engine's clock, without decoding the rest of it."""
    return float(_DOUBLE.unpack_from(payload, 2)[0]) if payload[1:2] == b"\xcb" and len(payload) >= 10 else None


def cache_salt(event: BlockStored) -> str | None:
    """Return the client's cache salt. SGLang sends it as a field, vLLM among the first block's extra keys."""
    if event.cache_salt is not None:
        return event.cache_salt
    if event.parent_block_hash is not None or not event.extra_keys:
        return None
    return next((key for key in _without_adapter(event, event.extra_keys[0]) if isinstance(key, str)), None)


def extra_keys_by_block(event: BlockStored) -> list[bytes | None] | None:
    """Return what distinguishes each block besides its tokens, adapter and salt, for example images."""
    if not event.extra_keys or not any(event.extra_keys):
        return None
    salt = cache_salt(event)
    extra: list[bytes | None] = []
    for number, keys in enumerate(event.extra_keys):
        own = _without_adapter(event, keys)
        if number == 0 and salt in own:
            own.remove(salt)
        extra.append(msgspec.msgpack.encode(own) if own else None)
    return extra if any(extra) else None


def _without_adapter(event: BlockStored, keys: Any) -> list[Any]:
    """Return a block's extra keys without its adapter, which comes first."""
    own = list(keys) if isinstance(keys, (list, tuple)) else []
    if own and event.lora_name is not None and own[0] == event.lora_name:
        del own[0]
    return own
