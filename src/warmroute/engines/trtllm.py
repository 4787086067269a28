"""TensorRT-LLM's KV events: JSON that POST /kv_cache_events hands out once, to one consumer; made into events of the
shape that the other engines have. No I/O.

A stored block may hold fewer tokens than a block has (the end of a prompt): no other prompt shares it as a whole, and
it is passed over. Blocks of models with several attention windows are told once for each; the widest is read.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from warmroute.engines.kv_events import BlockRemoved, BlockStored, EngineHash, Event

PATH: Final = "/kv_cache_events"
USUAL_SIZES: Final = (32, 64, 128)
"""Tokens in a block, where a single one is all there is to go by."""
_MEDIA: Final = ("GPU", "CPU")

WireHash = int | str


class _Token(msgspec.Struct, gc=False):
    token_id: int
    token_extra_id: int = 0


class _Block(msgspec.Struct, gc=False):
    block_hash: WireHash
    tokens: list[_Token]
    cache_level: int = 0
    lora_id: int | None = None
    cache_salt: str | None = None
    mm_keys: list[Any] | None = None


class _Created(msgspec.Struct, tag="created", gc=False):
    pass


class _Stored(msgspec.Struct, tag="stored", gc=False):
    blocks: list[_Block]
    parent_hash: WireHash | None = None


class _Removed(msgspec.Struct, tag="removed", gc=False):
    block_hashes: list[WireHash]


class _Change(msgspec.Struct, gc=False):
    old_value: int
    new_value: int


class _Updated(msgspec.Struct, tag="updated", gc=False):
    block_hash: WireHash
    cache_level: _Change | None = None


class Told(msgspec.Struct, gc=False):
    """One event."""

    event_id: int
    data: _Created | _Stored | _Removed | _Updated
    window_size: int = 0
    attention_dp_rank: int | None = None


_decode: Final = msgspec.json.Decoder(list[Told]).decode


def read_events(body: bytes) -> list[Told]:
    """Raises msgspec.DecodeError."""
    return _decode(body)


class Reader:
    """Makes one rank's events those that an Applier takes."""

    def __init__(self) -> None:
        self._block_size = 0
        self._window = 0

    def events(self, told: Told) -> list[Event]:
        self._window = max(self._window, told.window_size)
        if told.window_size < self._window:
            return []
        data = told.data
        if isinstance(data, _Stored):
            return self._stored(data)
        if isinstance(data, _Removed):
            hashes = [_hash(name) for name in data.block_hashes]
            return [BlockRemoved(hashes, medium) for medium in _MEDIA]  # it does not say from where
        if isinstance(data, _Updated) and data.cache_level is not None:
            change, names = data.cache_level, [_hash(data.block_hash)]
            return [
                BlockStored(names, medium=_medium(change.new_value)),
                BlockRemoved(names, _medium(change.old_value)),
            ]
        return []

    def _stored(self, data: _Stored) -> list[Event]:
        if not self._block_size:
            self._block_size = _size_of(data.blocks)
        parent = None if data.parent_hash is None else _hash(data.parent_hash)
        events: list[Event] = []
        for block in data.blocks:
            if len(block.tokens) != self._block_size:
                break
            name = _hash(block.block_hash)
            keys: list[Any] = [token.token_extra_id for token in block.tokens if token.token_extra_id]
            keys += block.mm_keys or ()
            stored = BlockStored([name], parent, [token.token_id for token in block.tokens], self._block_size)
            stored.lora_id, stored.medium = block.lora_id, _medium(block.cache_level)
            stored.extra_keys, stored.cache_salt = [keys or None], block.cache_salt or ""
            events.append(stored)
            parent = name
        return events


def _size_of(blocks: list[_Block]) -> int:
    """Every block but the last of a chain is full."""
    sizes = [len(block.tokens) for block in blocks]
    return max(sizes, default=0) if len(sizes) > 1 or (sizes and sizes[0] in USUAL_SIZES) else 0


def _hash(name: WireHash) -> EngineHash:
    return name.encode() if isinstance(name, str) else name


def _medium(level: int) -> str:
    return _MEDIA[min(max(level, 0), 1)]
