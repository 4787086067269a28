"""TensorRT-LLM's KV events: JSON that POST /kv_cache_events returns once, to one consumer. They are converted to the
event types of kv_events.py. No I/O.

A stored block may hold fewer tokens than the block size (the end of a prompt). No other prompt shares it as a whole, so
it is skipped. Models with several attention windows report each block once for each window; only the widest counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from warmroute.engines.kv_events import BadPayload, BlockRemoved, BlockStored, Event
from warmroute.fleet.reported_values import MAX_BLOCK_TOKENS, MAX_RANKS, MAX_SEQUENCE_NUMBER
from warmroute.index.node_cache import EngineHash

PATH: Final = "/kv_cache_events"
COMMON_BLOCK_SIZES: Final = (32, 64, 128)
"""Block sizes that the converter accepts from a single block."""
MAX_EVENT_BYTES: Final = 8 << 20
"""Longer events are ignored. A prompt of 128 Ki tokens takes 6 MB."""
MAX_OTHER_BYTES: Final = 1 << 20
"""Of a response that cannot be split before it is parsed, because its events do not start with their number."""
_EVENT_START: Final = b'{"event_id"'
_MEDIA: Final = ("GPU", "CPU")

WireHash = int | str


class _Token(msgspec.Struct, gc=False):
    token_id: int
    token_extra_id: int = 0


class _Block(msgspec.Struct, gc=False):
    block_hash: WireHash
    tokens: Annotated[list[_Token], Meta(max_length=MAX_BLOCK_TOKENS)]
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


class PolledEvent(msgspec.Struct, gc=False):
    """One event with its sequence number."""

    event_id: Annotated[int, Meta(ge=0, le=MAX_SEQUENCE_NUMBER)]
    data: _Created | _Stored | _Removed | _Updated
    window_size: int = 0
    attention_dp_rank: Annotated[int, Meta(ge=0, lt=MAX_RANKS)] | None = None


_event_list: Final = msgspec.json.Decoder(list[msgspec.Raw])
_event: Final = msgspec.json.Decoder(PolledEvent)


def split_events(body: bytes) -> Iterable[msgspec.Raw]:
    """Return the events of a response, which `decode_event` decodes one by one. Raises BadPayload.

    A response may be large: its events are found one at a time, so that the caller can do other work in between.
    """
    if body[:64].replace(b" ", b"").startswith(b"[" + _EVENT_START) and body[-64:].rstrip().endswith(b"]"):
        return _found_events(body)
    if len(body) > MAX_OTHER_BYTES:
        raise BadPayload("not a list of events that start with event_id")
    try:
        return _event_list.decode(body)
    except (ValueError, RecursionError) as error:
        raise BadPayload(f"not a list of events: {type(error).__name__}") from None


def _found_events(body: bytes) -> Iterator[msgspec.Raw]:
    start = body.index(_EVENT_START)
    while start >= 0:
        # Quotes inside a JSON string are escaped, so the next event is the next place with these bytes.
        following = body.find(_EVENT_START, start + 1, start + MAX_EVENT_BYTES)
        if following < 0 and len(body) - start > MAX_EVENT_BYTES:
            start = body.find(_EVENT_START, start + MAX_EVENT_BYTES)  # this event is too long: it counts as lost
            continue
        end = following if following >= 0 else body.rindex(b"]")
        yield msgspec.Raw(body[start:end].rstrip(b", \t\r\n"))
        start = following


def decode_event(raw: msgspec.Raw) -> PolledEvent:
    """Raises BadPayload."""
    try:
        return _event.decode(raw)
    except (ValueError, RecursionError) as error:
        raise BadPayload(str(error) if isinstance(error, msgspec.DecodeError) else type(error).__name__) from None


class EventConverter:
    def __init__(self) -> None:
        self._block_size = 0
        self._window = 0

    def convert(self, event: PolledEvent) -> list[Event]:
        self._window = max(self._window, event.window_size)
        if event.window_size < self._window:
            return []
        data = event.data
        if isinstance(data, _Stored):
            return self._stored(data)
        if isinstance(data, _Removed):
            hashes = [_hash(name) for name in data.block_hashes]
            return [BlockRemoved(hashes, medium) for medium in _MEDIA]  # the event does not name the medium
        if isinstance(data, _Updated) and data.cache_level is not None:
            change, names = data.cache_level, [_hash(data.block_hash)]
            return [
                BlockStored(names, medium=_medium(change.new_value)),
                BlockRemoved(names, _medium(change.old_value)),
            ]
        return []

    def _stored(self, data: _Stored) -> list[Event]:
        if not self._block_size:
            self._block_size = _block_size(data.blocks)
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
            stored.cache_salt = block.cache_salt or ""
            if keys:
                stored.extra_keys = msgspec.Raw(msgspec.msgpack.encode([keys]))
            events.append(stored)
            parent = name
        return events


def _block_size(blocks: list[_Block]) -> int:
    """Return the block size of a chain, of which every block but the last is full; 0 if it is uncertain."""
    sizes = [len(block.tokens) for block in blocks]
    return max(sizes, default=0) if len(sizes) > 1 or (sizes and sizes[0] in COMMON_BLOCK_SIZES) else 0


def _hash(name: WireHash) -> EngineHash:
    return name.encode() if isinstance(name, str) else name


def _medium(level: int) -> str:
    return _MEDIA[min(max(level, 0), 1)]
