"""KV event types, and decoding of the payloads that vLLM and SGLang publish. No I/O.

A payload is a msgpack array `[ts, events, rank]`. An event is a map with a "type" (vLLM since 0.24), or an array that
starts with its name (older vLLM, SGLang) and that newer releases extend at the end. Both forms are decoded; unknown
fields are ignored. Hashes are opaque: 64-bit integers, signed or unsigned, or 32 bytes.

A payload with a value outside its limits is unreadable as a whole. The limits keep the memory and time of one payload
small; the C kernel checks token ids and the length of hashes.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import astuple

from warmroute.fleet.reported_values import MAX_BLOCK_TOKENS, MAX_NAME_LENGTH, MAX_TIME_S
from warmroute.index.node_cache import EngineHash

MAX_EVENTS: Final = 1 << 18
"""Of one payload."""
MAX_TOKENS: Final = 1 << 21
"""Of one event."""
MAX_EXTRA_KEYS_BYTES: Final = 1 << 20
NO_EXTRA_KEYS: Final = msgspec.Raw(b"\xc0")


class BadPayload(ValueError):
    """Not a batch of KV events."""


_Hashes = Annotated[list[EngineHash], Meta(max_length=MAX_TOKENS)]


class _StoredFields(Struct, gc=False):
    block_hashes: _Hashes
    parent_block_hash: EngineHash | None = None
    token_ids: Annotated[list[int], Meta(max_length=MAX_TOKENS)] = []
    block_size: Annotated[int, Meta(ge=0, le=MAX_BLOCK_TOKENS)] = 0
    lora_id: int | None = None
    medium: str | None = None
    lora_name: Annotated[str, Meta(max_length=MAX_NAME_LENGTH)] | None = None
    extra_keys: msgspec.Raw = NO_EXTRA_KEYS
    """A list with an entry for each block: what its hash covers besides its tokens; nil for nothing. Not decoded, since
    it may contain anything: see `salt_and_extra_keys`."""
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class BlockStored(_StoredFields, tag="BlockStored", tag_field="type", gc=False):
    locality: str | None = None
    """LOCAL or REMOTE, as the engine sees it."""
    cache_salt: str | None = None


class _RemovedFields(Struct, gc=False):
    block_hashes: _Hashes
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
    events: Annotated[list[PublishedEvent], Meta(max_length=MAX_EVENTS)]
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
    events: Annotated[list[_StoredArray | _RemovedArray | _ClearedArray], Meta(max_length=MAX_EVENTS)]
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
    except msgspec.ValidationError as error:
        not_maps = str(error)
    except (ValueError, RecursionError) as error:
        raise BadPayload(_reason(error)) from None
    try:
        batch = _arrays.decode(payload)
    except (ValueError, RecursionError) as error:
        reason = _reason(error)
        raise BadPayload(not_maps if "got `object`" in reason else reason) from None
    return Batch(batch.sent_s, [_AS_MAP[type(event)](*astuple(event)) for event in batch.events], batch.rank)


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, msgspec.DecodeError) else type(error).__name__


def sent_time_s(payload: bytes) -> float | None:
    """Return when a batch was sent, by the engine's clock, without decoding the rest of it; None if it is no time."""
    if payload[1:2] != b"\xcb" or len(payload) < 10:
        return None
    sent_s = float(_DOUBLE.unpack_from(payload, 2)[0])
    return sent_s if 0.0 < sent_s < MAX_TIME_S else None


def salt_and_extra_keys(event: BlockStored) -> tuple[str | None, list[bytes | None] | None]:
    """Return the client's cache salt, and what distinguishes each block besides its tokens, adapter and salt, for
    example images. Raises ValueError."""
    keys_by_block = _decode_extra_keys(event.extra_keys)
    salt = event.cache_salt  # SGLang sends it as a field, vLLM among the first block's extra keys
    if salt is None and event.parent_block_hash is None and keys_by_block:
        salt = next((key for key in _without_adapter(event, keys_by_block[0]) if isinstance(key, str)), None)
    if not any(keys_by_block):
        return salt, None
    extra: list[bytes | None] = []
    for number, keys in enumerate(keys_by_block):
        own = _without_adapter(event, keys)
        if number == 0 and salt in own:
            own.remove(salt)
        extra.append(msgspec.msgpack.encode(own) if own else None)
    return salt, extra if any(extra) else None


def _decode_extra_keys(raw: msgspec.Raw) -> list[Any]:
    if raw == NO_EXTRA_KEYS:
        return []
    if len(raw) > MAX_EXTRA_KEYS_BYTES:
        raise ValueError("the extra keys are too long")
    keys = msgspec.msgpack.decode(raw)
    if not isinstance(keys, list):
        raise ValueError("the extra keys are not a list")
    return keys


def _without_adapter(event: BlockStored, keys: Any) -> list[Any]:
    """Return a block's extra keys without its adapter, which comes first."""
    own = list(keys) if isinstance(keys, (list, tuple)) else []
    if own and event.lora_name is not None and own[0] == event.lora_name:
        del own[0]
    return own
